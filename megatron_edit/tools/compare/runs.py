"""Carrying out a plan: stored results are reused, all other runs are trained."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.observe.records import RUN
from megatron_edit.tools.compare.entries import IDEAL
from megatron_edit.tools.compare.flags import (
    INSTANCES_FLAG,
    canonical,
    int_flag,
    model_parallel_ranks,
    size_of,
)
from megatron_edit.tools.compare.follow import (
    Limits,
    RunFailedError,
    environment_of_ranks,
    follow,
    torchrun_line,
)
from megatron_edit.tools.compare.plan import EVENTS, RunPlan, is_finished, store_finished
from megatron_edit.tools.compare.readings import Reading, RunKind, read_run
from megatron_edit.tools.compare.traffic import ElementBytes, Layout

CONSOLE, RESULT = "console.log", "result.json"

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
