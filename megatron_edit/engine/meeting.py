"""Meetings: the control records that replicas exchange, and what follows from them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.report import Reporter
from megatron_edit.replica.control import ControlRecord, check_same_meeting, record_bytes


@dataclass
class Meetings:
    """What this replica has to tell at the next meeting, and how meetings are held.

    Attributes:
        host: says where training stands.
        groups: who meets.
        reporter: where mean losses go.
        capacity: losses that a record has room for. Records of one run are all of one size, so
            that replicas at different steps can tell each other so.
    """

    host: Host
    groups: EngineGroups
    reporter: Reporter
    capacity: int
    _losses: list[float] = field(default_factory=list)
    _last_loss_step: int = 0

    @property
    def record_bytes(self) -> int:
        """Size of a record on the wire."""
        return record_bytes(self.capacity, len(self.host.plan.names))

    def note_loss(self, step: int, loss: float) -> None:
        """Keep the loss of a step for the next meeting; NaN where this rank does not know it."""
        self._losses.append(loss)
        self._last_loss_step = step

    def hold(
        self, *, round: int, step: int, inner_steps: int, norms: Sequence[float]
    ) -> list[ControlRecord]:
        """Exchange records with the other replicas: the one table of a sync.

        Collective: the sync group.

        Returns:
            The records by replica; losses were reported and schedules brought together.
        """
        progress = self.host.progress()
        mine = ControlRecord(
            round=round,
            step=step,
            inner_steps=inner_steps,
            samples=progress.samples,
            schedule_position=progress.schedule_position,
            losses=tuple(self._losses),
            norms=tuple(norms),
        )
        rows = self.groups.sync.all_gather(mine.pack(self.capacity))
        records = [ControlRecord.unpack(row, self.capacity) for row in rows]
        check_same_meeting(records)
        self._report_losses(records)
        self._align_schedules(records)
        return records

    def _report_losses(self, records: Sequence[ControlRecord]) -> None:
        losses = torch.tensor([record.losses for record in records], dtype=torch.float64)
        # The loss of step s is known only after the sync that follows it.
        first = self._last_loss_step - len(self._losses) + 1
        self.reporter.on_losses(first, torch.nanmean(losses, dim=0).tolist())
        self._losses.clear()

    def _align_schedules(self, records: Sequence[ControlRecord]) -> None:
        """A replica that skipped steps catches up with the learning-rate schedule of the others."""
        positions = [record.schedule_position for record in records]
        behind = max(positions) - positions[self.groups.sync.rank]
        if behind:
            self.host.advance_schedule(behind)
