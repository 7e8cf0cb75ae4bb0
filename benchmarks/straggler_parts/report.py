"""Analysis and table of benchmarks/stragglers.py: runs are compared within scenario and repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frame.page import ALL, Column, Spread, table_of

from .kinds import IDEAL, STOCK, title_of
from .runs import Measurement


class Analysis:
    """Compares measurements."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._runs = {(m.scenario, m.kind, m.repeat): m for m in measurements}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each scenario and kind, in the order of measurement."""
        return [self._row(*case) for case in dict.fromkeys((s, k) for s, k, _ in self._runs)]

    def _row(self, scenario: str, kind: str) -> dict[str, Any]:
        runs = [m for m in self._runs.values() if (m.scenario, m.kind) == (scenario, kind)]
        seconds = [sync["seconds"] for m in runs for sync in m.syncs]
        return {
            "scenario": scenario,
            "kind": kind,
            "tokens_per_second": Spread.of([m.tokens_per_second for m in runs]),
            "of_ideal": Spread.of([x for m in runs if (x := self._ratio(m, IDEAL))]),
            "of_stock": Spread.of([x for m in runs if (x := self._ratio(m, STOCK))]),
            "round_seconds": Spread.of([length for m in runs for length in m.round_seconds]),
            # Of replica 0, which is not slow.
            "waited": Spread.of([each["wait"] for each in seconds]),
            "waited_steps": Spread.of([steps for m in runs for steps in self._waited_steps(m)]),
            "synced": Spread.of([each["exposed"] - each["wait"] for each in seconds]),
        }

    def _ratio(self, run: Measurement, other_kind: str) -> float | None:
        other = self._runs.get((run.scenario, other_kind, run.repeat))
        return run.tokens_per_second / other.tokens_per_second if other else None

    def _waited_steps(self, run: Measurement) -> list[float]:
        """Return the waiting times in steps of the slowest replica in `ideal`."""
        ideal = self._runs.get((run.scenario, IDEAL, run.repeat))
        if ideal is None:
            return []
        return [sync["seconds"]["wait"] / max(ideal.step_seconds) for sync in run.syncs]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table; numbers are medians unless stated."""
    upper = ("median", "max")
    columns = (
        Column("stragglers", lambda row: title_of(row["scenario"])),
        Column("training", "kind"),
        Column("tokens/s", "tokens_per_second", "{:.0f}"),
        Column("of ideal", "of_ideal", "{:.3f}", of=ALL),
        Column("x stock", "of_stock", "{:.2f}"),
        Column("round (s)", "round_seconds", "{:.2f}"),
        Column("waited per round (ms)", "waited", "{:.0f}", 1e3, of=upper),
        Column("in slow steps", "waited_steps", "{:.2f}", of=upper),
        Column("rest of a sync (ms)", "synced", "{:.0f}", 1e3),
    )
    return table_of(columns, rows)
