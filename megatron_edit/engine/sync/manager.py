"""The syncs of this rank: at most one that is landing, and those that land later.

Note: the order of syncs. All ranks of a sync group must begin the same exchanges in the same order,
though each does so at times of its own. So syncs advance in the order of their starts (`poll`),
units of one sync in forward order (`Sync.advance`), and no exchange begins before its predecessor.
Landing is independent of that: it communicates inside a replica only, and the host calls it at the
same places on all ranks of the replica (`land_up_to`, `land_all`).

Where collectives run in order, second phases of delayed exchanges begin at the same step on all
ranks of a replica (`agree_on_next_steps`).

Note: two threads. Over sockets a progress thread advances exchanges while the main thread computes,
and runs the outer steps of the landing sync, unit by unit (`_drive`). It does the same work in the
same order as the main thread would, and the two never run concurrently; only the main thread writes
parameters. The collectives of `step` run on groups with no other use (`host/groups.py`), so it does
not matter which of the two threads runs them on which rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Work
from megatron_edit.comm.control import DelayedVote
from megatron_edit.comm.progress import ProgressThread
from megatron_edit.constants import FP32_BYTES
from megatron_edit.engine.host import EngineGroups, Host, Reporter
from megatron_edit.engine.plan import RoundPlan, SyncPlan
from megatron_edit.engine.saved import PendingState
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.sync.checks import (
    check_before_commit,
    plan_digest,
    restore_other_units,
    zero_nonfinite_moments,
)
from megatron_edit.engine.sync.offload import SyncStream
from megatron_edit.engine.sync.outer_state import OuterState, UnitState, replica_norms
from megatron_edit.engine.sync.reports import Footprint, SyncReports
from megatron_edit.engine.sync.syncs import (
    CheckedSync,
    DelayedSync,
    ForwardSync,
    Sync,
    SyncContext,
)
from megatron_edit.engine.units import Selection, UnitShard, select_all

NOTHING: Mapping[str, Tensor] = {}


class SyncManager:
    """Starts syncs, lands each when it is due, and reports them: the interface of this package.

    Args:
        reporter: receives reports and messages.

    Attributes:
        landing: the sync whose units are landing; None when all have landed and were checked.
        pending: syncs that land as a whole, later or after a check, in the order of their starts.
        together_bytes: what a link carries in the latency of an exchange: units of fewer bytes are
            exchanged together, so that not each of them costs a latency. At most the largest unit.
    """

    def __init__(
        self,
        host: Host,
        groups: EngineGroups,
        settings: EngineSettings,
        reporter: Reporter,
        footprint: Footprint,
    ) -> None:
        self._host, self._groups, self._settings = host, groups, settings
        self._reporter = reporter
        self._reports = SyncReports(groups, reporter, settings.wire, footprint)
        self.landing: Sync | None = None
        self.pending: list[DelayedSync] = []
        self.together_bytes = 0
        self._outer: OuterState | None = None
        self._reserved: OuterState | None = None  # allocated, before the rounds
        self._thread: ProgressThread | None = None
        self._thread_steps = False  # whether the thread runs outer steps
        self._stream = SyncStream(groups.sync.streams)
        self._vote, self._voted = DelayedVote(groups.control), list[tuple[Any, int]]()

    # ---- outer state

    def reserve(self) -> None:
        """Take the memory of the rounds now, and not after a long warm-up: that of the outer state,
        and once that of the buffers of delayed syncs, which torch keeps."""
        self._reserved = self._reserved or self._allocate()
        landing, device = self._settings.landing, self._groups.sync.device
        kept = 1 + int(landing.needs_snapshot) + len(self._settings.moments.rule.kinds)
        if not landing.is_immediate:
            fragments: dict[int, list[int]] = {}
            for shard in self._host.plan.shards:
                number = shard.index % self._settings.used.fragments
                fragments.setdefault(number, []).extend([shard.numel] * kept)
            largest = max(fragments.values(), key=sum, default=[])
            del [torch.empty(numel, device=device) for numel in largest][:]

    def take_anchor(self) -> OuterState:
        """Create outer state whose anchor is the current parameters; an argument of `begin`."""
        outer, self._reserved = self._reserved or self._allocate(), None
        return outer.at_parameters(self._host.plan)

    def _allocate(self) -> OuterState:
        groups, settings = self._groups, self._settings
        return OuterState.allocate(
            self._host.plan,
            groups.sync.device,
            offload=settings.used.offload,
            wire=settings.wire,
            num_replicas=groups.sync.size,
            streams=groups.sync.streams,
            max_staged=settings.depth + 1,  # those in flight, and the next one
        )

    def begin(self, outer: OuterState) -> None:
        """Begin or resume the rounds with this outer state."""
        self._outer = outer
        anchors = {name: unit.anchor for name, unit in outer.units.items()}
        momenta = {name: unit.momentum for name, unit in outer.units.items()}
        self._host.attach_outer_state(anchors, momenta)

    def reconfigure(self, settings: EngineSettings, footprint: Footprint) -> None:
        """Use other settings for the syncs from now on. None may be under way.

        Args:
            settings: of the engine; wire type, landing and depth may differ.
        """
        assert not self._all(), "settings change while a sync is under way"
        self.close()
        self._thread, self._thread_steps = None, False
        is_other_wire = settings.wire != self._settings.wire
        self._settings = settings
        self._reports = SyncReports(self._groups, self._reporter, settings.wire, footprint)
        if is_other_wire:
            sync = self._groups.sync
            self._outer, self._reserved = (
                None if outer is None else outer.with_wire(settings.wire, sync.size, sync.device)
                for outer in (self._outer, self._reserved)
            )

    def end(self) -> None:
        """Drop anchor and outer momentum, where no round follows and all units have landed."""
        self._outer = self._reserved = None
        self._reports.late_digests.clear()
        self._host.attach_outer_state({}, {})

    @property
    def has_outer_state(self) -> bool:
        """Whether there is an anchor: the replicas train locally."""
        return self._outer is not None

    @property
    def outer(self) -> OuterState:
        """Anchor, momentum and residuals; only between switch and end of the rounds."""
        assert self._outer is not None, "outer state before the switch"
        return self._outer

    @property
    def footprint(self) -> Footprint:
        """Sizes that no single rank knows."""
        return self._reports.footprint

    def norms(self, selection: Selection, loss: float) -> tuple[dict[int, float], float, float]:
        """||A - theta|| of this replica by unit position, its loss, and the seconds that syncs have
        added to its training since the last meeting; see `replica_norms`.

        Collective: the ranks of the replica.
        """
        replica, device = self._groups.replica, self._groups.sync.device
        exposed, self._reports.exposed = self._reports.exposed, math.nan
        norms, loss, exposed = replica_norms(
            selection.plan, self.outer, replica, device, loss, exposed
        )
        return dict(zip(selection.indices, norms.tolist(), strict=True)), loss, exposed

    def late_digests(self, selection: Selection) -> dict[int, float]:
        """Digests of units that have landed since their last meeting, by position."""
        digests = self._reports.late_digests
        return {index: digests[index] for index in selection.indices if index in digests}

    # ---- syncs begin

    def prepare(
        self,
        plan: SyncPlan,
        began: float,
        waited: float,
        *,
        checks_commit: bool = False,
        snapshots: Mapping[str, Tensor] = NOTHING,
    ) -> Sync:
        """Create the sync of a plan, to be passed to `start`.

        Its addends are computed from the parameters whose norms were gathered. With delayed syncs
        that includes the last one, which lands immediately: with CO2 the sync before it lands
        first, and changes the parameters.

        Args:
            began: start time, seconds on a monotonic clock.
            waited: seconds spent at the meeting.
            checks_commit: whether `check_commit` or `commit` is called before the sync lands.
            snapshots: fp32 [numel] by unit, the parameters at the meeting, where training may have
                changed them; empty otherwise.
        """
        for index in plan.selection.indices:
            self._reports.late_digests.pop(index, None)  # the meeting has compared them
        norms = plan.decision.norms[self._groups.sync.rank].tolist()
        for shard in plan.selection.plan.shards:
            if not math.isfinite(norms[shard.index]):  # the replica is rejected in this unit
                zero_nonfinite_moments(self._host, shard, self._reporter)
        kind: type[ForwardSync | DelayedSync] = CheckedSync
        if not checks_commit:
            kind = ForwardSync if plan.rules.landing.is_immediate else DelayedSync
        sync = kind(plan, self._context(), began, waited)
        if checks_commit or not self._settings.landing.is_immediate:
            with self._main_thread():  # on the stream that the addends' memory returns to
                sync.prepare(snapshots)
        return sync

    def start(self, sync: Sync) -> None:
        """Start a sync: its units land from now on, or later."""
        if isinstance(sync, DelayedSync):
            with self._main_thread():
                self.pending.append(sync)
                self._poll()
            sync.count_exposed_since_start()
            return
        # Counted twice: if a unit is not finite on this replica, `begin_landing` itself lands and
        # reports the sync, and the report needs the time until then.
        sync.count_exposed_since_start()
        self.begin_landing(sync)
        sync.count_exposed_since_start()

    def is_exchanged(self, sync: DelayedSync) -> bool:
        """Advance the exchange of a started sync without blocking; return whether it is done."""
        with self._main_thread():
            return sync.advance()

    def abandon(self, sync: DelayedSync) -> None:
        """Forget a started sync of which nothing has been applied. The caller keeps it, and with
        it the buffers that are still in use."""
        with self._main_thread():
            if sync in self.pending:
                self.pending.remove(sync)

    def snapshots(self, selection: Selection) -> dict[str, Tensor]:
        """Copies of the parameters of these units: fp32 [numel] by unit."""
        device = self._groups.sync.device
        return {
            shard.name: shard.gather(torch.empty(shard.numel, device=device))
            for shard in selection.plan.shards
        }

    def commit(self, sync: CheckedSync) -> None:
        """Change anchor and momentum by a sync that lands later.

        Collective: the ranks of the pipeline stage.
        """
        with self._main_thread():
            sync.is_committed = True
            self.outer.begin_sync()
            sync.finish_steps()

    def result_of(
        self, sync: CheckedSync, sent: Tensor
    ) -> tuple[list[bool], dict[int, Tensor], dict[int, Tensor]]:
        """What all replicas must agree on before the commit of an exchanged sync.

        Collective: the ranks of the pipeline stage.

        Args:
            sent: `CheckedSync.sent_projections` of all replicas, float64 [N, 1 + parts, 2].

        Returns:
            Which averages are corrupt, by unit; digests of anchor and momentum as they will be, and
            of means of moments, by unit position.
        """
        with self._main_thread():
            sync.finish_exchange()
            return sync.corrupt_averages(sent), sync.preview(), sync.mean_digests()

    def check_commit(self, sync: Sync, plan: RoundPlan) -> None:
        """Finish the exchange of a sync, and check that all replicas will apply the same.

        Collective: all ranks of all replicas; all raise, or none.

        Raises:
            DriftError: they would not. Parameters, anchor, momentum and the state of the rounds
                are as before the sync.
        """
        assert isinstance(sync, CheckedSync), "a sync that lands without this check"
        sync.finish_exchange()
        when = f"before round {plan.after.count} was applied"
        digests = sync.preview()
        for index, mean in sync.mean_digests().items():
            digests[index] = digests[index] * 3 + mean  # both, and their order, count
        check_before_commit(sync.units, self._groups, digests, plan_digest(plan), when)
        self.begin_landing(sync)
        sync.count_exposed_since_start()

    def begin_thread(self, explain: Callable[[Exception], Exception] = lambda error: error) -> None:
        """Start the progress thread, where exchanges need one.

        Args:
            explain: see `ProgressThread`.
        """
        settings, sync = self._settings, self._groups.sync
        inside = (self._groups.stage, *self._groups.ties.values())
        if not settings.overlaps_compute or sync.runs_in_order:
            return
        # Outer steps communicate inside the replica. On a GPU these collectives of the thread would
        # queue behind compute that waits for Megatron's own collectives: ranks could deadlock. In
        # that case the main thread runs the steps.
        is_safe = sync.device.type == "cpu" or all(group.size == 1 for group in inside)
        self._thread_steps = settings.overlap and is_safe

        def ended(error: Exception) -> Exception:
            for group in inside:  # the other ranks wait for this one in these groups
                if group.is_own:
                    group.close()
            return explain(error)

        self._stream = SyncStream(sync.streams, sync.streams.new())
        self._thread = ProgressThread(self._drive, ended)

    def poll(self) -> None:
        """Advance exchanges without blocking. See the note on the order of syncs."""
        if self._thread is None:
            self._poll()
        else:
            self._thread.raise_failure()

    def agree_on_next_steps(self) -> None:
        """Begin the next steps of exchanges whose last ones were done on all ranks of the replica
        one step ago; once a step. See the note on the order of phases
        (`comm/compressed_all_reduce.py`).

        Collective: the ranks of the replica, where exchanges run in order and in two phases.
        """
        sync = self._groups.sync
        if not sync.runs_in_order:
            return
        voted, self._voted = self._voted, []
        if self._vote.read():
            for exchange, num_begun in voted:
                if exchange.num_begun == num_begun:
                    exchange.begin_next()
        if self.pending and self._settings.num_phases > 1:
            self._voted = [(exchange, exchange.num_begun) for exchange in sync.backlog]
            self._vote.post(all(exchange.is_ready for exchange in sync.backlog))

    def poll_if_busy(self) -> bool:
        """Advance exchanges; return whether there are any that no thread advances."""
        if not self.is_busy:
            return False
        self.poll()
        return self._thread is None

    @property
    def has_pending_units(self) -> bool:
        """Whether units of the landing sync have not landed yet."""
        return self.landing is not None and not self.landing.is_done

    @property
    def is_busy(self) -> bool:
        """Whether an exchange may be in flight."""
        return self.has_pending_units or bool(self.pending)

    @property
    def failure(self) -> Exception | None:
        """The error that has ended the thread; None if there is none."""
        return None if self._thread is None else self._thread.failure

    def close(self) -> None:
        """End the progress thread."""
        if self._thread is not None:
            self._thread.close()

    # ---- syncs land

    def due(self, step: int) -> list[DelayedSync]:
        """Pending syncs that land after step `step`."""
        return [s for s in self.pending if s.plan.due is not None and s.plan.due <= step]

    def of_units(self, selection: Selection) -> list[Sync]:
        """Syncs with units of a selection that have not landed."""
        indices = set(selection.indices)
        return [s for s in self._all() if indices & set(s.plan.selection.indices)]

    def begin_landing(self, sync: Sync) -> None:
        """Begin to land the units of a sync, each when the forward pass needs it or all together.

        Collective: the ranks of the pipeline stage, where the landing mixes in the parameters.
        """
        if sync is self.landing:
            return
        self.land_all()
        with self._main_thread():
            if sync in self.pending:
                self.pending.remove(sync)
            # Outer state that was computed earlier may still be on its way to host memory.
            self.outer.begin_sync()
            self.landing = sync
            sync.check_finite()
            if not sync.plan.selection.has_all_units:
                self._restore_if_not_finite(sync)
            self._poll()

    def land(self, syncs: Iterable[Sync]) -> None:
        """Land all units of these syncs."""
        for sync in syncs:
            self.begin_landing(sync)
            self.land_all()

    def restore_anchor(self, sync: Sync) -> None:
        """Set the parameters to the anchor from which a sync began.

        Collective: all ranks of the replica.
        """
        with self._main_thread():
            self._scatter_anchor(sync.units.shards)
            if not sync.plan.selection.has_all_units and not sync.had_finite_norms:
                self._restore_others(sync)
        self._host.gather_parameters()

    def set_parameters_to_anchor(self) -> None:
        """Set all parameters to their anchor.

        Collective: the ranks of the replica.
        """
        self._scatter_anchor(self._host.plan.shards)
        self._host.gather_parameters()

    def _scatter_anchor(self, shards: Sequence[UnitShard]) -> None:
        outer = self.outer
        outer.begin_sync()
        for shard, anchor in outer.prefetch(shards, UnitState.stage_anchor):
            shard.scatter(anchor.ready())
            anchor.release()
            shard.publish()
        outer.end_sync()

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Set all parameters to their anchor inside the context.

        Collective: the ranks of the replica.
        """
        kept = self.snapshots(select_all(self._host.plan))
        self.set_parameters_to_anchor()
        try:
            yield
        finally:
            for shard in self._host.plan.shards:
                shard.scatter(kept[shard.name])
                shard.publish()
            self._host.gather_parameters()

    def land_up_to(self, num_shards: int) -> bool:
        """Land the pending units among the first `num_shards` shards of the stage; return whether
        there were any."""
        if (sync := self.landing) is None:
            return False
        began, num_landed = self._groups.sync.streams.mark(), 0
        while (landed := self._land_next(sync, num_shards)) is not None:
            self._publish(sync, *landed)
            num_landed += 1
        sync.count_exposed(began)
        return num_landed > 0

    def land_all(self) -> None:
        """Land all units of the landing sync, check for drift and report.

        It needs all stages of the replica together, so it never runs inside a forward pass, where
        one stage waits for another.
        """
        if (sync := self.landing) is None:
            return
        if self.land_up_to(len(self._host.plan.shards)):
            self._host.gather_parameters()
        self._reports.report(sync)
        # After the report, which checks for drift: an error in it names the round of `landing`.
        self.landing = None

    # ---- checkpoints

    def finish_exchanges(self) -> None:
        """Wait until no exchange is in flight. No sync lands early.

        Other replicas may do the same at a later time.

        Collective: the ranks of the pipeline stage.
        """
        if not self.pending:
            return
        with self._main_thread():
            for sync in self.pending:
                if sync.plan.due is None:
                    # CO2: without its outer steps. They move the anchor that the pseudo-gradient of
                    # the current round is relative to.
                    sync.finish_exchange()
            self._finish_steps()
            self.outer.wait()

    def state_dict(self) -> list[PendingState]:
        """Syncs that have not landed, for a checkpoint. No exchange may be in flight."""
        return [sync.state_dict() for sync in self.pending]

    def load_state_dict(self, saved: Sequence[PendingState]) -> None:
        """Resume syncs that had not landed when a checkpoint was written."""
        context = self._context()
        with self._main_thread():  # on the stream of syncs, as in `prepare`
            self.pending.extend(
                DelayedSync.restore(pending, context, self._settings) for pending in saved
            )

    # ---- the two threads

    @contextmanager
    def _main_thread(self) -> Iterator[None]:
        """Pause the progress thread, so that only the main thread touches syncs."""
        if self._thread is None:
            yield
            return
        with self._thread.paused(), self._stream.use():
            yield

    def _drive(self) -> Work | None:
        """One pass of the thread; returns the collective to wait for before the next one."""
        self._groups.sync.streams.use_device_in_thread()
        with torch.no_grad(), self._stream.use_unsynced():
            self._poll(takes_steps=self._thread_steps)
        return next((work for sync in self._all() if (work := sync.on_wire) is not None), None)

    def _poll(self, *, takes_steps: bool = False) -> None:
        for group in self._groups.ties.values():
            group.reap()
        for sync in self._all():
            # Not `advance` and then a step: an average that arrived between the two would wait for
            # its outer step, with nothing in flight, until the main thread polls.
            is_stepped = takes_steps and sync is self.landing
            is_over = sync.advance_and_step() if is_stepped else sync.advance()
            if not (is_over or sync.launches_together):
                return

    # ---- parts of the above

    def _context(self) -> SyncContext:
        settings = self._settings
        numels: list[int] = []
        if self.together_bytes:
            numels = self.footprint.unit_numels.amax(dim=0).tolist()
        return SyncContext(
            self._host,
            self._groups,
            settings.wire,
            settings.depth,
            self.outer,
            tuple(numels),
            min(self.together_bytes // FP32_BYTES, max(numels, default=0)),
        )

    def _all(self) -> list[Sync]:
        return [*self.pending] if self.landing is None else [self.landing, *self.pending]

    def _land_next(self, sync: Sync, num_shards: int) -> tuple[UnitShard, bool] | None:
        """Land the next unit; see `Sync.land_up_to`.

        Work after a landing may communicate inside the replica, where threads of other ranks may
        wait for the thread of this one: the caller does it after this method, unpaused.
        """
        with self._main_thread():
            sync.advance()
            return next(sync.land_up_to(num_shards), None)

    def _publish(self, sync: Sync, shard: UnitShard, has_bad_moments: bool) -> None:
        """Copy a landed unit to where the model reads it."""
        if has_bad_moments:
            zero_nonfinite_moments(self._host, shard, self._reporter)
        shard.publish()
        if sync.plan.is_checked and sync.plan.rules.landing.is_direct_copy:
            sync.digests[shard.index] = shard.digest()

    def _restore_if_not_finite(self, sync: Sync) -> None:
        """Land now and restore the other units if this replica's parameters are not finite."""
        if sync.is_finite_on_replica():
            return
        self._restore_others(sync)
        self.land_all()
        self._host.gather_parameters()

    def _restore_others(self, sync: Sync) -> None:
        """Restore the units outside a sync that are not finite to their anchor."""
        # They take the anchor after the outer steps of delayed syncs. A save finishes these steps,
        # too: without this, the anchor would depend on whether there was a save.
        self._finish_steps()
        self.outer.begin_sync()  # anchors that these steps moved may be on their way to host memory
        snapshots = {
            unit.shard.name: unit.snapshot
            for other in self.pending
            for unit in other.inflight_units
            if unit.snapshot is not None
        }
        landing = sync.units.names
        restore_other_units(
            self._host, self._groups, self.outer, landing, snapshots, self._reporter
        )

    def _finish_steps(self) -> None:
        for sync in self.pending:
            if sync.plan.due is not None and sync.is_committed:
                sync.finish_steps()
                self._reports.report(sync)
