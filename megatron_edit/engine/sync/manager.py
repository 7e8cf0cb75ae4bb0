"""The syncs of this rank: one that lands, and others in flight until they do.

Note: the order of syncs. All ranks of a sync group must begin the same exchanges in the same order,
though each comes to it at moments of its own. So syncs advance in the order of their starts
(`poll`), units of one sync in forward order (`Sync.advance`), and nothing begins whose predecessor
has not begun. Landing is another matter: it communicates inside a replica only, and is asked for by
the host at the same places on all ranks of the replica (`land_up_to`, `land_all`).

Note: two threads. Over sockets a thread lets exchanges go on while the main thread computes, and
takes the outer steps of the sync that lands at once, unit by unit (`_drive`). It does the same in
the same order as the main thread would, and the two never at once; parameters are written by the
main thread alone. What `step` communicates runs on groups that nothing else uses
(`host/groups.py`), so it does not matter which thread comes first on which rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_edit.comm.collectives import Work
from megatron_edit.comm.progress import ProgressThread
from megatron_edit.engine.host import EngineGroups, EngineSettings, Host, Reporter
from megatron_edit.engine.plan import SyncPlan
from megatron_edit.engine.saved import PendingState
from megatron_edit.engine.sync.finite import restore_other_units, zero_nonfinite_moments
from megatron_edit.engine.sync.offload import SyncStream
from megatron_edit.engine.sync.outer_state import OuterState, replica_norms
from megatron_edit.engine.sync.reports import Footprint, SyncReports
from megatron_edit.engine.sync.syncs import DelayedSync, ForwardSync, Sync, SyncContext
from megatron_edit.engine.units import Selection, UnitShard


class SyncManager:
    """Starts syncs, lands each at its time, and reports them: the only face of this folder.

    Args:
        host: gets the parameters.
        groups: who communicates.
        settings: of the engine.
        reporter: learns of it.
        footprint: sizes for reports.

    Attributes:
        landing: the sync whose units land now; None when all have, and were checked.
        pending: syncs whose results land later, in the order of their starts.
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
        self._outer: OuterState | None = None
        self._thread: ProgressThread | None = None
        self._thread_steps = False  # whether the thread takes outer steps
        self._stream = SyncStream(groups.sync.streams)

    # ---- outer state

    def take_anchor(self) -> OuterState:
        """Outer state whose anchor is the parameters as they are. To be given to `begin`."""
        groups, settings = self._groups, self._settings
        return OuterState.take(
            self._host.plan,
            groups.sync.device,
            offload=settings.offload,
            wire=settings.wire,
            num_replicas=groups.sync.size,
            streams=groups.sync.streams,
            max_staged=settings.depth + 1,  # those in flight, and the next one
        )

    def begin(self, outer: OuterState) -> None:
        """Rounds begin, or go on, with this outer state."""
        self._outer = outer
        anchors = {name: unit.anchor for name, unit in outer.units.items()}
        momenta = {name: unit.momentum for name, unit in outer.units.items()}
        self._host.attach_outer_state(anchors, momenta)

    def end(self) -> None:
        """Rounds are over, and all has landed: anchor and outer momentum are not needed again."""
        self._outer = None
        self._reports.late_digests.clear()
        self._host.attach_outer_state({}, {})

    @property
    def has_outer_state(self) -> bool:
        """Whether there is an anchor: replicas train alone."""
        return self._outer is not None

    @property
    def outer(self) -> OuterState:
        """Anchor, momentum and residuals. Only while there are any."""
        assert self._outer is not None, "outer state before the switch"
        return self._outer

    @property
    def footprint(self) -> Footprint:
        """Sizes that no single rank knows."""
        return self._reports.footprint

    def norms(self, selection: Selection, loss: float) -> tuple[dict[int, float], float]:
        """||A - theta|| of this replica by the units' position, and its loss; see `replica_norms`.

        Collective: the ranks of the replica.
        """
        replica, device = self._groups.replica, self._groups.sync.device
        norms, loss = replica_norms(selection.plan, self.outer, replica, device, loss)
        return dict(zip(selection.indices, norms.tolist(), strict=True)), loss

    def late_digests(self, selection: Selection) -> dict[int, float]:
        """Digests of units that have landed late and not met since, by position."""
        digests = self._reports.late_digests
        return {index: digests[index] for index in selection.indices if index in digests}

    # ---- syncs begin

    def prepare(self, plan: SyncPlan, began: float, waited: float) -> Sync:
        """The sync of a plan, to be started by `start`.

        Its addends are of the parameters whose norms were gathered. That holds for the last sync of
        delayed ones, too, which lands at once: with CO2 the sync before it lands first, and changes
        the parameters.

        Args:
            plan: of the sync.
            began: when, seconds on a monotonic clock.
            waited: seconds spent at the meeting.
        """
        for index in plan.selection.indices:
            self._reports.late_digests.pop(index, None)  # the meeting has compared them
        norms = plan.decision.norms[self._groups.sync.rank].tolist()
        for shard in plan.selection.plan.shards:
            if not math.isfinite(norms[shard.index]):  # all have left this replica out of the unit
                zero_nonfinite_moments(self._host, shard, self._reporter)
        is_forward = plan.rules.landing.is_immediate
        kind = ForwardSync if is_forward else DelayedSync
        sync = kind(plan, self._context(), began, waited)
        if not self._settings.landing.is_immediate:
            with self._main_thread():  # on the stream to which the addends' memory goes back
                sync.prepare()
        return sync

    def start(self, sync: Sync) -> None:
        """Let a sync begin: its units land from now on, or later."""
        if isinstance(sync, DelayedSync):
            with self._main_thread():
                self.pending.append(sync)
                self._poll()
            sync.count_exposed_since_start()
            return
        # Counted twice: where a unit is not finite on this replica, `begin_landing` lands and
        # reports the sync itself, and its report must have the time until then.
        sync.count_exposed_since_start()
        self.begin_landing(sync)
        sync.count_exposed_since_start()

    def begin_thread(self, explain: Callable[[Exception], Exception] = lambda error: error) -> None:
        """Let a thread go on with exchanges from here on, where they may need one.

        Args:
            explain: see `ProgressThread`.
        """
        settings, sync = self._settings, self._groups.sync
        inside = (self._groups.stage, *self._groups.ties.values())
        if not settings.overlaps_compute or sync.runs_in_order:
            return
        # Outer steps communicate inside the replica. On a GPU these collectives of the thread would
        # queue behind compute that waits for Megatron's own: ranks that wait for each other could
        # wait for ever. There the main thread takes the steps.
        is_safe = sync.device.type == "cpu" or all(group.size == 1 for group in inside)
        self._thread_steps = settings.overlap and is_safe

        def ended(error: Exception) -> Exception:
            for group in inside:  # the other ranks wait there for this one
                if group.is_own:
                    group.close()
            return explain(error)

        self._stream = SyncStream(sync.streams, sync.streams.new())
        self._thread = ProgressThread(self._drive, ended)

    def poll(self) -> None:
        """Let exchanges go on. Waits for nothing. See the note on the order of syncs."""
        if self._thread is None:
            self._poll()
        else:
            self._thread.raise_failure()

    def poll_if_busy(self) -> bool:
        """Let exchanges go on; whether there are any, and no thread lets them."""
        if not self.is_busy:
            return False
        self.poll()
        return self._thread is None

    @property
    def has_pending_units(self) -> bool:
        """Whether units of the sync that lands have still to land."""
        return self.landing is not None and not self.landing.is_done

    @property
    def is_busy(self) -> bool:
        """Whether something may be on the wire."""
        return self.has_pending_units or bool(self.pending)

    @property
    def failure(self) -> Exception | None:
        """What has ended the thread; None where nothing has."""
        return None if self._thread is None else self._thread.failure

    def close(self) -> None:
        """Let nothing go on any more."""
        if self._thread is not None:
            self._thread.close()

    # ---- syncs land

    def due(self, step: int) -> list[DelayedSync]:
        """Syncs that land after step `step`."""
        return [s for s in self.pending if s.plan.due is not None and s.plan.due <= step]

    def of_units(self, selection: Selection) -> list[Sync]:
        """Syncs that have units of a selection and have not landed."""
        wanted = set(selection.indices)
        return [s for s in self._all() if wanted & set(s.plan.selection.indices)]

    def begin_landing(self, sync: Sync) -> None:
        """From here on the units of a sync land, each when it is needed or when all do.

        Collective: the ranks of the pipeline stage, where the landing keeps parameters.
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
            if not sync.plan.selection.is_whole:
                self._restore_if_broken(sync)
            self._poll()

    def restore_anchor(self, sync: Sync) -> None:
        """Give the parameters the anchor that a sync has begun from. All ranks of the replica."""
        outer = self.outer
        with self._main_thread():
            outer.begin_sync()
            for shard in sync.units.shards:
                anchor = outer.units[shard.name].stage_anchor()
                shard.scatter(anchor.ready())
                anchor.release()
                shard.publish()
            if not sync.plan.selection.is_whole and not sync.had_finite_norms:
                self._restore_others(sync)
        self._host.gather_parameters()

    def land_up_to(self, num_shards: int) -> bool:
        """Land what there is to land among the first `num_shards` shards of the stage; whether
        there was anything."""
        if (sync := self.landing) is None:
            return False
        began, num_landed = time.monotonic(), 0
        while (landed := self._land_next(sync, num_shards)) is not None:
            self._publish(sync, *landed)
            num_landed += 1
        sync.count_exposed(time.monotonic() - began)
        return num_landed > 0

    def land_all(self) -> None:
        """Land all of the sync that lands, check for drift and report.

        It needs all stages of the replica at once, so it never runs inside a forward pass, where
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
        """Wait until nothing is on the wire. Nothing lands early.

        The others may come later to where they do the same.

        Collective: the ranks of the pipeline stage.
        """
        if not self.pending:
            return
        with self._main_thread():
            for sync in self.pending:
                if sync.plan.due is None:
                    # CO2: not its outer steps, too. They move the anchor that the pseudo-gradient
                    # of the round under way is to be taken from.
                    sync.finish_exchange()
            self._finish_steps()
            self.outer.wait()

    def state_dict(self) -> list[PendingState]:
        """Syncs that have not landed, for a checkpoint. Nothing may be on the wire."""
        return [sync.state_dict() for sync in self.pending]

    def load_state_dict(self, saved: Sequence[PendingState]) -> None:
        """Go on with syncs that had not landed when a checkpoint was written."""
        context = self._context()
        with self._main_thread():  # memory of the stream of syncs, as in `prepare`
            self.pending.extend(
                DelayedSync.restore(pending, context, self._settings) for pending in saved
            )

    # ---- the two threads

    @contextmanager
    def _main_thread(self) -> Iterator[None]:
        """Inside, the main thread alone touches what is under way."""
        if self._thread is None:
            yield
            return
        with self._thread.turn(), self._stream.use():
            yield

    def _drive(self) -> Work | None:
        """What the thread does; then it waits for what this returns."""
        self._groups.sync.streams.serve_thread()
        with torch.no_grad(), self._stream.use_unsynced():
            self._poll(takes_steps=self._thread_steps)
        return next((work for sync in self._all() if (work := sync.on_wire) is not None), None)

    def _poll(self, *, takes_steps: bool = False) -> None:
        for group in self._groups.ties.values():
            group.reap()
        for sync in self._all():
            # One or the other: what arrived between the two would wait for its outer step,
            # with nothing on the wire, until the main thread comes by.
            is_stepped = takes_steps and sync is self.landing
            is_over = sync.advance_and_step() if is_stepped else sync.advance()
            if not (is_over or sync.launches_together):
                return

    # ---- parts of the above

    def _context(self) -> SyncContext:
        settings = self._settings
        return SyncContext(self._host, self._groups, settings.wire, settings.depth, self.outer)

    def _all(self) -> list[Sync]:
        return [*self.pending] if self.landing is None else [self.landing, *self.pending]

    def _land_next(self, sync: Sync, num_shards: int) -> tuple[UnitShard, bool] | None:
        """Land a unit; see `Sync.land_up_to`. What follows a landing may communicate inside the
        replica, and the others' threads may wait for this one's there: it comes after this."""
        with self._main_thread():
            sync.advance()
            return next(sync.land_up_to(num_shards), None)

    def _publish(self, sync: Sync, shard: UnitShard, has_bad_moments: bool) -> None:
        """A unit has landed: the model reads it from here on."""
        if has_bad_moments:
            zero_nonfinite_moments(self._host, shard, self._reporter)
        shard.publish()
        if sync.plan.is_checked and sync.plan.rules.landing.is_direct_copy:
            sync.digests[shard.index] = shard.digest()

    def _restore_if_broken(self, sync: Sync) -> None:
        """If this replica broke: its other units come back with those that land, and at once."""
        if sync.is_finite_on_replica():
            return
        self._restore_others(sync)
        self.land_all()
        self._host.gather_parameters()

    def _restore_others(self, sync: Sync) -> None:
        """All units but those of a sync, where they are not finite."""
        # Broken units take their anchor as it is after the outer steps of delayed syncs. A save
        # finishes these steps, too: without this, the anchor would depend on whether there was one.
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
            if sync.plan.due is not None:
                sync.finish_steps()
                self._reports.report(sync)
