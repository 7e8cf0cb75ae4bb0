"""State that training changes and no optimizer owns, such as biases of MoE routers (method 3.9).

It is small, so it travels with the control records; every rank averages the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.rounds.plan import Decision


def values_of(host: Host) -> list[float]:
    """All buffers of this rank's stage, end to end: fp32 values are exact in a record."""
    tensors = [tensor.reshape(-1) for _, tensor in host.shared_buffers()]
    return torch.cat(tensors).tolist() if tensors else []


def average(
    host: Host, records: Sequence[ControlRecord], decision: Decision, units: Sequence[int]
) -> None:
    """Give the buffers of some units their mean over the replicas that the unit accepted.

    Where none was accepted, over all: there is no anchor to go back to. Values that are not
    finite never count. No communication.

    Args:
        host: has the buffers.
        records: of all replicas, with all buffers.
        decision: its columns are `units`.
        units: positions in the replica's list.

    Mutates: the host's buffers.
    """
    rows = torch.tensor([record.buffers for record in records], dtype=torch.float64)
    start = 0
    for index, tensor in host.shared_buffers():
        part = rows[:, start : start + tensor.numel()]
        start += tensor.numel()
        if index not in units:
            continue
        accepted = ~decision.verdict.anomalous[:, units.index(index)]
        usable = (accepted if bool(accepted.any()) else ~accepted) & part.isfinite().all(dim=1)
        total = torch.zeros(tensor.numel(), dtype=torch.float64)
        for row in part[usable]:
            total += row
        mean = total / max(1, int(usable.sum()))
        tensor.copy_(mean.view_as(tensor))


def sum_counts(host: Host, groups: EngineGroups) -> None:
    """In warm-up, before the buffers move: let every replica see what all have counted.

    Collective: the sync group. Mutates: the host's counts.
    """
    _for_all(host.shared_counts(), groups, divisor=1)


def average_in_warmup(host: Host, groups: EngineGroups) -> None:
    """In warm-up, after the buffers moved: mean of those that are linear in what was seen.

    Collective: the sync group. Mutates: the host's buffers.
    """
    _for_all(host.linear_buffers(), groups, divisor=groups.sync.size)


def _for_all(tensors: Sequence[Tensor], groups: EngineGroups, *, divisor: int) -> None:
    if not tensors or groups.sync.size == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    groups.sync.all_reduce(flat)
    flat /= divisor
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
