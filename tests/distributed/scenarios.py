"""Functions of the distributed tests. Each runs on every rank."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from megatron_edit.config import EditConfig
from megatron_edit.engine import EditEngine
from megatron_edit.engine.rounds.meeting import size_of_record
from megatron_edit.errors import DriftError
from tests.distributed.toy import build_engine, with_outer

Record = dict[str, Any]


def run_rounds(
    settings: dict[str, Any],
    sizes: dict[str, int],
    start: dict[str, Any],
    displacements: list[list[dict[str, Any]]],
) -> list[Record]:
    """Make rounds of one step: move by `displacements[round][replica]`, then sync.

    Returns:
        One record per round: the decision of the sync, and this rank's shards after it.
    """
    config = EditConfig(use_edit=True, warmup_steps=0, sync_interval=1, digest_interval=1,
                        **with_outer(settings))  # fmt: skip
    engine, host, reporter = build_engine(config, sizes, start)
    engine.start()
    replica = engine.groups.sync.rank
    records = []
    for moves in displacements:
        engine.before_step()
        host.move(moves[replica])
        engine.after_step()
        report = reporter.syncs[-1]
        records.append(
            {
                "norms": report.decision.norms.numpy(),
                "z": report.decision.verdict.scores.numpy(),
                "anomalous": report.decision.verdict.anomalous.numpy(),
                "weights": report.decision.weights.numpy(),
                "rollback": report.decision.rollback.numpy(),
                "clip": report.clip.numpy(),
                "update_norm": report.update_norm.numpy(),
                "digest": report.digest,
                "theta": {name: values.numpy().copy() for name, values in host.full.items()},
                "anchor": {n: u.anchor.numpy().copy() for n, u in engine.syncs.outer.units.items()},
                "momentum": {
                    n: u.momentum.numpy().copy() for n, u in engine.syncs.outer.units.items()
                },
                "slices": host.slices,
                "bytes": _payload(engine),
                "wire_bytes": report.wire_bytes,
            }
        )
    return records


def _payload(engine: EditEngine) -> int:
    """Return the bytes that this rank has sent to other replicas."""
    return engine.groups.sync.payload_bytes + engine.groups.meeting.payload_bytes


def sync_with_schedule_lag(behind: int) -> int:
    """Sync with replica 1's schedule `behind` samples behind; returns the position afterwards."""
    config = EditConfig(use_edit=True, num_replicas=2, warmup_steps=0, sync_interval=1)
    engine, host, _ = build_engine(config, {"final": 3}, {"final": [0.0, 0.0, 0.0]})
    engine.start()
    engine.before_step()
    host.schedule_position = 100 - (behind if engine.groups.sync.rank else 0)
    engine.after_step()
    return host.schedule_position


def differ_before_commit(what: str, fragments: int) -> dict[str, Any]:
    """Sync twice; before the second sync, replica 1's state or plan differs in one place.

    Returns:
        The error, and whether parameters, anchor and round are as they were before that sync.
    """
    config = EditConfig(use_edit=True, num_replicas=2, warmup_steps=0, sync_interval=fragments,
                        fragments=fragments, check_commits=True, digest_interval=100)  # fmt: skip
    sizes = {"embedding": 6, "layer.1": 5, "layer.2": 3, "final": 4}
    engine, host, _ = build_engine(config, sizes, {n: [1.0] * k for n, k in sizes.items()})
    engine.start()
    moves = {name: torch.arange(size) * 0.01 for name, size in sizes.items()}
    for number in range(2):
        if number == 1 and engine.groups.sync.rank == 1 and engine.groups.replica.rank == 0:
            if what == "momentum":
                engine.syncs.outer.units["layer.2"].momentum[0] += 1e-3
            elif what == "plan":
                engine.state.rounds = replace(engine.state.rounds, first_loss=7.0)
        engine.before_step()
        host.move(moves)
        before = {name: values.clone() for name, values in host.full.items()}
        outer = engine.syncs.outer.units.items()
        anchors = {name: unit.anchor.clone() for name, unit in outer}
        count, message = engine.state.rounds.count, ""
        try:
            engine.after_step()
        except DriftError as error:
            message = str(error)
    return {
        "message": message,
        "is_unchanged": engine.state.rounds.count == count
        and all(torch.equal(host.full[name], before[name]) for name in sizes)
        and all(torch.equal(unit.anchor, anchors[name]) for name, unit in outer),
    }


def miss_a_sync() -> None:
    """Wait at a sync that replica 1 never reaches."""
    config = EditConfig(use_edit=True, num_replicas=2, warmup_steps=0, sync_interval=1,
                        timeout_seconds=3.0)  # fmt: skip
    engine, _, _ = build_engine(config, {"embedding": 2, "final": 3},
                                {"embedding": [0.0] * 2, "final": [0.0] * 3})  # fmt: skip
    engine.start()
    engine.groups.sync.timeout = engine.groups.meeting.timeout = timedelta(seconds=3)
    if engine.groups.sync.rank == 1:
        import time

        time.sleep(3600)
        return
    engine.before_step()
    engine.after_step()


def start_from_different_values() -> list[float]:
    """Start each replica from other numbers; returns this rank's parameters after `start`."""
    config = EditConfig(use_edit=True, num_replicas=2, warmup_steps=5, sync_interval=1)
    import os

    start = [float(os.environ["RANK"])] * 5
    engine, host, _ = build_engine(config, {"final": 5}, {"final": start})
    engine.start()
    return [float(x) for x in host.full["final"]]


def switch_with_rounding_difference() -> tuple[list[str], list[float]]:
    """End the warm-up with replicas that differ by an ulp; returns messages and parameters."""
    config = EditConfig(use_edit=True, num_replicas=2, warmup_steps=1, sync_interval=1)
    engine, host, reporter = build_engine(config, {"final": 3}, {"final": [1.0, 2.0, 3.0]})
    engine.start()
    engine.before_step()
    if engine.groups.sync.rank == 1:
        host.full["final"][1] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    engine.after_step()
    return reporter.messages, host.full["final"].tolist()


class _Counter:
    """A process group that counts the collectives issued on it, by name."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.counts: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in ("allgather", "allreduce", "broadcast"):
            return method

        def counted(*args: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return method(*args)

        return counted


def count_messages(num_replicas: int, num_layers: int, unit_numel: int) -> Record:
    """Count collectives and bytes of one sync without a drift check."""
    names = ["embedding", *(f"layer.{i + 1}" for i in range(num_layers)), "final"]
    config = EditConfig(use_edit=True, num_replicas=num_replicas, warmup_steps=0, sync_interval=1)
    zeros = torch.zeros(unit_numel)
    engine, host, _ = build_engine(
        config, dict.fromkeys(names, unit_numel), dict.fromkeys(names, zeros)
    )
    engine.start()
    counters = {}
    for name in ("sync", "meeting", "replica"):
        group = getattr(engine.groups, name)
        group.process_group = counters[name] = _Counter(group.process_group)
    engine.before_step()
    host.move(dict.fromkeys(names, torch.ones(unit_numel) * (1 + engine.groups.sync.rank)))
    before = _payload(engine)
    engine.after_step()
    nbytes = size_of_record(engine.host, engine.state, has_digests=False)
    table = nbytes * (num_replicas - 1)
    return {
        **{name: counter.counts for name, counter in counters.items()},
        "bytes": _payload(engine) - before,
        "control_bytes": table,
        "numel": host.plan.numel,
    }


def run_rounds_with_losses(losses: list[list[float]], settings: dict[str, Any]) -> list[Record]:
    """Make rounds of two steps with the loss `losses[round][replica]` in both of them.

    Only the last rank of a replica has its loss, as with pipeline stages, and only after the step
    and its sync, as in Megatron.

    Returns:
        The decision of each sync, as this rank saw it.
    """
    config = EditConfig(use_edit=True, num_replicas=len(losses[0]), warmup_steps=0,
                        digest_interval=1, **{"sync_interval": 2, **settings})  # fmt: skip
    sizes = {"embedding": 4, "layer.1": 5, "final": 3}
    engine, host, reporter = build_engine(config, sizes, {n: [0.0] * s for n, s in sizes.items()})
    engine.start()
    replica, control = engine.groups.sync.rank, engine.groups.control
    has_loss = control.rank == control.size - 1
    for own in (row[replica] for row in losses):
        for _ in range(2):
            engine.before_step()
            host.move({name: [1.0 + replica] * size for name, size in sizes.items()})
            engine.after_step()
            engine.record_loss(own if has_loss else float("nan"))
    engine.finish()
    return [
        {
            "units": list(report.units),
            "why": report.decision.reasons(),
            "round_loss": report.decision.loss.losses.tolist(),
            "weights": report.decision.weights.tolist(),
            "rollback": report.decision.rollback.tolist(),
            "digest": report.digest,
        }
        for report in reporter.syncs
    ]
