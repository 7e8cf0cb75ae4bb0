"""SyncController that have not landed, told to a checkpoint and brought back from one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_edit.checkpoint.manifest import PendingSync
from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine.engine import EditEngine
from megatron_edit.engine.rounds.plan import Decision
from megatron_edit.engine.sync.fragments import select
from megatron_edit.engine.sync.inflight import InflightSync
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.engine.sync.unit_sync import Outcome, Rules, UnitSync
from megatron_edit.engine.sync.units import UnitShard
from megatron_edit.method.detector import Verdict
from megatron_edit.method.landing import LandingRule

AVERAGE, SNAPSHOT = "average", "snapshot"  # kinds of tensors


def pending_of(run: InflightSync) -> PendingSync:
    """For a manifest. Nothing of the sync may be on the wire."""
    decision, replica = run.decision, run.groups.sync.rank
    excluded = decision.rollback | decision.verdict.anomalous[replica]
    return PendingSync(
        round=run.round,
        step=run.step,
        due=run.due,
        units=run.plan.names,
        excluded=tuple(excluded.tolist()),
        is_stepped=run.due is not None,
        has_snapshot=run.rules.landing.needs_snapshot,
        landing=dataclasses.asdict(run.rules.landing),
        inner_lr=run.rules.inner_lr,
        tables={
            "norms": decision.norms.tolist(),
            "scores": decision.verdict.scores.tolist(),
            "anomalous": decision.verdict.anomalous.tolist(),
            "weights": decision.weights.tolist(),
            "rollback": decision.rollback.tolist(),
        },
        inner_steps=tuple(record.inner_steps for record in run.records),
        samples=tuple(record.samples for record in run.records),
    )


def bring_back(engine: EditEngine, pending: PendingSync, state: OuterState) -> InflightSync:
    """The sync again, with room for its tensors (see `tensors_of`).

    Args:
        engine: that goes on.
        pending: of this replica.
        state: of this rank.
    """
    plan, settings = engine.host.plan, engine.settings
    selection = select(plan, [plan.names.index(name) for name in pending.units])
    order = [pending.units.index(name) for name in selection.plan.names]
    rules = Rules(
        settings.outer, settings.max_norm, LandingRule(**pending.landing), pending.inner_lr
    )
    run = InflightSync(
        round=pending.round,
        step=pending.step,
        due=pending.due,
        selection=selection,
        state=state,
        groups=engine.groups,
        decision=_decision(pending.tables, order),
        records=[
            ControlRecord(pending.round, pending.step, steps, samples, 0, losses=(), norms=())
            for steps, samples in zip(pending.inner_steps, pending.samples, strict=True)
        ],
        rules=rules,
        wire=settings.wire,
        depth=settings.prefetch_units,
        began=time.monotonic(),
        waited=0.0,
        is_reported=pending.is_stepped,  # when the checkpoint was written
    )
    run.bring_back([_flight(run, pending, shard) for shard in selection.plan.shards])
    return run


def tensors_of(runs: Sequence[InflightSync]) -> dict[str, dict[str, Tensor]]:
    """Averages and snapshots that a checkpoint keeps, fp32 [numel] by kind and unit."""
    flights = [flight for run in runs for flight in run.flights]
    averages = {f.shard.name: f.average for f in flights if f.average is not None}
    snapshots = {f.shard.name: f.snapshot for f in flights if f.snapshot is not None}
    return {AVERAGE: averages, SNAPSHOT: snapshots}


def _flight(run: InflightSync, pending: PendingSync, shard: UnitShard) -> UnitSync:
    index, device = pending.units.index(shard.name), run.groups.sync.device
    is_excluded = pending.excluded[index]
    has_average = not pending.is_stepped and not bool(run.decision.rollback[shard.index])
    unknown = torch.full((), torch.nan, dtype=torch.float64, device=device)

    def room() -> Tensor:
        return torch.zeros(shard.numel, device=device)

    return UnitSync(
        shard,
        run.state.units[shard.name],
        is_excluded,
        staged=None,
        average=room() if has_average else None,
        snapshot=room() if pending.has_snapshot and not is_excluded else None,
        outcome=Outcome(unknown, unknown) if pending.is_stepped else None,
        is_exchanged=True,
    )


def _decision(tables: Mapping[str, Sequence[Sequence[float]]], order: Sequence[int]) -> Decision:
    def table(name: str) -> Tensor:
        return torch.tensor(tables[name], dtype=torch.float64)[..., list(order)]

    verdict = Verdict(table("anomalous").bool(), table("scores"))
    return Decision(table("norms"), verdict, table("weights"), table("rollback").bool())
