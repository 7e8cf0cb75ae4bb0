"""The syncs that are under way on this rank: one that lands, and others in flight until they do.

Note: the order of syncs. All ranks of a sync group must begin the same exchanges in the same order,
though each comes to it at moments of its own. So syncs advance in the order of their starts
(`poll`), units of one sync in forward order (`InflightSync.advance`), and nothing begins whose
predecessor has not begun. Landing is another matter: it communicates inside a replica only, and is
asked for by the host at the same places on all ranks of the replica (`apply_up_to`, `settle`).

Note: two threads. Over sockets a thread lets exchanges go on beside compute, and takes the outer
steps of the sync that lands at once, unit by unit (`_drive`). It takes the same turns in the same
order as the main thread would, and the two never at once; parameters are written by the main thread
alone. What `step` communicates runs on groups that nothing else uses (`host/groups.py`), so it does
not matter which thread comes first on which rank.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Work
from megatron_edit.comm.progress import ProgressThread
from megatron_edit.comm.wire import moment_bytes
from megatron_edit.engine.checks import drift
from megatron_edit.engine.checks.finite import (
    is_finite_on_all_stages,
    restore_other_units,
    zero_nonfinite_moments,
)
from megatron_edit.engine.host import EngineGroups, EngineSettings, Host, Reporter, SyncReport
from megatron_edit.engine.rounds.plan import Decision, SyncRules
from megatron_edit.engine.state import PendingState, RunState
from megatron_edit.engine.sync.inflight import InflightSync, SyncPlan, UnitSync
from megatron_edit.engine.sync.moments import UnitMoments
from megatron_edit.engine.sync.offload import HomeStream
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.engine.sync.units import Selection, UnitPlan, UnitShard, select
from megatron_edit.method.detector import Verdict
from megatron_edit.method.landing import DIRECT_COPY
from megatron_edit.method.loss_check import LossVerdict
from megatron_edit.method.moments import MomentRule


@dataclass(frozen=True)
class Footprint:
    """Sizes that no single rank knows, for reports.

    Attributes:
        unit_numels: elements that each rank of the replica holds of each unit, int64 [K, U].
        table_bytes: size of one replica's control records, those of all its ranks together.
        state_bytes: what outer state takes on all ranks of a replica together: anchor, momentum,
            error-feedback residuals, and of units that land late, average, snapshot and means of
            inner moments.
    """

    unit_numels: Tensor
    table_bytes: int
    state_bytes: int

    @classmethod
    def measure(
        cls, groups: EngineGroups, plan: UnitPlan, settings: EngineSettings, record_bytes: int
    ) -> Footprint:
        """Ask the ranks of the replica. Set-up only.

        Collective: the ranks of the replica.

        Args:
            groups: who communicates.
            plan: this rank's shards.
            settings: say what is kept of each element.
            record_bytes: size of this rank's control record.
        """
        mine = torch.zeros(len(plan.names), dtype=torch.int64)
        for shard in plan.shards:
            mine[shard.index] = shard.numel
        numels = groups.replica.all_gather(mine)
        tables = groups.replica.all_gather(torch.tensor(record_bytes))
        wire, landing = settings.wire, settings.landing
        kept = 2 + int(landing.needs_snapshot)
        if not landing.is_immediate:
            kept += 1 + len(settings.moments.rule.kinds)
        elements = kept * int(numels.sum())
        if wire.has_residual:
            summed = (
                wire.owner_numel(numel, groups.sync.size) for numel in numels.flatten().tolist()
            )
            elements += int(numels.sum()) + sum(summed)
        return cls(numels, int(tables.sum()), 4 * elements)


@dataclass
class SyncQueue:
    """Lands syncs, each at its time, and reports them.

    Attributes:
        host: gets the parameters.
        groups: who communicates.
        settings: of the engine.
        reporter: learns of it.
        state: of the run: keeps digests of units that land late until these meet again.
        footprint: sizes for reports.
        landing: the sync whose units land now; None when all have, and were checked.
        pending: syncs whose results land later, in the order of their starts.
        num_landings: begun so far, of syncs that have units of this rank's stage.
        thread: goes on with exchanges; None where the main thread alone does.
    """

    host: Host
    groups: EngineGroups
    settings: EngineSettings
    reporter: Reporter
    state: RunState
    footprint: Footprint
    landing: InflightSync | None = None
    pending: list[InflightSync] = field(default_factory=list)
    num_landings: int = 0
    thread: ProgressThread | None = None
    _home: HomeStream = field(init=False)
    _steps_beside: bool = False

    def begin_thread(self, explain: Callable[[Exception], Exception] = lambda error: error) -> None:
        """Let a thread go on with exchanges from here on, where they may need one.

        Args:
            explain: see `ProgressThread`.
        """
        sync, inside = self.groups.sync, (self.groups.stage, *self.groups.ties.values())
        if not self.settings.overlaps_compute or sync.runs_in_order:
            return
        # Outer steps communicate inside the replica. On a GPU these collectives of the thread would
        # queue behind compute that waits for Megatron's own: ranks that wait for each other could
        # wait for ever. There the main thread takes the steps.
        is_safe = sync.device.type == "cpu" or all(group.size == 1 for group in inside)
        self._steps_beside = self.settings.overlap and is_safe

        def ended(error: Exception) -> Exception:
            for group in inside:  # the other ranks wait there for this one
                if group.is_own:
                    group.close()
            return explain(error)

        self.thread = ProgressThread(self._drive, ended)
        self._home = HomeStream(sync.streams, sync.streams.new())

    @property
    def has_pending_units(self) -> bool:
        """Whether units of the sync that lands have still to land."""
        return self.landing is not None and not self.landing.is_done

    @property
    def is_busy(self) -> bool:
        """Whether something may be on the wire."""
        return self.has_pending_units or bool(self.pending)

    def poll(self) -> None:
        """Let exchanges go on. Waits for nothing. See the note on the order of syncs."""
        if self.thread is None:
            self._poll()
        else:
            self.thread.raise_failure()

    def poll_if_busy(self) -> bool:
        """Let exchanges go on; whether there are any, and nobody else does."""
        if not self.is_busy:
            return False
        self.poll()
        return self.thread is None

    def due(self, step: int) -> list[InflightSync]:
        """Syncs that land after step `step`."""
        return [s for s in self.pending if s.plan.due is not None and s.plan.due <= step]

    def of_units(self, selection: Selection) -> list[InflightSync]:
        """Syncs that have units of a selection and have not landed."""
        wanted = set(selection.indices)
        return [s for s in self._all() if wanted & set(s.plan.selection.indices)]

    def prepare(self, sync: InflightSync) -> None:
        """Compute the addends of a sync that lands later, on the stream that will work on them: to
        that one their memory goes back."""
        with self._turn():
            sync.prepare_all()

    def add(self, sync: InflightSync) -> None:
        """A sync begins that lands later."""
        with self._turn():
            self.pending.append(sync)
            self._poll()

    def begin_landing(self, sync: InflightSync) -> None:
        """From here on the units of a sync land, each when it is needed or when all are settled.

        Collective: the ranks of the pipeline stage, where the landing keeps parameters.
        """
        if sync is self.landing:
            return
        self.settle()
        with self._turn():
            if sync in self.pending:
                self.pending.remove(sync)
            if sync.state.offload_streams is not None:
                # Outer state that was computed earlier may still be on its way to host memory.
                sync.state.begin_sync()
            self.landing = sync
            # Whoever counts a landing may leave the gather of parameters to it. A stage that holds
            # none of these units lands nothing and gathers nothing here: it must not count one.
            self.num_landings += bool(sync.units.shards)
            sync.check_finite()
            if not sync.plan.selection.is_whole:
                self._restore_if_broken(sync)
            self._poll()

    def restore_anchor(self, sync: InflightSync) -> None:
        """Give the parameters the anchor that a sync has begun from. All ranks of the replica."""
        with self._turn():
            sync.state.begin_sync()
            for shard in sync.units.shards:
                anchor = sync.state.units[shard.name].stage_anchor()
                shard.scatter(anchor.ready())
                anchor.release()
                shard.publish()
            if not sync.plan.selection.is_whole and not sync.had_finite_norms:
                self._restore_others(sync)
        self.num_landings += 1
        self.host.gather_parameters()

    def apply_up_to(self, num_shards: int) -> bool:
        """Land what there is to land among the first `num_shards` shards of the stage; whether
        there was anything."""
        if (sync := self.landing) is None:
            return False
        began, num_landed = time.monotonic(), 0
        while (landed := self._land_next(sync, num_shards)) is not None:
            self._note_landing(sync, *landed)
            num_landed += 1
        sync.exposed += time.monotonic() - began
        return num_landed > 0

    def settle(self) -> None:
        """Land all of the sync that lands, check for drift and report.

        It needs all stages of the replica at once, so it never runs inside a forward pass, where
        one stage waits for another.
        """
        if (sync := self.landing) is None:
            return
        if self.apply_up_to(len(self.host.plan.shards)):
            self.host.gather_parameters()
        self._report(sync)
        # After the report, which checks for drift: an error in it names the round of `landing`.
        self.landing = None

    def finish_exchanges(self) -> None:
        """Wait until nothing is on the wire. Nothing lands early.

        The others may come later to where they do the same.

        Collective: the ranks of the pipeline stage.
        """
        if not self.pending:
            return
        with self._turn():
            for sync in self.pending:
                if sync.plan.due is None:
                    # CO2: not its outer steps, too. They move the anchor that the pseudo-gradient
                    # of the round under way is to be taken from.
                    sync.finish_exchange()
            self._finish_steps()
            for sync in self.pending:
                sync.state.wait()

    def close(self) -> None:
        """Let nothing go on any more."""
        if self.thread is not None:
            self.thread.close()

    def is_checked(self, round: int) -> bool:
        """Whether drift is looked for after a sync: one of each group, then none for a while."""
        turn = (round - 1) // self.settings.schedule.fragments + 1
        return turn % self.settings.digest_interval == 0

    def state_dict(self) -> list[PendingState]:
        """Syncs that have not landed, for a checkpoint. Nothing may be on the wire."""
        return [state_of(sync) for sync in self.pending]

    def load_state_dict(self, saved: Sequence[PendingState]) -> None:
        """Go on with syncs that had not landed when a checkpoint was written."""
        outer = self.state.outer
        assert outer is not None, "syncs in flight before the switch"
        with self._turn():  # memory of the stream of syncs, as in `prepare`
            self.pending.extend(
                restore_sync(pending, self.host, outer, self.groups, self.settings)
                for pending in saved
            )

    def _land_next(self, sync: InflightSync, num_shards: int) -> tuple[UnitShard, bool] | None:
        """Land a unit; see `InflightSync.land_up_to`. What follows a landing may communicate inside
        the replica, and the others' threads may wait for this one's there: it is no part of the
        turn."""
        with self._turn():
            sync.advance()
            return next(sync.land_up_to(num_shards), None)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Inside, the main thread alone touches what is under way."""
        if self.thread is None:
            yield
            return
        with self.thread.turn(), self._home.entered():
            yield

    def _drive(self) -> Work | None:
        """What the thread does at its turn; then it waits for what this returns."""
        self.groups.sync.streams.serve_thread()
        with torch.no_grad(), self._home.alone():
            self._poll(takes_steps=self._steps_beside)
        return next((work for sync in self._all() if (work := sync.on_wire) is not None), None)

    def _poll(self, *, takes_steps: bool = False) -> None:
        for group in self.groups.ties.values():
            group.reap()
        for sync in self._all():
            # One or the other: what arrived between the two would wait for its outer step,
            # with nothing on the wire, until the main thread comes by.
            is_stepped = takes_steps and sync is self.landing
            is_over = sync.step_exchanged() if is_stepped else sync.advance()
            if not (is_over or sync.launches_together):
                return

    def _all(self) -> list[InflightSync]:
        return self.pending if self.landing is None else [self.landing, *self.pending]

    def _restore_if_broken(self, sync: InflightSync) -> None:
        """If this replica broke: its other units come back with those that land, and at once."""
        is_finite = sync.is_finite
        if not sync.plan.rules.landing.is_immediate:
            is_finite = is_finite_on_all_stages(is_finite, self.groups)
        if is_finite:
            return
        self._restore_others(sync)
        self.settle()
        self.host.gather_parameters()

    def _restore_others(self, sync: InflightSync) -> None:
        """All units but those of a sync, where they are not finite."""
        # Broken units take their anchor as it is after the outer steps of delayed syncs. A save
        # finishes these steps, too: without this, the anchor would depend on whether there was one.
        self._finish_steps()
        sync.state.begin_sync()  # anchors that these steps moved may be on their way to host memory
        snapshots = {
            unit.shard.name: unit.snapshot
            for other in self.pending
            for unit in other.inflight_units
            if unit.snapshot is not None
        }
        landing = sync.units.names
        restore_other_units(self.host, self.groups, sync.state, landing, snapshots, self.reporter)

    def _finish_steps(self) -> None:
        for sync in self.pending:
            if sync.plan.due is not None:
                sync.finish_steps()
                self._report(sync)

    def _note_landing(self, sync: InflightSync, shard: UnitShard, has_bad_moments: bool) -> None:
        """A unit has landed: the model reads it from here on."""
        if has_bad_moments:
            zero_nonfinite_moments(self.host, shard, self.reporter)
        shard.publish()
        if self.is_checked(sync.plan.round) and sync.plan.rules.landing.is_direct_copy:
            sync.digests[shard.index] = drift.shard_digest(shard)

    def _report(self, sync: InflightSync) -> None:
        """The outer step of all units is done: check for drift, and tell."""
        if sync.is_reported:
            return
        plan = sync.plan
        digest = self._check(sync) if self.is_checked(plan.round) else None
        sync.is_reported = True
        report = SyncReport(
            round=plan.round,
            step=plan.step,
            units=sync.units.names,
            decision=plan.decision,
            clip=self._over_stages(sync.clip_factors()),
            update_norm=self._over_stages(sync.update_norms()),
            inner_steps=plan.inner_steps,
            samples=plan.samples,
            wire_bytes=self._wire_bytes(sync),
            state_bytes=self.footprint.state_bytes,
            seconds=sync.seconds(),
            digest=digest,
        )
        self.reporter.on_sync(report)

    def _check(self, sync: InflightSync) -> int:
        """Compare digests now, or where replicas land at different times, at the next meeting."""
        landing = sync.plan.rules.landing
        if not landing.is_direct_copy:
            sync.digests.update(sync.state.digests(sync.units.shards))
        if landing.is_immediate:
            when = f"after the sync of round {sync.plan.round}"
            return drift.check(sync.units, self.groups, sync.digests, when)
        digests, digest = drift.replica_digests(sync.units, self.groups, sync.digests)
        for index, value in zip(sync.plan.selection.indices, digests, strict=True):
            self.state.landed_digests[index] = drift.as_number(value)
        return digest

    def _wire_bytes(self, sync: InflightSync) -> int:
        """Payload that the ranks of one replica send in a sync."""
        size, units = self.groups.sync.size, list(sync.plan.selection.indices)
        exchanged = self.footprint.unit_numels[:, units][:, ~sync.plan.decision.rollback]
        tables = (size - 1) * self.footprint.table_bytes
        numels = exchanged.flatten().tolist()
        return tables + sum(
            sync.wire.payload_bytes(int(numel), size)
            + moment_bytes(sync.plan.moments, int(numel), size)
            for numel in numels
        )

    def _over_stages(self, values: Tensor) -> Tensor:
        """Fill in the units of other pipeline stages from whoever knows them.

        Collective: the ranks of the replica, where it has pipeline stages.

        Args:
            values: float64 [U] on the CPU, NaN where this stage does not hold the unit.
        """
        if self.groups.stage.size == self.groups.replica.size:
            return values
        rows = self.groups.replica.all_gather(values)
        known = torch.where(rows.isnan(), -torch.inf, rows).max(dim=0).values
        return torch.where(known.isinf(), torch.nan, known)


def state_of(sync: InflightSync) -> PendingState:
    """What a checkpoint keeps of a sync. Nothing of it may be on the wire; no tensor is copied."""
    plan, decision = sync.plan, sync.plan.decision
    units = sync.inflight_units
    return PendingState(
        round=plan.round,
        step=plan.step,
        due=plan.due,
        units=sync.units.names,
        excluded=tuple(decision.excluded[sync.groups.sync.rank].tolist()),
        is_stepped=plan.due is not None,
        has_snapshot=plan.rules.landing.needs_snapshot,
        landing=dataclasses.asdict(plan.rules.landing),
        inner_lr=plan.rules.inner_lr,
        tables={
            "norms": decision.norms.tolist(),
            "scores": decision.verdict.scores.tolist(),
            "anomalous": decision.verdict.anomalous.tolist(),
            "weights": decision.weights.tolist(),
            "rollback": decision.rollback.tolist(),
            "round_loss": decision.loss.losses.tolist(),
            "loss_scores": decision.loss.scores.tolist(),
            "loss_rejected": decision.loss.rejected.tolist(),
        },
        inner_steps=plan.inner_steps,
        samples=plan.samples,
        averages={u.shard.name: u.average for u in units if u.average is not None},
        snapshots={u.shard.name: u.snapshot for u in units if u.snapshot is not None},
        moments={
            kind: {u.shard.name: u.moments.means[kind] for u in units if u.moments is not None}
            for kind in plan.moments.kinds
        },
    )


def restore_sync(
    saved: PendingState,
    host: Host,
    outer: OuterState,
    groups: EngineGroups,
    settings: EngineSettings,
) -> InflightSync:
    """A sync that had not landed when a checkpoint was written.

    Args:
        saved: what `state_of` told on this replica; units may be numbered in another order here.
        host: has the units of this rank, and gets moments that have not landed.
        outer: anchor and momentum.
        groups: who communicates.
        settings: of this run.
    """
    whole = host.plan
    selection = select(whole, [whole.names.index(name) for name in saved["units"]])
    order = [saved["units"].index(name) for name in selection.plan.names]

    def table(name: str) -> Tensor:
        return torch.tensor(saved["tables"][name], dtype=torch.float64)[..., order]

    verdict = Verdict(table("anomalous").bool(), table("scores"))
    rollback, loss = table("rollback").bool(), _loss_verdict_of(saved["tables"])
    decision = Decision(table("norms"), verdict, table("weights"), rollback, loss)
    # Checkpoints may be older than a field of the rule.
    landing = dataclasses.replace(DIRECT_COPY, **saved["landing"])
    rules = SyncRules(settings.outer, settings.max_norm, landing, saved["inner_lr"])
    plan = SyncPlan(
        saved["round"],
        saved["step"],
        saved["due"],
        selection,
        decision,
        rules,
        tuple(saved["inner_steps"]),
        tuple(saved["samples"]),
        MomentRule(tuple(saved["moments"])),
    )
    began = time.monotonic()
    sync = InflightSync(plan, outer, groups, settings.wire, settings.depth, began, 0.0, host)
    sync.is_reported = saved["is_stepped"]  # its report came with the outer steps, before the save
    for shard in sync.units.shards:
        unit = UnitSync.restore(
            shard,
            outer.units[shard.name],
            groups.sync.device,
            saved["averages"].get(shard.name),
            saved["snapshots"].get(shard.name),
            is_excluded=saved["excluded"][saved["units"].index(shard.name)],
            is_stepped=saved["is_stepped"],
        )
        means = {
            kind: units[shard.name].to(groups.sync.device)
            for kind, units in saved["moments"].items()
            if shard.name in units
        }
        if means:
            unit.moments = UnitMoments(host, shard, means, plan.moments, unit.is_excluded)
        sync._inflight.append(unit)
    sync._started = len(sync.units.shards)
    return sync


def _loss_verdict_of(tables: Mapping[str, Any]) -> LossVerdict:
    """From the tables of a pending sync; those of older checkpoints have none of it."""
    if "round_loss" not in tables:
        norms = torch.tensor(tables["norms"], dtype=torch.float64)
        return LossVerdict.without_check(torch.full_like(norms[:, 0], torch.nan))
    losses, scores, rejected = (
        torch.tensor(tables[name], dtype=torch.float64)
        for name in ("round_loss", "loss_scores", "loss_rejected")
    )
    return LossVerdict(rejected.bool(), losses, scores)
