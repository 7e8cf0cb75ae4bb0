"""Latency, bandwidth and clocks between replicas, and what they mean for a training.

They are measured over groups like those of a sync.

Times are those of whole exchanges, latency included, of payloads that take a good part of a
second: what a sync would see, not what a data sheet says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from megatron_edit.comm.collectives import Group, all_reduce_payload
from megatron_edit.comm.transport import ON_CPU, Transport, stand_alone_group
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import GOAL_SHARE, EditConfig
from megatron_edit.constants import FP32_BYTES
from megatron_edit.tools.doctor.finding import DoctorFinding, Level

FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 28
LONG_SECONDS = 0.5  # an exchange of this length is believed
ROUNDS = 30
MORE_ROUNDS = 2  # of the long exchanges of all ranks, after the first one
MOST_SKEW_SECONDS = 1.0
_INT8_BYTES = 1

Exchange = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class MeasuredLink:
    """The way between the first ranks of two replicas.

    Attributes:
        source: replica that measured; its clock is the one that others are compared with.
        target: the other replica.
        round_trip_seconds: there and back, a few bytes; the median.
        forward_bytes_per_second: from source to target.
        backward_bytes_per_second: from target to source.
        clock_offset_seconds: by how much the target's clock is ahead.
        clock_error_seconds: the offset may be wrong by so much.
    """

    source: int
    target: int
    round_trip_seconds: float
    forward_bytes_per_second: float
    backward_bytes_per_second: float
    clock_offset_seconds: float
    clock_error_seconds: float


@dataclass(frozen=True)
class AllReduceResult:
    """All-reduces among all replicas, on all their ranks at once, as in a sync.

    Attributes:
        latency_seconds: of a few bytes; the median.
        bytes_per_second: that one rank sends, by the time of the slowest one.
    """

    latency_seconds: float
    bytes_per_second: float


def measure_links(world: ReplicaWorld, transport: Transport) -> list[MeasuredLink]:
    """Measure the ways from each replica to the next, one after the other.

    Collective: the first ranks of all replicas; other ranks come and go at once.

    Args:
        world: this process's place, and the stores.
        transport: what carries the payload; small things always go over gloo.

    Returns:
        What this rank has measured: its way to the next replica.
    """
    place = world.placement
    if place.rank > 0:
        return []
    count = place.num_replicas
    links = []
    # With two replicas there is one way; else one from each to the next, around.
    for source in range(count if count > 2 else count - 1):
        target = (source + 1) % count
        world.after_all_replicas(f"doctor/link{source}")
        if place.replica in (source, target):
            link = _measure(world, source, target, transport)
            links += [link] if place.replica == source else []
    return links


def measure_together(group: Group, everybody: Group) -> AllReduceResult:
    """Measure all-reduces.

    Collective: all ranks.

    Args:
        group: of the ranks at one position of every replica.
        everybody: all ranks; they begin each exchange together, as what another position does not
            send at the time would not slow this one down.
    """
    small = torch.zeros(1, device=group.device)
    latency = statistics.median(_timed(lambda: _reduce(group, small)) for _ in range(ROUNDS))
    exchange = partial(_reduce, group)
    nbytes, first = _grow(exchange, group, everybody)
    # Many flows share the links, which one exchange may be unlucky with.
    times = [first, *(_judged(exchange, group, everybody, nbytes) for _ in range(MORE_ROUNDS))]
    return AllReduceResult(
        latency, all_reduce_payload(nbytes, group.size) / statistics.median(times)
    )


def link_findings(links: list[MeasuredLink]) -> Iterator[DoctorFinding]:
    """Lines about the ways between replicas, and their clocks."""
    for link in links:
        name = f"replica {link.source} to {link.target}"
        rates = link.forward_bytes_per_second, link.backward_bytes_per_second
        text = f"{_rate(rates[0])} there, {_rate(rates[1])} back, "
        yield DoctorFinding(name, text + f"round trip {link.round_trip_seconds * 1e3:.2f} ms")
        skew = f"{link.clock_offset_seconds * 1e3:+.2f} ms (+-{link.clock_error_seconds * 1e3:.2f})"
        is_far = abs(link.clock_offset_seconds) > MOST_SKEW_SECONDS
        yield DoctorFinding(
            f"clock of replica {link.target} against {link.source}",
            skew,
            Level.HINT if is_far else Level.OK,
            "run NTP or chrony: log lines of replicas cannot be compared" if is_far else "",
        )


def sync_findings(
    together: AllReduceResult, num_replicas: int, ranks: int, parameters: int, step_seconds: float
) -> Iterator[DoctorFinding]:
    """Lines about a sync among all replicas, and how often to sync.

    Args:
        together: of one rank; all of a replica's were measured at once.
        num_replicas: N.
        ranks: of one replica, K.
        parameters: of the model.
        step_seconds: of one inner step.
    """
    rate = together.bytes_per_second * ranks
    yield DoctorFinding(
        "all-reduce among the replicas",
        f"{_rate(rate)} sent per replica, latency {together.latency_seconds * 1e3:.2f} ms",
    )
    seconds = all_reduce_payload(FP32_BYTES * parameters, num_replicas) / rate
    interval = max(1, round(seconds / (GOAL_SHARE * step_seconds)))
    usual = EditConfig().sync_interval
    value = f"{seconds:.1f} s ({parameters / 1e9:g} billion parameters, fp32, {ranks} ranks each)"
    if interval <= usual:
        yield DoctorFinding("a sync", value)
        return
    coded = max(1, round(interval * _INT8_BYTES / FP32_BYTES))
    delay = max(1, round(seconds * _INT8_BYTES / FP32_BYTES / step_seconds))
    yield DoctorFinding(
        "a sync",
        value,
        Level.HINT,
        f"at {step_seconds:g} s per step --edit-sync-interval {usual} spends more than "
        f"{GOAL_SHARE:.0%} of the time on it: use {interval}, "
        f"or --edit-sync-dtype int8 with {coded}"
        + (f", or hide int8 with --edit-delay-steps {delay} at some loss" if delay < usual else ""),
    )


def _measure(world: ReplicaWorld, source: int, target: int, transport: Transport) -> MeasuredLink:
    there, back = (_pair(world, a, b, ON_CPU) for a, b in ((source, target), (target, source)))
    is_source = world.placement.replica == source
    trips = [_ping(there, back, is_source=is_source) for _ in range(ROUNDS)]
    if transport.backend != "gloo":  # the payload as Megatron's default group would carry it
        there, back = (
            _pair(world, a, b, transport) for a, b in ((source, target), (target, source))
        )
    shortest = min(trips)
    return MeasuredLink(
        source,
        target,
        round_trip_seconds=statistics.median(seconds for seconds, _ in trips),
        forward_bytes_per_second=_one_way(there),
        backward_bytes_per_second=_one_way(back),
        clock_offset_seconds=shortest[1],
        clock_error_seconds=shortest[0] / 2,
    )


def _pair(world: ReplicaWorld, first: int, second: int, transport: Transport) -> Group:
    """A group of two replicas in which `first` is the one that broadcasts."""
    rank = 0 if world.placement.replica == first else 1
    name = f"doctor/{transport.backend} from {first} to {second}"
    return stand_alone_group(world.shared_store, rank, 2, transport, world.timeout, name)


def _ping(there: Group, back: Group, *, is_source: bool) -> tuple[float, float]:
    """Seconds there and back, and how far the target's clock is ahead (Cristian's method)."""
    ping, answer = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    began, sent = time.perf_counter(), time.time()
    there.broadcast(ping)
    if not is_source:
        answer.fill_(time.time())
    back.broadcast(answer)
    seconds = time.perf_counter() - began
    return seconds, float(answer) - (sent + seconds / 2)


def _one_way(pair: Group) -> float:
    """Bytes per second from the group's first rank to the second."""
    token = torch.zeros(1, device=pair.device)
    nbytes, seconds = _grow(partial(_send, pair, token), pair, pair)
    answer = statistics.median(_timed(lambda: _reduce(pair, token)) for _ in range(ROUNDS))
    return nbytes / max(seconds - answer, 1e-9)


def _send(pair: Group, token: torch.Tensor, values: torch.Tensor) -> None:
    pair.broadcast(values)
    _reduce(pair, token)  # it has arrived: to have sent it says little


def _grow(exchange: Exchange, group: Group, judges: Group) -> tuple[int, float]:
    """Bytes and seconds of the first exchange that lasts long enough, of ever bigger ones.

    All judges have the same time, so that all stop at the same size.
    """
    nbytes = FIRST_BYTES
    while True:
        seconds = _judged(exchange, group, judges, nbytes)
        if seconds >= LONG_SECONDS or nbytes >= MOST_BYTES:
            return nbytes, seconds
        nbytes *= 2 if seconds > LONG_SECONDS / 8 else 4


def _judged(exchange: Exchange, group: Group, judges: Group, nbytes: int) -> float:
    """Seconds of an exchange, of the judges' slowest one; all of them return together."""
    values = torch.zeros(nbytes // 4, device=group.device)
    mine = torch.tensor([_timed(partial(exchange, values))], device=judges.device)
    return float(judges.all_gather(mine).max())


def _reduce(group: Group, values: torch.Tensor) -> None:
    group.all_reduce(values)
    if values.is_cuda:
        torch.cuda.synchronize(values.device)


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _rate(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
