"""Call each method of `Group` in groups of one rank, over NCCL and over gloo from a device.

    python -m gpu_parts.group_calls cuda

A group of one rank sends nothing: each method tests its size. `Uncut` is a size of 1 that is not
equal to 1, so that the transports are created, and get every collective, as for several ranks. Each
result is known: that of a group whose only rank is this one. Prints JSON, a `Found`. On the CPU
there is no NCCL, and gloo alone is called.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.comm.collectives import Group, Work
from megatron_edit.comm.timeouts import set_timeout
from megatron_edit.comm.transport import ON_CPU, Transport, stand_alone_group
from megatron_edit.comm.wire import NUM_PHASES, Exchange, Wire
from megatron_edit.constants import WIRE_TYPES

TIMEOUT = timedelta(seconds=60)
NUMEL = 100_003  # no multiple of any block or alignment
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


class Uncut(int):
    """An integer that is not equal to 1, so that no call of a group of one rank is cut short."""

    def __eq__(self, other: object) -> bool:
        return int(self) != 1 and int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


@dataclass(frozen=True)
class Found:
    """What the calls showed.

    Attributes:
        complaints: a line for each call that failed or gave a wrong result.
        microseconds: of each call and transport, by their names, until its result is there.
    """

    complaints: list[str]
    microseconds: dict[str, float]


type Check = Callable[[Group], bool]


def values(group: Group, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of a type that all sums and copies must keep."""
    made = torch.arange(NUMEL, device=group.device) % 251
    return made.to(dtype)


def _in_place(method: str) -> Check:
    """Make a check of a method that must leave the values of a single rank as they are."""

    def check(group: Group) -> bool:
        for dtype in DTYPES:
            tensor = values(group, dtype)
            before, work = tensor.clone(), getattr(group, method)(tensor)
            if isinstance(work, Work):
                work.wait()
            if not torch.equal(tensor, before):
                return False
        return True

    return check


def all_reduce_together(group: Group) -> bool:
    """Sum several tensors in one launch, an empty one among them."""
    tensors = [values(group)[:end].clone() for end in (NUMEL, 0, 5)]
    before = [tensor.clone() for tensor in tensors]
    group.start_all_reduce_together(tensors).wait()
    return all(map(torch.equal, tensors, before))


def all_to_all(group: Group) -> bool:
    """Send a row in each phase; poll one of them to its end."""
    rows = values(group, torch.uint8).unsqueeze(0)
    outputs = [torch.empty_like(rows) for _ in range(NUM_PHASES)]
    works = [group.start_all_to_all(output, rows, i) for i, output in enumerate(outputs)]
    end = time.monotonic() + TIMEOUT.total_seconds()
    while not works[0].advance() and time.monotonic() < end:
        time.sleep(0.0001)
    for work in works[1:]:
        work.wait()
    is_over = bool(works[0].is_completed and works[0].on_wire is None)
    outputs.append(group.all_to_all(rows))
    return is_over and all(torch.equal(output, rows) for output in outputs)


def all_gather(group: Group) -> bool:
    """Gather tensors of the device and of the host, blocking, polling and in the background."""
    polls: list[float] = []

    def poll() -> float:
        polls.append(time.monotonic())
        return 0.001

    for dtype in DTYPES:
        own = values(group, dtype)
        work, rows = group.start_all_gather(own)
        work.wait()
        gathered = (rows, group.all_gather(own), group.all_gather(own.cpu()))
        if not all(torch.equal(each.cpu(), own.cpu().unsqueeze(0)) for each in gathered):
            return False
    return group.device.type != "cpu" or bool(group.all_gather(own, poll)[0].equal(own))


def gather_json(group: Group) -> bool:
    """Gather a value of set-up."""
    value = {"host": "a", "ranks": [1, 2]}
    return group.all_gather_json(value) == [value]


def broadcast_nowait(group: Group) -> bool:
    """Broadcast without waiting; the tensor is released when it has been sent."""
    tensor = values(group)
    before = tensor.clone()
    group.broadcast_nowait(tensor)
    end = time.monotonic() + TIMEOUT.total_seconds()
    while group._unreaped and time.monotonic() < end:
        group.reap()
        time.sleep(0.0001)
    return not group._unreaped and torch.equal(tensor, before)


def warm_up(group: Group) -> bool:
    """Use it once: this is not counted."""
    counts = group.payload_bytes, group.num_started
    group.warm_up(group.all_reduce, group.broadcast, group.all_gather, group.all_to_all)
    return (group.payload_bytes, group.num_started) == counts


def timeouts(group: Group) -> bool:
    """Change the time-out, then send with it."""
    set_timeout(group, 2 * TIMEOUT)
    group.all_reduce(values(group))
    return group.timeout == 2 * TIMEOUT


def any_rank(group: Group) -> bool:
    """Ask all ranks."""
    return group.is_true_on_any_rank(True) and not group.is_true_on_any_rank(False)


def exchange_of(wire: Wire) -> Check:
    """Make a check of two sums in flight: the same bits as where nothing is sent."""

    def check(group: Group) -> bool:
        alone = Group(None, 0, 1, group.device, TIMEOUT, "a group that sends nothing")
        sums = [_sums(wire, each) for each in (group, alone)]
        return all(map(torch.equal, *sums))

    return check


def _sums(wire: Wire, group: Group) -> list[Tensor]:
    """Return the sums and residuals of two exchanges, the second of an excluded addend."""
    made: list[Tensor] = []
    exchanges: list[Exchange] = []
    for is_excluded in (False, True):
        addend = torch.sin(values(group))
        residual = wire.new_residual(NUMEL, int(group.size), group.device)
        kept = residual if wire.has_residual else None
        exchanges.append(wire.start(group, addend, kept, is_excluded=is_excluded))
        made += [addend, residual.sent, residual.summed]
    for exchange in exchanges:
        exchange.wait()
    return made


# By the methods of `Group` that they call.
CHECKS: Mapping[str, Check] = {
    "warm_up": warm_up,
    "start_all_reduce": _in_place("start_all_reduce"),
    "start_all_reduce_together": all_reduce_together,
    "all_reduce": _in_place("all_reduce"),
    "start_broadcast": _in_place("start_broadcast"),
    "broadcast": _in_place("broadcast"),
    "broadcast_nowait, reap": broadcast_nowait,
    "start_all_to_all, all_to_all": all_to_all,
    "start_all_gather, all_gather": all_gather,
    "all_gather_json": gather_json,
    "set_timeout": timeouts,
    "is_true_on_any_rank": any_rank,
    **{f"exchange of {name}": exchange_of(Wire.of(name)) for name in WIRE_TYPES},
}
IN_ORDER = ("start_all_reduce_together",)  # only where collectives run in order
ON_THE_CPU = ("is_true_on_any_rank",)


def groups_of(device: torch.device) -> Iterator[Group]:
    """Make the groups of one rank that the calls are tried on, as a training makes them."""
    used = {"": ON_CPU}
    if device.type == "cuda":
        kinds = {backend: Transport(backend, device, members=(0,)) for backend in ("nccl", "gloo")}
        used = kinds | used
    for number, transport in enumerate(used.values()):
        name = f"sync group {number} over {transport.backend} on {transport.device.type}"
        yield stand_alone_group(
            dist.HashStore(), 0, Uncut(1), transport, TIMEOUT, name, num_phases=NUM_PHASES
        )


def checks_for(group: Group) -> dict[str, Check]:
    """Return the checks that are possible on a group."""
    is_on_cpu = group.device.type == "cpu"
    return {
        name: check
        for name, check in CHECKS.items()
        if (name not in IN_ORDER or group.runs_in_order)
        and (name not in ON_THE_CPU or (is_on_cpu and not group.runs_in_order))
    }


def call_all(group: Group) -> Found:
    """Make all calls on a group, and close it."""
    found = Found([], {})
    for name, check in checks_for(group).items():
        began = time.perf_counter()
        started = group.num_started
        try:
            wrong = "" if check(group) else "a wrong result"
            if not wrong and name != "warm_up" and group.num_started == started:
                wrong = "nothing was sent"
        except Exception as error:  # one call must not keep the others from being tried
            wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        found.microseconds[f"{group.name}, {name}"] = 1e6 * (time.perf_counter() - began)
        found.complaints.extend([f"{group.name}, {name}: {wrong}"] if wrong else [])
    try:
        group.stop_loops()
        group.close()
    except RuntimeError as error:
        found.complaints.append(f"{group.name}, close: {error}")
    return found


def main(device_name: str) -> Found:
    """Make all calls on all groups of a device, `cuda` or `cpu`."""
    if device_name == "cuda":
        torch.cuda.set_device(0)
    found = Found([], {})
    for group in groups_of(torch.device(device_name)):
        each = call_all(group)
        found.complaints.extend(each.complaints)
        found.microseconds.update(each.microseconds)
    return found


if __name__ == "__main__":
    print(json.dumps(asdict(main(sys.argv[1]))))
