"""Landing units just before Megatron gathers them, on its own bucket groups.

Every route to a gather ends in a bucket group's `start_param_sync`: the forward hooks, gathers
forced by evaluation or saving, recomputation, interleaved schedules. It is overridden there, on
the instances. Stock `finish_param_sync` of one bucket starts the gather of the next before the
layer computes; while units are pending that would expose the next unit's exchange, so the next
gather is then left to the next bucket's own first use.
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
    """All bucket groups of Megatron's DDP, dense and expert."""
    for chunk in model:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups


def shards_needed(group: BucketGroup, plan: UnitPlan, unit_of: Mapping[Parameter, str]) -> int:
    """How many shards of the plan, from the first on, must have landed before `group` is gathered.

    Units land in forward order, so a bucket needs all shards up to the last one that it touches.
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
    """Override the bucket groups of a model.

    Args:
        patcher: undoes it.
        model: chunks in Megatron's DDP.
        engine: asked to land units.
        plan: this rank's shards.
        unit_of: unit of every trainable parameter.

    Returns:
        Whether some bucket is gathered before all units of the stage must have landed: only then
        can a sync hide behind compute.
    """
    can_hide = False
    for group in bucket_groups(model):
        needed = shards_needed(group, plan, unit_of)
        can_hide |= 0 < needed < len(plan.shards)
        patcher.wrap(group, "start_param_sync", _landing_first(engine, needed))
        patcher.wrap(group, "finish_param_sync", _one_bucket_at_a_time(engine))
    return can_hide


def keep_sends_asynchronous(patcher: Patcher, config: ModelConfig, device: torch.device) -> None:
    """Stop Megatron from synchronising the device after each send between pipeline stages.

    `batch_p2p_sync`, on by default, would wait for the exchanges behind the forward pass, too: no
    sync would hide. It works around a race of old torch. Since torch 2 `wait` orders the stream
    that receives behind NCCL's, Megatron waits for every request of a batch before it hands its
    tensors on, and frees what it sent on that same stream: nothing is left to guard. That does not
    hold for the custom ring exchange, whose handles are not torch's; on the CPU, and where sends
    are not batched, the flag does nothing.

    Args:
        patcher: undoes it.
        config: of the model's first chunk, which Megatron's schedules read.
        device: of the parameters.
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
            # Asked before the landing: all ranks of the bucket's group answer alike.
            skip = skip_next_bucket_dispatch or engine.status.has_pending_units
            return finish(skip_next_bucket_dispatch=skip)

        return finished

    return around
