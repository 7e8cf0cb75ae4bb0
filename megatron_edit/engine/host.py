"""What an engine is given: host, reporter, settings, and the groups that it communicates over.

`megatron_edit.host` answers for Megatron and `megatron_edit.observe` writes down what is reported;
tests answer with plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.wire import NUM_PHASES, Wire
from megatron_edit.engine.plan import Decision, Penalty, RoundRules
from megatron_edit.engine.units import UnitPlan, UnitShard
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.moments import MomentSchedule
from megatron_edit.method.outer import OuterRule
from megatron_edit.method.schedule import Schedule

TIED_EMBEDDING = "tied-embedding"


@dataclass(frozen=True)
class Progress:
    """Where training stands on this replica.

    Attributes:
        samples: consumed so far by this replica alone.
        schedule_position: of the learning-rate schedule, in samples of all replicas.
        pending_schedule: samples by which it advances, or advanced, with the last step.
        is_last_step: training reaches its target with the step being attempted.
        begins_final_phase: no local step follows the step being attempted, or, before the first
            one, is left: the final synchronous phase follows.
        inner_lr: learning rate of the last step, the largest of all parameter groups.
        next_lr: of the next step; while the schedule warms up, the peak that it comes to.
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

    def attach_outer_state(
        self, anchors: Mapping[str, Tensor], momenta: Mapping[str, Tensor]
    ) -> None:
        """Learn where anchor and momentum of the shards are, fp32 [numel] by unit."""

    def gather_parameters(self) -> None:
        """Give all ranks of the replica the parameters that the last step, or `UnitShard.publish`,
        wrote."""

    @property
    def awaits_gather(self) -> bool:
        """Whether the last step of local training left out its gather of the parameters, no
        `gather_parameters` has followed, and the next forward pass will not gather them."""

    @property
    def lands_in_forward(self) -> bool:
        """Whether the next forward pass will ask for each unit before it is gathered."""

    def zero_nonfinite_moments(self, shard: UnitShard) -> int:
        """Zero the inner moments of a shard that are not finite; returns how many elements."""

    def num_moment_elements(self) -> int:
        """Elements of all moments that the inner optimizers of this rank hold now."""

    def inner_counters(self) -> Tensor:
        """float64 [n], what the inner optimizers count: step counters, loss scales."""

    def set_inner_counters(self, values: Tensor) -> None:
        """Put these counters to what `inner_counters` of a replica told, float64 [n]."""

    def reset_moments(self) -> None:
        """Let the inner optimizers begin anew, as before their first step."""

    def read_moments(self, shard: UnitShard, kind: str, out: Tensor) -> None:
        """Copy a moment of the inner optimizer, of a whole shard.

        Mutates: `out`. Where a parameter has no such moment (yet), its elements stay as they are.

        Args:
            shard: whose.
            kind: `constants.FIRST_MOMENT` or `SECOND_MOMENT`.
            out: fp32 [numel].
        """

    def write_moments(self, shard: UnitShard, kind: str, values: Tensor) -> None:
        """Inverse of `read_moments`; a moment that a parameter does not have is not made.

        Args:
            shard: whose.
            kind: `constants.FIRST_MOMENT` or `SECOND_MOMENT`.
            values: fp32 [numel].
        """

    def set_local_training(self, is_local: bool) -> str | None:
        """Learn whether gradients stay in the replica from the next step on.

        Returns:
            What the inner optimizer does otherwise by that, for people; None where nothing is.
        """

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

    def end_round(self, samples: int, *, is_over: bool, next_meeting_without_step: bool) -> None:
        """A round of replicas at their own speeds is over: counters and schedules meet.

        Args:
            samples: consumed by all replicas so far.
            is_over: whether these are all; no further step may be made.
            next_meeting_without_step: whether a replica goes on to the next meeting without a step. Nothing that
                all replicas do together may come in between.
        """


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
        inner_steps: of the round, by replica.
        samples: consumed so far, by replica.
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
    inner_steps: Sequence[int]
    samples: Sequence[int]
    wire_bytes: int
    state_bytes: int
    seconds: Mapping[str, float]
    digest: int | None


class Reporter(Protocol):
    """Where the engine's news go."""

    def on_sync(self, report: SyncReport) -> None:
        """A sync is over."""

    def on_losses(
        self, first_step: int, losses: Sequence[float], samples: int | None = None
    ) -> None:
        """Mean losses over the replicas, of steps `first_step`, `first_step` + 1, ...

        Args:
            first_step: of the first loss.
            losses: one for each step, or one for a whole round.
            samples: consumed by all replicas at the end of that round; None where each step has its
                loss.
        """

    def on_message(self, text: str) -> None:
        """A line for people, which all ranks say alike."""

    def on_local_message(self, text: str) -> None:
        """A line for people about this rank alone."""


@dataclass(frozen=True)
class EngineGroups:
    """Who talks to whom.

    Attributes:
        sync: the N ranks, one per replica, that hold the same shard as this one: parameters.
        meeting: the same ranks, on the CPU: records. What it carries never waits behind an
            exchange, and the two may be under way in any order.
        replica: all ranks of this replica.
        stage: the ranks of this replica on this rank's pipeline stage.
        control: all ranks of this replica, on the CPU: what it carries waits for no device.
        ties: by name, groups over which copies of a parameter stay bit-identical; `TIED_EMBEDDING`
            joins the stages that hold a copy of the embedding.
    """

    sync: Group
    meeting: Group
    replica: Group
    stage: Group
    control: Group
    ties: Mapping[str, Group]

    def warm_up(self, *, has_exchanges: bool) -> None:
        """Use every group of the device once, in the same order on all ranks: NCCL's buffers are
        then there before training takes the memory.

        Collective: all ranks of all replicas.

        Args:
            has_exchanges: whether exchanges in phases will run on the sync group.
        """
        self.sync.warm_up(has_exchanges=has_exchanges)
        for group in self._inside:
            group.warm_up()

    def close(self) -> None:
        """At a good end: give up the transports, so that the threads of gloo are joined here and
        not in an interpreter that ends, which may abort (exit code -6). Nothing may be on its way.
        """
        for group in (self.sync, self.meeting, self.control, *self._inside):
            group.close()

    @property
    def _inside(self) -> tuple[Group, ...]:
        """Inside the replica, in an order that is the same on all ranks."""
        return (self.replica, self.stage, *(self.ties[name] for name in sorted(self.ties)))


@dataclass(frozen=True)
class TimedRounds:
    """Rounds that end by the clock (A-EDiT).

    Attributes:
        length: seconds between two meetings: tau_time / F.
        min_steps: steps of all replicas since the last meeting below which a round goes on.
        target: blocks of samples to consume, one per step of a replica.
    """

    length: float
    min_steps: float
    target: int


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine.

    Attributes:
        schedule: warm-up and sync interval.
        penalty: the pseudo-gradient penalty.
        outer: the outer step.
        max_norm: phi of the clip; None is off.
        landing: when and how parameters take the result of a sync.
        wire: type on the wire.
        digest_interval: syncs between two drift checks.
        fixed_timeout: whether the user gave the time-out; otherwise it follows the rounds.
        timed: how rounds end by the clock; None ends them by the schedule.
        overlap: whether units land in the forward pass, where the host can.
        prefetch_units: units in flight in overlap mode.
        offload: whether the outer state lives in host memory.
        moments: which moments of the inner optimizer are averaged, and at which syncs.
    """

    schedule: Schedule
    penalty: Penalty
    outer: OuterRule
    max_norm: float | None
    landing: LandingRule
    wire: Wire
    digest_interval: int
    fixed_timeout: bool
    timed: TimedRounds | None
    overlap: bool
    prefetch_units: int
    offload: bool
    moments: MomentSchedule

    @property
    def round_rules(self) -> RoundRules:
        """The settings that plans of rounds follow."""
        min_steps = 0.0 if self.timed is None else self.timed.min_steps
        return RoundRules(self.penalty, self.landing, self.schedule, min_steps, self.moments)

    @property
    def num_phases(self) -> int:
        """Phases that exchanges of the sync group may have, see `comm.wire`; 0 is none."""
        return NUM_PHASES if self.moments.rule.has_phases else self.wire.num_phases

    def checks_drift_after(self, round: int) -> bool:
        """Whether drift is looked for after a sync: one of each fragment, then none for a while."""
        turn = (round - 1) // self.schedule.fragments + 1
        return turn % self.digest_interval == 0

    @cached_property
    def depth(self) -> int:
        """Units in flight at most, of a sync that lands at once."""
        return self.prefetch_units if self.overlap else 1

    @property
    def overlaps_compute(self) -> bool:
        """Whether exchanges may be under way while the host computes."""
        return self.overlap or not self.landing.is_immediate
