"""Examination of one launch: its ranks, the links between them, and a shared folder."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_edit.comm.collectives import Group, all_reduce_payload
from megatron_edit.comm.interfaces import GLOO_INTERFACE
from megatron_edit.comm.placement import Placement, host_lines, place, straddling_warnings
from megatron_edit.comm.transport import ON_CPU, Transport, stand_alone_group
from megatron_edit.comm.worlds import ReplicaWorld, join
from megatron_edit.config import EditConfig
from megatron_edit.constants import CPU
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.tools.doctor.machine import DoctorFinding, Level, machine_facts
from megatron_edit.tools.plan.values import show_rate

PATIENCE_SECONDS = 10.0
POLL_SECONDS = 0.005
_BLOCKED = "start all ranks, and open all ports between the machines (docs/troubleshooting.md)"


@dataclass
class Report:
    """The results, as lines, and as numbers for ``--json``."""

    findings: list[DoctorFinding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


def placement_of(config: EditConfig, env: Mapping[str, str]) -> Placement | None:
    """Return the placement of this process; None if it is the only one.

    The launch of a replica of an elastic run is one replica. On a single node each rank is a
    replica by default.

    Raises:
        UsageError: settings and environment contradict each other.
    """
    world = env.get("WORLD_SIZE", "1")
    if world == "1" and config.replica_id is None:
        return None
    num_replicas = config.num_replicas if config.hub is None else 1
    try:
        return place(num_replicas, config.replica_id, env)
    except UsageError:
        if num_replicas is not None:
            raise
    return place(int(world), None, env)


def examine(config: EditConfig, placement: Placement | None, folder: Path | None) -> Report:
    """Exchange facts with all ranks and, if they can be connected, measure the links.

    Collective: all ranks of the launch.

    Args:
        folder: to be visible to all ranks; None checks none.

    Returns:
        The results; on the first rank also a failed or lost connection between the ranks.

    Raises:
        UsageError: the launch cannot be used.
        ReplicaLostError: the ranks could not connect, and this is not the first rank.
    """
    report = Report()
    if placement is None:
        return report
    transport = _transport(config)
    world = join(placement, rendezvous=config.rendezvous, timeout_seconds=config.timeout_seconds)
    try:
        world.arrange(config.placement)
        os.environ.update(world.interface_variable)
        if _exchange_facts(world, report):
            all_ranks = _all_ranks_group(world)
            if placement.num_replicas > 1:
                _measure(world, transport, all_ranks, report)
            if folder is not None:
                _check_folder(folder, all_ranks, report)
        world.exit_barrier()
        world.wait_for_all_readers("doctor/left", world.timeout)  # rank 0 may host the store
    except ReplicaLostError as error:
        if placement.global_rank > 0:
            raise
        reason = str(error).partition("\n")[0]
        report.findings.append(DoctorFinding("between the ranks", reason, Level.BAD, _BLOCKED))
    return report


def _exchange_facts(world: ReplicaWorld, report: Report) -> bool:
    """Compare the machines of all ranks, on the first one; return whether gloo can connect them.

    The store is used, which needs no interface of gloo's.
    """

    def decide(machines: list[dict[str, Any]]) -> list[bool]:
        report.findings += _machine_findings(world, machines)
        return [not any(each["missing"] for each in machines)] * len(machines)

    return bool(world.settle("doctor", machine_facts(), decide))


def _machine_findings(
    world: ReplicaWorld, machines: Sequence[dict[str, Any]]
) -> Iterator[DoctorFinding]:
    place, first = world.placement, machines[0]
    num_hosts = len({each["host"] for each in machines})
    shape = f"{place.num_replicas} replicas x {place.ranks_per_replica} ranks"
    yield DoctorFinding("ranks", f"{len(machines)} on {num_hosts} machines, {shape}")
    if place.is_single_launch:  # which arranges its ranks in replicas
        counts = world.host_counts() or []
        yield DoctorFinding("placement", "; ".join(host_lines(counts)))
        for warning in straddling_warnings(counts):
            yield DoctorFinding("placement", warning, Level.HINT)
    for each in machines:
        for name, version in each["versions"].items():
            if version != first["versions"][name]:
                value = f"{version} on {each['host']}, {first['versions'][name]} on the first"
                yield DoctorFinding(name, value, Level.BAD, "install the same everywhere")
        if each["missing"]:
            value = f"no {each['missing']} on {each['host']}; nothing is measured"
            yield DoctorFinding(GLOO_INTERFACE, value, Level.BAD, "name an interface of it")


def _measure(world: ReplicaWorld, transport: Transport, all_ranks: Group, report: Report) -> None:
    """Measure the links between the replicas, and all-reduces among them."""
    place = world.placement
    name = f"doctor/sync {place.rank}"  # the ranks at this rank's position in every replica
    among = stand_alone_group(
        world.shared_store, place.replica, place.num_replicas, transport, world.timeout, name
    )
    all_reduce = measure_all_reduce(among, all_ranks)
    mine = [asdict(link) for link in measure_links(world, transport)]
    links = [MeasuredLink(**link) for one in all_ranks.all_gather_json(mine) for link in one]
    report.findings += link_findings(links)
    report.findings += sync_findings(all_reduce, links, world.host_counts() or [])
    report.numbers = {
        "links": [asdict(link) for link in links],
        "all_reduce": asdict(all_reduce),
    }


def _check_folder(folder: Path, all_ranks: Group, report: Report) -> None:
    """Let the first rank write a file, and all ranks look for it.

    Collective: all ranks of the group.
    """
    path, error = folder / f".doctor-{uuid.uuid4().hex}", None
    if all_ranks.rank == 0:
        try:
            path.touch()
        except OSError as failure:
            error = f"the first rank cannot write to it ({failure.strerror})"
    name, error = all_ranks.all_gather_json((path.name, error))[0]
    mine = {"delay_seconds": 0.0, "error": error} if error else _look_for(folder / name)
    seen = all_ranks.all_gather_json(mine)
    if all_ranks.rank == 0:
        path.unlink(missing_ok=True)
    report.numbers["shared_dir"] = seen
    value = f"seen by all ranks ({len(seen)})"
    finding = DoctorFinding(f"shared folder {folder}", value)
    for rank, one in enumerate(seen):
        if one["error"] is not None:
            remedy = "give --save and --edit-log-dir a folder that all machines mount"
            value = f"rank {rank}: {one['error']}"
            finding = DoctorFinding(finding.name, value, Level.BAD, remedy)
    report.findings.append(finding)


def _look_for(path: Path) -> dict[str, Any]:
    """Return when this rank saw a file, or that it did not."""
    began = time.monotonic()
    while not path.exists():
        if time.monotonic() - began > PATIENCE_SECONDS:
            return {"delay_seconds": 0.0, "error": f"not seen within {PATIENCE_SECONDS:.0f} s"}
        time.sleep(POLL_SECONDS)
    return {"delay_seconds": time.monotonic() - began, "error": None}


def _transport(config: EditConfig) -> Transport:
    """Return the transport that the syncs of a training would use."""
    if config.device == CPU or not torch.cuda.is_available():
        return ON_CPU
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return Transport("nccl", device)


def _all_ranks_group(world: ReplicaWorld) -> Group:
    place = world.placement
    size = place.num_replicas * place.ranks_per_replica
    return stand_alone_group(
        world.shared_store, place.global_rank, size, ON_CPU, world.timeout, "doctor/all_ranks"
    )


# ---- Latency, bandwidth and clock offsets between replicas
#
# They are measured over groups like those of a sync. Times are of complete exchanges, latency
# included, with payloads that take a good part of a second, as in a sync.


FIRST_BYTES, MOST_BYTES = 1 << 16, 1 << 28
LONG_SECONDS = 0.5  # an exchange of this length is accurate enough
ROUNDS = 30
MORE_ROUNDS = 2  # repeats of the long exchange of all ranks
MOST_SKEW_SECONDS = 1.0

Exchange = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class MeasuredLink:
    """The link between rank 0 of two replicas.

    Attributes:
        source: replica that measured; its clock is the reference.
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
            link = _measure_link(world, source, target, transport)
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
        there, back = link.forward_bytes_per_second, link.backward_bytes_per_second
        text = f"{show_rate(8 * there)} there, {show_rate(8 * back)} back, "
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
    all_reduce: AllReduceResult, links: Sequence[MeasuredLink], counts: Sequence[Mapping[str, int]]
) -> Iterator[DoctorFinding]:
    """Yield findings on a sync among all replicas, and the link as `megatron-edit plan` takes it.

    Args:
        all_reduce: of one rank; all ranks of a replica were measured at once.
        links: between the replicas.
        counts: for each replica the number of its ranks on each host.
    """
    rate = show_rate(8 * all_reduce.bytes_per_second * sum(counts[0].values()))
    latency = all_reduce.latency_seconds * 1e3
    yield DoctorFinding(
        "all-reduce among the replicas", f"{rate} sent per replica, latency {latency:.2f} ms"
    )
    host = show_rate(8 * all_reduce.bytes_per_second * max(counts[0].values()))
    one_way = max(link.round_trip_seconds for link in links) / 2
    options = f"--link {host.replace(' ', '')} --latency {one_way * 1e3:.2f}ms"
    yield DoctorFinding("for megatron-edit plan", options)


def _measure_link(
    world: ReplicaWorld, source: int, target: int, transport: Transport
) -> MeasuredLink:
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
