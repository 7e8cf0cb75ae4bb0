"""Outer state: anchor and outer momentum, sharded like the optimizer's main parameters.

With offload the state lives in host memory (pinned, where there is a GPU) and only the units in
flight are staged on the device, each in buffers of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.compressed_all_reduce import Residual
from megatron_edit.comm.streams import Streams, page_locked, streams_of
from megatron_edit.comm.wire import Wire
from megatron_edit.engine.saved import UnitTensors
from megatron_edit.engine.sync.offload import DeviceCopy, OffloadStreams
from megatron_edit.engine.units import UnitPlan, UnitShard
from megatron_edit.method.digest import tensor_digest
from megatron_edit.method.norms import sum_in_rank_order


@dataclass(frozen=True)
class UnitState:
    """Outer state of this rank's shard of one unit, where it lives between syncs.

    Attributes:
        anchor: A, fp32 [numel], parameters after the last sync.
        momentum: b, fp32 [numel].
        offload_streams: for copies to the device, where it lives in host memory; else None.
        residual: error-feedback residual of a lossy wire type; None for a lossless one.
    """

    anchor: Tensor
    momentum: Tensor
    offload_streams: OffloadStreams | None = None
    residual: Residual | None = None

    def tensors(self) -> UnitTensors:
        """The tensors that a checkpoint stores; not copied."""
        tensors = UnitTensors(anchor=self.anchor, momentum=self.momentum)
        if self.residual is not None:
            tensors["sent"], tensors["summed"] = self.residual.sent, self.residual.summed
        return tensors

    def stage_anchor(self) -> DeviceCopy:
        """Begin to copy the anchor to the device; without offload it is already there."""
        if (streams := self.offload_streams) is None:
            return DeviceCopy(self.anchor)
        return streams.upload(self.anchor)

    def stage(self) -> StagedUnit:
        """Begin to copy the state to the device; without offload it is already there."""
        if (streams := self.offload_streams) is None:
            return StagedUnit(DeviceCopy(self.anchor), DeviceCopy(self.momentum), self)
        return StagedUnit(streams.upload(self.anchor), streams.upload(self.momentum), self)


@dataclass(frozen=True)
class StagedUnit:
    """Outer state of a shard on the device.

    Attributes:
        anchor: A, fp32 [numel].
        momentum: b, fp32 [numel].
        resident_state: where it lives between syncs; the same tensors, unless it is offloaded.
    """

    anchor: DeviceCopy
    momentum: DeviceCopy
    resident_state: UnitState

    def put_back(self) -> None:
        """Begin to copy a changed state back to where it lives."""
        if (streams := self.resident_state.offload_streams) is not None:
            streams.download(self.anchor.tensor, self.resident_state.anchor)
            streams.download(self.momentum.tensor, self.resident_state.momentum)

    def release(self) -> None:
        """Release both copies; see `DeviceCopy.release`."""
        self.anchor.release()
        self.momentum.release()


@dataclass(frozen=True)
class OuterState:
    """Outer state of all shards of this rank: 8 bytes per element, nothing full-size.

    Lossy wire types add up to 8 bytes: their error-feedback residuals.

    Attributes:
        units: by unit name, in forward order.
        offload_streams: of offloaded units; else None.
    """

    units: dict[str, UnitState]
    offload_streams: OffloadStreams | None = None

    @classmethod
    def allocate(
        cls,
        plan: UnitPlan,
        device: torch.device,
        *,
        offload: bool,
        num_replicas: int,
        max_staged: int,
        wire: Wire | None = None,
        streams: Streams | None = None,
    ) -> OuterState:
        """Allocate the state. Momentum is zero; the anchor is set by `at_parameters`.

        Args:
            plan: this rank's shards.
            offload: whether anchor and momentum are to live in host memory.
            num_replicas: N.
            max_staged: maximum number of units of an offloaded state on the device.
            wire: type on the wire, which may need a residual.
            streams: of the device; None creates them.
        """
        resident_device = torch.device("cpu") if offload else device
        is_pinned = offload and device.type == "cuda"
        copies = None
        if offload:  # anchor and momentum of each unit
            copies = OffloadStreams(device, streams or streams_of(device), 2 * max_staged)
        units, numels = {}, [shard.numel for shard in plan.shards for _ in range(2)]
        resident = iter(_resident_tensors(numels, resident_device, is_pinned=is_pinned))
        for shard in plan.shards:
            residual = None
            if wire is not None and wire.has_residual:
                residual = wire.new_residual(shard.numel, num_replicas, device)
            anchor, momentum = next(resident), next(resident).zero_()
            units[shard.name] = UnitState(anchor, momentum, copies, residual)
        return cls(units, copies)

    def at_parameters(self, plan: UnitPlan) -> OuterState:
        """The same state, with the current parameters as anchor. Mutates the anchor."""
        for shard in plan.shards:
            shard.gather(self.units[shard.name].anchor)
        return self

    def with_wire(self, wire: Wire, num_replicas: int, device: torch.device) -> OuterState:
        """The same anchor and momentum for another type on the wire, whose residuals begin at zero.

        Args:
            num_replicas: N.
        """
        units = {}
        for name, unit in self.units.items():
            numel = unit.anchor.numel()
            residual = wire.new_residual(numel, num_replicas, device) if wire.has_residual else None
            units[name] = replace(unit, residual=residual)
        return replace(self, units=units)

    def load(self, saved: Mapping[str, UnitTensors]) -> None:
        """Load the tensors of a checkpoint, by unit; missing ones keep their value."""
        for name, tensors in saved.items():
            targets: Mapping[str, Any] = self.units[name].tensors()
            for kind, tensor in tensors.items():
                if kind in targets:
                    assert isinstance(tensor, Tensor)
                    targets[kind][: tensor.numel()].copy_(tensor)

    def prefetch[Begun](
        self, shards: Iterable[UnitShard], begin: Callable[[UnitState], Begun]
    ) -> Iterator[tuple[UnitShard, Begun]]:
        """Yield each shard with its `begin` result, which is started one shard ahead."""
        waiting: tuple[UnitShard, Begun] | None = None
        for shard in shards:
            begun = (shard, begin(self.units[shard.name]))
            if waiting is not None:
                yield waiting
            waiting = begun
            del begun  # or the tensors of this shard would be kept alive next to the next two
        if waiting is not None:
            yield waiting

    def begin_sync(self) -> None:
        """Order the staging of a sync's units after the downloads of the last sync."""
        if self.offload_streams is not None:
            self.offload_streams.fence()

    def end_sync(self) -> None:
        """Free staging memory on the device: no unit is staged for a while."""
        if self.offload_streams is not None:
            self.offload_streams.free()

    def wait(self) -> None:
        """Block the host until all downloads to host memory are done."""
        if self.offload_streams is not None:
            self.offload_streams.wait()

    def tensors(self) -> dict[str, UnitTensors]:
        """The tensors that a checkpoint stores, by unit, after all downloads are done."""
        self.wait()
        return {name: unit.tensors() for name, unit in self.units.items()}

    def digests(self, shards: Iterable[UnitShard]) -> dict[int, Tensor]:
        """Digests of anchor and momentum, int64 scalars by the units' position. Does not block.

        They are computed on the device, offloaded or not: a CPU would take seconds.
        """
        self.begin_sync()
        found = {}
        for shard, staged in self.prefetch(shards, UnitState.stage):
            found[shard.index] = tensor_digest([staged.anchor.ready(), staged.momentum.ready()])
            staged.release()
            del staged  # free it before the shard after the next is staged
        self.end_sync()
        return found

    @property
    def nbytes(self) -> int:
        """Persistent bytes: anchors, momenta, and error-feedback residuals."""
        tensors: list[Any] = [t for u in self.units.values() for t in u.tensors().values()]
        return sum(int(tensor.nbytes) for tensor in tensors)


def _resident_tensors(
    numels: Sequence[int], device: torch.device, *, is_pinned: bool
) -> Sequence[Tensor]:
    """fp32 tensors of these sizes, uninitialized. Page-locked ones share one buffer: torch's own
    allocations of such memory are rounded up to powers of two."""
    if is_pinned and (flat := page_locked(sum(numels))) is not None:
        return list(flat.split(list(numels)))
    return [torch.empty(numel, device=device, pin_memory=is_pinned) for numel in numels]


def replica_norms(
    plan: UnitPlan,
    state: OuterState,
    replica: Group,
    device: torch.device,
    loss: float = math.nan,
    exposed: float = math.nan,
) -> tuple[Tensor, float, float]:
    """||A - theta|| of every unit of this replica, its loss, and the time that its last sync added;
    the same bits on all its ranks.

    Collective: the ranks of the replica.

    Args:
        plan: the units.
        replica: group of all its ranks.
        loss: of this rank; NaN where it is not known. With pipeline stages only the last one
            knows it.
        exposed: seconds, of this rank; NaN where there is none.

    Returns:
        The norms, float64 [U], the loss of the last rank that knows it, and the longest time; NaN
        if none is known.
    """
    scratch = torch.empty(plan.largest_numel, dtype=torch.float32, device=device)
    squares = torch.zeros(len(plan.names), dtype=torch.float64, device=device)
    state.begin_sync()
    with record_function("edit/norms"):
        for shard, anchor in state.prefetch(plan.shards, UnitState.stage_anchor):
            delta = shard.pseudo_gradient(anchor.ready(), scratch)
            squares[shard.index] = shard.squared_norm(delta)
            if state.offload_streams is not None:
                anchor.release()
            del anchor  # free it before the shard after the next is staged
    state.end_sync()
    own = torch.tensor([loss, exposed], dtype=torch.float64, device=device)
    rows = replica.all_gather(torch.cat((squares, own)))
    losses, times = (
        [each for each in column.tolist() if not math.isnan(each)]
        for column in rows[:, -2:].unbind(1)
    )
    norms = sum_in_rank_order(rows[:, :-2]).sqrt()
    return norms, losses[-1] if losses else math.nan, max(times, default=math.nan)
