"""Which rank of a replica holds how much of which unit: Megatron's buckets, as sizes alone.

Megatron lays the parameters out in the reverse of their order, closes a bucket with the parameter
that reaches the bucket's size, and gives every rank of the shard group one part of each bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from megatron_edit.constants import EMBEDDING
from megatron_edit.tools.plan.model import Parameter

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
USUAL_BUCKET = 40_000_000
USUAL_BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True)
class ParamRange:
    """Where a parameter lies.

    Attributes:
        unit: that it belongs to.
        start: first element in the buffer.
        stop: behind its last.
    """

    unit: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """A stretch of the buffer that is communicated as one.

    Attributes:
        start: first element in the buffer.
        stop: behind its last, padding included.
        pieces: parameters in it.
    """

    start: int
    stop: int
    pieces: tuple[ParamRange, ...]


def bucket_size(
    *, given: int | None, num_buckets: int | None, overlaps: bool, numel: int, num_shards: int
) -> int | None:
    """Elements that close a bucket; None puts all into one.

    Args:
        given: --ddp-bucket-size.
        num_buckets: --ddp-num-buckets.
        overlaps: --overlap-grad-reduce.
        numel: parameters of the rank.
        num_shards: ranks of the shard group.
    """
    if not overlaps:
        return None
    if num_buckets is not None:
        return numel // num_buckets
    return max(USUAL_BUCKET, USUAL_BUCKET_PER_RANK * num_shards) if given is None else given


def lay_out(
    parameters: Sequence[Parameter],
    *,
    tensor_parallel: int,
    size: int | None,
    num_shards: int,
    is_tied_over_stages: bool = False,
) -> tuple[Bucket, ...]:
    """Cut the parameters of a rank into buckets.

    Args:
        parameters: in the order of their registration.
        tensor_parallel: ranks that share the split ones.
        size: that closes a bucket; None puts all into one.
        num_shards: ranks of the shard group.
        is_tied_over_stages: whether the embedding is tied to another stage's: it then has a bucket
            of its own.
    """
    divisor = lcm(num_shards, BUCKET_ALIGNMENT)
    buckets: list[Bucket] = []
    pieces: list[ParamRange] = []
    place = start = 0

    def close() -> None:
        nonlocal place, start
        stop = _aligned(place, divisor)
        buckets.append(Bucket(start, stop, tuple(pieces)))
        pieces.clear()
        place = start = stop

    # The word embedding comes first, or last as the tied copy of the last stage.
    for number, parameter in reversed(list(enumerate(parameters))):
        is_alone = is_tied_over_stages and parameter.unit == EMBEDDING and parameter.is_split
        if is_alone and pieces:
            close()
        first = _aligned(place, PARAMETER_ALIGNMENT)
        place = first + parameter.on_rank(tensor_parallel)
        pieces.append(ParamRange(parameter.unit, first, place))
        is_full = size is not None and place - start >= size
        if is_full or is_alone or number == 0:
            close()
    return tuple(buckets)


def shard_numels(
    buckets: Sequence[Bucket], units: Sequence[str], num_shards: int
) -> tuple[tuple[int, ...], ...]:
    """Elements of each unit on each rank of the shard group, [num_shards][units]."""
    index = {unit: place for place, unit in enumerate(units)}
    table = [[0] * len(units) for _ in range(num_shards)]
    for bucket in buckets:
        part = (bucket.stop - bucket.start) // num_shards
        for piece in bucket.pieces:
            first = (piece.start - bucket.start) // part
            last = (piece.stop - 1 - bucket.start) // part
            for rank in range(first, last + 1):
                begin = bucket.start + rank * part
                overlap = min(piece.stop, begin + part) - max(piece.start, begin)
                table[rank][index[piece.unit]] += overlap
    return tuple(map(tuple, table))


def _aligned(place: int, divisor: int) -> int:
    return -(-place // divisor) * divisor
