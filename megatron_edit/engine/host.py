"""What the engine asks of its host. `megatron_edit.host` answers for Megatron; tests answer too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.engine.sync.units import UnitPlan, UnitShard


@dataclass(frozen=True)
class Progress:
    """Where training stands on this replica.

    Attributes:
        samples: consumed so far by this replica alone.
        schedule_position: of the learning-rate schedule, in samples of all replicas.
        pending_schedule: samples by which it advances, or advanced, with the last step.
        is_last_step: training reaches its target with the step being attempted.
        inner_lr: learning rate of the last step, the largest of all parameter groups.
        next_lr: of the next step; while the schedule warms up, the peak that it comes to.
    """

    samples: int
    schedule_position: int
    pending_schedule: int
    is_last_step: bool
    inner_lr: float = 0.0
    next_lr: float = 0.0


class Host(Protocol):
    """The training framework around the engine."""

    plan: UnitPlan

    def gradient_shards(self) -> Iterable[Tensor]:
        """The reduced gradients that this rank's optimizer reads, as flat views; in place."""

    def tied_gradients(self) -> Iterable[tuple[str, Tensor]]:
        """Tie and gradient of parameters whose copies could be averaged to different bits."""

    def replicated_tensors(self) -> Iterable[Tensor]:
        """Tensors of the model that no optimizer owns and that must start equal."""

    def shared_buffers(self) -> Sequence[tuple[int, Tensor]]:
        """Position of the unit and tensor of all state that training changes and no optimizer
        owns; averaged at a sync. The same order and sizes on all ranks of a sync group."""

    def shared_counts(self) -> Sequence[Tensor]:
        """What a step counts before it moves some of these buffers; summed in warm-up."""

    def linear_buffers(self) -> Sequence[Tensor]:
        """The buffers that may be averaged after they moved; averaged in warm-up."""

    def attach_outer_state(self, state: OuterState) -> None:
        """Learn where anchor and momentum of the shards are."""

    def gather_parameters(self) -> None:
        """Give all ranks of the replica the parameters that `UnitShard.publish` wrote."""

    @property
    def lands_in_forward(self) -> bool:
        """Whether the next forward pass will ask for each unit before it is gathered."""

    def zero_nonfinite_moments(self, shard: UnitShard) -> int:
        """Zero the inner moments of a shard that are not finite; returns how many elements."""

    @property
    def is_end_asked(self) -> bool:
        """Whether this process got a signal to end, or its time is over. Communicates nothing."""

    def progress(self) -> Progress:
        """Where training stands now."""

    def advance_schedule(self, samples: int) -> None:
        """Move the learning-rate schedule forward by `samples` of all replicas."""

    def begin_local(self, *, is_over: bool) -> None:
        """From here on each replica makes steps at its own speed; the engine says when to end.

        Args:
            is_over: whether all samples have been consumed already.
        """

    def end_round(self, samples: int, *, is_over: bool, is_followed: bool) -> None:
        """A round of replicas at their own speeds is over: counters and schedules meet.

        Args:
            samples: consumed by all replicas so far.
            is_over: whether these are all; no further step may be made.
            is_followed: whether a replica goes on to the next meeting without a step. Nothing that
                all replicas do together may come in between.
        """
