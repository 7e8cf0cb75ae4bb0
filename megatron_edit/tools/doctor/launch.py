"""Examination of one launch: its ranks, the links between them, and a shared folder."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.hosts import host_lines, straddling_warnings
from megatron_edit.comm.placement import Placement, place
from megatron_edit.comm.transport import ON_CPU, Transport, stand_alone_group
from megatron_edit.comm.worlds import ReplicaWorld, join
from megatron_edit.command_line import config_from_argv
from megatron_edit.config import EditConfig
from megatron_edit.constants import CPU, CUDA
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.tools.doctor.finding import DoctorFinding, Level
from megatron_edit.tools.doctor.links import (
    AllReduceResult,
    MeasuredLink,
    link_findings,
    measure_all_reduce,
    measure_links,
    sync_findings,
)
from megatron_edit.tools.doctor.machine import machine_facts, unusable_interfaces

PATIENCE_SECONDS = 10.0
POLL_SECONDS = 0.005
_UNUSABLE = "correct the lines about interfaces first: the ranks could not be connected"
_BLOCKED = "start all ranks, and open all ports between the machines (docs/troubleshooting.md)"


@dataclass
class Report:
    """The results, as lines and as numbers.

    Attributes:
        findings: lines.
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
            env: as the launcher set it.

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
        launch: the ranks.
        folder: to be visible to all ranks; None checks none.
        parameters: of the model for which the time of a sync is computed.
        step_seconds: of its inner step.

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
