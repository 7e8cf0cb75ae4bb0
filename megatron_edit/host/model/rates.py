"""Learning rates of Megatron's schedule at a given position."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_edit.host.seams.megatron import InnerOptimizer, ParamScheduler


def rate_at(
    optimizers: Iterable[InnerOptimizer],
    scheduler: ParamScheduler,
    position: int,
    *,
    is_peak: bool,
) -> float:
    """Return the largest learning rate of all parameter groups.

    Args:
        optimizers: optimizers with the groups.
        scheduler: Megatron's `OptimizerParamScheduler`; not changed.
        position: position in samples of all replicas.
        is_peak: during the schedule's warm-up return its peak (method section 6).
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if is_peak and position <= scheduler.lr_warmup_steps:
        return max((float(group.get("max_lr", scheduler.max_lr)) for group in groups), default=0.0)
    kept, scheduler.num_steps = scheduler.num_steps, position
    try:
        return max((float(scheduler.get_lr(group)) for group in groups), default=0.0)
    finally:
        scheduler.num_steps = kept
