"""Carrying out a plan: stored results are reused, all other runs are trained.

The log of each is followed with a progress bar; one that takes too long is aborted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from megatron_edit.errors import EditError
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.observe.line_files import stat_or_none
from megatron_edit.observe.records import RUN
from megatron_edit.tools.compare.entries import IDEAL
from megatron_edit.tools.compare.flags import (
    INSTANCES_FLAG,
    canonical,
    int_flag,
    model_parallel_ranks,
    size_of,
)
from megatron_edit.tools.compare.plan import EVENTS, RunPlan, is_finished, store_finished
from megatron_edit.tools.compare.readings import Reading, RunKind, RunLog, read_run
from megatron_edit.tools.compare.traffic import ElementBytes, Layout

CONSOLE, RESULT = "console.log", "result.json"
NUM_TAIL_LINES = 40
POLL_SECONDS = 0.2
STOP_SECONDS = 45  # torchrun gives its ranks 30 seconds to end
# Begins torchrun's report on a failed rank, which hides the output of the rank itself.
LAUNCHER_REPORT = "failed (exitcode: "

Seed = int | None


@dataclass(frozen=True)
class ComparisonResult:
    """The results of a comparison."""

    plan: Sequence[RunPlan]  # all runs
    readings: Mapping[RunPlan, Reading]
    failures: Mapping[RunPlan, str]  # messages of failed runs

    def of_label(self, label: str) -> dict[Seed, Reading]:
        """Return the readings of an entry's finished runs, by seed."""
        return {run.seed: r for run, r in self.readings.items() if run.entry.label == label}

    @property
    def labels(self) -> list[str]:
        """Labels of all entries, in their order."""
        return list(dict.fromkeys(run.entry.label for run in self.plan))

    @property
    def compared(self) -> list[str]:
        """Labels of the entries whose losses are compared."""
        return [label for label in self.labels if label != IDEAL]


def folder_of(run: RunPlan, output_dir: Path) -> Path:
    """Return the folder of a run's files."""
    return output_dir / "runs" / run.folder_name


def has_finished(run: RunPlan, output_dir: Path) -> bool:
    """Return whether a run need not be trained: it is finished, and its files are there."""
    folder = folder_of(run, output_dir)
    needed = [folder / CONSOLE]
    if run.entry.strategy is not None:
        needed.append(folder / EVENTS / RUN)
    is_there = all(path.is_file() for path in needed)
    return is_there and is_finished(folder / RESULT, run.configuration)


def reading_of(run: RunPlan, output_dir: Path) -> Reading:
    """Return the reading of a run that has been trained."""
    folder = folder_of(run, output_dir)
    return read_run(run.entry.label, folder / CONSOLE, folder / EVENTS, kind_of(run))


def carry_out(
    plan: Sequence[RunPlan], output_dir: Path, limits: Limits, say: Callable[[str], None]
) -> ComparisonResult:
    """Train every run that is not finished. A failed run does not end the others.

    Args:
        plan: all runs.
        output_dir: holds a folder for each run.
        limits: when a run is aborted.
        say: prints progress lines.
    """
    readings: dict[RunPlan, Reading] = {}
    failures: dict[RunPlan, str] = {}
    for number, run in enumerate(plan, start=1):
        place = f"{run.name} ({number} of {len(plan)})"
        if has_finished(run, output_dir):
            say(f"{place}: finished before")
            readings[run] = reading_of(run, output_dir)
            continue
        try:
            readings[run] = train(place, run, output_dir, limits)
        except RunFailedError as error:
            failures[run] = error.reason
            say("".join(["\n", *error.tail]).rstrip() + f"\n{error}\n")
    return ComparisonResult(plan, readings, failures)


def train(name: str, run: RunPlan, output_dir: Path, limits: Limits) -> Reading:
    """Train one run and store its result.

    Raises:
        RunFailedError: it failed or took too long.
    """
    folder = folder_of(run, output_dir)
    shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
    folder.mkdir(parents=True)
    setting, console = run.setting, folder / CONSOLE
    launcher = setting.launcher or torchrun_line(setting.num_ranks)
    follow(
        name,
        [*launcher, "-m", "megatron_edit", *run.script_words(folder)],
        log_path=console,
        environment=environment_of_ranks(0 if setting.launcher else setting.num_ranks),
        limits=limits,
        events=folder / EVENTS,
    )
    reading = reading_of(run, output_dir)
    if not reading.iterations:
        raise RunFailedError(name, "ended without a single iteration", 1, console)
    store_finished(folder / RESULT, run.configuration)
    return reading


def kind_of(run: RunPlan) -> RunKind:
    """Return the properties of a run that its reading depends on."""
    words, place, strategy = run.words, run.placement, run.entry.strategy
    return RunKind(
        layout=Layout(
            place.num_replicas,
            place.ranks_per_replica,
            0,
            model_parallel_ranks=model_parallel_ranks(words),
            num_instances=size_of(words, INSTANCES_FLAG),
        ),
        seq_length=int_flag(words, "--seq-length"),
        warmup_steps=run.setting.warmup_steps,
        is_stock=strategy is None,
        is_ideal=run.entry.name == IDEAL,
        is_timed=strategy is not None and STRATEGIES[strategy].is_timed,
        is_synchronous=run.entry.is_synchronous,
        element=ElementBytes.of_flags(canonical(words).__contains__),
    )


# ---- One training


class RunFailedError(EditError):
    """A training ended with an exit code other than 0, or was aborted.

    Args:
        name: of the training.
        reason: of the failure.
        exit_code: for the present process.
        log_path: of its output.

    Attributes:
        reason: of the failure, with the path of the output.
        tail: the last lines of the output, with line ends.
    """

    def __init__(self, name: str, reason: str, exit_code: int, log_path: Path) -> None:
        self.exit_code = exit_code
        self.reason = f"{reason}; all of its output: {log_path}"
        self.tail = tail(log_path)
        super().__init__(f"{name} {self.reason}")


@dataclass(frozen=True)
class Limits:
    """Limits after which a training is aborted.

    Attributes:
        seconds: of run time; None for no limit.
        silent_seconds: without output; None for no limit.
        silent_factor: a silence may also be this many times as long as the longest one before it:
            lines come every few steps, and slow steps take long. 0: it may not.
    """

    seconds: float | None = None
    silent_seconds: float | None = None
    silent_factor: float = 0.0

    def exceeded(self, *, running: float, silent: float, longest: float = 0.0) -> str:
        """Return which limit is exceeded, as text; empty if none.

        Args:
            running: seconds since the start.
            silent: seconds since the last line.
            longest: longest silence before, seconds.
        """
        if self.seconds is not None and running > self.seconds:
            return f"was not done after {self.seconds:g} s"
        if self.silent_seconds is not None:
            limit = max(self.silent_seconds, self.silent_factor * longest)
            if silent > limit:
                return f"has printed nothing for {limit:g} s"
        return ""


def follow(
    name: str,
    command: Sequence[str],
    *,
    log_path: Path,
    environment: Mapping[str, str],
    cwd: Path | None = None,
    limits: Limits | None = None,
    events: Path | None = None,
) -> RunLog:
    """Run `command` to its end; its output goes to `log_path` and into the returned log.

    Args:
        name: of the training.
        command: of the training, in the foreground.
        log_path: for all output.
        environment: of the command.
        cwd: working directory; None for the present one.
        limits: after which it is aborted; None for no limits.
        events: folder whose files grow with every step, as a sign that it is not silent; None
            where there are none. It need not exist.

    Raises:
        RunFailedError: the command failed or took too long.
    """
    with log_path.open("wb") as sink:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,  # Ctrl-C reaches this process only, which ends the ranks
        )
    try:
        log, reason = _watch(name, process, log_path, limits or Limits(), events)
    finally:
        _stop(process)
    if reason:
        raise RunFailedError(name, reason, 1, log_path)
    if code := process.returncode:
        ours = code if code > 0 else 128 - code  # a signal, as shells do
        raise RunFailedError(name, f"ended with exit code {code}", ours, log_path)
    return log


def _watch(
    name: str, process: subprocess.Popen[bytes], log_path: Path, limits: Limits, events: Path | None
) -> tuple[RunLog, str]:
    """Read the log until the process ends or a limit is exceeded."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    log, rest = RunLog(), b""
    began = heard = time.monotonic()
    longest, written = 0.0, 0
    # In a file, each refresh is a line: fewer are enough.
    pause = 0.5 if sys.stderr.isatty() else 20.0
    with tqdm(desc=name, mininterval=pause, maxinterval=60) as bar, log_path.open("rb") as source:
        while True:
            is_over = process.poll() is not None  # before the read, to get all of its output
            *found, rest = (rest + source.read()).split(b"\n")
            for line in found:
                log.feed(line.decode("utf-8", errors="replace"))
            now = time.monotonic()
            if found or _bytes_in(events) > written:
                longest, heard, written = max(longest, now - heard), now, _bytes_in(events)
            bar.total = log.num_iterations or None
            bar.set_postfix_str(f"loss {log.last_loss:.3f}", refresh=False)
            bar.update(log.last_iteration - bar.n)
            if is_over:
                return log, ""
            if reason := limits.exceeded(running=now - began, silent=now - heard, longest=longest):
                return log, reason
            time.sleep(POLL_SECONDS)


def _bytes_in(folder: Path | None) -> int:
    """Return the size of all files of a folder; 0 where there is none."""
    if folder is None or not folder.is_dir():
        return 0
    found = (stat_or_none(path) for path in folder.iterdir())
    return sum(each.st_size for each in found if each is not None)


def tail(log_path: Path) -> list[str]:
    """Return the last lines of a log, without the launcher's report; empty without a log."""
    if not log_path.exists():
        return []
    with log_path.open(encoding="utf-8", errors="replace") as source:
        own = takewhile(lambda line: LAUNCHER_REPORT not in line, source)
        return list(deque(own, maxlen=NUM_TAIL_LINES))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a training; the launcher then ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def torchrun_line(num_ranks: int) -> list[str]:
    """Return the command that starts `num_ranks` ranks with this environment's torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(num_ranks)]


def environment_of_ranks(num_ranks: int) -> dict[str, str]:
    """Return the present environment; all ranks on the CPU if there are too few GPUs."""
    import torch

    environment = dict(os.environ, PYTHONUNBUFFERED="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    environment.setdefault("OMP_NUM_THREADS", "1")
    if 0 < torch.cuda.device_count() < num_ranks:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
