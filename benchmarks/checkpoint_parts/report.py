"""Analysis and report of benchmarks/checkpoints.py: bytes and times relative to stock Megatron.

The necessary bytes of a checkpoint per parameter: the model parameters (2 in bf16, 4 in fp32) and
the optimizer's fp32 parameters and moments (12); with EDiT also the outer momentum (4), between two
syncs the anchor (4), and with `all` the first two for every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from frame.page import ALL as SPREAD
from frame.page import Column, Spread, draw_bars, picture, table_of, target_line

from megatron_edit.tools.compare.statistics import quotients

from .kinds import (
    ALL,
    ASYNC,
    BF16,
    LEADER,
    MID_ROUND,
    STOCK,
    STOCK_ALL,
    STOCK_ONE,
    SYNC,
    WARMUP_SAVES,
)
from .runs import PARTS, Measurement, Save

MAX_BYTES_RATIO, MAX_STALL_RATIO = 1.6, 1.1
OPTIMIZER_BYTES, OUTER_BYTES = 12, 4
REST = "rest"


@dataclass(frozen=True)
class Weight:
    """Bytes per parameter of one type of checkpoint.

    Attributes:
        parts: medians by part.
        limit: necessary bytes.
        of_stock: bytes over those of stock Megatron in the same precision.
    """

    kind: str
    is_asked_late: bool
    precision: str
    num_replicas: int
    position: str
    parts: dict[str, float]
    total: Spread
    limit: float
    of_stock: Spread | None

    @property
    def name(self) -> str:
        """Name of the type."""
        late = " (asked for in mid-round)" if self.is_asked_late else ""
        return f"{self.kind} {self.position}{late}, {self.precision}, N = {self.num_replicas}"


@dataclass(frozen=True)
class Timing:
    """All timed saves of one type.

    Attributes:
        stall: seconds, of the rank with the longest stall.
        of_one: median stall of a repeat over that of `stock-one` in the same repeat.
        of_one_aside: as `of_one`, both without the landing of the last exchange.
        of_all: as `of_one`, over `stock-all`.
        loop: seconds by which the save lengthened the training loop.
        loop_of_one, loop_of_all: as `of_one` and `of_all`, of `loop`.
        complete: seconds until the checkpoint was complete.
        finalized: additional seconds in the training loop to complete an asynchronous save.
        spans: median seconds of the stall by span.
    """

    kind: str
    is_async: bool
    position: str
    num_saves: int
    stall: Spread
    of_one: Spread | None
    of_one_aside: Spread | None
    of_all: Spread | None
    loop: Spread | None
    loop_of_one: Spread | None
    loop_of_all: Spread | None
    complete: Spread
    complete_of_one: Spread | None
    finalized: Spread
    spans: dict[str, float]

    @property
    def mode(self) -> str:
        """Mode of saving."""
        return ASYNC if self.is_async else SYNC


class TimedSave(NamedTuple):
    """A timed save and its type."""

    kind: str
    is_async: bool
    position: str
    turn: int
    save: Save


@dataclass(frozen=True)
class Verdict:
    """A target with its measured value."""

    text: str
    value: float
    bound: float

    @property
    def passes(self) -> bool:
        """Whether the target is reached."""
        return self.value <= self.bound


def limit_bytes(kind: str, precision: str, num_replicas: int, position: str) -> float:
    """Return the necessary bytes of a checkpoint per parameter."""
    own = (2 if precision == BF16 else 4) + OPTIMIZER_BYTES
    if kind in STOCK:
        return own
    copies = num_replicas if kind == ALL else 1
    return copies * own + OUTER_BYTES * (2 if position == MID_ROUND else 1)


class Analysis:
    """Compares measurements."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._runs = measurements
        self._timed = [
            TimedSave(run.case.kind, run.case.is_async, save.position, run.turn, save)
            for run in measurements
            if run.turn is not None
            for save in run.saves[WARMUP_SAVES:]
        ]

    def weights(self) -> list[Weight]:
        """Return the bytes of every type of checkpoint, in the order of measurement."""
        groups: dict[tuple[str, bool, str, int, str], list[dict[str, float]]] = {}
        for run in self._runs:
            case = run.case
            for save in run.saves:
                kind = (case.kind, case.is_asked_late, case.precision, case.num_replicas)
                parts = {part: save.num_bytes[part] / run.parameters for part in PARTS}
                groups.setdefault((*kind, save.position), []).append(parts)
        return [self._weight(*key, parts) for key, parts in groups.items()]

    def timings(self) -> list[Timing]:
        """Return the times of every type of save."""
        return [self._timing(*key) for key in dict.fromkeys(each[:3] for each in self._timed)]

    def verdicts(self) -> list[Verdict]:
        """Return the targets of what was measured."""
        found = [
            Verdict(f"bytes, {w.name}, x stock", w.of_stock.max, MAX_BYTES_RATIO)
            for w in self.weights()
            if w.kind == LEADER and w.of_stock is not None
        ]
        for timing in self.timings():
            if timing.kind in STOCK:
                continue
            name = f"{timing.kind} {timing.position}, {timing.mode}"
            for what, other, ratio in (
                ("stall", STOCK_ONE, timing.of_one),
                ("stall", STOCK_ALL, timing.of_all),
                ("loop", STOCK_ONE, timing.loop_of_one),
                ("loop", STOCK_ALL, timing.loop_of_all),
            ):
                if ratio is not None:
                    text = f"{what}, {name}, x {other}"
                    found.append(Verdict(text, ratio.median, MAX_STALL_RATIO))
        return found

    def _weight(
        self,
        kind: str,
        is_asked_late: bool,
        precision: str,
        num_replicas: int,
        position: str,
        each: Sequence[Mapping[str, float]],
    ) -> Weight:
        total = Spread.some([sum(parts.values()) for parts in each])
        stock = [
            sum(save.num_bytes.values()) / run.parameters
            for run in self._runs
            if run.case.kind == STOCK_ONE and run.case.precision == precision
            for save in run.saves
        ]
        base = median(stock) if stock else None
        return Weight(
            kind=kind,
            is_asked_late=is_asked_late,
            precision=precision,
            num_replicas=num_replicas,
            position=position,
            parts={part: median(parts[part] for parts in each) for part in PARTS},
            total=total,
            limit=limit_bytes(kind, precision, num_replicas, position),
            of_stock=total.over(base) if base else None,
        )

    def _timing(self, kind: str, is_async: bool, position: str) -> Timing:
        saves = [each.save for each in self._timed if each[:3] == (kind, is_async, position)]
        spans = [_by_label(save) for save in saves]
        labels = dict.fromkeys(label for each in spans for label in each)
        loops = [save.loop for save in saves if save.loop is not None]

        def ratio(other: str, value: Callable[[Save], float | None]) -> Spread | None:
            if kind == other:
                return None
            own_values = self._by_turn(value, kind, is_async, position)
            return Spread.of(quotients(own_values, self._by_turn(value, other, is_async)))

        return Timing(
            kind=kind,
            is_async=is_async,
            position=position,
            num_saves=len(saves),
            stall=Spread.some([save.stall for save in saves]),
            of_one=ratio(STOCK_ONE, lambda save: save.stall),
            of_one_aside=ratio(STOCK_ONE, lambda save: save.aside),
            of_all=ratio(STOCK_ALL, lambda save: save.stall),
            loop=Spread.of(loops),
            loop_of_one=ratio(STOCK_ONE, lambda save: save.loop),
            loop_of_all=ratio(STOCK_ALL, lambda save: save.loop),
            complete=Spread.some([save.complete for save in saves]),
            complete_of_one=ratio(STOCK_ONE, lambda save: save.complete),
            finalized=Spread.some([save.finalized for save in saves]),
            spans={label: median(each.get(label, 0.0) for each in spans) for label in labels},
        )

    def _by_turn(
        self,
        value: Callable[[Save], float | None],
        kind: str,
        is_async: bool,
        position: str | None = None,
    ) -> dict[int, float]:
        """Return medians of timed saves by repeat; a position of None matches any."""
        found: dict[int, list[float]] = {}
        for each in self._timed:
            is_match = each[:2] == (kind, is_async) and position in (None, each.position)
            if is_match and (number := value(each.save)) is not None:
                found.setdefault(each.turn, []).append(number)
        return {turn: median(numbers) for turn, numbers in found.items()}


def _by_label(save: Save) -> dict[str, float]:
    """Return the seconds of a save by the innermost span name."""
    found: dict[str, float] = {}
    for path, seconds in save.spans.items():
        label = path.rpartition("/")[2]
        label = REST if label in ("", "save") else label
        found[label] = found.get(label, 0.0) + seconds
    return found


def _item(field: str, key: str) -> Callable[[Any], Any]:
    """Return a getter for a key in a mapping field of a row; None where it is missing."""
    return lambda row: getattr(row, field).get(key)


WEIGHTS = (
    Column("bytes per parameter", "kind"),
    Column("precision", "precision"),
    Column("N", lambda row: None if row.kind in STOCK else row.num_replicas),
    Column("saved", lambda row: row.position + (" (asked before)" if row.is_asked_late else "")),
    *(Column(part, _item("parts", part), "{:.2f}") for part in PARTS),
    Column("all", "total", "{:.2f}"),
    Column("limit", "limit", "{:g}"),
    Column("x stock", "of_stock", "{:.3f}"),
)
TIMINGS = (
    Column("save", "kind"),
    Column("mode", "mode"),
    Column("saved", "position"),
    Column("number", "num_saves"),
    Column("stall (s)", "stall", "{:.2f}", of=SPREAD),
    Column("x stock-one", "of_one", "{:.2f}", of=SPREAD),
    Column("landing aside", "of_one_aside", "{:.2f}"),
    Column("x stock-all", "of_all", "{:.2f}", of=SPREAD),
    Column("costs the loop (s)", "loop", "{:.2f}", of=SPREAD),
    Column("x stock-one", "loop_of_one", "{:.2f}", of=SPREAD),
    Column("x stock-all", "loop_of_all", "{:.2f}", of=SPREAD),
    Column("complete (s)", "complete", "{:.2f}", of=("median", "max")),
    Column("x stock-one", "complete_of_one", "{:.2f}"),
    Column("later in the loop (ms)", lambda row: row.finalized if row.is_async else None, "{:.0f}",
           1e3),
)  # fmt: skip
LABELS = (
    "gather parameters", "settle", "previous", "write outer", "copy outer", "hand over outer",
    "state dict", "write", "copy", "hand over", "barrier", "rest",
)  # fmt: skip


def markdown(
    weights: Sequence[Weight], timings: Sequence[Timing], verdicts: Sequence[Verdict]
) -> str:
    """Return tables of bytes, times and median stalls by span, and a line for each target."""
    tables = [table_of(WEIGHTS, weights)]
    if timings:
        labels = [name for name in LABELS if any(name in timing.spans for timing in timings)]
        stalls = (
            Column("stall (ms) of the slowest rank", "kind"), *TIMINGS[1:3],
            *(Column(label, _item("spans", label), "{:.0f}", 1e3)
              for label in labels),
        )  # fmt: skip
        tables += [table_of(TIMINGS, timings), table_of(stalls, timings)]
    if verdicts:
        tables.append("\n".join(target_line(f"{v.text}:", v.value, v.bound) for v in verdicts))
    return "\n\n".join(tables)


def draw(path: Path, weights: Sequence[Weight], timings: Sequence[Timing]) -> None:
    """Write the picture: bytes by part, and stalls."""
    with picture(path, ncols=2, figsize=(13, 5.5)) as (_, (left, right)):
        _draw_weights(left, [w for w in weights if not w.is_asked_late])
        _draw_stalls(right, timings)


def _draw_weights(axes: Any, weights: Sequence[Weight]) -> None:
    weights = sorted(weights, key=lambda w: w.precision != BF16)
    names = [
        f"{w.kind}{'' if w.kind in STOCK else f', N={w.num_replicas}'} {w.precision}"
        + (f"\n{w.position}" if w.position else "")
        for w in weights
    ]
    places = range(len(weights))
    start = [0.0] * len(weights)
    for part in PARTS:
        values = [w.parts[part] for w in weights]
        axes.barh(places, values, left=start, label=part)
        start = [a + b for a, b in zip(start, values, strict=True)]
    for place, (weight, end) in enumerate(zip(weights, start, strict=True)):
        ratio = f" {weight.of_stock.median:.2f} x" if weight.of_stock else ""
        axes.text(end, place, ratio, va="center", fontsize=8)
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(start, default=1.0))
    axes.set_xlabel("bytes per parameter; x stock in the same precision")
    axes.set_title("One checkpoint on the disk")
    axes.legend(fontsize=8)


def _draw_stalls(axes: Any, timings: Sequence[Timing]) -> None:
    sorts = list(dict.fromkeys((t.kind, t.position) for t in timings))
    series = {
        label: {(t.kind, t.position): t.stall for t in timings if t.is_async == is_async}
        for label, is_async in (("synchronous", False), ("--async-save", True))
    }
    draw_bars(axes, sorts, series)
    axes.set_xticks(range(len(sorts)), ["\n".join(sort) for sort in sorts])
    axes.set_ylabel("seconds of the rank that stalls longest")
    axes.set_title("Stall of training in a save: median, least and most")
    if timings:
        axes.legend(fontsize=8)
