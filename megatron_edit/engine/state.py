"""Outer state: anchor and outer momentum, as shards beside the optimizer's main shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.engine.units import UnitPlan, UnitShard


@dataclass(frozen=True)
class UnitState:
    """Outer state of this rank's shard of one unit.

    Attributes:
        anchor: A, fp32 [numel], parameters after the last sync.
        momentum: b, fp32 [numel].
    """

    anchor: Tensor
    momentum: Tensor

    def pseudo_gradient(self, shard: UnitShard, out: Tensor) -> Tensor:
        """D = A - theta of this shard, fp32 [numel], written into `out` and returned."""
        delta = shard.gather(out)
        return torch.sub(self.anchor, delta, out=delta)


@dataclass(frozen=True)
class OuterState:
    """Outer state of all shards of this rank: 8 bytes per element, nothing full-size.

    Attributes:
        units: by unit name, in forward order.
    """

    units: dict[str, UnitState]

    @classmethod
    def take(cls, plan: UnitPlan, device: torch.device) -> OuterState:
        """Take the anchor from the parameters as they are; momentum starts at zero."""
        units = {}
        for shard in plan.shards:
            anchor = torch.empty(shard.numel, dtype=torch.float32, device=device)
            shard.gather(anchor)
            units[shard.name] = UnitState(anchor, torch.zeros_like(anchor))
        return cls(units)

    @property
    def nbytes(self) -> int:
        """Persistent bytes: anchors and momenta."""
        return sum(u.anchor.nbytes + u.momentum.nbytes for u in self.units.values())
