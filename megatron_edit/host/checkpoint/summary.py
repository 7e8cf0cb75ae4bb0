"""What people are told of a resume."""

from __future__ import annotations

import dataclasses

from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.checkpoint.resume import ResumePlan
from megatron_edit.config import EditConfig
from megatron_edit.flags import flag, shown
from megatron_edit.host.checkpoint.choosing import Choice

# Settings that say who, where and how, and leave the numbers of a training alone.
_WITHOUT_EFFECT = frozenset(
    ("use_edit", "num_replicas", "replica_id", "rendezvous", "log_dir", "device", "inner_state",
     "log_units_to_tensorboard", "digest_interval", "timeout_seconds", "sync_mode", "sync_backend",
     "prefetch_units", "offload")
)  # fmt: skip


def training_settings(config: EditConfig) -> dict[str, object]:
    """Settings that decide the numbers of a training, for a manifest."""
    settings = dataclasses.asdict(config)
    return {name: value for name, value in settings.items() if name not in _WITHOUT_EFFECT}


def changed_settings(manifest: Manifest, config: EditConfig) -> str | None:
    """One line: which settings are other ones than when the checkpoint was written, if any are.

    Args:
        manifest: of the checkpoint; an older version has written strategy and wire type alone.
        config: of this run.
    """
    before = {"strategy": manifest.strategy, "sync_dtype": manifest.wire, **manifest.settings}
    now = training_settings(config)
    changes = [
        f"{flag(name)} {shown(value)} -> {shown(now[name])}"
        for name, value in before.items()
        if name in now and value != now[name]
    ]
    return f"settings changed since the checkpoint: {', '.join(changes)}" if changes else None


def summary_of(choice: Choice, manifest: Manifest, plan: ResumePlan, num_replicas: int) -> str:
    """One line: from where, who, and how much has been consumed."""
    if manifest.is_warmup:
        where = "in the final synchronous phase" if manifest.is_final_phase else "in warm-up"
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
