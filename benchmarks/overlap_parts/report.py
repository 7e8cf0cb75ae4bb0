"""Analysis and table of benchmarks/overlap.py.

Every run is compared with the others of its link and repeat. Stock Megatron exchanges at every
step: even if all of it were hidden behind compute, its speed would be at most
step / max(step, exchange) of the ideal one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from frame.gpt import Link, link_name
from frame.page import ALL, Column, Spread, table_of

from .kinds import IDEAL, STOCK, STOCK_INSTANCES, STOCKS
from .runs import Measurement

# *Exposed* and *waiting* are those that EDiT records, by sync; *lost* is the time of a round beyond
# that of ideal steps.
COLUMNS = (
    Column("link", lambda row: link_name(row["rate"])),
    Column("link measured (Mbit/s)", "bandwidth", "{:.1f}", 1e-6),
    Column("training", "kind"),
    Column("ms / iteration", "step_seconds", "{:.1f}", 1e3),
    Column("tokens/s", "tokens_per_second", "{:.0f}"),
    Column("of ideal", "of_ideal", "{:.3f}", of=ALL),
    Column("if all hidden", "hidden_limit", "{:.3f}"),
    Column("x stock", "of_stock", "{:.2f}"),
    Column("x stock-instances", "of_instances", "{:.2f}"),
    Column("MB / iteration", "step_bytes", "{:.3f}", 1e-6),
    Column("exposed (ms / sync)", "exposed", "{:.1f}", 1e3),
    Column("of it waiting", "waited", "{:.1f}", 1e3),
    Column("lost (ms / round)", "lost", "{:.1f}", 1e3),
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table; numbers are medians unless stated."""
    return table_of(COLUMNS, rows)


class Analysis:
    """Compares measurements.

    Args:
        tau: sync interval.
        tokens_per_iteration: of the whole job.
    """

    def __init__(
        self,
        measurements: Sequence[Measurement],
        links: Sequence[Link],
        *,
        tau: int,
        tokens_per_iteration: int,
    ) -> None:
        self._runs = {(m.kind, m.rate, m.repeat): m for m in measurements}
        self._bandwidth = {(link.rate, link.repeat): link.bandwidth for link in links}
        self._tau = tau
        self._tokens = tokens_per_iteration

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each link and kind, in the order of measurement."""
        return [self._row(*case) for case in dict.fromkeys((r, k) for k, r, _ in self._runs)]

    def _row(self, rate: float | None, kind: str) -> dict[str, Any]:
        runs = [m for m in self._runs.values() if (m.kind, m.rate) == (kind, rate)]
        seconds = [sync["seconds"] for m in runs for sync in m.syncs]
        has_rounds = kind not in (IDEAL, *STOCKS)  # of the same length

        def spread(of: Callable[[Measurement], float | None]) -> Spread | None:
            return Spread.of([x for m in runs if (x := of(m)) is not None])

        return {
            "rate": rate,
            "kind": kind,
            "bandwidth": Spread.of([b for (r, _), b in self._bandwidth.items() if r == rate]),
            "tokens_per_second": spread(lambda m: m.tokens_per_second),
            "step_seconds": spread(self._step),
            "of_ideal": spread(lambda m: self._ratio(m, IDEAL)),
            "of_stock": spread(lambda m: self._ratio(m, STOCK)),
            "of_instances": spread(lambda m: self._ratio(m, STOCK_INSTANCES)),
            "exposed": Spread.of([each["exposed"] for each in seconds]),
            "waited": Spread.of([each["wait"] for each in seconds]),
            "lost": spread(self._lost) if has_rounds else None,
            "step_bytes": spread(_step_bytes),
            "hidden_limit": spread(self._hidden_limit) if kind in STOCKS else None,
        }

    def _step(self, run: Measurement) -> float:
        return self._tokens / run.tokens_per_second

    def _ratio(self, run: Measurement, other_kind: str) -> float | None:
        other = self._runs.get((other_kind, run.rate, run.repeat))
        return run.tokens_per_second / other.tokens_per_second if other else None

    def _lost(self, run: Measurement) -> float | None:
        """Return the seconds of a round beyond those of ideal steps."""
        ideal = self._runs.get((IDEAL, run.rate, run.repeat))
        return self._tau * (self._step(run) - self._step(ideal)) if ideal else None

    def _hidden_limit(self, run: Measurement) -> float | None:
        """Return the limit with an exchange at every step, from numbers of the same repeat."""
        ideal = self._runs.get((IDEAL, run.rate, run.repeat))
        if ideal is None:
            return None
        exchange = 8 * _step_bytes(run) / self._bandwidth[run.rate, run.repeat]
        return self._step(ideal) / max(self._step(ideal), exchange)


def _step_bytes(run: Measurement) -> float:
    """Return the bytes that a host sends in a step, with headers."""
    return max(run.window_bytes) / (run.window.last - run.window.first)
