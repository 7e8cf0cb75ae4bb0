"""Lands units just before Megatron gathers their parameters, by hooks on its bucket groups.

All gathers go through a bucket group's `start_param_sync`: those of forward hooks, evaluation,
saving, recomputation and interleaved schedules. It is overridden on the instances. In stock
Megatron `finish_param_sync` of a bucket starts the gather of the next bucket before the layer
computes. While units are pending this would wait for the next unit's exchange, so that the next
gather is then started at the first use of its own bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps

import torch
from torch.nn import Parameter

from megatron_edit.engine import EditEngine, UnitPlan
from megatron_edit.host.seams.megatron import BucketGroup, DdpChunk, ModelConfig
from megatron_edit.host.seams.patching import Patcher


def bucket_groups(model: Sequence[DdpChunk]) -> Iterator[BucketGroup]:
    """Yield all bucket groups of Megatron's DDP, dense and expert."""
    for chunk in model:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups


def shards_needed(group: BucketGroup, plan: UnitPlan, unit_of: Mapping[Parameter, str]) -> int:
    """Return how many leading shards of the plan must have landed before `group` is gathered.

    Units land in forward order, so that a bucket needs all shards up to its last one.
    """
    position = {shard.name: place for place, shard in enumerate(plan.shards)}
    touched = [
        position[unit_of[parameter]] for bucket in group.buckets for parameter in bucket.params_list
    ]
    return max(touched, default=-1) + 1


def land_before_gathers(
    patcher: Patcher,
    model: Sequence[DdpChunk],
    engine: EditEngine,
    plan: UnitPlan,
    unit_of: Mapping[Parameter, str],
) -> bool:
    """Override the gathers of a model's bucket groups, so that they land units first.

    Args:
        model: chunks in Megatron's DDP.
        engine: lands the units.
        plan: this rank's shards.
        unit_of: unit of every trainable parameter.

    Returns:
        Whether some bucket can be gathered before all units of the stage have landed: only then
        can a sync overlap compute.
    """
    can_hide = False
    for group in bucket_groups(model):
        needed = shards_needed(group, plan, unit_of)
        can_hide |= 0 < needed < len(plan.shards)
        patcher.wrap(group, "start_param_sync", _landing_first(engine, needed))
        patcher.wrap(group, "finish_param_sync", _one_bucket_at_a_time(engine))
    return can_hide


def keep_sends_asynchronous(patcher: Patcher, config: ModelConfig, device: torch.device) -> None:
    """Stop Megatron from synchronizing the device after each send between pipeline stages.

    `batch_p2p_sync`, on by default, would also wait for the exchanges that overlap the forward
    pass, so that no sync would be hidden. It works around a race in old versions of torch. Since
    torch 2 `wait` orders the receiving stream after NCCL's, Megatron waits for every request of a
    batch before it passes its tensors on, and it frees sent tensors on that same stream: the flag
    is not needed. This does not hold for the custom ring exchange, whose handles are not torch's.
    On the CPU, and with sends that are not batched, the flag has no effect.

    Args:
        config: config of the model's first chunk, which Megatron's schedules read.
    """
    if device.type == "cuda" and config.batch_p2p_comm and not config.use_ring_exchange_p2p:
        patcher.replace(config, "batch_p2p_sync", False)


def _landing_first[**P, R](
    engine: EditEngine, needed: int
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def around(start: Callable[P, R]) -> Callable[P, R]:
        @wraps(start)
        def landed(*args: P.args, **kwargs: P.kwargs) -> R:
            engine.land_up_to(needed)
            return start(*args, **kwargs)

        return landed

    return around


def _one_bucket_at_a_time[R](engine: EditEngine) -> Callable[[Callable[..., R]], Callable[..., R]]:
    def around(finish: Callable[..., R]) -> Callable[..., R]:
        @wraps(finish)
        def finished(skip_next_bucket_dispatch: bool = False) -> R:
            # Read before the landing, when all ranks of the bucket's group have the same value.
            skip = skip_next_bucket_dispatch or engine.status.has_pending_units
            return finish(skip_next_bucket_dispatch=skip)

        return finished

    return around
