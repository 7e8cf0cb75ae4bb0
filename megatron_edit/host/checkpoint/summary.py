"""Messages about a resume."""

from __future__ import annotations

import dataclasses

from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.checkpoint.resume import ResumePlan
from megatron_edit.config import EditConfig
from megatron_edit.flags import flag, format_value
from megatron_edit.host.checkpoint.choosing import Choice

# Settings of the deployment, without effect on the numbers of a training.
_WITHOUT_EFFECT = frozenset(
    ("use_edit", "num_replicas", "placement", "replica_id", "rendezvous", "log_dir", "device",
     "inner_state", "log_units_to_tensorboard", "digest_interval", "timeout_seconds", "sync_mode",
     "sync_backend", "sync_net", "prefetch_units", "offload", "check_commits", "hub",
     "replica_name", "nominal_replicas", "min_replicas", "hub_token_file", "telemetry",
     "metrics_port", "mlflow_experiment")
)  # fmt: skip


def training_settings(config: EditConfig) -> dict[str, object]:
    """Return the settings that affect the numbers of a training, for a manifest."""
    settings = dataclasses.asdict(config)
    return {name: value for name, value in settings.items() if name not in _WITHOUT_EFFECT}


def changed_settings(manifest: Manifest, config: EditConfig) -> str | None:
    """Return one line with the settings changed since the checkpoint; None if there are none.

    Args:
        manifest: of the checkpoint; older versions wrote only strategy and wire type.
        config: of this run.
    """
    before = {"strategy": manifest.strategy, "sync_dtype": manifest.wire, **manifest.settings}
    if manifest.choice is not None and not config.auto:
        before |= manifest.choice["settings"]
    now = training_settings(config)
    changes = [
        f"{flag(name)} {format_value(value)} -> {format_value(now[name])}"
        for name, value in before.items()
        if name in now and value != now[name]
    ]
    return f"settings changed since the checkpoint: {', '.join(changes)}" if changes else None


def summary_of(choice: Choice, manifest: Manifest, plan: ResumePlan, num_replicas: int) -> str:
    """Return one line: the checkpoint, the round, the replicas, and the consumed samples."""
    if manifest.is_warmup:
        where = "in the final synchronous phase" if manifest.is_final_phase else "in warm-up"
    elif manifest.is_mid_round:
        where = f"in round {manifest.round + 1}"
        where += "" if plan.continues else ", which is completed"
    else:
        where = f"after the sync of round {manifest.round}"
    change = (
        f"{num_replicas} replicas"
        if manifest.num_replicas == num_replicas
        else f"{manifest.num_replicas} replicas become {num_replicas}"
    )
    return f"resuming from {choice.path}, {where}: {change}, {plan.consumed} samples consumed"


def dropped_state(choice: Choice, flag_given: str) -> str:
    """Return one line about what a load of the parameters alone leaves out.

    Args:
        choice: the checkpoint.
        flag_given: `--finetune` or `--no-load-optim`.
    """
    manifest = choice.manifest
    text = f"{flag_given}: of {choice.path} only the parameters are loaded"
    if manifest is None or manifest.is_warmup:
        return text
    steps = sum(entry.inner_steps for entry in manifest.replicas[1:])
    dropped = f"; {steps} steps of the others since the last sync are dropped" if steps else ""
    return f"{text}, those of replica 0{dropped}"
