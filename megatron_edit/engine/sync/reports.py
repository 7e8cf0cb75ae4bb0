"""Reports of syncs, written when all outer steps are done, and the drift check before them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_edit.comm.wire import Wire, moment_bytes, sent_bytes
from megatron_edit.engine.host import EngineGroups, Reporter, SyncReport
from megatron_edit.engine.plan import SyncPlan
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.sync import checks
from megatron_edit.engine.sync.syncs import Sync
from megatron_edit.engine.units import UnitPlan


@dataclass(frozen=True)
class Footprint:
    """Sizes that no single rank knows, for reports.

    Attributes:
        unit_numels: elements that each rank of the replica holds of each unit, int64 [K, U].
        table_bytes: size of the control records of all ranks of one replica.
        state_bytes: size of the outer state on all ranks of one replica: anchor, momentum,
            error-feedback residuals, and with delayed landings average, snapshot and means of
            inner moments.
    """

    unit_numels: Tensor
    table_bytes: int
    state_bytes: int

    @classmethod
    def measure(
        cls, groups: EngineGroups, plan: UnitPlan, settings: EngineSettings, record_bytes: int
    ) -> Footprint:
        """Gather the sizes from the ranks of the replica. Set-up only.

        Collective: the ranks of the replica.

        Args:
            plan: this rank's shards.
            settings: determine the state per element.
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
class SyncReports:
    """Checks syncs for drift and reports them.

    Attributes:
        late_digests: of units with a delayed landing, by position, until their next meeting, which
            compares them: replicas land at different times.
        exposed: seconds that a sync added to training, without the wait at its meeting; the longest
            since the last meeting, NaN where no sync was reported.
    """

    groups: EngineGroups
    reporter: Reporter
    wire: Wire
    footprint: Footprint
    late_digests: dict[int, float] = field(default_factory=dict)
    exposed: float = math.nan

    def report(self, sync: Sync) -> None:
        """Check for drift and report a sync, after the outer step of all units. Once per sync.

        Collective: the ranks of the replica; where drift is checked, also the sync group.

        Raises:
            DriftError: the replicas differ; the message names a unit.
        """
        if sync.is_reported:
            return
        plan = sync.plan
        digest = self._check(sync) if plan.is_checked else sync.digest
        sync.is_reported = True
        seconds = sync.seconds()
        exposed = max(0.0, seconds["exposed"] - seconds["wait"])
        self.exposed = exposed if math.isnan(self.exposed) else max(self.exposed, exposed)
        report = SyncReport(
            round=plan.round,
            step=plan.step,
            units=sync.units.names,
            decision=plan.decision,
            clip=self._over_stages(sync.clip_factors()),
            update_norm=self._over_stages(sync.update_norms()),
            inner_steps=plan.inner_steps,
            samples=plan.samples,
            samples_of_all=plan.samples_of_all,
            members=plan.members,
            epoch=plan.epoch,
            wire_bytes=self.wire_bytes(plan),
            state_bytes=self.footprint.state_bytes,
            seconds=seconds,
            digest=digest,
        )
        self.reporter.on_sync(report)

    def wire_bytes(self, plan: SyncPlan) -> int:
        """Payload that the ranks of one replica send in a sync."""
        sync, units = self.groups.sync, list(plan.selection.indices)
        size, of = sync.size, () if sync.places is None else sync.places.of
        exchanged = self.footprint.unit_numels[:, units][:, ~plan.decision.rollback]
        tables = (size - 1) * self.footprint.table_bytes
        sizes, counts = exchanged.unique(return_counts=True)  # few: most ranks have equal shards
        return tables + sum(
            int(count)
            * (
                sent_bytes(self.wire.codec, numel, size, of)
                + moment_bytes(plan.moments, numel, size, of)
            )
            for numel, count in zip(sizes.tolist(), counts.tolist(), strict=True)
        )

    def _check(self, sync: Sync) -> int:
        """Compare digests now; where replicas land at different times, at the next meeting."""
        plan = sync.plan
        if not plan.rules.landing.is_direct_copy:
            sync.digests.update(sync.outer_digests())
        if plan.rules.landing.is_immediate:
            when = f"after the sync of round {plan.round}"
            return checks.check(sync.units, self.groups, sync.digests, when)
        digests, digest = checks.replica_digests(sync.units, self.groups, sync.digests)
        for index, value in zip(plan.selection.indices, digests, strict=True):
            self.late_digests[index] = checks.as_number(value)
        return digest

    def _over_stages(self, values: Tensor) -> Tensor:
        """Fill in the values of units that only other pipeline stages hold.

        Collective: the ranks of the replica, where it has pipeline stages.

        Args:
            values: float64 [U] on the CPU, NaN where this stage does not hold the unit.
        """
        if self.groups.stage.size == self.groups.replica.size:
            return values
        rows = self.groups.replica.all_gather(values)
        known = torch.where(rows.isnan(), -torch.inf, rows).max(dim=0).values
        return torch.where(known.isinf(), torch.nan, known)
