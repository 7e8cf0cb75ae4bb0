"""The results of a training, from Megatron's console output and EDiT's event files."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron_edit.constants import FP32, SYNC_TIMES
from megatron_edit.observe.line_files import read_json_lines
from megatron_edit.observe.records import LOSSES, RUN, SYNCS, VALIDATION, Array, LossRecord
from megatron_edit.tools.compare.traffic import (
    BF16,
    ElementBytes,
    Layout,
    baseline_bytes,
    warmup_bytes,
)
from megatron_edit.tools.pages.charts import Curve, RunCurves

_ITERATION = re.compile(r"(?<!at )\biteration\s+(\d+)/\s*(\d+)\s*\|(.*)")
_EVALUATED = re.compile(
    r"validation\S* loss at iteration\s+(\d+)([^|]*)\|\s*lm loss value:\s*(\S+)"
)
_PARAMETERS = re.compile(r"number of parameters on .*model parallel rank \(([\d, ]+)\):\s*(\d+)")

# Excluded from speeds: the first iterations allocate memory and import modules.
NUM_EXCLUDED_ITERATIONS = 5


@dataclass(frozen=True)
class RunKind:
    """Properties of a training that its reading depends on."""

    layout: Layout  # N and K; the number of parameters is taken from the log
    seq_length: int  # tokens of a sample
    warmup_steps: int  # steps excluded from speed and bytes, where `run.json` does not give them
    is_stock: bool = False  # Megatron without the plugin
    is_ideal: bool = False  # replicas never sync; their exchange at the end does not count
    is_timed: bool = False  # replicas make different numbers of steps
    is_synchronous: bool = False  # gradients are exchanged at every step, to the end
    element: ElementBytes = BF16  # bytes of a parameter that a synchronous step exchanges


@dataclass(frozen=True, eq=False)
class Timeline:
    """Progress of a training by iteration: three arrays of equal length, all increasing."""

    iterations: Array  # of replica 0, as in Megatron's log; the first entry is the start
    seconds: Array  # spent in training, without start-up and evaluations
    tokens: Array  # consumed by all replicas together

    @classmethod
    def of(
        cls, log: RunLog, seq_length: int, meetings: Mapping[int, int] | None = None
    ) -> Timeline:
        """Compute it from a console log.

        Args:
            log: of the training.
            seq_length: tokens of a sample.
            meetings: samples consumed by all replicas together at some iterations of replica 0;
                needed where replicas make different numbers of steps, as Megatron's own count
                is then right at these iterations only.
        """
        times = log.milliseconds()
        logged = list(times)
        if not logged:
            return cls(*np.zeros((3, 1)))
        # A line covers the iterations since the previous one; the first one covers as many.
        start = max(0, logged[0] - (logged[1] - logged[0] if len(logged) > 1 else logged[0]))
        iterations = np.array([start, *logged], dtype=np.float64)
        lengths = np.array(list(times.values())) * np.diff(iterations) / 1e3
        batch = log.batch_size
        samples = np.array([start * batch, *(log.samples.get(i, i * batch) for i in logged)])
        if meetings:
            before = (iterations == start) | (iterations < min(meetings))
            known = dict(zip(iterations[before], samples[before], strict=True)) | dict(meetings)
            places = sorted(known)
            samples = np.interp(iterations, places, [known[place] for place in places])
        return cls(iterations, np.append(0.0, np.cumsum(lengths)), samples * float(seq_length))

    def tokens_at(self, iterations: Array) -> Array:
        """Return the tokens consumed up to the end of iterations."""
        return np.interp(iterations, self.iterations, self.tokens)

    def speed(self, first: float, last: float) -> float | None:
        """Return tokens per second of iterations first + 1 .. last; None without log lines."""
        kept = (self.iterations >= first) & (self.iterations <= last)
        seconds, tokens = (float(np.ptp(each[kept])) if kept.any() else 0.0
                           for each in (self.seconds, self.tokens))  # fmt: skip
        return tokens / seconds if seconds > 0 else None


@dataclass(frozen=True, eq=False)
class Reading:
    """The numbers of one training. Bytes are payload sent by one replica."""

    num_parameters: int
    iterations: int
    curves: RunCurves
    bytes_per_step: float  # after the warm-up, mean
    peak_bytes_per_second: float | None  # after the warm-up; see `_peak`
    state_bytes: int | None  # of the outer state of one replica; None where not known
    versions: Mapping[str, str]  # of the software; empty for stock Megatron


def read_run(name: str, console: Path, events: Path, kind: RunKind) -> Reading:
    """Read a finished training.

    Args:
        name: of the training.
        console: output of its launcher.
        events: folder of EDiT's event files; it need not exist.
        kind: properties of the run.
    """
    with console.open(encoding="utf-8", errors="replace") as lines:
        log = RunLog.of(lines)
    return make_reading(
        name, log, edit_losses(events, log), read_json_lines(events / SYNCS),
        _run_record(events), kind, edit_validation(events, log),
    )  # fmt: skip


def make_reading(
    name: str,
    log: RunLog,
    losses: Mapping[int, float],
    syncs: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    kind: RunKind,
    evaluations: Mapping[int, float] | None = None,
) -> Reading:
    """Compute the numbers of one training.

    Args:
        name: of the training.
        log: its console log.
        losses: of training, by iteration.
        syncs: lines of `sync.jsonl`.
        run: `run.json`; empty for stock Megatron.
        kind: properties of the run.
        evaluations: validation losses, by iteration; None takes those of the console.
    """
    meetings = {int(s["iteration"]): sum(s["samples"]) for s in syncs} if kind.is_timed else None
    timeline = Timeline.of(log, kind.seq_length, meetings)
    warmup = _warmup(run, kind)
    counted = [] if kind.is_ideal else [s for s in syncs if s["iteration"] > warmup]
    # Without earlier syncs, the exchange at the end of the training is excluded from the speed.
    last = min((s["iteration"] - 1 for s in syncs), default=log.last_iteration) \
        if kind.is_ideal else log.last_iteration  # fmt: skip
    speed = _speed(timeline, warmup, last)
    step_bytes = _step_bytes(run, kind, log.num_parameters)
    # After a resume, the event files contain only the syncs since then.
    steps = max(1, log.last_iteration - max(warmup, int(timeline.iterations[0])))
    exchanges = [(int(s["iteration"]), float(s["wire_bytes"])) for s in counted]
    first = max(_last_local(run, kind, log.last_iteration), warmup, int(timeline.iterations[0]))
    exchanges += [(i, step_bytes) for i in range(first + 1, log.last_iteration + 1)]
    in_rounds = sum(size for _, size in exchanges) / steps
    places, sizes = np.array([*exchanges, (log.last_iteration, 0)], dtype=np.float64).T
    evaluations = log.validation() if evaluations is None else evaluations
    curves = RunCurves(
        name,
        seconds=(timeline.tokens, timeline.seconds),
        training=_by_tokens(losses, timeline),
        validation=_by_tokens(evaluations, timeline),
        sent=(timeline.tokens_at(places), np.cumsum(sizes)),
        final_loss=evaluations[max(evaluations)] if evaluations else None,
        speed=speed,
        local=timeline.tokens_at(np.array([warmup, _last_local(run, kind, log.last_iteration)])),
        exposed=[sum(each["seconds"][name] for each in counted) for name in SYNC_TIMES[:3]],
    )
    return Reading(
        num_parameters=log.num_parameters,
        iterations=log.last_iteration,
        curves=curves,
        bytes_per_step=step_bytes if kind.is_synchronous else in_rounds,
        peak_bytes_per_second=_peak(kind, counted, step_bytes, speed, log),
        state_bytes=_state_bytes(kind, syncs),
        versions={name: str(text) for name, text in run.get("versions", {}).items()},
    )


def _run_record(events: Path) -> dict[str, Any]:
    path = events / RUN
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _warmup(run: Mapping[str, Any], kind: RunKind) -> int:
    """Return the synchronous steps at the beginning; if all are, those excluded from the speed."""
    if kind.is_synchronous or "config" not in run:
        return kind.warmup_steps
    choices = run.get("choices")  # the warm-up may have ended early
    return int(choices[0]["since"] if choices else run["config"]["warmup_steps"])


def _last_local(run: Mapping[str, Any], kind: RunKind, last: int) -> int:
    """Return the last step before the synchronous ones; `last` without such steps at the end."""
    used = [run.get("config", {}), *(choice["settings"] for choice in run.get("choices", []))]
    has_phase = bool(used[-1].get("final_sync_fraction"))
    if kind.is_synchronous:
        return 0
    if kind.is_ideal or not has_phase:
        return last
    return min(last, int(run["training"]["last_local_step"]))


def _speed(timeline: Timeline, warmup: int, last: int) -> float | None:
    """Return the speed after warm-up and first iterations; of all where there are no more."""
    first = max(warmup, timeline.iterations[0] + NUM_EXCLUDED_ITERATIONS)
    speeds = (timeline.speed(start, last) for start in (first, warmup, timeline.iterations[0]))
    return next((speed for speed in speeds if speed is not None), None)


def _step_bytes(run: Mapping[str, Any], kind: RunKind, num_parameters: int) -> float:
    """Return the bytes that one replica sends in a synchronous step."""
    layout = replace(kind.layout, num_parameters=num_parameters)
    if kind.is_stock:
        total = baseline_bytes(layout, num_steps=1, element=kind.element)
    else:
        dtype = run.get("config", {}).get("warmup_dtype", FP32)  # earlier versions had no other
        total = warmup_bytes(layout, num_steps=1, element=kind.element, dtype=dtype)
    return total / layout.num_replicas


def _peak(
    kind: RunKind,
    syncs: Sequence[Mapping[str, Any]],
    step_bytes: float,
    speed: float | None,
    log: RunLog,
) -> float | None:
    """Return the rate of the busiest exchange, in bytes per second of one replica.

    Of a sync: its bytes over the seconds from the meeting of the replicas to the landing of the
    last unit. Of a synchronous step: its bytes over the mean length of such a step.
    """
    if kind.is_synchronous:
        tokens = log.batch_size * kind.seq_length
        return step_bytes * speed / tokens if speed and tokens else None
    spans = ((s["wire_bytes"], s["seconds"]["total"] - s["seconds"]["wait"]) for s in syncs)
    return max((nbytes / seconds for nbytes, seconds in spans if seconds > 0), default=None)


def _state_bytes(kind: RunKind, syncs: Sequence[Mapping[str, Any]]) -> int | None:
    if kind.is_synchronous:
        return 0
    known = [sync["state_bytes"] for sync in syncs if sync.get("state_bytes") is not None]
    return int(median(known)) if known else None


def _by_tokens(losses: Mapping[int, float], timeline: Timeline) -> Curve:
    iterations = np.array(sorted(losses), dtype=np.float64)
    return timeline.tokens_at(iterations), np.array([losses[int(i)] for i in iterations])


# ---- The console output
#
# With EDiT every replica is a separate Megatron world and may print its own lines: several values
# for one iteration are averaged.


@dataclass
class RunLog:
    """Numbers collected from the console lines of one training, as they are printed."""

    last_iteration: int = 0  # highest iteration seen
    num_iterations: int = 0  # of the complete training, as printed by Megatron
    last_loss: float = math.nan  # training loss of the newest line that has one
    batch_size: int = 0  # samples per iteration, of the newest line
    # Consumed since the start of the training, by iteration.
    samples: dict[int, int] = field(default_factory=dict)
    _parameters: dict[str, int] = field(default_factory=dict)
    _losses: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _validation: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _milliseconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, lines: Iterable[str]) -> RunLog:
        """Read the log of a finished training."""
        log = cls()
        for line in lines:
            log.feed(line)
        return log

    def feed(self, line: str) -> None:
        """Parse one line; unknown lines are ignored."""
        if found := _ITERATION.search(line):
            self.num_iterations = int(found[2])
            self._feed_iteration(int(found[1]), _fields(found[3]))
        elif found := _EVALUATED.search(line):
            # At the end of a training Megatron also evaluates "on test set".
            if "test" not in found[2]:
                self._validation[int(found[1])].append(float(found[3]))
        elif found := _PARAMETERS.search(line):
            self._parameters[found[1]] = int(found[2])

    def _feed_iteration(self, iteration: int, values: dict[str, str]) -> None:
        self.last_iteration = max(self.last_iteration, iteration)
        if "elapsed time per iteration (ms)" in values:
            elapsed = float(values["elapsed time per iteration (ms)"])
            self._milliseconds[iteration].append(elapsed)
        if "global batch size" in values:
            self.batch_size = int(values["global batch size"])
        if "consumed samples" in values:
            self.samples[iteration] = int(values["consumed samples"])
        if "lm loss" in values:  # absent in a skipped iteration
            self.last_loss = float(values["lm loss"])
            self._losses[iteration].append(self.last_loss)

    @property
    def num_parameters(self) -> int:
        """Parameters of all model-parallel ranks together; replicated ones count several times."""
        return sum(self._parameters.values())

    def losses(self) -> dict[int, float]:
        """Return the training loss by iteration."""
        return _means(self._losses)

    def validation(self) -> dict[int, float]:
        """Return the validation loss by iteration."""
        return _means(self._validation)

    def milliseconds(self) -> dict[int, float]:
        """Return milliseconds per iteration since the previous line, by the line's iteration."""
        return _means(self._milliseconds)


def _fields(text: str) -> dict[str, str]:
    """Parse the `name: value | name: value |` part of an iteration line."""
    pairs = (part.rpartition(":") for part in text.split("|"))
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _means(values: dict[int, list[float]]) -> dict[int, float]:
    """Return the mean per key, in the order of the keys."""
    return {key: sum(values[key]) / len(values[key]) for key in sorted(values)}


def edit_losses(log_dir: Path, log: RunLog) -> dict[int, float]:
    """Return the training loss of an EDiT run from its event files, else from the console."""
    found = {
        record.iteration: record.loss
        for record in _loss_records(log_dir)
        if record.split is None and not math.isnan(record.loss)
    }
    return found or log.losses()


def edit_validation(log_dir: Path, log: RunLog) -> dict[int, float]:
    """Return the validation loss of an EDiT run from its event files, else from the console."""
    found: dict[int, list[float]] = defaultdict(list)  # several validation sets have equal weight
    for record in _loss_records(log_dir):
        if record.split == VALIDATION and not math.isnan(record.loss):
            found[record.iteration].append(record.loss)
    return _means(found) or log.validation()


def _loss_records(log_dir: Path) -> Iterator[LossRecord]:
    return map(LossRecord.of, read_json_lines(log_dir / LOSSES))
