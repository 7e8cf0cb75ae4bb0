"""When replicas meet, and what a meeting decides about the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from megatron_edit.checkpoint.manifest import ReplicaEntry
from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine.rounds.losses import Losses
from megatron_edit.method.ledger import Dealing


class Outcome(Enum):
    """What follows from a meeting."""

    SYNC = auto()
    EXTEND = auto()  # too few steps so far: the round goes on


class SyncTrigger(Protocol):
    """Decides when this replica meets the others. All ranks of a replica answer alike.

    Attributes:
        losses: what the replicas tell each other of their losses.
        last_step_seconds: what the clock of the inner phase showed after the step before.
        meets_at_same_step: whether all replicas come to a meeting after the same step.
    """

    losses: Losses
    meets_at_same_step: bool

    @property
    def round_length(self) -> int:
        """Steps of the round that is under way, where a count decides; else 0."""

    @property
    def dealing(self) -> Dealing | None:
        """Of the round that is under way; None where steps are counted."""

    @property
    def last_step_seconds(self) -> float:
        """See above; 0 where no clock decides."""

    def begin_together(self, step: int) -> None:
        """Warm-up goes on after step `step`."""

    def begin(self, step: int) -> None:
        """The replicas part after step `step`."""

    def begin_phase(self) -> None:
        """Inner training goes on from here: a meeting and what it led to are over."""

    def resume(self, entry: ReplicaEntry, dealing: Dealing | None, *, is_rejoined: bool) -> None:
        """Stand where a checkpoint was written, in the middle of a phase.

        Args:
            entry: of this replica.
            dealing: of the round that was under way, where replicas run at their own speeds.
            is_rejoined: whether a replica comes to the next meeting before it has made a step.
        """

    def groups_after(self, step: int, num_syncs: int) -> Sequence[int]:
        """The groups of units that sync at a meeting after step `step`.

        Args:
            step: s.
            num_syncs: syncs so far.
        """

    @property
    def is_last(self) -> bool:
        """Whether training is over with the meeting that this replica comes to next, or is at."""

    def is_due(self, step: int, *, is_asked: bool) -> bool:
        """Whether a meeting follows step `step`, the one being attempted.

        Args:
            step: s, from 1.
            is_asked: whether rank 0 of the replica asked for it after the step before.
        """

    def after_step(self) -> bool:
        """Note an inner step; whether this rank, if it is rank 0, asks for a meeting."""

    def after_meeting(self, records: Sequence[ControlRecord]) -> Outcome:
        """What the gathered records decide. Every rank of every replica finds the same."""

    @property
    def must_meet_again(self) -> bool:
        """Whether this replica has nothing to do in the round that begins."""

    @property
    def is_over(self) -> bool:
        """Whether all has been consumed: nobody makes another step."""
