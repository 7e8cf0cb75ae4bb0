"""When things happen: phases of training by attempted optimizer step (method section 2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSchedule:
    """A synchronous warm-up, then a sync every `interval` steps.

    Attributes:
        warmup_steps: W; None is a warm-up that never ends (strategy `ddp`).
        interval: tau, inner steps between two syncs.
    """

    warmup_steps: int | None
    interval: int

    def is_warmup(self, step: int) -> bool:
        """Whether the gradients of step `step` (from 1) are averaged over the replicas."""
        return self.warmup_steps is None or step <= self.warmup_steps

    def is_switch(self, step: int) -> bool:
        """Whether the anchor is taken after step `step`; step 0 is the start of training."""
        return self.warmup_steps is not None and step == self.warmup_steps

    def is_sync(self, step: int, *, is_last: bool = False) -> bool:
        """Whether a sync follows step `step`.

        Args:
            step: s, attempted optimizer steps so far, from 1.
            is_last: training reaches its target with this step: a partial round is synced there,
                so that nothing that was learned is left behind.
        """
        if self.warmup_steps is None or step <= self.warmup_steps:
            return False
        return (step - self.warmup_steps) % self.interval == 0 or is_last
