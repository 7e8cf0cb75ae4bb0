"""Checks and page of benchmarks/gpu_check.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from frame.page import Column, table_of

from .cases import BF16, LARGE, TAU, WARMUP, Case
from .runs import Reading

MIN_SYNCS = 2  # where rounds are timed


@dataclass(frozen=True)
class Analysis:
    """Analysis of all finished cases.

    Attributes:
        cases: by name.
        readings: of the finished cases.
        reference: losses of the cases on the CPU, by name: iterations and values.
    """

    cases: Mapping[str, Case]
    readings: Sequence[Reading]
    reference: Mapping[str, Sequence[Sequence[float]]]

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

    def _row(self, reading: Reading) -> dict[str, Any]:
        steady = reading.step_ms[WARMUP + TAU + 1 :]  # after the first sync
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
            # Without the first sync, which allocates, and the last, which lands at once.
            "exposed_ms": median(reading.exposed_ms[1:-1] or [0.0]),
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

    def _step_beside_exchange(self, reading: Reading) -> float | None:
        """Return the median of the first steps after the start of a delayed sync; None without."""
        if not self.cases[reading.case].delay:
            return None
        numbered = enumerate(reading.step_ms, start=1)
        beside = [ms for step, ms in numbered if step - 1 in reading.sync_steps[1:-1]]
        return median(beside) if beside else None

    def _peak_per_parameter(self, reading: Reading) -> float | None:
        peak = reading.peak_bytes
        return None if peak is None else peak / reading.num_parameters

    def _beyond_stock(self, reading: Reading) -> float | None:
        """Return device bytes per parameter beyond those of stock Megatron with the same model."""
        own = self.cases[reading.case]
        known = ((each, self.cases[each.case]) for each in self.readings)
        stock = [each for each, case in known if case.is_stock and case.size == own.size]
        if not stock or own.ranks > 1 or not set(BF16) <= set(own.words):
            return None
        own_bytes, stock_bytes = map(self._peak_per_parameter, (reading, stock[0]))
        return None if own_bytes is None or stock_bytes is None else own_bytes - stock_bytes


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


def markdown(summary: Mapping[str, Any], failures: Sequence[str]) -> str:
    """Return the page."""
    head = f"{summary['device']} x {summary['num_devices']}"
    verdict = "\n".join(f"- FAILED: {line}" for line in failures) or "All checks passed."
    outcomes = [
        {"case": each["case"], "name": name, "value": value}
        for each in summary["outcomes"]
        for name, value in each["numbers"].items()
    ]
    tables = [(CASES, summary["rows"]), (LEFT_OUT, summary["left_out"]), (OUTCOMES, outcomes)]
    return "\n\n".join([head, verdict, *(table_of(*each) for each in tables if each[1])])
