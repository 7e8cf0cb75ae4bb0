"""The settings of a run, with what the host adds to them and the rules that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_edit.comm.wire import Wire, num_phases_of
from megatron_edit.constants import FP32
from megatron_edit.method.auto import AutoChoice, with_choice
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.moments import MomentSchedule
from megatron_edit.method.outer import OuterRule, outer_rule
from megatron_edit.method.schedule import Schedule, schedule_of
from megatron_edit.method.settings import Settings
from megatron_edit.method.strategy import STRATEGIES


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine.

    Attributes:
        given: the settings of the run, before a choice of `--edit-auto`.
        overlap: whether units land in the forward pass, where the host supports it.
        target_blocks: steps of all replicas together, before a final synchronous phase. With a hub
            those of such a phase are among them.
        last_local_step: last step before the final synchronous phase, or of the training.
        choice: what `--edit-auto` has chosen; None before that, and where it is not used.
        has_final_phase: whether `target_blocks` are followed by a final synchronous phase.
    """

    given: Settings
    overlap: bool
    target_blocks: int
    last_local_step: int
    choice: AutoChoice | None = None
    has_final_phase: bool = False

    @cached_property
    def used(self) -> Settings:
        """The settings in use: those given, with the choice."""
        return self.given if self.choice is None else with_choice(self.given, self.choice)

    @cached_property
    def schedule(self) -> Schedule:
        """Warm-up and sync interval. With a hub there are only rounds; see `is_synchronous`."""
        origin = None if self.choice is None else self.choice.since
        return schedule_of(self.used, self.last_local_step, origin)

    def is_synchronous(self, consumed: int) -> bool:
        """Whether a round has one step, after which the parameters of all replicas are averaged as
        they are, without a penalty. With a hub the warm-up and the final phase consist of such
        rounds, in which replicas may be lost and join as in any other.

        Args:
            consumed: blocks before the round.
        """
        if self.used.hub is None:
            return False
        return self.is_warmup(consumed) or consumed >= self.local_blocks

    def is_warmup(self, consumed: int) -> bool:
        """Whether a round is one of the warm-up, with a hub.

        Args:
            consumed: blocks before the round.
        """
        return consumed < self.used.warmup_steps * self.num_nominal

    @property
    def num_nominal(self) -> int:
        """Replicas that a global batch is divided among, with a hub."""
        return self.used.nominal_replicas or 1

    @property
    def local_blocks(self) -> int:
        """Blocks before the rounds of one step that a final phase with a hub consists of; all
        blocks where there is no such phase."""
        if self.used.hub is None:
            return self.target_blocks
        return min(self.target_blocks, self.last_local_step * self.num_nominal)

    @property
    def has_final_round(self) -> bool:
        """Whether the last blocks are assigned in proportion to the steps of a round."""
        return self.is_timed and self.local_blocks == self.target_blocks

    @cached_property
    def landing(self) -> LandingRule:
        """When and how parameters take the result of a sync."""
        return LandingRule.of(self.used)

    @cached_property
    def moments(self) -> MomentSchedule:
        """Which moments of the inner optimizer are averaged, and at which syncs."""
        return MomentSchedule.of(self.used)

    @cached_property
    def outer(self) -> OuterRule:
        """The outer step."""
        return outer_rule(self.used)

    @property
    def max_norm(self) -> float | None:
        """phi of the clip; None switches the clip off."""
        return None if self.used.no_clip else self.used.clip

    @cached_property
    def wire(self) -> Wire:
        """The type in which updates are exchanged."""
        return Wire.of(self.used.sync_dtype)

    @cached_property
    def gradient_wire(self) -> Wire:
        """The same for gradients, in the warm-up and in the final phase."""
        return Wire.of(self.used.warmup_dtype)

    def in_checkpoints(self, wire: Wire) -> Wire:
        """The type whose error-feedback residuals checkpoints hold, for a type on the wire: with a
        hub fp32, which has none, as one replica writes for all and others may resume."""
        return wire if self.used.hub is None else Wire.of(FP32)

    @property
    def num_phases(self) -> int:
        """Phases that exchanges of the sync group may have; see `comm.wire`."""
        return num_phases_of(self.given)

    @property
    def is_timed(self) -> bool:
        """Whether the clock ends rounds (A-EDiT)."""
        return STRATEGIES[self.used.strategy].is_timed

    @property
    def assigns_blocks(self) -> bool:
        """Whether blocks of samples are assigned to replicas: rounds end by the clock, or there is
        a hub."""
        return self.is_timed or self.used.hub is not None

    @property
    def round_seconds(self) -> float:
        """Seconds between two meetings, tau_time / F, where the clock ends rounds."""
        return self.used.sync_seconds / self.used.fragments

    @property
    def min_round_steps(self) -> float:
        """Steps of all replicas since the last meeting below which a round goes on that the clock
        has ended. With a hub no round does."""
        is_extended = self.is_timed and self.used.hub is None
        return self.used.min_round_steps / self.used.fragments if is_extended else 0.0

    @property
    def checks_commit(self) -> bool:
        """Whether replicas compare the results of a blocking sync before they apply it."""
        return self.used.check_commits or self.used.hub is not None

    def checks_drift_after(self, round: int) -> bool:
        """Whether drift is checked after a sync: every `digest_interval`-th sync of a fragment."""
        sync_of_fragment = (round - 1) // self.used.fragments + 1
        return sync_of_fragment % self.used.digest_interval == 0

    @property
    def depth(self) -> int:
        """Maximum number of units in flight, of a sync that lands immediately."""
        return self.used.prefetch_units if self.overlap else 1

    @property
    def overlaps_compute(self) -> bool:
        """Whether exchanges may be in flight while the host computes."""
        return self.overlap or not self.landing.is_immediate
