"""What an engine needs of the configuration, for the life of the run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.engine.decisions import Penalty
from megatron_edit.engine.flight import OuterRule
from megatron_edit.method.schedule import StepSchedule


@dataclass(frozen=True)
class TimedRounds:
    """Rounds that end by the clock (A-EDiT).

    Attributes:
        length: tau_time, seconds.
        min_steps: steps of all replicas below which a round goes on.
        target: blocks of samples to consume, one per step of a replica.
    """

    length: float
    min_steps: int
    target: int


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine.

    Attributes:
        schedule: warm-up and sync interval.
        penalty: the pseudo-gradient penalty.
        rule: the outer step.
        digest_interval: syncs between two drift checks.
        fixed_timeout: whether the user gave the time-out; otherwise it follows the rounds.
        timed: how rounds end by the clock; None ends them by the schedule.
        overlap: whether units land in the forward pass, where the host can.
        prefetch_units: units in flight in overlap mode.
        offload: whether the outer state lives in host memory.
    """

    schedule: StepSchedule
    penalty: Penalty
    rule: OuterRule
    digest_interval: int
    fixed_timeout: bool
    timed: TimedRounds | None = None
    overlap: bool = False
    prefetch_units: int = 2
    offload: bool = False
