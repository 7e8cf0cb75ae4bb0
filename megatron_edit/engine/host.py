"""The interfaces of the engine: host, reporter, and communication groups.

`megatron_edit.host` implements `Host` for Megatron, and `megatron_edit.observe` implements
`Reporter`; tests implement them with plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.engine.plan import Decision
from megatron_edit.engine.units import UnitPlan, UnitShard
from megatron_edit.method.auto import AutoChoice

TIED_EMBEDDING = "tied-embedding"


@dataclass(frozen=True)
class Progress:
    """Progress of training on this replica.

    Attributes:
        samples: consumed so far by this replica alone.
        schedule_position: of the learning-rate schedule, in samples of all replicas.
        pending_schedule: samples by which it advances, or advanced, with the last step.
        is_last_step: whether training reaches its target with the step being attempted.
        begins_final_phase: whether the final synchronous phase follows the step being attempted,
            or, before the first step, there is no local step.
        inner_lr: learning rate of the last step, the largest of all parameter groups.
        next_lr: of the next step; while the schedule warms up, its peak value.
    """

    samples: int
    schedule_position: int
    pending_schedule: int
    is_last_step: bool
    inner_lr: float = 0.0
    next_lr: float = 0.0
    begins_final_phase: bool = False


class Host(Protocol):
    """The training framework around the engine."""

    plan: UnitPlan

    @property
    def update_error(self) -> float:
        """Rounding error of an element's update by the inner optimizer, at the largest rate of the
        schedule."""

    def gradient_shards(self) -> Iterable[Tensor]:
        """The reduced gradients that this rank's optimizer reads, as flat views to be mutated; as
        many and of the same sizes at every step."""

    def tied_gradients(self, *, is_encoded: bool) -> Iterable[tuple[str, Tensor]]:
        """Tie name and gradient, in this rank's gradient shards, of parameters whose copies could
        average to different bits.

        Args:
            is_encoded: whether the sums are encoded, in blocks that have other elements of a
                parameter's neighbours on each rank.
        """

    def loss_scale(self) -> Tensor | None:
        """What the gradients of this step are multiplied by, fp32 [1] on their device; None where
        it never changes."""

    def replicated_tensors(self) -> Iterable[Tensor]:
        """Tensors of the model that no optimizer owns and that must be identical at the start."""

    def shared_buffers(self) -> Sequence[tuple[int, Tensor]]:
        """Unit position and tensor of all state that training changes and no optimizer owns.

        Averaged at a sync. The order and sizes are the same on all ranks of a sync group.
        """

    def shared_counts(self) -> Sequence[Tensor]:
        """Counts from which a step updates some of these buffers; summed in warm-up."""

    def linear_buffers(self) -> Sequence[Tensor]:
        """The buffers that may be averaged after their update; averaged in warm-up."""

    def attach_outer_state(
        self, anchors: Mapping[str, Tensor], momenta: Mapping[str, Tensor]
    ) -> None:
        """Receive anchor and momentum of the shards, fp32 [numel] by unit."""

    def gather_parameters(self) -> None:
        """Give all ranks of the replica the parameters that the last step, or `UnitShard.publish`,
        wrote."""

    @property
    def awaits_gather(self) -> bool:
        """Whether the last local step omitted its gather of the parameters, no
        `gather_parameters` has followed, and the next forward pass will not gather them."""

    @property
    def lands_in_forward(self) -> bool:
        """Whether the next forward pass will land each unit before gathering it."""

    def zero_nonfinite_moments(self, shard: UnitShard) -> int:
        """Zero the inner moments of a shard that are not finite; return the number of elements."""

    def num_moment_elements(self) -> int:
        """Elements of all moments that the inner optimizers of this rank hold now."""

    def inner_counters(self) -> dict[str, float]:
        """Step counters and loss scales of the inner optimizers, by names that are equal on all
        replicas. One replica may have counters that another one does not have."""

    def set_inner_counters(self, values: Mapping[str, float]) -> None:
        """Make the counters those of another replica, its `inner_counters`."""

    def reset_moments(self) -> None:
        """Reset the inner optimizers to their state before the first step."""

    def create_moments(self) -> None:
        """Create the moments of the inner optimizers, as their first step does. The parameters
        change, and are to be set afterwards."""

    def read_moments(self, shard: UnitShard, kind: str, out: Tensor) -> None:
        """Copy a moment of the inner optimizer for a complete shard.

        Mutates: `out`. Where a parameter has no such moment (yet), its elements stay as they are.

        Args:
            kind: `constants.FIRST_MOMENT` or `SECOND_MOMENT`.
            out: fp32 [numel].
        """

    def write_moments(self, shard: UnitShard, kind: str, values: Tensor) -> None:
        """Inverse of `read_moments`; a moment that a parameter does not have is not created.

        Args:
            kind: `constants.FIRST_MOMENT` or `SECOND_MOMENT`.
            values: fp32 [numel].
        """

    def set_local_training(self, is_local: bool) -> str | None:
        """Set whether gradients stay in the replica from the next step on.

        Returns:
            A message on what this changes in the inner optimizer; None if nothing.
        """

    @property
    def is_end_requested(self) -> bool:
        """Whether this process got a signal to end, or its time is over. No communication."""

    def progress(self) -> Progress:
        """Progress of training on this replica."""

    def advance_schedule(self, samples: int) -> None:
        """Advance the learning-rate schedule by `samples` of all replicas."""

    def begin_local(self, *, is_over: bool) -> None:
        """Begin local training at each replica's own speed; the engine decides when it ends.

        Args:
            is_over: whether all samples have been consumed already.
        """

    def end_local(self) -> int:
        """End training at this replica's own speed, before the final synchronous phase: from now on
        all replicas count the same steps and samples.

        Returns:
            s, the steps that consume as many samples if all replicas make the same ones.
        """

    def set_final_fraction(self, fraction: float) -> tuple[int, bool]:
        """Set the share of training, at its end, in which gradients are averaged at every step.

        Returns:
            The last step before it, and whether there is such a phase.
        """

    def samples_of(self, blocks: int) -> int:
        """Samples that all replicas have consumed once so many blocks are consumed."""

    def common_state(self) -> dict[str, Any]:
        """State of the host that is equal on all replicas and no tensor, as JSON values."""

    def join_local(self, blocks: int, common: Mapping[str, Any], *, is_over: bool) -> None:
        """Begin local training as a replica that joins others.

        Args:
            blocks: consumed by all replicas so far.
            common: `common_state` of another replica.
            is_over: see `begin_local`.
        """

    def end_round(
        self, samples: int, *, num_replicas: int, is_over: bool, next_meeting_without_step: bool
    ) -> None:
        """Equalize counters and schedules after a round of replicas at their own speeds.

        Args:
            samples: consumed by all replicas so far.
            num_replicas: that share the blocks of the next round.
            is_over: whether these are all; no further step may be made.
            next_meeting_without_step: whether some replica goes on to the next meeting without a
                step. No joint action of all replicas may come in between.
        """


@dataclass(frozen=True)
class SyncReport:
    """Report of one sync, the same on all ranks of all replicas except for `seconds`.

    Attributes:
        round: from 1.
        step: s, attempted optimizer steps so far.
        units: names in forward order; rows of the tables below.
        decision: norms, scores, rejected replicas, weights, roll-backs.
        clip: float64 [U].
        update_norm: float64 [U], norms of the weighted averages, before the clip.
        inner_steps: of the round, by replica.
        samples: consumed so far, by replica.
        samples_of_all: consumed so far, also by replicas that do not take part any more.
        members, epoch: names of the replicas, and number of their epoch, in an elastic run.
        wire_bytes: payload sent by the ranks of one replica.
        state_bytes: size of the outer state on all ranks of one replica.
        seconds: wait, exchange, outer, exposed, total, as this rank measured them.
        digest: of all replicas, or None where it was not computed.
    """

    round: int
    step: int
    units: Sequence[str]
    decision: Decision
    clip: Tensor
    update_norm: Tensor
    inner_steps: Sequence[int]
    samples: Sequence[int]
    wire_bytes: int
    state_bytes: int
    seconds: Mapping[str, float]
    digest: int | None
    samples_of_all: int = 0
    members: Sequence[str] = ()
    epoch: int | None = None


class Reporter(Protocol):
    """Receives the engine's reports and messages."""

    def on_sync(self, report: SyncReport) -> None:
        """Report a finished sync."""

    def on_losses(
        self, first_step: int, losses: Sequence[float], samples: int | None = None
    ) -> None:
        """Report mean losses over the replicas, of steps `first_step`, `first_step` + 1, ...

        Args:
            first_step: of the first loss.
            losses: one for each step, or one for a round.
            samples: consumed by all replicas at the end of that round; None where there is a loss
                for each step.
        """

    def on_choice(self, choice: AutoChoice, last_local_step: int, *, is_resumed: bool) -> None:
        """Report the chosen settings of the rounds.

        Args:
            choice: see `method.auto`.
            last_local_step: before the final synchronous phase, or of the training.
            is_resumed: whether a checkpoint had it.
        """

    def on_message(self, text: str) -> None:
        """Log a line that is the same on all ranks."""

    def on_local_message(self, text: str) -> None:
        """Log a line about this rank alone."""


@dataclass(frozen=True)
class EngineGroups:
    """The communication groups of a rank.

    Attributes:
        sync: the N ranks, one per replica, that hold the same shard as this one; for parameters.
        meeting: the same ranks, on the CPU; for records, which never wait behind an exchange.
            Collectives of the two groups may be in flight in any order.
        replica: all ranks of this replica.
        stage: the ranks of this replica on this rank's pipeline stage.
        control: all ranks of this replica, on the CPU: its messages wait for no device.
        ties: by name, groups over which copies of a parameter stay bit-identical; `TIED_EMBEDDING`
            has the stages that hold a copy of the embedding.
    """

    sync: Group
    meeting: Group
    replica: Group
    stage: Group
    control: Group
    ties: Mapping[str, Group]

    def warm_up(self, *, has_exchanges: bool) -> None:
        """Run each collective that a group will need, in the same order on all ranks, where it is
        connected or allocates its buffers only then: before training takes the memory.

        Collective: all ranks of all replicas.

        Args:
            has_exchanges: whether exchanges in phases will run on the sync group.
        """
        sync, ties = self.sync, [self.ties[name] for name in sorted(self.ties)]
        phased = [sync.all_to_all] if has_exchanges else []
        control = self.control
        control.warm_up(control.all_reduce, control.broadcast, control.all_gather)
        sync.warm_up(sync.all_reduce, sync.broadcast, sync.all_gather, *phased)
        if sync.places is not None:
            up, down = sync.places.up, sync.places.down
            up.warm_up(up.all_reduce)
            down.warm_up(down.all_gather)
        for group in (self.replica, self.stage):
            group.warm_up(group.all_gather)
        for tie in ties:
            tie.warm_up(tie.broadcast)

    def stop_loops(self) -> None:
        """End the use of groups that connect lazily, before all ranks meet and then `close`."""
        self.control.stop_loops()

    def close(self) -> None:
        """Release the transports at a regular end, when all replicas have finished and no message
        is in flight.

        The threads of gloo are joined here and not at interpreter exit, which may abort the process
        (exit code -6).
        """
        ties = (self.ties[name] for name in sorted(self.ties))
        for group in (self.sync, self.meeting, self.control, self.replica, self.stage, *ties):
            group.close()
