"""Anchor and outer momentum in a checkpoint: one flat piece for each part of each parameter.

Tensors are given by kind and unit, so that other tensors shaped like the units' flat ranges are
written and read in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import extract_sharded_base
from torch import Tensor

from megatron_edit.checkpoint.files import REMEDY
from megatron_edit.engine import PendingState, UnitTensors
from megatron_edit.errors import UsageError
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.seams.megatron import ModelChunk

ANCHOR, MOMENTUM, SENT, SUMMED = "anchor", "momentum", "sent", "summed"
GRADIENT_SENT, GRADIENT_SUMMED = "gradient_sent", "gradient_summed"
AVERAGE, SNAPSHOT = "average", "snapshot"
MOMENT_PREFIX = "moment_"  # followed by the name of the moment
# Copies of a parameter (on TP ranks, on stages) are in shards of different shapes, whose blocks
# have different encoding errors: for these kinds each copy is stored separately.
STORED_PER_COPY = (SENT, SUMMED, GRADIENT_SENT, GRADIENT_SUMMED)
# Flat tensors [numel] of this rank's shards, by kind (the prefix of the stored name) and unit, or
# number of the gradient shard.
Kinds = Mapping[str, Mapping[str, Tensor]]


def shared_kinds(
    outer: Mapping[str, UnitTensors], pending: Sequence[PendingState], *, has_anchor: bool
) -> Kinds:
    """Return the outer state that is equal on all replicas.

    Args:
        outer: anchor and momentum by unit.
        pending: syncs that have not landed.
        has_anchor: whether the anchor differs from the parameters.
    """
    kinds: dict[str, dict[str, Tensor]] = {
        MOMENTUM: {name: unit["momentum"] for name, unit in outer.items()}
    }
    if has_anchor:
        kinds[ANCHOR] = {name: unit["anchor"] for name, unit in outer.items()}
    averages = {name: tensor for sync in pending for name, tensor in sync.averages.items()}
    if averages:
        kinds[AVERAGE] = averages
    for sync in pending:
        for moment, means in sync.moments.items():
            kinds.setdefault(MOMENT_PREFIX + moment, {}).update(means)
    return {kind: units for kind, units in kinds.items() if units}


@dataclass(frozen=True)
class LocalPiece:
    """This rank's elements of a part.

    Attributes:
        start: first element of this rank, counted in the part.
        unit: name of the unit, or number of the gradient shard.
        where: in the unit's flat range, or in the gradient shard.
        copy: replica id; all 0 where this rank's copy is the one to write.
    """

    place: PartLocation
    start: int
    unit: str
    where: slice
    copy: tuple[int, ...]

    @property
    def copy_label(self) -> str:
        """Suffix that distinguishes the name of this copy; empty for the first one."""
        ids = self.copy[:2]
        return f"_{'_'.join(map(str, ids))}" if any(ids) else ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(self.where.stop - self.where.start)


class RankPieces:
    """This rank's pieces of all tensors that are stored by parameter; computed once.

    Args:
        host: gives the plan, and the positions of shards in their parameters.
    """

    def __init__(self, host: MegatronHost, model: Sequence[ModelChunk]) -> None:
        self._host, self._model = host, model

    @cached_property
    def outer(self) -> list[LocalPiece]:
        """Pieces of the outer state, in the order of the plan."""
        pieces: list[LocalPiece] = []
        for shard in self._host.plan.shards:
            for param, where in zip(shard.params, shard.slices, strict=True):
                parameter, first, copy = self._host.origin_of(param)
                pieces += _pieces_of(self._places[parameter], first, shard.name, where, copy)
        return pieces

    @cached_property
    def gradients(self) -> list[LocalPiece]:
        """Pieces of the gradient shards, without padding, in the order of the buckets."""
        pieces: list[LocalPiece] = []
        for place in self._host.gradient_places():
            copy = None if place.is_copied else self._host.copy_index
            parts = self._places[place.parameter]
            pieces += _pieces_of(parts, place.first, str(place.shard), place.where, copy)
        return pieces

    @cached_property
    def _places(self) -> dict[Tensor, tuple[PartLocation, ...]]:
        return part_locations(self._model)


def _pieces_of(
    places: Sequence[PartLocation], first: int, unit: str, where: slice, copy: int | None
) -> Iterator[LocalPiece]:
    """Yield the pieces of a flat range of a parameter that begins at its element `first`.

    Args:
        first: see above.
        unit: see `LocalPiece`.
        where: of the range, in the flat tensor of `unit`.
        copy: number of this copy of the shards; None if it is the data-parallel rank.
    """
    stop = first + where.stop - where.start
    for place in places:
        low, high = max(first, place.start), min(stop, place.start + place.part.numel)
        if low < high:
            begin = where.start + low - first
            ids = place.replica_id if copy is None else (*place.replica_id[:2], copy)
            yield LocalPiece(place, low - place.start, unit, slice(begin, begin + high - low), ids)


def sharded_outer_state(pieces: Sequence[LocalPiece], kinds: Kinds) -> dict[str, ShardedTensor]:
    """Return the state dict that Megatron writes. Its tensors are views, not to be changed before.

    Args:
        kinds: to write.
    """
    return {
        f"{kind} {number}": _sharded(kind, piece, values)
        for number, piece in enumerate(pieces)
        for kind, values in _values(piece, kinds)
    }


def load_outer_state(folder: Path, pieces: Sequence[LocalPiece], kinds: Kinds) -> None:
    """Fill tensors from a checkpoint, whatever layout it was written in.

    Mutates: the tensors of `kinds`.

    Raises:
        UsageError: the checkpoint lacks a part of a parameter.
    """
    stored = _stored_parts(folder)
    wanted: dict[str, ShardedTensor] = {}
    targets = [
        (number, _stored_kind(kind, piece, stored), piece, values)
        for number, piece in enumerate(pieces)
        for kind, values in _values(piece, kinds)
    ]
    for number, kind, piece, values in targets:
        part = piece.place.part
        if (name := part.name(kind)) in stored:
            wanted[f"{kind} {number}"] = _flat(name, torch.empty_like(values), part, piece.start)
            continue
        for name in _overlapping(kind, piece.place.part, stored):
            wanted[name] = _flat(name, torch.empty(stored[name].numel), stored[name])
    loaded = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
    for number, kind, piece, values in targets:
        if (own := loaded.get(f"{kind} {number}")) is not None:
            values.copy_(own)
        else:
            values.copy_(_assemble(kind, piece, stored, loaded))


def _values(piece: LocalPiece, kinds: Kinds) -> Iterator[tuple[str, Tensor]]:
    for kind, units in kinds.items():
        if piece.unit in units:
            yield kind, units[piece.unit][piece.where]


def _sharded(kind: str, piece: LocalPiece, values: Tensor) -> ShardedTensor:
    part, copy = piece.place.part, piece.copy
    if kind in STORED_PER_COPY and piece.copy_label:
        kind, copy = kind + piece.copy_label, (0, 0, *copy[2:])
    return _flat(part.name(kind), values, part, piece.start, copy)


def _flat(
    name: str, values: Tensor, part: TensorPart, start: int = 0, copy: tuple[int, ...] = (0,)
) -> ShardedTensor:
    """Return Megatron's description of a range of a part, from element `start` on."""
    return ShardedTensor(
        key=name,
        data=values,
        dtype=values.dtype,
        local_shape=tuple(values.shape),
        global_shape=(part.numel,),
        global_offset=(start,),
        axis_fragmentations=None,
        replica_id=copy,
    )


def _stored_parts(folder: Path) -> dict[str, TensorPart]:
    names = dist_checkpointing.load_tensors_metadata(str(folder))
    found = {name: parse_name(name) for name in names}
    return {name: parsed[1] for name, parsed in found.items() if parsed is not None}


def _stored_kind(kind: str, piece: LocalPiece, stored: dict[str, TensorPart]) -> str:
    """Return the stored kind of this copy; of the first copy where the layout was another."""
    own = kind + piece.copy_label
    is_there = kind in STORED_PER_COPY and any(_overlapping(own, piece.place.part, stored))
    return own if is_there else kind


def _overlapping(kind: str, part: TensorPart, stored: dict[str, TensorPart]) -> Iterator[str]:
    for name, other in stored.items():
        if name.startswith(f"{kind}/") and part.overlap(other) is not None:
            yield name


def _assemble(
    kind: str, piece: LocalPiece, stored: dict[str, TensorPart], loaded: dict[str, Tensor]
) -> Tensor:
    """Assemble this rank's piece of a part that was stored in other pieces."""
    part = piece.place.part
    full = torch.zeros(part.shape)
    names = list(_overlapping(kind, part, stored))
    if not names:
        raise UsageError(
            f"parameter {part.key}",
            f"the checkpoint's outer state has no {kind} for it",
            REMEDY,
        )
    for name in names:
        other = stored[name]
        if (both := part.overlap(other)) is not None:
            full[both[0]] = loaded[name].view(other.shape)[both[1]]
    return full.view(-1)[piece.start : piece.start + piece.numel]


# ---- A parameter as Megatron's checkpoints see it: parts of global tensors
#
# Outer state is stored in flat pieces, one per part, so that saving needs no communication and
# the sharding inside a replica may change. The name of a piece contains its tensor, offset and
# shape; from the names alone, parts are split again where tensor or pipeline parallelism has
# changed.


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
    """Return the parts of every parameter of this rank, in the order of its elements."""
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
