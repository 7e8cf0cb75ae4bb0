"""What an engine needs of the configuration, for the life of the run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.comm.wire import Wire
from megatron_edit.engine.rounds.plan import Penalty
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.outer import OuterRule
from megatron_edit.method.schedule import Schedule


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
    """

    schedule: Schedule
    penalty: Penalty
    outer: OuterRule
    max_norm: float | None
    landing: LandingRule
    wire: Wire
    digest_interval: int
    fixed_timeout: bool
    timed: TimedRounds | None = None
    overlap: bool = False
    prefetch_units: int = 2
    offload: bool = False

    @property
    def replicas_identical(self) -> bool:
        """Whether all replicas hold the anchor after every sync: all units land at once."""
        return self.landing.is_direct_copy and self.schedule.fragments == 1
