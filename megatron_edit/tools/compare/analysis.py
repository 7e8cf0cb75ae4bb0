"""The rows of a comparison's table, computed from its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from megatron_edit.tools.compare.entries import IDEAL
from megatron_edit.tools.compare.plan import RunPlan
from megatron_edit.tools.compare.readings import Reading

Seed = int | None


@dataclass(frozen=True)
class Spread:
    """Mean and spread of several values of one quantity."""

    mean: float
    # Standard deviation of the values (not of their mean); None for a single one.
    deviation: float | None
    num: int  # number of values

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Compute it from the known values; None without any, NaN if one is not finite."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        if not all(map(math.isfinite, known)):  # a run that diverged
            return cls(math.nan, None, len(known))
        return cls(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class ComparisonRow:
    """The row of one entry of the comparison. None where not known."""

    label: str
    loss: Spread | None
    difference: Spread | None  # of `loss` to that of the first entry with a loss, seed by seed
    speed: Spread | None  # tokens per second of all replicas, after the warm-up
    share: Spread | None  # `speed` as a share of that of `ideal` with the same seed
    step_bytes: Spread | None  # sent by one replica per step, after the warm-up
    peak: Spread | None  # bytes per second of the busiest exchange of a replica
    state_bytes: int | None  # of the outer state of one replica
    num_parameters: int
    failed: tuple[str, ...]  # seeds without a result, as text


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


def make_rows(outcome: ComparisonResult) -> list[ComparisonRow]:
    """Return a row for each entry, in the given order."""
    first = next((label for label in outcome.compared if outcome.of_label(label)), None)
    base = _losses(outcome, first) if first is not None else {}
    ideal = _values(outcome.of_label(IDEAL), lambda r: r.curves.speed)
    return [_row(outcome, label, base if label != first else {}, ideal) for label in outcome.labels]


def _row(
    outcome: ComparisonResult, label: str, base: Mapping[Seed, float], ideal: Mapping[Seed, float]
) -> ComparisonRow:
    found = outcome.of_label(label)
    losses = _losses(outcome, label) if label in outcome.compared else {}
    speeds = _values(found, lambda r: r.curves.speed)
    readings = list(found.values())
    states = [r.state_bytes for r in readings if r.state_bytes is not None]
    failed = [str(run.seed) for run in outcome.failures if run.entry.label == label]
    return ComparisonRow(
        label=label,
        loss=Spread.of(list(losses.values())),
        difference=Spread.of([losses[seed] - base[seed] for seed in losses if seed in base]),
        speed=Spread.of(list(speeds.values())),
        share=Spread.of([speeds[seed] / ideal[seed] for seed in speeds if ideal.get(seed)]),
        step_bytes=Spread.of([r.bytes_per_step for r in readings]),
        peak=Spread.of([r.peak_bytes_per_second for r in readings]),
        state_bytes=max(states, default=None),
        num_parameters=max((r.num_parameters for r in readings), default=0),
        failed=tuple(failed),
    )


def _losses(outcome: ComparisonResult, label: str) -> dict[Seed, float]:
    return _values(outcome.of_label(label), lambda r: r.curves.final_loss)


def _values(
    readings: Mapping[Seed, Reading], value: Callable[[Reading], float | None]
) -> dict[Seed, float]:
    found = {seed: value(reading) for seed, reading in readings.items()}
    return {seed: number for seed, number in found.items() if number is not None}
