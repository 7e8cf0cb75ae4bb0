"""Checks, cost of syncs, page and picture of benchmarks/gpu_check.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from frame.page import Column, picture, table_of

from .cases import BF16, LARGE, MODELS, TAU, TRACED, WARMUP, Case
from .runs import Reading

MIN_SYNCS = 2  # where rounds are timed
# Minimal memory traffic of a sync in bytes per element, each tensor read and written once: norm 8,
# addend 12, norm of the average 4, outer step and parameters 26.
MIN_BYTES = 50
MARK_FIELDS = ("mark", "count", "launches", "host_ms", "device_ms", "transfer_ms")
NUM_OTHER_UNITS = 2  # units that are not layers: embedding and final norm


@dataclass(frozen=True)
class Analysis:
    """Analysis of all finished cases.

    Attributes:
        cases: by name.
        readings: of the finished cases.
        reference: losses of the cases on the CPU, by name: iterations and values.
        copy_rate: bytes per second that the device reads and writes in a copy.
    """

    cases: Mapping[str, Case]
    readings: Sequence[Reading]
    reference: Mapping[str, Sequence[Sequence[float]]]
    copy_rate: float

    def complaints(self) -> list[str]:
        """Return a line for each failed check."""
        return [
            f"{reading.case}: {line}"
            for reading in self.readings
            for line in self._complaints_of(reading)
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each case."""
        return [self._row(reading) for reading in self.readings]

    def losses(self) -> dict[str, list[list[float]]]:
        """Return iterations and losses by case."""
        return {
            reading.case: [[float(i) for i in reading.iterations], reading.losses]
            for reading in self.readings
        }

    def times(self) -> dict[str, list[list[float]]]:
        """Return by large case the milliseconds of every step, and those exposed by every sync."""
        large = [each for each in self.readings if self.cases[each.case].size == LARGE]
        return {reading.case: [reading.step_ms, reading.exposed_ms] for reading in large}

    def marks(self) -> list[dict[str, Any]]:
        """Return the values of the engine's marks in each trace of one sync."""
        return [
            {"case": reading.case, **{name: getattr(mark, name) for name in MARK_FIELDS},
             "bytes_per_element": self._bytes_per_element(reading, mark.device_ms)}
            for reading in self.readings
            for mark in reading.marks
        ]  # fmt: skip

    def sync_costs(self) -> list[dict[str, Any]]:
        """Return the sums over all marks of each trace, and the minimal cost."""
        found = []
        for reading in self.readings:
            if not reading.marks:
                continue
            units = MODELS[self.cases[reading.case].size].num_layers + NUM_OTHER_UNITS
            times = [mark.device_ms for mark in reading.marks if mark.device_ms is not None]
            total = sum(times) if times else None
            launches = sum(mark.launches for mark in reading.marks)
            least = MIN_BYTES * reading.num_parameters / self.copy_rate * 1e3
            found.append({
                "case": reading.case,
                "launches": launches,
                "launches_per_unit": launches / units,
                "device_ms": total,
                "least_ms": least,
                "bytes_per_element": self._bytes_per_element(reading, total),
                "least_bytes_per_element": MIN_BYTES,
            })  # fmt: skip
        return found

    def _row(self, reading: Reading) -> dict[str, Any]:
        steady = self._steady_steps(reading)
        syncs = reading.digests[0]
        return {
            "case": reading.case,
            "backend": reading.backend,
            "syncs": len(syncs),
            "are_equal": all(each == syncs for each in reading.digests),
            "first_loss": _ends(reading.losses)[0],
            "last_loss": _ends(reading.losses)[1],
            "distance": self.distance(reading),
            "step_ms": median(steady),
            "exposed_ms": median(self._usual_exposed(reading) or [0.0]),
            "beside_ms": self._step_beside_exchange(reading),
            "share_beyond_median_step": 1 - median(steady) / mean(steady),
            "peak_bytes": reading.peak_bytes,
            "bytes_per_parameter": self._peak_per_parameter(reading),
            "bytes_beyond_stock": self._beyond_stock(reading),
            "seconds": reading.seconds,
        }

    def distance(self, reading: Reading) -> float | None:
        """Return the mean relative distance from the losses of the CPU; None without any."""
        case = self.cases[reading.case]
        found = self.reference.get(case.like or case.name)
        if found is None or case.tolerance is None:
            return None
        iterations, losses = found
        if [float(i) for i in reading.iterations] != list(iterations):
            return math.inf
        pairs = zip(reading.losses, losses, strict=True)
        return mean(abs(here - there) / there for here, there in pairs)

    def _complaints_of(self, reading: Reading) -> list[str]:
        case, found = self.cases[reading.case], []
        first, wanted = reading.digests[0], case.num_syncs
        if any(each != first for each in reading.digests):
            found.append("replicas differ after a sync")
        twins = [each.digests[0] for each in self.readings if each.case == case.twin]
        if any(each[-len(first) :] != first for each in twins):
            found.append(f"parameters are not those of {case.twin} after a sync")
        if wanted is not None and len(first) != wanted:
            found.append(f"{len(first)} syncs, not {wanted}")
        if wanted is None and len(first) < MIN_SYNCS:
            found.append(f"{len(first)} syncs, fewer than {MIN_SYNCS}")
        if not all(map(math.isfinite, reading.losses)):
            found.append("a loss is not finite")
        elif (losses := _ends(reading.losses))[1] >= losses[0]:
            found.append(f"loss {losses[0]:.3f} -> {losses[1]:.3f}")
        distance = self.distance(reading)
        if distance is not None and case.tolerance is not None and distance > case.tolerance:
            found.append(f"losses {distance:.4f} from the CPU's, more than {case.tolerance:g}")
        return found

    def _steady_steps(self, reading: Reading) -> list[float]:
        """Return the steps after the first sync, without those that a profiler slowed down."""
        numbered = enumerate(reading.step_ms, start=1)
        slowed = self._slowed(reading)
        return [ms for step, ms in numbered if step > WARMUP + TAU + 1 and step not in slowed]

    def _usual_exposed(self, reading: Reading) -> list[float]:
        """Return the exposed times, without the first sync, which allocates, the last, which lands
        at once, and those that a profiler slowed down."""
        slowed = self._slowed(reading)
        pairs = list(zip(reading.sync_steps, reading.exposed_ms, strict=True))[1:-1]
        return [ms for step, ms in pairs if step not in slowed]

    def _step_beside_exchange(self, reading: Reading) -> float | None:
        """Return the median of the first steps after the start of a delayed sync; None without."""
        if not self.cases[reading.case].delay:
            return None
        numbered = enumerate(reading.step_ms, start=1)
        beside = [ms for step, ms in numbered if step - 1 in reading.sync_steps[1:-1]]
        return median(beside) if beside else None

    def _slowed(self, reading: Reading) -> range:
        """Return the steps in which a profiler was active, or wrote its file."""
        first, last = TRACED
        return range(first, last + 1) if self.cases[reading.case].is_traced else range(0)

    def _peak_per_parameter(self, reading: Reading) -> float | None:
        if reading.peak_bytes is None:
            return None
        return reading.peak_bytes / reading.num_parameters

    def _beyond_stock(self, reading: Reading) -> float | None:
        """Return device bytes per parameter beyond those of stock Megatron with the same model."""
        own = self.cases[reading.case]
        known = ((each, self.cases[each.case]) for each in self.readings)
        stock = [each for each, case in known if case.is_stock and case.size == own.size]
        if not stock or own.ranks > 1 or not set(BF16) <= set(own.words):
            return None
        own_bytes, stock_bytes = (
            self._peak_per_parameter(reading),
            self._peak_per_parameter(stock[0]),
        )
        return None if own_bytes is None or stock_bytes is None else own_bytes - stock_bytes

    def _bytes_per_element(self, reading: Reading, device_ms: float | None) -> float | None:
        """Return the memory traffic per element that a copy would make in this time."""
        if device_ms is None:
            return None
        return device_ms / 1e3 * self.copy_rate / reading.num_parameters


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and last quarter, as single batches vary too much."""
    quarter = max(1, len(losses) // 4)
    return mean(losses[:quarter]), mean(losses[-quarter:])


def _if_synced(value: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return a getter for rows of cases that gives None without syncs."""
    return lambda row: value(row) if row["syncs"] else None


CASES = (
    Column("case", "case"),
    Column("between replicas", "backend"),
    Column("syncs", "syncs"),
    Column("replicas equal", _if_synced(lambda row: "yes" if row["are_equal"] else "NO")),
    Column("loss", lambda row: f"{row['first_loss']:.3f} -> {row['last_loss']:.3f}"),
    Column("from the CPU's", "distance", "{:.2%}"),
    Column("step (ms)", "step_ms", "{:.1f}"),
    Column("exposed per sync (ms)", _if_synced(lambda row: row["exposed_ms"]), "{:.1f}"),
    Column("step beside an exchange (ms)", "beside_ms", "{:.1f}"),
    Column("beyond the median step", "share_beyond_median_step", "{:.1%}"),
    Column("device bytes per parameter", "bytes_per_parameter", "{:.1f}"),
    Column("beyond stock", "bytes_beyond_stock", "{:+.1f}"),
)
COSTS = (
    Column("one sync", "case"),
    Column("launches", "launches"),
    Column("per unit", "launches_per_unit", "{:.1f}"),
    Column("device (ms)", "device_ms", "{:.2f}"),
    Column("least (ms)", "least_ms", "{:.2f}"),
    Column("bytes per element", "bytes_per_element", "{:.0f}"),
    Column("least", "least_bytes_per_element"),
)
OUTCOMES = (
    Column("case", "case"),
    Column("measured", "name"),
    Column("value", "value", "{:.1f}"),
)
LEFT_OUT = (
    Column("left out", "case"),
    Column("expected (s)", "seconds", "{:.0f}"),
    Column("needs", "lacking"),
)
MARKS = (
    Column("case", "case"),
    Column("mark", "mark"),
    Column("count", "count"),
    Column("launches", "launches"),
    Column("host (ms)", "host_ms", "{:.2f}"),
    Column("device (ms)", "device_ms", "{:.2f}"),
    Column("transfers (ms)", "transfer_ms", "{:.2f}"),
    Column("bytes per element", "bytes_per_element", "{:.0f}"),
)


def markdown(summary: Mapping[str, Any], failures: Sequence[str]) -> str:
    """Return the page."""
    head = f"{summary['device']} x {summary['num_devices']}, "
    head += f"{summary['copy_rate'] / 1e9:.0f} GB/s read and written in a copy"
    verdict = "\n".join(f"- FAILED: {line}" for line in failures) or "All checks passed."
    outcomes = [
        {"case": each["case"], "name": name, "value": value}
        for each in summary["outcomes"]
        for name, value in each["numbers"].items()
    ]
    tables = [
        (CASES, summary["rows"]), (LEFT_OUT, summary["left_out"]), (OUTCOMES, outcomes),
        (COSTS, summary["sync_costs"]), (MARKS, summary["marks"]),
    ]  # fmt: skip
    return "\n\n".join([head, verdict, *(table_of(*each) for each in tables if each[1])])


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw time beyond the median step and device memory of each case."""
    names = [row["case"] for row in rows]
    panels = [
        ("time beyond the median step (%)", [100 * r["share_beyond_median_step"] for r in rows]),
        ("device memory (bytes per parameter)", [r["bytes_per_parameter"] or 0.0 for r in rows]),
    ]
    with picture(path, ncols=2, figsize=(11, 0.35 * len(rows) + 1.5), sharey=True) as (_, axes):
        for each, (label, values) in zip(axes, panels, strict=True):
            bars = each.barh(names, values)
            each.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
            each.set_xlabel(label)
            each.grid(axis="x", alpha=0.3)
        axes[0].invert_yaxis()
