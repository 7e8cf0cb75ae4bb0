"""Figures of a sync that no single rank knows: bytes of a replica, numbers of other stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.report import SyncReport
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.sync.inflight import InflightSync
from megatron_edit.engine.sync.units import UnitPlan


@dataclass(frozen=True)
class Accounts:
    """Turns a finished sync into a report.

    Attributes:
        groups: who communicates.
        unit_numels: elements that each rank of the replica holds of each unit, int64 [K, U].
        table_bytes: size of one replica's control records, those of all its ranks together.
        state_bytes: what outer state takes on all ranks of a replica together: anchor, momentum,
            what a lossy wire type owes, and of units that land late, average and snapshot.
    """

    groups: EngineGroups
    unit_numels: Tensor
    table_bytes: int
    state_bytes: int

    @classmethod
    def open(
        cls, groups: EngineGroups, plan: UnitPlan, settings: EngineSettings, record_bytes: int
    ) -> Accounts:
        """Ask the ranks of the replica. Set-up only.

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
        kept = 2 + int(not landing.is_immediate) + int(landing.needs_snapshot)
        elements = kept * int(numels.sum())
        if wire.has_residual:
            owned = (
                wire.owner_numel(numel, groups.sync.size) for numel in numels.flatten().tolist()
            )
            elements += int(numels.sum()) + sum(owned)
        return cls(groups, numels, int(tables.sum()), 4 * elements)

    def report(self, run: InflightSync, digest: int | None) -> SyncReport:
        """What became of a sync.

        Collective: the ranks of the replica, where it has pipeline stages.
        """
        return SyncReport(
            round=run.round,
            step=run.step,
            units=run.plan.names,
            decision=run.decision,
            clip=self._over_stages(run.clip_factors()),
            update_norm=self._over_stages(run.update_norms()),
            records=run.records,
            wire_bytes=self._wire_bytes(run),
            state_bytes=self.state_bytes,
            seconds=run.seconds(),
            digest=digest,
        )

    def _wire_bytes(self, run: InflightSync) -> int:
        """Payload that the ranks of one replica send in a sync."""
        size, units = self.groups.sync.size, list(run.selection.indices)
        exchanged = self.unit_numels[:, units][:, ~run.decision.rollback].flatten().tolist()
        tables = (size - 1) * self.table_bytes
        return tables + sum(run.wire.payload_bytes(int(numel), size) for numel in exchanged)

    def _over_stages(self, values: Tensor) -> Tensor:
        """Fill in the units of other pipeline stages from whoever knows them.

        Args:
            values: float64 [U] on the CPU, NaN where this stage does not hold the unit.
        """
        if self.groups.stage.size == self.groups.replica.size:
            return values
        rows = self.groups.replica.all_gather(values)
        known = torch.where(rows.isnan(), -torch.inf, rows).max(dim=0).values
        return torch.where(known.isinf(), torch.nan, known)
