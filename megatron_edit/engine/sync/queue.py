"""The syncs that are under way on this rank: one that lands, and others that fly until they do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from megatron_edit.engine.accounting import Accounts
from megatron_edit.engine.checks import drift
from megatron_edit.engine.checks.digest import tensor_digest
from megatron_edit.engine.checks.equal import zero_nonfinite_moments
from megatron_edit.engine.checks.finite import is_finite_on_all_stages, restore_other_units
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.report import Reporter
from megatron_edit.engine.sync.fragments import Selection
from megatron_edit.engine.sync.inflight import InflightSync


@dataclass
class SyncQueue:
    """Lands syncs, each at its time, and reports them.

    Attributes:
        host: gets the parameters.
        groups: who communicates.
        accounts: turn a sync into a report.
        reporter: learns of it.
        digest_interval: syncs of a unit between two drift checks.
        fragments: F, groups that sync in turn.
        landing: the sync whose units land now; None when all have, and were checked.
        flying: syncs whose results land later, in the order of their starts.
        landed_digests: of units that landed late, by position: checked when they meet again.
        num_landings: begun so far, of syncs that have units of this rank's stage.
    """

    host: Host
    groups: EngineGroups
    accounts: Accounts
    reporter: Reporter
    digest_interval: int
    fragments: int
    landed_digests: dict[int, float]
    landing: InflightSync | None = None
    flying: list[InflightSync] = field(default_factory=list)
    num_landings: int = 0

    @property
    def has_pending_units(self) -> bool:
        """Whether units of the sync that lands have still to land."""
        return self.landing is not None and not self.landing.is_done

    @property
    def is_busy(self) -> bool:
        """Whether something may be on the wire."""
        return self.has_pending_units or bool(self.flying)

    def poll(self) -> None:
        """Let exchanges go on, in the order of their starts. Waits for nothing."""
        for group in self.groups.ties.values():
            group.reap()
        runs = self.flying if self.landing is None else [self.landing, *self.flying]
        for run in runs:
            if not (run.advance() or run.goes_together):
                return

    def due(self, step: int) -> list[InflightSync]:
        """SyncController that land after step `step`."""
        return [run for run in self.flying if run.due is not None and run.due <= step]

    def of_units(self, selection: Selection) -> list[InflightSync]:
        """SyncController that have units of a selection and have not landed."""
        wanted = set(selection.indices)
        runs = self.flying if self.landing is None else [self.landing, *self.flying]
        return [run for run in runs if wanted & set(run.selection.indices)]

    def fly(self, run: InflightSync) -> None:
        """A sync begins that lands later."""
        self.flying.append(run)
        self.poll()

    def begin_landing(self, run: InflightSync) -> None:
        """From here on the units of a sync land, each when it is needed or when all are settled.

        Collective: the ranks of the pipeline stage, where the landing keeps parameters.
        """
        if run is self.landing:
            return
        self.settle()
        if run in self.flying:
            self.flying.remove(run)
        run.state.begin_sync()  # what was computed since may still be on its way home
        self.landing = run
        # A stage that holds none of these units gathers what its own step has left to be gathered.
        self.num_landings += bool(run.plan.shards)
        run.check_finite()
        if not run.selection.is_whole:
            self._rescue(run)
        self.poll()

    def go_back(self, run: InflightSync) -> None:
        """Give the parameters the anchor that a sync has begun from. All ranks of the replica."""
        for shard in run.plan.shards:
            shard.scatter(run.state.units[shard.name].stage_anchor().ready())
            shard.publish()
        if not run.selection.is_whole and not run.had_finite_norms:
            self._restore_rest(run)
        self.num_landings += 1
        self.host.gather_parameters()

    def _rescue(self, run: InflightSync) -> None:
        """If this replica broke: its other units come back with those that land, and at once."""
        is_finite = run.is_finite
        if not run.rules.landing.is_immediate:
            is_finite = is_finite_on_all_stages(is_finite, self.groups)
        if is_finite:
            return
        self._restore_rest(run)
        self.settle()
        self.host.gather_parameters()

    def _restore_rest(self, run: InflightSync) -> None:
        """All units but those of a sync, where they are not finite."""
        self._finish_steps()  # so that a save before this, which does the same, changes nothing
        flights = [flight for other in self.flying for flight in other.flights]
        restore_other_units(
            self.host, self.groups, run.state, run.plan.names, flights, self.reporter
        )

    def apply_up_to(self, num_shards: int) -> None:
        """Land what there is to land among the first `num_shards` shards of the stage."""
        if (run := self.landing) is None or run.is_done:
            return
        began = time.monotonic()
        run.advance()
        while run.needs(num_shards):
            self._land_next(run)
        run.exposed += time.monotonic() - began

    def settle(self) -> None:
        """Land all of the sync that lands, check for drift and report.

        It needs all stages of the replica at once, so it never runs inside a forward pass, where
        one stage waits for another.
        """
        if (run := self.landing) is None:
            return
        if not run.is_done:
            self.apply_up_to(len(self.host.plan.shards))
            self.host.gather_parameters()
        self._report(run)
        self.landing = None  # only now: who is lost in the check is lost in this round

    def finish_exchanges(self) -> None:
        """Wait until nothing is on the wire. Nothing lands early.

        The others may come later to where they do the same.

        Collective: the ranks of the pipeline stage.
        """
        for run in self.flying:
            if run.due is None:
                run.finish_exchange()  # the next pseudo-gradient needs the anchor as it is
        self._finish_steps()
        for run in self.flying:
            run.state.wait()

    def _finish_steps(self) -> None:
        for run in self.flying:
            if run.due is not None:
                run.finish_steps()
                self._report(run)

    def _land_next(self, run: InflightSync) -> None:
        shard, has_bad_moments = run.land_next()
        if has_bad_moments:
            zero_nonfinite_moments(self.host, shard, self.reporter)
        shard.publish()
        if self.is_checked(run) and run.rules.landing.is_direct_copy:
            run.digests[shard.index] = drift.shard_digest(shard)

    def _report(self, run: InflightSync) -> None:
        """The outer step of all units is done: check for drift, and tell."""
        if run.is_reported:
            return
        digest = self._check(run) if self.is_checked(run) else None
        run.is_reported = True
        self.reporter.on_sync(self.accounts.report(run, digest))

    def is_checked(self, run: InflightSync) -> bool:
        """Whether drift is looked for after a sync: one of each group, then none for a while."""
        turn = (run.round - 1) // self.fragments + 1
        return turn % self.digest_interval == 0

    def _check(self, run: InflightSync) -> int:
        """Compare digests now, or where replicas land at different times, at the next meeting."""
        if not run.rules.landing.is_direct_copy:
            run.state.wait()
            for shard in run.plan.shards:
                home = run.state.units[shard.name]
                run.digests[shard.index] = tensor_digest([home.anchor, home.momentum])
        if run.rules.landing.is_immediate:
            when = f"after the sync of round {run.round}"
            return drift.check(run.plan, self.groups, run.digests, when)
        digests, digest = drift.replica_digests(run.plan, self.groups, run.digests)
        for index, value in zip(run.selection.indices, digests, strict=True):
            self.landed_digests[index] = drift.as_number(value)
        return digest
