"""When parameters take the result of a sync, and how both are merged (method 4 and 6)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_edit.method.settings import Settings
from megatron_edit.method.strategy import STRATEGIES


@dataclass(frozen=True)
class LandingRule:
    """When and how theta takes the new anchor A'.

    Attributes:
        delay: d, steps of this replica between the snapshot and the landing.
        mix: share of theta that is kept.
        keeps_progress: whether the change of theta since the snapshot is added to A'.
        at_next_meeting: CO2: the result lands at the next meeting of its units, after the next
            pseudo-gradient was computed.
    """

    delay: int
    mix: float
    keeps_progress: bool
    at_next_meeting: bool

    @classmethod
    def of(cls, settings: Settings) -> LandingRule:
        """The rule for all syncs but the last one of a run."""
        strategy = STRATEGIES[settings.strategy]
        return cls(
            settings.delay_steps,
            settings.mix,
            keeps_progress=strategy.keeps_progress,
            at_next_meeting=strategy.lands_at_next_meeting,
        )

    @cached_property
    def is_immediate(self) -> bool:
        """Whether no step lies between the start of the sync and the landing."""
        return self.delay == 0 and not self.at_next_meeting

    @cached_property
    def is_direct_copy(self) -> bool:
        """Whether theta becomes the anchor immediately: all replicas are equal after the sync."""
        return self.is_immediate and self.mix == 0.0

    @cached_property
    def merges(self) -> bool:
        """Whether the landing merges theta into the result."""
        return self.mix > 0.0 or (self.keeps_progress and not self.is_immediate)

    @cached_property
    def needs_snapshot(self) -> bool:
        """Whether the parameters at the start of the sync are needed when it lands."""
        return self.keeps_progress and not self.is_immediate

    def merge_(self, theta: Tensor, anchor: Tensor, snapshot: Tensor | None) -> Tensor:
        """theta <- mix theta + (1 - mix) (A' + theta - snapshot), or without the progress.

        Args:
            theta: fp32 [n]. Mutated, and returned.
            anchor: A', fp32 [n].
            snapshot: theta when the sync began, fp32 [n], mutated as scratch; None where there is
                no progress to keep.
        """
        if self.mix == 0.0:  # with the fewest passes over memory
            return theta.copy_(anchor) if snapshot is None else theta.sub_(snapshot).add_(anchor)
        target = anchor
        if snapshot is not None:  # A' - (snapshot - theta), in place
            target = torch.sub(anchor, snapshot.sub_(theta), out=snapshot)
        return theta.mul_(self.mix).add_(target, alpha=1.0 - self.mix)


DIRECT_COPY = LandingRule(delay=0, mix=0.0, keeps_progress=True, at_next_meeting=False)
