"""Collectives inside a replica on the average of a unit: identical copies, and its norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.constants import EMBEDDING
from megatron_edit.engine.host import TIED_EMBEDDING, EngineGroups
from megatron_edit.engine.units import UnitShard
from megatron_edit.method.norms import sum_in_rank_order


def tie_copies(shard: UnitShard, values: Sequence[Tensor], tie: str, group: Group) -> None:
    """Broadcast the first copy of a parameter to all other copies.

    Copies on several TP ranks or stages are averaged by different sync groups, whose sums may
    round differently; after this, identical anchors stay identical.

    Collective: the group, where the shard has copies.
    Mutates: `values`.

    Args:
        shard: of a unit.
        values: fp32 [numel] each, of the complete shard.
        group: the ranks that hold copies.
    """
    places = _places_of(shard, tie)
    if not places or group.size == 1:
        return
    parts = [each[where] for each in values for where in places]
    copies = torch.cat(parts)
    group.broadcast_nowait(copies)
    for part, copy in zip(parts, copies.split([part.numel() for part in parts]), strict=True):
        part.copy_(copy)


def _places_of(shard: UnitShard, tie: str) -> list[slice]:
    """Slices of the shard that hold copies of a tie."""
    params = zip(shard.params, shard.slices, strict=True)
    return [where for param, where in params if param.tie == tie]


def agree_on_average(
    shard: UnitShard, average: Tensor, moments: Sequence[Tensor], groups: EngineGroups
) -> Tensor:
    """Make copies of a parameter identical in the average of a unit, and compute its norm.

    Collective: the ranks of the pipeline stage, and the groups of copies.
    Mutates: `average` and `moments`.

    Args:
        shard: of the unit.
        average: fp32 [numel].
        moments: fp32 [numel] each, means of moments of the inner optimizer.

    Returns:
        ||average|| of the whole unit, float64 scalar, the same bits on all ranks that hold it.
    """
    values = (average, *moments)
    for tie, group in groups.ties.items():
        if not _is_sent_with_norm(shard, tie):
            tie_copies(shard, values, tie, group)
    squares = sum_in_rank_order(groups.stage.all_gather(shard.squared_norm(average)))
    stages = groups.ties.get(TIED_EMBEDDING)
    if stages is not None and _is_sent_with_norm(shard, TIED_EMBEDDING):
        squares = _tie_embedding(shard, values, squares, stages)
    return squares.sqrt()


def _is_sent_with_norm(shard: UnitShard, tie: str) -> bool:
    return shard.name == EMBEDDING and tie == TIED_EMBEDDING


def _tie_embedding(
    shard: UnitShard, values: Sequence[Tensor], squares: Tensor, stages: Group
) -> Tensor:
    """Broadcast the first stage's copy of the embedding and its sum of squares to all stages.

    A stage that holds only a tied copy counts no element of the unit; only the first stage has the
    norm. Both are sent as bits in one message. A second message would wait behind the first in the
    device's queue; on a device with a single queue so would the first stage's forward pass, which
    the other stages wait for before they join the broadcast: a deadlock.

    Args:
        values: fp32 [numel] each: average and moments. Mutated.
        squares: float64 scalar, of this stage.
        stages: the ranks that hold a copy; rank 0 is the first stage.
    """
    places = _places_of(shard, TIED_EMBEDDING)
    parts = [each[where].view(torch.int32) for each in values for where in places]
    parts.append(squares.reshape(1).view(torch.int32))
    message = torch.cat(parts)
    stages.broadcast_nowait(message)
    *copies, first = message.split([part.numel() for part in parts])
    for part, copy in zip(parts, copies, strict=False):
        part.copy_(copy)
    return first.clone().view(torch.float64).reshape(())
