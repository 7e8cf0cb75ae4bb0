"""What the engine says of itself. `megatron_edit.observe` writes it down; tests read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine.rounds.plan import Decision


@dataclass(frozen=True)
class SyncReport:
    """One sync, as every rank of every replica saw it.

    Attributes:
        round: from 1.
        step: s, attempted optimizer steps so far.
        units: names in forward order; rows of the tables below.
        decision: norms, scores, who was left out, weights, roll-backs.
        clip: float64 [U].
        update_norm: float64 [U], norms of the weighted averages, before the clip.
        records: control records by replica.
        wire_bytes: payload sent by the ranks of one replica.
        state_bytes: what outer state takes on the ranks of one replica.
        seconds: wait, exchange, outer, exposed, total, as this rank measured them.
        digest: of all replicas, or None where it was not computed.
    """

    round: int
    step: int
    units: Sequence[str]
    decision: Decision
    clip: Tensor
    update_norm: Tensor
    records: Sequence[ControlRecord]
    wire_bytes: int
    state_bytes: int
    seconds: Mapping[str, float]
    digest: int | None


class Reporter(Protocol):
    """Where the engine's news go."""

    def on_sync(self, report: SyncReport) -> None:
        """A sync is over."""

    def on_losses(self, first_step: int, losses: Sequence[float]) -> None:
        """Mean losses over the replicas, of steps `first_step`, `first_step` + 1, ..."""

    def on_message(self, text: str) -> None:
        """A line for people, which all ranks say alike."""

    def on_local_message(self, text: str) -> None:
        """A line for people about this rank alone."""
