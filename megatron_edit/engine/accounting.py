"""Figures of a sync that no single rank knows: bytes of a replica, numbers of other stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.report import SyncReport
from megatron_edit.engine.sync import SyncRun
from megatron_edit.engine.units import UnitPlan
from megatron_edit.replica.collectives import all_reduce_payload


@dataclass(frozen=True)
class Accounts:
    """Turns a finished sync into a report.

    Attributes:
        groups: who communicates.
        unit_numels: elements that each rank of the replica holds of each unit, int64 [K, U].
        table_bytes: size of one replica's control records, those of all its ranks together.
    """

    groups: EngineGroups
    unit_numels: Tensor
    table_bytes: int

    @classmethod
    def open(cls, groups: EngineGroups, plan: UnitPlan, record_bytes: int) -> Accounts:
        """Ask the ranks of the replica. Set-up only.

        Args:
            groups: who communicates.
            plan: this rank's shards.
            record_bytes: size of this rank's control record.
        """
        mine = torch.zeros(len(plan.names), dtype=torch.int64)
        for shard in plan.shards:
            mine[shard.index] = shard.numel
        tables = groups.replica.all_gather(torch.tensor(record_bytes))
        return cls(groups, groups.replica.all_gather(mine), int(tables.sum()))

    def report(self, run: SyncRun, digest: int | None) -> SyncReport:
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
            wire_bytes=self._wire_bytes(run.decision.rollback),
            seconds=run.seconds(),
            digest=digest,
        )

    def _wire_bytes(self, rollback: Tensor) -> int:
        """Payload that the ranks of one replica send in a sync, as rings send it."""
        size = self.groups.sync.size
        exchanged = self.unit_numels[:, ~rollback].flatten().tolist()
        tables = (size - 1) * self.table_bytes
        return tables + sum(all_reduce_payload(4 * int(numel), size) for numel in exchanged)

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
