"""What people are told of a resume."""

from __future__ import annotations

from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.checkpoint.resume import ResumePlan
from megatron_edit.host.checkpoint.choosing import Choice


def summary_of(choice: Choice, manifest: Manifest, plan: ResumePlan, num_replicas: int) -> str:
    """One line: from where, who, and how much has been consumed."""
    if manifest.is_warmup:
        where = "in warm-up"
    elif manifest.is_mid_round:
        where = f"in round {manifest.round + 1}"
        where += "" if plan.goes_on else ", which is completed"
    else:
        where = f"after the sync of round {manifest.round}"
    change = (
        f"{num_replicas} replicas"
        if manifest.num_replicas == num_replicas
        else f"{manifest.num_replicas} replicas become {num_replicas}"
    )
    return f"going on from {choice.path}, {where}: {change}, {plan.consumed} samples consumed"
