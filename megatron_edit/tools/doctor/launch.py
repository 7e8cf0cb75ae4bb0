"""Examination of one launch: its ranks, the links between them, and a shared folder."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_edit.comm.collectives import Group, all_reduce_payload
from megatron_edit.comm.placement import Placement, host_lines, place, straddling_warnings
from megatron_edit.comm.transport import ON_CPU, Transport, stand_alone_group
from megatron_edit.comm.worlds import ReplicaWorld, join
from megatron_edit.command_line import config_from_argv
from megatron_edit.config import TARGET_SYNC_SHARE, EditConfig
from megatron_edit.constants import CPU, CUDA, FP32_BYTES
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.tools.doctor.finding import DoctorFinding, Level
from megatron_edit.tools.doctor.machine import machine_facts, unusable_interfaces

PATIENCE_SECONDS = 10.0
POLL_SECONDS = 0.005
_UNUSABLE = "correct the lines about interfaces first: the ranks could not be connected"
_BLOCKED = "start all ranks, and open all ports between the machines (docs/troubleshooting.md)"


@dataclass
class Report:
    """The results, as lines and as numbers.

    Attributes:
        numbers: for ``--json``.
        is_single_host: whether all ranks are on this machine.
    """

    findings: list[DoctorFinding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    is_single_host: bool = True


@dataclass(frozen=True)
class Launch:
    """A launch as this process sees it.

    Attributes:
        config: of a training with the same flags.
        placement: of this process; None where it is the only one.
    """

    config: EditConfig
    placement: Placement | None

    @classmethod
    def of(cls, words: Sequence[str], env: Mapping[str, str]) -> Launch:
        """Determine this process's placement. On a single node each rank is a replica by default.

        Args:
            words: flags of a training.

        Raises:
            UsageError: flags and environment contradict each other.
        """
        config = config_from_argv(words)
        world = env.get("WORLD_SIZE", "1")
        if world == "1" and config.replica_id is None:
            return cls(config, None)
        try:
            return cls(config, place(config.num_replicas, config.replica_id, env))
        except UsageError:
            if config.num_replicas is not None:
                raise
        config = config_from_argv([*words, "--edit-num-replicas", world])
        return cls(config, place(config.num_replicas, config.replica_id, env))

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of the launch, which prints the report."""
        return self.placement is None or self.placement.global_rank == 0


@dataclass(frozen=True)
class FolderVisibility:
    """Whether and when one rank saw the file that global rank 0 wrote.

    Attributes:
        error: why the file was not seen; None where it was.
        delay_seconds: from the announcement of the file to reading all of it.
    """

    delay_seconds: float = 0.0
    error: str | None = None


def examine(launch: Launch, *, folder: Path | None, parameters: int, step_seconds: float) -> Report:
    """Exchange facts with all ranks and, if they can be connected, measure the links.

    Collective: all ranks of the launch.

    Args:
        folder: to be visible to all ranks; None checks none.
        parameters: of the model for which the time of a sync is computed.

    Returns:
        The results; on the first rank also a failed or lost connection between the ranks.

    Raises:
        UsageError: the launch cannot be used.
        ReplicaLostError: the ranks could not connect, and this is not the first rank.
    """
    report, placement = Report(), launch.placement
    if placement is None:
        if folder is not None:
            alone = Group(None, 0, 1, torch.device("cpu"), timedelta(seconds=1), "alone")
            _check_folder(folder, alone, report)
        return report
    transport = _transport(launch.config)
    config = launch.config
    world = join(placement, rendezvous=config.rendezvous, timeout_seconds=config.timeout_seconds)
    try:
        world.arrange(config.placement)
        os.environ.update(world.interface_variable)
        all_ranks = _exchange_facts(world, report)
        if all_ranks is not None and placement.num_replicas > 1:
            all_reduce = _measure(world, transport, all_ranks, report)
            shape = placement.num_replicas, placement.ranks_per_replica
            report.findings += sync_findings(all_reduce, *shape, parameters, step_seconds)
        if all_ranks is not None and folder is not None:
            _check_folder(folder, all_ranks, report)
        world.exit_barrier()
        world.wait_for_all_readers("doctor/left", world.timeout)  # rank 0 may host the store
    except ReplicaLostError as error:
        if not launch.is_first:
            raise
        reason = str(error).partition("\n")[0]
        report.findings.append(DoctorFinding("between the ranks", reason, Level.BAD, _BLOCKED))
    return report


def _exchange_facts(world: ReplicaWorld, report: Report) -> Group | None:
    """Exchange facts about the machines; return a group of all ranks if they can be connected.

    The store is used, which needs none of the interfaces that gloo and NCCL choose. All ranks get
    the same facts, so that all decide alike.
    """
    place, store = world.placement, world.shared_store
    size = place.num_replicas * place.ranks_per_replica
    store.set(f"doctor/rank{world.launch_rank}", json.dumps(machine_facts()))
    machines: list[dict[str, Any]] = []
    for rank in range(size):
        replica = rank // place.ranks_per_replica
        if world.arrangement is not None:
            replica, _ = world.arrangement.places()[rank]
        world.wait_for(f"doctor/rank{rank}", world.timeout, replica=replica)
        machines.append(json.loads(store.get(f"doctor/rank{rank}")))
        report.is_single_host = len({entry["host"] for entry in machines}) == 1
    hosts = {entry["host"] for entry in machines}
    shape = f"{place.num_replicas} replicas x {place.ranks_per_replica} ranks"
    unusable = [
        unusable_interfaces(entry, is_single_host=report.is_single_host) for entry in machines
    ]
    report.findings += [
        DoctorFinding("ranks", f"{size} on {len(hosts)} machines, {shape}"),
        *_placement_findings(world),
        *_different_versions(machines),
        *_findings_on_other_hosts([entry["host"] for entry in machines], unusable),
    ]
    if any(unusable):
        report.findings.append(
            DoctorFinding("between the ranks", "not measured", Level.HINT, _UNUSABLE)
        )
        return None
    return _all_ranks_group(world)


def _placement_findings(world: ReplicaWorld) -> Iterator[DoctorFinding]:
    """Yield which replica is on which hosts, where one launch arranges its ranks in replicas."""
    if world.arrangement is not None and world.placement.is_single_launch:
        counts = world.arrangement.counts()
        yield DoctorFinding("placement", "; ".join(host_lines(counts)))
        for warning in straddling_warnings(counts):
            yield DoctorFinding("placement", warning, Level.HINT)


def _measure(
    world: ReplicaWorld, transport: Transport, all_ranks: Group, report: Report
) -> AllReduceResult:
    """Measure the links between the replicas, and all-reduces among them."""
    all_reduce = measure_all_reduce(_sync_group(world, transport), all_ranks)
    mine = [dataclasses.asdict(link) for link in measure_links(world, transport)]
    links = [MeasuredLink(**link) for one in all_ranks.all_gather_json(mine) for link in one]
    report.findings += link_findings(links)
    report.numbers = {
        "links": [dataclasses.asdict(link) for link in links],
        "all_reduce": dataclasses.asdict(all_reduce),
    }
    return all_reduce


def _check_folder(folder: Path, all_ranks: Group, report: Report) -> None:
    seen = _watch(folder, all_ranks)
    report.findings.append(_folder_finding(folder, seen))
    report.numbers["shared_dir"] = [dataclasses.asdict(one) for one in seen]


def _watch(folder: Path, all_ranks: Group) -> list[FolderVisibility]:
    """Let rank 0 of the group write a file, and all ranks look for it.

    Collective: all ranks of the group.

    Returns:
        The visibility for each rank, in rank order.
    """
    content = uuid.uuid4().hex
    written = _write(folder / f".doctor-{content}", content) if all_ranks.rank == 0 else None
    content, error = all_ranks.all_gather_json((content, written))[0]
    path = folder / f".doctor-{content}"
    mine = FolderVisibility(error=error) if error else _poll(path, content)
    seen = [FolderVisibility(**one) for one in all_ranks.all_gather_json(dataclasses.asdict(mine))]
    if all_ranks.rank == 0:
        path.unlink(missing_ok=True)
    return seen


def _write(path: Path, content: str) -> str | None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        return f"the first rank cannot write to it ({error.strerror})"
    return None


def _poll(path: Path, content: str) -> FolderVisibility:
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_SECONDS:
        try:
            if path.read_text(encoding="utf-8") == content:
                return FolderVisibility(time.monotonic() - began)
        except OSError:
            pass  # not there yet
        time.sleep(POLL_SECONDS)
    return FolderVisibility(error=f"not seen within {PATIENCE_SECONDS:.0f} s")


def _transport(config: EditConfig) -> Transport:
    """Return the transport that the syncs of a training would use."""
    if config.device == CUDA and not torch.cuda.is_available():
        remedy = "use --edit-device auto or cpu"
        raise UsageError("--edit-device cuda", "no CUDA device was found", remedy, is_local=True)
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


def _sync_group(world: ReplicaWorld, transport: Transport) -> Group:
    """Return a group of the ranks at this rank's position in every replica."""
    place = world.placement
    name = f"doctor/sync {place.rank}"
    return stand_alone_group(
        world.shared_store, place.replica, place.num_replicas, transport, world.timeout, name
    )


def _findings_on_other_hosts(
    hosts: list[str], unusable: list[list[DoctorFinding]]
) -> Iterator[DoctorFinding]:
    """Yield the findings on other machines that the first rank has not on its own."""
    found = [(host, one) for host, several in zip(hosts, unusable, strict=True) for one in several]
    for host, one in dict.fromkeys(found):
        if host != hosts[0] or one not in unusable[0]:
            yield dataclasses.replace(one, name=f"{one.name} on {host}")


def _different_versions(machines: list[dict[str, Any]]) -> Iterator[DoctorFinding]:
    first = machines[0]
    for entry in machines:
        for name, version in entry["versions"].items():
            if version != first["versions"][name]:
                value = f"{version} on {entry['host']}, {first['versions'][name]} on the first"
                yield DoctorFinding(name, value, Level.BAD, "install the same everywhere")


def _folder_finding(folder: Path, seen: list[FolderVisibility]) -> DoctorFinding:
    name = f"shared folder {folder}"
    for rank, one in enumerate(seen):
        if one.error is not None:
            remedy = "give --save and --edit-log-dir a folder that all machines mount"
            return DoctorFinding(name, f"rank {rank}: {one.error}", Level.BAD, remedy)
    slowest = max(one.delay_seconds for one in seen)
    return DoctorFinding(name, f"seen by all ranks ({len(seen)}) within {slowest * 1e3:.0f} ms")


# ---- Latency, bandwidth and clock offsets between replicas, and suggestions for a training
#
# They are measured over groups like those of a sync. Times are of complete exchanges, latency
# included, with payloads that take a good part of a second, as in a sync.


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


def _rate(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
