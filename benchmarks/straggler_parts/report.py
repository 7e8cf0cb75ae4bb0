"""Analysis and report of benchmarks/stragglers.py: runs are compared within scenario and repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from frame.page import ALL, Column, Spread, draw_bars, picture, table_of

from .kinds import A_EDIT, EDIT, IDEAL, STOCK
from .runs import Measurement


@dataclass(frozen=True)
class Row:
    """All repeats of a kind in a scenario.

    Attributes:
        tokens_per_second: of all replicas together.
        of_ideal: tokens/s over those of `ideal`.
        of_stock: tokens/s over those of `stock`.
        slow_step: seconds; mean step of the slowest replica.
        round_seconds: from sync to sync.
        waited: seconds per sync that replica 0, which is not slow, waited for the others.
        waited_steps: the same in steps of the slowest replica in `ideal`.
        synced: other exposed seconds per sync, on replica 0.
    """

    scenario: str
    kind: str
    tokens_per_second: Spread | None
    of_ideal: Spread | None
    of_stock: Spread | None
    slow_step: Spread | None
    round_seconds: Spread | None
    waited: Spread | None
    waited_steps: Spread | None
    synced: Spread | None


class Analysis:
    """Compares measurements."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._runs = {(m.scenario, m.kind, m.repeat): m for m in measurements}

    def rows(self) -> list[Row]:
        """Return a row for each scenario and kind, in the order of measurement."""
        return [self._row(*case) for case in dict.fromkeys((s, k) for s, k, _ in self._runs)]

    def _row(self, scenario: str, kind: str) -> Row:
        runs = [m for m in self._runs.values() if (m.scenario, m.kind) == (scenario, kind)]
        seconds = [sync["seconds"] for m in runs for sync in m.syncs]
        return Row(
            scenario=scenario,
            kind=kind,
            tokens_per_second=Spread.of([m.tokens_per_second for m in runs]),
            of_ideal=Spread.of([x for m in runs if (x := self._ratio(m, IDEAL))]),
            of_stock=Spread.of([x for m in runs if (x := self._ratio(m, STOCK))]),
            slow_step=Spread.of([m.slowest_step for m in runs]),
            round_seconds=Spread.of([length for m in runs for length in m.round_seconds]),
            waited=Spread.of([each["wait"] for each in seconds]),
            waited_steps=Spread.of([steps for m in runs for steps in self._waited_steps(m)]),
            synced=Spread.of([each["exposed"] - each["wait"] for each in seconds]),
        )

    def _ratio(self, run: Measurement, other_kind: str) -> float | None:
        other = self._runs.get((run.scenario, other_kind, run.repeat))
        return run.tokens_per_second / other.tokens_per_second if other else None

    def _waited_steps(self, run: Measurement) -> list[float]:
        ideal = self._runs.get((run.scenario, IDEAL, run.repeat))
        if ideal is None:
            return []
        return [sync["seconds"]["wait"] / ideal.slowest_step for sync in run.syncs]


NAMES = {
    STOCK: "stock DistOpt",
    EDIT: "EDiT",
    A_EDIT: "A-EDiT",
}


def markdown(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    """Return the table; numbers are medians unless stated."""
    upper = ("median", "max")
    columns = (
        Column("stragglers", lambda row: titles[row.scenario]),
        Column("training", "kind"),
        Column("tokens/s", "tokens_per_second", "{:.0f}"),
        Column("of ideal", lambda r: r.of_ideal if r.kind != IDEAL else None, "{:.3f}", of=ALL),
        Column("x stock", lambda r: r.of_stock if r.kind != STOCK else None, "{:.2f}"),
        Column("round (s)", "round_seconds", "{:.2f}"),
        Column("waited per round (ms)", "waited", "{:.0f}", 1e3, of=upper),
        Column("in slow steps", "waited_steps", "{:.2f}", of=upper),
        Column("rest of a sync (ms)", "synced", "{:.0f}", 1e3),
    )
    return table_of(columns, rows)


def draw(path: Path, rows: Sequence[Row], titles: Mapping[str, str]) -> None:
    """Write the picture: tokens/s as a share of the ideal, by scenario."""
    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    series = {
        name: {row.scenario: row.of_ideal for row in rows if row.kind == kind}
        for kind, name in NAMES.items()
        if any(row.kind == kind for row in rows)
    }
    with picture(path, figsize=(8, 4.5)) as (_, axes):
        draw_bars(axes, scenarios, series)
        axes.axhline(1.0, color="black", linestyle="dashed", linewidth=1, label="no waiting")
        axes.set_xticks(range(len(scenarios)), [titles[name] for name in scenarios])
        axes.set_ylabel("tokens/s, part of the ideal")
        axes.set_ylim(0, 1.15)
        axes.set_title("What slow replicas cost: median, least and most of the repeats")
        axes.legend(loc="lower left", ncols=4, fontsize=8)
