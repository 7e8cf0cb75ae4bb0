"""Run one training in the hosts of a lab, and read its speed or its losses."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from typing import Any

from frame.gpt import Window
from frame.launch import Hosts, Rank, Training, torchft_ranks
from frame.readings import Console, RunLog, read_console, read_syncs
from netlab import Lab

from megatron_edit.tools.compare.readings import edit_validation

from .kinds import (
    APART,
    EDIT,
    IDEAL,
    OURS,
    TORCHFT,
    TORCHFT_INTERVAL,
    Job,
    chosen_words,
    measured_rounds,
    rounds_of,
)

EVENTS = "events"
POLL_SECONDS = 0.1
SKIPPED_STEPS = 2  # at the start of each run
# Steps that are all alike are measured as long as this, and at least three of them.
LEAST_SECONDS, LEAST_STEPS = 6.0, 3


@dataclass(frozen=True)
class Speed:
    """The speed of a run.

    Attributes:
        rate: of the links, bits per second; None is no limit.
        warmup: median seconds of a step of the warm-up; None without one.
        local: mean seconds of a step of local training; all steps of `stock` and `ideal` are such.
        choice: seconds that choosing the settings adds to the last step of the warm-up.
        chosen: the chosen settings as a text; "" where nothing is chosen.
        expected: share of the ideal that the choice predicts.
        waits: share of the local steps' time that replica 0 waits for others at its syncs; of
            `ideal`: that replicas would wait on average if all made as many steps.
        exchange: share of that time that the syncs of replica 0 add besides; None without syncs.
        record: the `run.json` of EDiT's kinds.
    """

    kind: str
    rate: float | None
    repeat: int
    warmup: float | None
    local: float
    choice: float = 0.0
    chosen: str = ""
    expected: float | None = None
    waits: float | None = None
    exchange: float | None = None
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Curve:
    """The validation loss of a training by iteration.

    Attributes:
        chosen: see `Speed`.
        warmup: W, iterations of the warm-up.
        last_local: the last iteration before the final phase.
    """

    kind: str
    seed: int
    chosen: str
    warmup: int
    last_local: int
    validation: dict[int, float]

    @property
    def final(self) -> float:
        """The loss at the end."""
        return self.validation[max(self.validation)]

    def steps_to(self, target: float) -> float:
        """Return after how many steps a loss is reached, linear between two evaluations."""
        before: tuple[int, float] | None = None
        for step, loss in self.validation.items():
            if loss <= target:
                if before is None:
                    return step
                return before[0] + (before[1] - target) / (before[1] - loss) * (step - before[0])
            before = (step, loss)
        raise ValueError(f"{self.kind}, seed {self.seed}: does not reach {target}")


class Bench:
    """Runs trainings in a lab; methods raise `RunFailedError` if one fails or takes too long."""

    def __init__(self, lab: Lab, args: argparse.Namespace) -> None:
        self._lab, self._hosts, self._args = lab, Hosts(lab), args

    def speed(self, kind: str, rate: float | None, repeat: int) -> Speed:
        """Run a training over limited links until enough of it is measured, and end it."""
        with self._training(kind, 1, is_short=True) as (job, training):
            self._lab.set_rate(rate)
            consoles = [Console(training.log(host)) for host in job.consoles]

            def probe() -> tuple[tuple[int, int], Mapping[str, Any]] | None:
                logs, run = [console.read() for console in consoles], read_run(training)
                span = self._span(training, job, logs[0].milliseconds(), run)
                is_done = span and min(log.last_iteration for log in logs) >= span[1]
                return (span, run) if span and is_done else None

            limit = self._args.time_limit
            (first, last), run = training.until(probe, limit=limit, poll=POLL_SECONDS)
            steps = [console.read().milliseconds() for console in consoles]
            syncs = read_syncs(training.folder / EVENTS, Window(first, last, 1, last))
        choices = run.get("choices", [])
        given = run.get("config", {"warmup_steps": 0})["warmup_steps"]
        num_warmup = choices[0]["since"] if choices else given
        warmup = [steps[0][step] / 1e3 for step in range(SKIPPED_STEPS + 1, num_warmup + 1)]
        window = range(first + 1, last + 1)
        own = [fmean(each[step] / 1e3 for step in window) for each in steps]
        local = harmonic_mean(own)  # the speeds of jobs apart are added
        waits, exchange = _shares(syncs, own[0] * len(window)) if run else (None, None)
        if kind == IDEAL:
            waits = 1 - local / max(own)
        return Speed(
            kind=kind,
            rate=rate,
            repeat=repeat,
            warmup=median(warmup) if warmup else None,
            local=local,
            choice=max(0.0, warmup[-1] - median(warmup)) if choices else 0.0,
            chosen=chosen_words(choices),
            expected=choices[-1]["share"] if choices else None,
            waits=waits,
            exchange=exchange,
            record=run,
        )

    def _span(
        self, training: Training, job: Job, steps: Mapping[int, float], run: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        """Return the local iterations (first, last) to measure, as soon as they are known."""
        least, end = self._args.local_steps, self._args.iterations
        if job.kind not in (TORCHFT, *OURS):
            return enough_steps(steps, least)
        if job.kind == TORCHFT:
            span = measured_rounds(0, TORCHFT_INTERVAL, end, is_in_flight=True, least=least)
        elif not run or (job.kind == EDIT and not run.get("choices")):
            return None
        else:
            span = rounds_of(run, least)
        if span is None:
            raise training.failed("no whole round is left to be measured", 0)
        return span

    def loss(self, kind: str, seed: int, of: Speed | None = None) -> Curve:
        """Train to the end without limited links, with the settings that a speed run chose, if
        one is given."""
        chosen, record = (of.chosen, of.record) if of else ("", {})
        with self._training(kind, seed, record, is_short=False) as (job, training):
            training.to_end(lambda: None, limit=self._args.time_limit, poll=POLL_SECONDS)
            if kind not in OURS:
                log = read_console(*map(training.log, job.consoles))
                return Curve(kind, seed, chosen, 0, self._args.iterations, log.validation())
            run = read_run(training)
            phases = run["config"]["warmup_steps"], run["training"]["last_local_step"]
            validation = edit_validation(training.folder / EVENTS, RunLog())
            return Curve(kind, seed, chosen, *phases, validation)

    @contextmanager
    def _training(
        self, kind: str, seed: int, record: Mapping[str, Any] | None = None, *, is_short: bool
    ) -> Iterator[tuple[Job, Training]]:
        args = self._args
        with tempfile.TemporaryDirectory(prefix="gains-") as name:
            folder, path = Path(name), Path(name) / "chosen.json"
            if record:
                path.write_text(json.dumps(record), encoding="utf-8")
            job = Job(kind, args, seed, str(path) if record else "")
            words = [job.words(host, folder / EVENTS, is_short=is_short)
                     for host in range(args.hosts)]  # fmt: skip
            ranks = [Rank(each) for each in words]
            if job.kind == TORCHFT:
                ranks = torchft_ranks(self._lab, words, args.torchft, TORCHFT_INTERVAL)
            is_apart = job.kind in APART
            with self._hosts.training(job.kind, folder, ranks, apart=is_apart) as training:
                yield job, training


def _shares(syncs: Sequence[Mapping[str, Any]], seconds: float) -> tuple[float, float]:
    """Return the shares of a time in which syncs wait for other replicas, and add time besides."""
    waits = sum(sync["seconds"]["wait"] for sync in syncs)
    exposed = sum(sync["seconds"]["exposed"] for sync in syncs)
    return waits / seconds, (exposed - waits) / seconds


def enough_steps(steps: Mapping[int, float], most: int) -> tuple[int, int] | None:
    """Return the iterations (first, last) that are measured of steps that are all alike.

    Args:
        steps: milliseconds of all steps so far.
        most: number of steps to measure, however short they are.
    """
    seconds = 0.0
    for step in range(SKIPPED_STEPS + 1, len(steps) + 1):
        seconds += steps[step] / 1e3
        number = step - SKIPPED_STEPS
        if number >= most or (seconds >= LEAST_SECONDS and number >= LEAST_STEPS):
            return SKIPPED_STEPS, step
    return None


def read_run(training: Training) -> dict[str, Any]:
    """Return the `run.json` of a training; empty where there is none yet."""
    path = training.folder / EVENTS / "run.json"
    run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return run
