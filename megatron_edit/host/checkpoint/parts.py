"""A parameter as Megatron's checkpoints see it: parts of global tensors.

Outer state is stored in flat pieces, one per part, so that saving needs no communication and the
sharding inside a replica may change. The name of a piece contains its tensor, offset and shape;
from the names alone, parts are split again where tensor or pipeline parallelism has changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import extract_sharded_base
from torch import Tensor

from megatron_edit.errors import UsageError
from megatron_edit.host.seams.megatron import ModelChunk

_NAME = re.compile(r"^(?P<kind>\w+)/(?P<key>.+)@(?P<offset>[\d,]*):(?P<shape>[\d,]*)$")


@dataclass(frozen=True)
class TensorPart:
    """A box of a global tensor.

    Attributes:
        key: Megatron's name of the tensor.
        offset: of the box, in elements, by axis.
        shape: of the box, by axis.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return int(torch.Size(self.shape).numel())

    def name(self, kind: str) -> str:
        """Return the name under which this part of the given kind of tensor is stored."""
        offset, shape = (",".join(map(str, axis)) for axis in (self.offset, self.shape))
        return f"{kind}/{self.key}@{offset}:{shape}"

    def overlap(self, other: TensorPart) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return the common elements as slices of this box and of the other; None for none."""
        if self.key != other.key:
            return None
        here, there = [], []
        for mine, size, theirs, their_size in zip(
            self.offset, self.shape, other.offset, other.shape, strict=True
        ):
            low, high = max(mine, theirs), min(mine + size, theirs + their_size)
            if low >= high:
                return None
            here.append(slice(low - mine, high - mine))
            there.append(slice(low - theirs, high - theirs))
        return tuple(here), tuple(there)


def parse_name(name: str) -> tuple[str, TensorPart] | None:
    """Inverse of `TensorPart.name`: kind and part; None for a name of something else."""
    if (found := _NAME.match(name)) is None:
        return None
    offset, shape = (
        tuple(int(word) for word in found[axis].split(",") if word) for axis in ("offset", "shape")
    )
    return found["kind"], TensorPart(found["key"], offset, shape)


@dataclass(frozen=True)
class PartLocation:
    """The position of a part in a parameter of this rank.

    Attributes:
        part: box of a global tensor.
        start: first element, in the flattened parameter.
        replica_id: distinguishes copies; Megatron writes the one with zeros.
    """

    part: TensorPart
    start: int
    replica_id: tuple[int, ...]


def part_locations(model: Sequence[ModelChunk]) -> dict[Tensor, tuple[PartLocation, ...]]:
    """Return the parts of every parameter of this rank, in the order of its elements.

    Args:
        model: unwrapped model chunks.
    """
    found: dict[Tensor, tuple[PartLocation, ...]] = {}
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    for chunk in model:
        sharded, _ = extract_sharded_base(chunk.sharded_state_dict(metadata=metadata))
        for base in nested_values(sharded):
            if isinstance(base, ShardedTensor | ShardedTensorFactory):
                found[base.data] = tuple(_places(base))
    return found


def _places(base: ShardedTensor | ShardedTensorFactory) -> Iterator[PartLocation]:
    if isinstance(base, ShardedTensor):
        yield PartLocation(_part(base), 0, base.replica_id)
        return
    # A parameter that Megatron stores in several tensors (gated MLPs): let it split the indices of
    # the elements, to find out where each tensor's elements are.
    numbers = torch.arange(base.data.numel()).view(base.data.shape)
    for piece in nested_values(replace(base, data=numbers).build()):
        start = int(piece.data.reshape(-1)[0])
        expected = torch.arange(start, start + piece.data.numel())
        if not torch.equal(piece.data.reshape(-1).cpu(), expected):
            raise UsageError(
                f"model parameter {base.key}",
                "Megatron stores it in an order that megatron_edit does not know",
                "train without --save, or report this model as unsupported",
            )
        yield PartLocation(_part(piece), start, piece.replica_id)


def _part(tensor: ShardedTensor) -> TensorPart:
    shape = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    return TensorPart(tensor.key, tuple(tensor.global_offset), shape)
