"""Outer state: anchor and outer momentum, as shards beside the optimizer's main shards.

With offload the state lives in host memory (pinned, where there is a GPU) and only the units in
flight are staged on the device, each in buffers of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.engine.lanes import Arriving, Lanes
from megatron_edit.engine.units import UnitPlan, UnitShard


@dataclass(frozen=True)
class UnitState:
    """Outer state of this rank's shard of one unit, where it lives between syncs.

    Attributes:
        anchor: A, fp32 [numel], parameters after the last sync.
        momentum: b, fp32 [numel].
        lanes: how it is copied to be used, where it lives in host memory; else None.
    """

    anchor: Tensor
    momentum: Tensor
    lanes: Lanes | None = None

    def stage_anchor(self) -> Arriving:
        """Begin to bring the anchor to the device; without offload it is there."""
        return Arriving(self.anchor) if self.lanes is None else self.lanes.upload(self.anchor)

    def stage(self) -> StagedUnit:
        """Begin to bring the state to the device; without offload it is there."""
        if self.lanes is None:
            return StagedUnit(Arriving(self.anchor), Arriving(self.momentum), self)
        return StagedUnit(self.lanes.upload(self.anchor), self.lanes.upload(self.momentum), self)


@dataclass(frozen=True)
class StagedUnit:
    """Outer state of a shard where arithmetic happens: on the device.

    Attributes:
        anchor: A, fp32 [numel].
        momentum: b, fp32 [numel].
        home: where the state lives between syncs; the same tensors, unless it is offloaded.
    """

    anchor: Arriving
    momentum: Arriving
    home: UnitState

    def put_back(self) -> None:
        """Begin to bring a changed state home."""
        if (lanes := self.home.lanes) is not None:
            lanes.download(self.anchor.tensor, self.home.anchor)
            lanes.download(self.momentum.tensor, self.home.momentum)


def pseudo_gradient(anchor: Tensor, shard: UnitShard, out: Tensor) -> Tensor:
    """D = A - theta, fp32 [numel], into `out`; `anchor` is on the device of `out`."""
    delta = shard.gather(out)
    return torch.sub(anchor, delta, out=delta)


@dataclass(frozen=True)
class OuterState:
    """Outer state of all shards of this rank: 8 bytes per element, nothing full-size.

    Attributes:
        units: by unit name, in forward order.
        lanes: of offloaded units; else None.
    """

    units: dict[str, UnitState]
    lanes: Lanes | None = None

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
        lanes = Lanes(device) if offload else None
        units = {}
        for shard in plan.shards:
            anchor = torch.empty(shard.numel, device=home, pin_memory=is_pinned)
            momentum = torch.zeros(shard.numel, device=home, pin_memory=is_pinned)
            shard.gather(anchor)
            units[shard.name] = UnitState(anchor, momentum, lanes)
        return cls(units, lanes)

    def begin_sync(self) -> None:
        """Called before the units of a sync are staged: they are read as the last one left them."""
        if self.lanes is not None:
            self.lanes.fence()

    def wait(self) -> None:
        """Wait until what was offloaded is home, for the host to read it."""
        if self.lanes is not None:
            self.lanes.wait()

    @property
    def nbytes(self) -> int:
        """Persistent bytes: anchors and momenta."""
        return sum(u.anchor.nbytes + u.momentum.nbytes for u in self.units.values())
