"""The gradients that this rank's optimizers read, in the buffers of Megatron's DDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from megatron_edit.host.seams.megatron import DdpChunk, ParamBucket


@dataclass(frozen=True)
class GradientPlace:
    """A parameter's gradient, or this rank's part of it, in a gradient shard.

    Attributes:
        parameter: the parameter.
        first: its first element in the shard, counted in the flattened parameter.
        shard: number of the gradient shard.
        where: in the shard.
        is_copied: whether the ranks of a data-parallel group have all elements, and not one each.
        gradient: the elements, flat; a view.
    """

    parameter: Parameter
    first: int
    shard: int
    where: slice
    is_copied: bool
    gradient: Tensor


def gradient_shards(model: Sequence[DdpChunk]) -> Iterator[Tensor]:
    """Yield flat views of gradient buffers: this rank's shards, or with plain DDP all.

    One per bucket, in buffer order, including padding (which is zero).
    """
    return (shard for _, _, shard in _shards(model))


def gradient_places(model: Sequence[DdpChunk]) -> Iterator[GradientPlace]:
    """Yield the gradients of all parameters that have elements in a gradient shard, in the order of
    the buckets' parameters, which is the same on all ranks with the same layers."""
    for number, (chunk, bucket, shard) in enumerate(_shards(model)):
        is_copied = not chunk.ddp_config.use_distributed_optimizer
        begin = _offset(shard, bucket.grad_data)
        for parameter in bucket.params_list:
            start = _offset(parameter.main_grad, bucket.grad_data) - begin  # may be negative
            low, high = max(start, 0), min(start + parameter.numel(), shard.numel())
            if low < high:
                yield GradientPlace(
                    parameter, low - start, number, slice(low, high), is_copied, shard[low:high]
                )


def _shards(model: Sequence[DdpChunk]) -> Iterator[tuple[DdpChunk, ParamBucket, Tensor]]:
    for chunk in model:
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            for bucket in bucket_group.buckets:
                shard = bucket.grad_data.view(-1)
                if chunk.ddp_config.use_distributed_optimizer:
                    parts = shard.chunk(bucket_group.intra_distributed_optimizer_instance_size)
                    shard = parts[bucket_group.intra_distributed_optimizer_instance_rank]
                yield chunk, bucket, shard


def _offset(view: Tensor, data: Tensor) -> int:
    """Return the elements of `data` before `view`, which lies in it."""
    return int((view.data_ptr() - data.data_ptr()) // data.element_size())
