"""Latency, bandwidth and clock offsets between replicas, and suggestions for a training.

They are measured over groups like those of a sync. Times are of complete exchanges, latency
included, with payloads that take a good part of a second, as in a sync.
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
from megatron_edit.config import TARGET_SYNC_SHARE, EditConfig
from megatron_edit.constants import FP32_BYTES
from megatron_edit.tools.doctor.finding import DoctorFinding, Level

FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 28
LONG_SECONDS = 0.5  # an exchange of this length is accurate enough
ROUNDS = 30
MORE_ROUNDS = 2  # repeats of the long exchange of all ranks
MOST_SKEW_SECONDS = 1.0
_INT8_BYTES = 1

Exchange = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class MeasuredLink:
    """The link between rank 0 of two replicas.

    Attributes:
        source: replica that measured; its clock is the reference.
        target: the other replica.
        round_trip_seconds: of a few bytes; the median.
        forward_bytes_per_second: from source to target.
        backward_bytes_per_second: from target to source.
        clock_offset_seconds: by how much the target's clock is ahead.
        clock_error_seconds: bound on the error of the offset.
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
    """Result of all-reduces among all replicas, on all their ranks at once, as in a sync.

    Attributes:
        latency_seconds: of a few bytes; the median.
        bytes_per_second: sent by one rank, by the time of the slowest one.
    """

    latency_seconds: float
    bytes_per_second: float


def measure_links(world: ReplicaWorld, transport: Transport) -> list[MeasuredLink]:
    """Measure the link from each replica to the next, one after the other.

    Collective: rank 0 of all replicas; other ranks return at once.

    Args:
        world: this process's placement, and the stores.
        transport: of the payload; small messages always use gloo.

    Returns:
        The measurements of this rank: its link to the next replica.
    """
    place = world.placement
    if place.rank > 0:
        return []
    count = place.num_replicas
    links = []
    # With two replicas there is one link; else a ring of links.
    for source in range(count if count > 2 else count - 1):
        target = (source + 1) % count
        world.wait_for_all_replicas(f"doctor/link{source}")
        if place.replica in (source, target):
            link = _measure(world, source, target, transport)
            links += [link] if place.replica == source else []
    return links


def measure_all_reduce(group: Group, all_ranks: Group) -> AllReduceResult:
    """Measure all-reduces among the replicas.

    Collective: all ranks.

    Args:
        group: of the ranks at one position of every replica.
        all_ranks: all ranks; they begin each exchange at the same time, so that the positions
            share the links as in a sync.
    """
    small = torch.zeros(1, device=group.device)
    latency = statistics.median(_timed(lambda: _reduce(group, small)) for _ in range(ROUNDS))
    exchange = partial(_reduce, group)
    nbytes, first = _find_long_exchange(exchange, group, all_ranks)
    # Many flows share the links: a single exchange may be an outlier.
    more = (_slowest_time(exchange, group, all_ranks, nbytes) for _ in range(MORE_ROUNDS))
    times = [first, *more]
    return AllReduceResult(
        latency, all_reduce_payload(nbytes, group.size) / statistics.median(times)
    )


def link_findings(links: list[MeasuredLink]) -> Iterator[DoctorFinding]:
    """Yield findings on the links between replicas, and on their clocks."""
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
    all_reduce: AllReduceResult, num_replicas: int, ranks: int, parameters: int, step_seconds: float
) -> Iterator[DoctorFinding]:
    """Yield findings on a sync among all replicas, and on the sync interval.

    Args:
        all_reduce: of one rank; all ranks of a replica were measured at once.
        num_replicas: N.
        ranks: of one replica, K.
        parameters: of the model.
        step_seconds: of one inner step.
    """
    rate = all_reduce.bytes_per_second * ranks
    yield DoctorFinding(
        "all-reduce among the replicas",
        f"{_rate(rate)} sent per replica, latency {all_reduce.latency_seconds * 1e3:.2f} ms",
    )
    seconds = all_reduce_payload(FP32_BYTES * parameters, num_replicas) / rate
    interval = max(1, round(seconds / (TARGET_SYNC_SHARE * step_seconds)))
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
        f"{TARGET_SYNC_SHARE:.0%} of the time on it: use {interval}, "
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
    """Return a group of two replicas in which `first` has rank 0."""
    rank = 0 if world.placement.replica == first else 1
    name = f"doctor/{transport.backend} from {first} to {second}"
    return stand_alone_group(world.shared_store, rank, 2, transport, world.timeout, name)


def _ping(there: Group, back: Group, *, is_source: bool) -> tuple[float, float]:
    """Measure round trip and clock offset of the target in seconds (Cristian's method)."""
    ping, answer = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    began, sent = time.perf_counter(), time.time()
    there.broadcast(ping)
    if not is_source:
        answer.fill_(time.time())
    back.broadcast(answer)
    seconds = time.perf_counter() - began
    return seconds, float(answer) - (sent + seconds / 2)


def _one_way(pair: Group) -> float:
    """Measure bytes per second from the group's rank 0 to rank 1."""
    token = torch.zeros(1, device=pair.device)
    nbytes, seconds = _find_long_exchange(partial(_send, pair, token), pair, pair)
    answer = statistics.median(_timed(lambda: _reduce(pair, token)) for _ in range(ROUNDS))
    return nbytes / max(seconds - answer, 1e-9)


def _send(pair: Group, token: torch.Tensor, values: torch.Tensor) -> None:
    pair.broadcast(values)
    _reduce(pair, token)  # waits for its arrival: a send may return earlier


def _find_long_exchange(exchange: Exchange, group: Group, timed: Group) -> tuple[int, float]:
    """Increase the payload until an exchange takes long enough; return its bytes and seconds.

    All ranks of `timed` get the same times, so that all stop at the same size.
    """
    nbytes = FIRST_BYTES
    while True:
        seconds = _slowest_time(exchange, group, timed, nbytes)
        if seconds >= LONG_SECONDS or nbytes >= MOST_BYTES:
            return nbytes, seconds
        nbytes *= 2 if seconds > LONG_SECONDS / 8 else 4


def _slowest_time(exchange: Exchange, group: Group, timed: Group, nbytes: int) -> float:
    """Measure an exchange; return the seconds of the slowest rank of `timed`, on all of them."""
    values = torch.zeros(nbytes // 4, device=group.device)
    mine = torch.tensor([_timed(partial(exchange, values))], device=timed.device)
    return float(timed.all_gather(mine).max())


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
