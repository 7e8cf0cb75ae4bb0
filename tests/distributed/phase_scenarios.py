"""Functions that ranks run in the tests of the final synchronous phase and of `adacomm`."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from megatron_edit.comm import timeouts
from megatron_edit.config import EditConfig
from megatron_edit.constants import FIRST_MOMENT
from tests.distributed.toy import build_engine

SIZES = {"embedding": 13, "final": 3}
ALL_REPLICAS = -2
START = {name: [0.5] * size for name, size in SIZES.items()}


def end_rounds(
    values: list[list[float] | None], settings: dict[str, Any], nonfinite: int = -1
) -> dict[str, Any]:
    """Make three local steps and then two in the final phase.

    Args:
        values: the first moment of the unit "final", by replica; None where it has no moments.
        settings: of the run.
        nonfinite: replica whose unit "final" is not finite at the last sync, or `ALL_REPLICAS`.
    """
    config = EditConfig(use_edit=True, warmup_steps=0, sync_interval=2, digest_interval=1,
                        num_replicas=len(values), **settings)  # fmt: skip
    engine, host, reporter = build_engine(config, SIZES, START)
    engine.start()
    replica = engine.groups.sync.rank
    own = values[replica]
    if own is not None:
        host.set_moments(FIRST_MOMENT, {"embedding": [0.0] * 13, "final": own})
    host.counters = {"step": 8.0 * (replica + 1), f"of {replica}": 3.0 + replica}
    host.schedule_position = 10 - replica
    phases = []
    for step in range(1, 6):
        host.begins_final = step >= 3
        # Only replica 0 applies the last local step, which advances its schedule.
        host.pending_schedule = 2 if step == 3 and replica == 0 else 0
        engine.before_step()
        if step <= 3:  # afterwards gradients are averaged: a toy has none
            host.move({name: [0.1 * (replica + step)] * size for name, size in SIZES.items()})
        if step == 3 and nonfinite in (replica, ALL_REPLICAS):
            host.full["final"][0] = float("nan")
        engine.after_step()
        engine.record_loss(float(step))
        if step == 3:
            schedule = host.schedule_position + host.pending_schedule
        phases.append((engine.status.is_warmup, engine.status.is_final_phase))
    moments = host.moments.get(FIRST_MOMENT, {})
    return {
        "phases": phases,
        "theta": {name: value.tolist() for name, value in host.full.items()},
        "moments": moments["final"].tolist() if moments else [],
        "counters": host.counters,
        "schedule": schedule,
        "is_local": host.is_local,
        "is_reset": host.is_reset,
        "sync_steps": [report.step for report in reporter.syncs],
        "loss_steps": [step for step, _ in reporter.losses],
        "messages": reporter.messages,
        "has_outer": engine.syncs.has_outer_state,
    }


def follow_losses(losses: list[list[float]], tau: int) -> list[int]:
    """Train with `adacomm`; returns the steps after which replicas sync.

    Args:
        losses: by replica and step.
        tau: interval of the first round.
    """
    config = EditConfig(use_edit=True, warmup_steps=0, sync_interval=tau, interval="adacomm",
                        num_replicas=len(losses))  # fmt: skip
    engine, _, reporter = build_engine(config, SIZES, START)
    engine.start()
    mine = losses[engine.groups.sync.rank]
    has_loss = engine.groups.control.rank == engine.groups.control.size - 1  # the last stage
    for loss in mine:
        engine.before_step()
        engine.after_step()
        engine.record_loss(loss if has_loss else float("nan"))
    return [report.step for report in reporter.syncs]


def average_in_phases(gradients: list[list[list[Any]]], settings: dict[str, Any]) -> dict[str, Any]:
    """Make two steps of warm-up, two local ones and two in the final phase.

    Args:
        gradients: of each replica, step and shard.
        settings: of the run.

    Returns:
        Gradients after each step's average, bytes that each average sent, and the number of
        residuals after each step.
    """
    config = EditConfig(use_edit=True, warmup_steps=2, sync_interval=4,
                        num_replicas=len(gradients), **settings)  # fmt: skip
    engine, host, _ = build_engine(config, SIZES, START)
    engine.start()
    found, sent, residuals = [], [], []
    group = engine.groups.sync
    for step, shards in enumerate(gradients[group.rank], start=1):
        host.begins_final = step >= 4
        host.gradients = [torch.tensor(shard, dtype=torch.float32) for shard in shards]
        engine.before_gradients()
        before = group.payload_bytes
        engine.average_gradients()
        found.append([shard.numpy().copy() for shard in host.gradients])
        sent.append(group.payload_bytes - before)
        engine.before_step()
        engine.after_step()
        residuals.append(len(engine._gradients._residuals))
    return {"gradients": found, "bytes": sent, "residuals": residuals}


def wait_in_warmup(seconds: list[float], minimum: float) -> list[float]:
    """Make three steps of the warm-up and one after it, of unequal length.

    Args:
        seconds: of a step, by replica.
        minimum: lower bound of time-outs, instead of ten minutes.

    Returns:
        The time-out after each step.
    """
    config = EditConfig(use_edit=True, warmup_steps=3, sync_interval=8, num_replicas=len(seconds))
    engine, _, _ = build_engine(config, SIZES, START)
    engine.start()
    timeouts.MIN_TIMEOUT_SECONDS = minimum  # type: ignore[attr-defined]
    for group in (engine.groups.sync, engine.groups.meeting):
        timeouts.set_timeout(group, timedelta(seconds=minimum))
    found = []
    for _ in range(4):
        engine.before_step()
        time.sleep(seconds[engine.groups.sync.rank])
        engine.before_gradients()
        engine.average_gradients()
        engine.after_step()
        found.append(engine.status.timeout_seconds)
    return found
