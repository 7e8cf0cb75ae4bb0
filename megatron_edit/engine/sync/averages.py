"""What the ranks of a replica do to the average of a unit together: equal copies, and its norm."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_edit.engine.host import TIED_EMBEDDING, EngineGroups
from megatron_edit.engine.sync.units import EMBEDDING, UnitShard
from megatron_edit.method.norms import sum_in_rank_order


def tie_copies(shard: UnitShard, average: Tensor, groups: EngineGroups) -> None:
    """Give all copies of a parameter the bits of the first one.

    Copies on several TP ranks or stages are averaged by different sync groups, whose sums may
    round differently; after this, equal anchors stay equal.

    Collective: the ranks that hold copies.
    Mutates: `average`, fp32 [numel].
    """
    for tie, group in groups.ties.items():
        chosen = [
            where
            for param, where in zip(shard.params, shard.slices, strict=True)
            if param.tie == tie
        ]
        if not chosen or group.size == 1:
            continue
        copies = torch.cat([average[where] for where in chosen])
        group.broadcast_nowait(copies)
        parts = copies.split([where.stop - where.start for where in chosen])
        for where, part in zip(chosen, parts, strict=True):
            average[where].copy_(part)


def norm_over_stage(shard: UnitShard, average: Tensor, groups: EngineGroups) -> Tensor:
    """||average|| of the whole unit, float64 scalar, the same bits on all ranks that hold it.

    Collective: the ranks of the pipeline stage, and for the embedding the stages with a copy.
    """
    squares = sum_in_rank_order(groups.stage.all_gather(shard.squared_norm(average)))
    stages = groups.ties.get(TIED_EMBEDDING)
    if stages is not None and shard.name == EMBEDDING:
        # A stage that holds only a tied copy counts nothing of the unit: the first stage knows.
        stages.broadcast_nowait(squares)
    return squares.sqrt()
