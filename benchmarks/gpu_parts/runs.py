"""Run a case to the end of training, and read its output.

The engine marks its work with `record_function("edit/...")`. A launch belongs to the innermost open
mark of its thread; an event on the device belongs to its launch. Without a device, operators that
no other operator called count as launches.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.launch import Forks, Rank, RunFailedError, free_ports
from frame.readings import RunLog, edit_losses, inner_steps, read_json_lines, read_syncs

from .cases import ELASTIC, KILL, SHARED, STOP, TRACED, Case
from .pretrain_measured import FAULT, FAULT_FILE, MEMORY, STEPS, TRACE

SCRIPT = Path(__file__).with_name("pretrain_measured.py")
CALLS = (sys.executable, "-m", "gpu_parts.group_calls")
LOST = 4  # exit code where a replica is lost
MIN_COMMITS = 2  # of an elastic run
FIRST_PORT, FIRST_RENDEZVOUS = 28000, 28500
POLL_SECONDS = 0.25
_BACKEND = re.compile(r"exchanges over (\w+) \(")

PREFIX = "edit/"
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
TRANSFERS = ("nccl", "dtoh", "htod")  # in the names of events that transfer data between ranks


@dataclass(frozen=True)
class MarkReading:
    """The work under a mark, without that of marks nested in it.

    Attributes:
        mark: name of the mark.
        count: number of marks of this name.
        host_ms: total time of all marks of this name.
        launches: of kernels, copies and fills; of operators, without a device.
        device_ms: sum over kernels, copies and fills, transfers left out; None without a device.
        transfer_ms: of collectives, including waiting for other ranks, and of copies between device
            and host for gloo.
    """

    mark: str
    count: int
    host_ms: float
    launches: int
    device_ms: float | None
    transfer_ms: float | None


@dataclass(frozen=True)
class _Span:
    """An interval on a thread, in microseconds."""

    begin: float
    end: float
    name: str

    @classmethod
    def of(cls, event: dict[str, Any]) -> _Span:
        return cls(event["ts"], event["ts"] + event["dur"], event["name"])


def read_trace(path: Path) -> list[MarkReading]:
    """Read a trace of torch's profiler; returns the marks by name, none without marks."""
    with gzip.open(path, "rt", encoding="utf-8") as source:
        return read_marks(json.load(source)["traceEvents"])


def read_marks(events: Iterable[dict[str, Any]]) -> list[MarkReading]:
    """Return the marks of the events of a trace, by name."""
    complete = [event for event in events if event.get("ph") == "X"]
    marks: dict[Any, list[_Span]] = defaultdict(list)
    for event in complete:
        # "gpu_user_annotation" is the same mark on the device.
        if event["name"].startswith(PREFIX) and event.get("cat") == "user_annotation":
            marks[event["tid"]].append(_Span.of(event))
    on_device = _by_correlation(event for event in complete if event.get("cat") in ON_DEVICE)
    launches = [event for event in complete if _correlation(event) in on_device
                and event.get("cat") in LAUNCHES]  # fmt: skip
    if not on_device:
        launches = _outermost([event for event in complete if event.get("cat") == "cpu_op"])
    found: dict[str, list[dict[str, Any]]] = {
        span.name: [] for spans in marks.values() for span in spans
    }
    for tid, spans in marks.items():
        ordered = sorted(spans, key=lambda span: span.begin)
        for event in launches:
            if event["tid"] == tid and (span := _innermost(ordered, event["ts"])) is not None:
                found[span.name].append(event)
    all_spans = [span for spans in marks.values() for span in spans]
    return [_reading(name, all_spans, found[name], on_device) for name in sorted(found)]


def _reading(
    name: str,
    spans: Sequence[_Span],
    launches: Sequence[dict[str, Any]],
    on_device: dict[int, list[dict[str, Any]]],
) -> MarkReading:
    own = [span for span in spans if span.name == name]
    kernels = [each for event in launches for each in on_device.get(_correlation(event), [])]
    transfers = [
        each for each in kernels if any(name in each["name"].lower() for name in TRANSFERS)
    ]
    total, wire = (sum(each["dur"] for each in some) / 1e3 for some in (kernels, transfers))
    return MarkReading(
        mark=name,
        count=len(own),
        host_ms=sum(span.end - span.begin for span in own) / 1e3,
        launches=len(launches),
        device_ms=total - wire if on_device else None,
        transfer_ms=wire if on_device else None,
    )


def _correlation(event: dict[str, Any]) -> int:
    """Return the id shared by a launch and its device events; -1 without one."""
    return int(event.get("args", {}).get("correlation", -1))


def _by_correlation(events: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        found[_correlation(event)].append(event)
    found.pop(-1, None)
    return found


def _innermost(ordered: Sequence[_Span], moment: float) -> _Span | None:
    """Return the open span that began last; `ordered` is sorted by begin."""
    last = bisect_right(ordered, moment, key=lambda span: span.begin)
    return next((span for span in reversed(ordered[:last]) if span.end > moment), None)


def _outermost(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the operators that no other operator of their thread called."""
    found, until = list[dict[str, Any]](), dict[Any, float]()
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= until.get(event["tid"], float("-inf")):
            until[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found


@dataclass(frozen=True)
class Reading:
    """The measurements of a case.

    Attributes:
        case: name of the case.
        losses: nats per token, mean over the replicas, by iteration or, under A-EDiT, by round.
        iterations: of the losses.
        digests: of the parameters after each sync, a list for each replica.
        step_ms: length of every step, of replica 0.
        sync_steps: steps after which the syncs began.
        exposed_ms: exposed time of every sync, as EDiT records it.
        backend: between the replicas; None for stock Megatron.
        peak_bytes: peak device memory of the first rank; None on the CPU.
        num_parameters: of a replica.
        marks: of the first rank's trace.
        seconds: of the run, start included.
    """

    case: str
    losses: list[float]
    iterations: list[int]
    digests: list[list[str]]
    step_ms: list[float]
    sync_steps: list[int]
    exposed_ms: list[float]
    backend: str | None
    peak_bytes: int | None
    num_parameters: int
    marks: list[MarkReading]
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case that is no training to its end.

    Attributes:
        case: name of the case.
        complaints: a line for each failed check.
        numbers: what was measured, by name.
        seconds: of the run, start included.
    """

    case: str
    complaints: list[str]
    numbers: dict[str, float]
    seconds: float


class Bench:
    """Runs cases; several threads may do so at once.

    Args:
        device: `cuda` or `cpu`.
        count: devices; replicas share a single device, each in a launch of its own.
        time_limit: most seconds of a case.
        output: traces and the logs of failed ranks are written next to this file.
    """

    def __init__(self, device: str, count: int, time_limit: float, output: Path) -> None:
        self._device, self._count, self._output = device, count, output
        # Megatron would compile small functions in each rank, which takes longer than training.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        self._forks = Forks(FIRST_PORT, time_limit, gpus=device == "cuda")
        self._port, self._choice = FIRST_RENDEZVOUS, threading.Lock()

    @property
    def are_forked(self) -> bool:
        """Whether ranks are forked from a process that has imported the slow modules."""
        return self._forks.are_forked

    def measure(self, case: Case, limit: float) -> Reading | Outcome:
        """Run a case once.

        Args:
            case: to run.
            limit: seconds until it is stopped.

        Raises:
            RunFailedError: it failed, took too long, or its output is incomplete.
        """
        began = time.monotonic()
        if not case.is_training:
            complaints, numbers = self._call_group(limit)
            return Outcome(case.name, complaints, numbers, time.monotonic() - began)
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
            folder = Path(name)
            try:
                for words in _launches(case, folder):
                    codes = self._train(case, folder, words, limit - (time.monotonic() - began))
                seconds = time.monotonic() - began
                if case.special == KILL:
                    return Outcome(case.name, *_after_kill(folder, codes), seconds)
                if case.special == ELASTIC:
                    return Outcome(case.name, *_after_hub(folder), seconds)
                if case.is_traced:
                    shutil.copy(trace_file(folder), self._beside(f"{case.name}.trace.json.gz"))
                return read(case, folder, seconds)
            except RunFailedError:
                self._keep_logs(case, folder)
                raise
            except (OSError, EOFError, ValueError, KeyError) as error:
                self._keep_logs(case, folder)
                raise RunFailedError(f"its output is incomplete: {error!r}") from error

    def _train(self, case: Case, folder: Path, words: Sequence[str], limit: float) -> Sequence[int]:
        """Run a launch to its end; returns the exit codes of its ranks."""
        apart = case.is_apart or (self._count == 1 and not case.shares_device)
        with self._hub(case, folder) as hub:
            ranks = self._ranks(case, folder, words, hub, apart=apart)
            one_machine = not case.shares_device  # else each rank would take a GPU of its own
            with self._forks.training(
                case.name, folder, ranks, apart=apart, one_machine=one_machine
            ) as training:
                return training.to_end(
                    lambda: None, limit=limit, poll=POLL_SECONDS, may_fail=case.special == KILL
                )

    @contextmanager
    def _hub(self, case: Case, folder: Path) -> Iterator[str]:
        """Run the hub of an elastic case inside the `with` block; yields its address."""
        if case.special != ELASTIC:
            yield ""
            return
        address = f"127.0.0.1:{self._free_port()}"
        argv = [sys.executable, "-m", "megatron_edit", "hub", "--listen", address,
                "--state-dir", str(folder / "hub")]  # fmt: skip
        with (folder / "console-hub.log").open("w") as log:
            hub = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield address
        finally:
            hub.kill()
            hub.wait()

    def _call_group(self, limit: float) -> tuple[list[str], dict[str, float]]:
        """Make all calls of `Group` in a process; returns complaints and microseconds."""
        argv = [*CALLS, self._device]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"not done after {limit:.0f} s") from None
        if done.returncode:
            raise RunFailedError(f"exit code {done.returncode}; {done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        return found["complaints"], found["microseconds"]

    def _free_port(self) -> int:
        with self._choice:
            (self._port,) = (port,) = free_ports(self._port, 1)
        return port

    def _beside(self, name: str) -> Path:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        return self._output.with_name(f"{self._output.stem}.{name}")

    def _keep_logs(self, case: Case, folder: Path) -> None:
        for path in [*folder.glob("console*.log"), *folder.glob("replica-*.log")]:
            shutil.copy(path, self._beside(f"{case.name}.{path.name}"))

    def _ranks(
        self, case: Case, folder: Path, more: Sequence[str], hub: str, *, apart: bool
    ) -> list[Rank]:
        words = [*case.flags(self._device, str(folder)), *more]
        numbers = range(case.num_ranks)
        own: list[list[str]] = [[] for _ in numbers]
        if hub:
            own = [["--edit-hub", hub, "--edit-replica-name", f"r{rank}"] for rank in numbers]
        elif apart and not case.is_stock:  # each rank is a replica
            words += ["--edit-rendezvous", f"127.0.0.1:{self._free_port()}"]
            own = [["--edit-replica-id", str(rank)] for rank in numbers]
        return [Rank([*words, *one], self._environment(case, folder, rank, apart=apart), SCRIPT)
                for rank, one in enumerate(own)]  # fmt: skip

    def _environment(
        self, case: Case, folder: Path, rank: int, *, apart: bool
    ) -> Mapping[str, str]:
        found = {
            MEMORY: str(folder / f"memory{rank}.json"),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        } | dict(each.split("=", 1) for each in case.environment)
        if case.shares_device:
            found |= SHARED
        if apart and self._device == "cuda" and self._count > 1:  # a launch takes its first GPU
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(rank + 1)))
            found |= {"CUDA_VISIBLE_DEVICES": visible.split(",")[rank]}
        if case.is_traced and rank == 0:
            found |= {TRACE: str(trace_file(folder)), STEPS: ",".join(map(str, TRACED))}
        if case.special in (STOP, KILL) and rank == case.num_ranks - 1:
            found |= {FAULT: case.special, FAULT_FILE: str(folder / "fault")}
        return found


def _after_kill(folder: Path, codes: Sequence[int]) -> tuple[list[str], dict[str, float]]:
    """Check the exit codes where the last rank was killed; returns complaints and numbers."""
    if not (folder / "fault").exists():
        raise ValueError("the last rank was not killed")
    seconds = time.time() - float((folder / "fault").read_text())
    complaints = [f"rank {rank} exited with {code}, not {LOST}"
                  for rank, code in enumerate(codes[:-1]) if code != LOST]  # fmt: skip
    return complaints, {"seconds until all ranks ended": seconds}


def _after_hub(folder: Path) -> tuple[list[str], dict[str, float]]:
    """Check the journal of an elastic run; returns complaints and numbers."""
    lines = read_json_lines(folder / "hub" / "journal.jsonl")
    commits = sum(line["event"] == "commit" for line in lines)
    few = [f"{commits} commits, fewer than {MIN_COMMITS}"] if commits < MIN_COMMITS else []
    return few, {"commits": float(commits)}


def _launches(case: Case, folder: Path) -> list[list[str]]:
    """Return the further flags of each launch: one, or two of which the second resumes."""
    if not case.resumes_at:
        return [[]]
    checkpoints, step = str(folder / "checkpoints"), str(case.resumes_at)
    save = ["--save", checkpoints, "--save-interval", step]
    return [[*save, "--exit-interval", step], [*save, "--load", checkpoints]]


def trace_file(folder: Path) -> Path:
    """Return the path of the first rank's trace."""
    return folder / "trace.json.gz"


def read(case: Case, folder: Path, seconds: float) -> Reading:
    """Read the measurements of a case from its folder.

    Raises:
        OSError, ValueError, KeyError: the output is incomplete.
    """
    consoles = sorted(folder.glob("console*.log"))
    lines = [line for path in consoles for line in path.read_text(errors="replace").splitlines()]
    log = RunLog.of(lines)
    losses = log.losses() if case.is_stock else edit_losses(folder, log)
    syncs = read_syncs(folder)
    steps = step_ms(case, folder, log)
    if not losses or len(steps) < case.least_steps or not log.num_parameters:
        found = f"{len(losses)} losses, {len(steps)} steps, {log.num_parameters} parameters"
        raise ValueError(f"too few values: {found}")
    return Reading(
        case=case.name,
        losses=list(losses.values()),
        iterations=list(losses),
        digests=[digests(folder, replica) for replica in range(case.num_replicas)],
        step_ms=steps,
        sync_steps=[line["iteration"] for line in syncs],
        exposed_ms=[1e3 * line["seconds"]["exposed"] for line in syncs],
        backend=backend(lines),
        peak_bytes=json.loads((folder / "memory0.json").read_text()),
        num_parameters=log.num_parameters,
        marks=read_trace(trace_file(folder)) if case.is_traced else [],
        seconds=seconds,
    )


def digests(folder: Path, replica: int) -> list[str]:
    """Return the digests of a replica's parameters after every sync."""
    lines = read_json_lines(folder / f"replica-{replica}.jsonl")
    return [line["digest"] for line in lines if "digest" in line]


def step_ms(case: Case, folder: Path, log: RunLog) -> list[float]:
    """Return the milliseconds of every step of replica 0."""
    if case.is_stock:
        return list(log.milliseconds().values())
    return [1e3 * seconds for seconds in inner_steps(folder)]


def backend(lines: Sequence[str]) -> str | None:
    """Return the backend between the replicas, from the console of the first replica."""
    found = (_BACKEND.search(line) for line in lines)
    return next((match[1] for match in found if match), None)
