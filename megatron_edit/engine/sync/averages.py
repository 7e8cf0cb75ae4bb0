"""What the ranks of a replica do to the average of a unit together: equal copies, and its norm."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.constants import EMBEDDING
from megatron_edit.engine.host import TIED_EMBEDDING, EngineGroups
from megatron_edit.engine.sync.units import UnitShard
from megatron_edit.method.norms import sum_in_rank_order


def _tie_copies(shard: UnitShard, average: Tensor, groups: EngineGroups) -> None:
    """Give all copies of a parameter the bits of the first one.

    Copies on several TP ranks or stages are averaged by different sync groups, whose sums may
    round differently; after this, equal anchors stay equal.
    """
    for tie, group in groups.ties.items():
        chosen = _places_of(shard, tie)
        if not chosen or group.size == 1 or _is_told_with_norm(shard, tie):
            continue
        copies = torch.cat([average[where] for where in chosen])
        group.broadcast_nowait(copies)
        parts = copies.split([where.stop - where.start for where in chosen])
        for where, part in zip(chosen, parts, strict=True):
            average[where].copy_(part)


def _places_of(shard: UnitShard, tie: str) -> list[slice]:
    """Where the copies of a tie lie in the shard."""
    params = zip(shard.params, shard.slices, strict=True)
    return [where for param, where in params if param.tie == tie]


def agree_on_average(shard: UnitShard, average: Tensor, groups: EngineGroups) -> Tensor:
    """Make copies of a parameter equal in the average of a unit, and take its norm.

    Collective: the ranks of the pipeline stage, and those that hold copies.
    Mutates: `average`, fp32 [numel].

    Returns:
        ||average|| of the whole unit, float64 scalar, the same bits on all ranks that hold it.
    """
    _tie_copies(shard, average, groups)
    squares = sum_in_rank_order(groups.stage.all_gather(shard.squared_norm(average)))
    stages = groups.ties.get(TIED_EMBEDDING)
    if stages is not None and _is_told_with_norm(shard, TIED_EMBEDDING):
        squares = _tie_embedding(shard, average, squares, stages)
    return squares.sqrt()


def _is_told_with_norm(shard: UnitShard, tie: str) -> bool:
    return shard.name == EMBEDDING and tie == TIED_EMBEDDING


def _tie_embedding(shard: UnitShard, average: Tensor, squares: Tensor, stages: Group) -> Tensor:
    """Give all copies of the embedding the bits of the first stage's; its squares, to all stages.

    A stage that holds only a tied copy counts nothing of the unit: the first stage knows. Both go
    in one message, as bits. A second one would wait behind the first in the device's queue, and
    where there is one queue, so would the first stage's forward pass, which the others wait for
    before they come: a deadlock.

    Args:
        shard: of the embedding.
        average: fp32 [numel]. Mutated.
        squares: float64 scalar, of this stage.
        stages: that hold a copy; rank 0 is the first stage.
    """
    places = _places_of(shard, TIED_EMBEDDING)
    parts = [average[where].view(torch.int32) for where in places]
    parts.append(squares.reshape(1).view(torch.int32))
    message = torch.cat(parts)
    stages.broadcast_nowait(message)
    *copies, first = message.split([part.numel() for part in parts])
    for part, copy in zip(parts, copies, strict=False):
        part.copy_(copy)
    return first.clone().view(torch.float64).reshape(())
