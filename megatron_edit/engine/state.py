"""Outer state: anchor and outer momentum, as shards beside the optimizer's main shards.

With offload the state lives in host memory (pinned, where there is a GPU) and only the units in
flight are staged on the device, each in buffers of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.engine.units import UnitPlan, UnitShard


@dataclass(frozen=True)
class UnitState:
    """Outer state of this rank's shard of one unit, where it lives between syncs.

    Attributes:
        anchor: A, fp32 [numel], parameters after the last sync.
        momentum: b, fp32 [numel].
        is_offloaded: whether it lives in host memory, and is copied to be used.
    """

    anchor: Tensor
    momentum: Tensor
    is_offloaded: bool = False

    def pseudo_gradient(self, shard: UnitShard, out: Tensor) -> Tensor:
        """D = A - theta of this shard, fp32 [numel] on the device of `out`, into `out`."""
        return pseudo_gradient(_staged(self.anchor, self.is_offloaded, out.device), shard, out)

    def stage(self, device: torch.device) -> StagedUnit:
        """Bring the state to `device`; without offload it is there."""
        return StagedUnit(
            _staged(self.anchor, self.is_offloaded, device),
            _staged(self.momentum, self.is_offloaded, device),
            self,
        )


@dataclass(frozen=True)
class StagedUnit:
    """Outer state of a shard where arithmetic happens: on the device.

    Attributes:
        anchor: A, fp32 [numel].
        momentum: b, fp32 [numel].
        home: where the state lives between syncs; the same tensors, unless it is offloaded.
    """

    anchor: Tensor
    momentum: Tensor
    home: UnitState

    def put_back(self) -> None:
        """Bring a changed state home.

        The copies are queued on the stream of the outer step, and so are the next sync's copies
        to the device, which therefore read what was put back here.
        """
        if self.home.is_offloaded:
            self.home.anchor.copy_(self.anchor, non_blocking=True)
            self.home.momentum.copy_(self.momentum, non_blocking=True)


def pseudo_gradient(anchor: Tensor, shard: UnitShard, out: Tensor) -> Tensor:
    """D = A - theta, fp32 [numel], into `out`; `anchor` is on the device of `out`."""
    delta = shard.gather(out)
    return torch.sub(anchor, delta, out=delta)


def _staged(tensor: Tensor, is_offloaded: bool, device: torch.device) -> Tensor:
    """`tensor` itself, or a copy of it on the device (on CPU runs, too: the memory is counted)."""
    if not is_offloaded:
        return tensor
    return torch.empty_like(tensor, device=device, pin_memory=False).copy_(
        tensor, non_blocking=True
    )


@dataclass(frozen=True)
class OuterState:
    """Outer state of all shards of this rank: 8 bytes per element, nothing full-size.

    Attributes:
        units: by unit name, in forward order.
    """

    units: dict[str, UnitState]

    @classmethod
    def take(cls, plan: UnitPlan, device: torch.device, offload: bool = False) -> OuterState:
        """Take the anchor from the parameters as they are; momentum starts at zero.

        Args:
            plan: this rank's shards.
            device: of the parameters.
            offload: whether the state is to live in host memory.
        """
        home = torch.device("cpu") if offload else device
        is_pinned = offload and device.type == "cuda"
        units = {}
        for shard in plan.shards:
            anchor = torch.empty(shard.numel, device=home, pin_memory=is_pinned)
            momentum = torch.zeros(shard.numel, device=home, pin_memory=is_pinned)
            shard.gather(anchor)
            units[shard.name] = UnitState(anchor, momentum, offload)
        return cls(units)

    @property
    def nbytes(self) -> int:
        """Persistent bytes: anchors and momenta."""
        return sum(u.anchor.nbytes + u.momentum.nbytes for u in self.units.values())
