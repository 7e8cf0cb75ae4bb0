"""Analysis, table and picture of benchmarks/overlap.py.

Every run is compared with the others of its link and repeat. Stock Megatron exchanges at every
step: even if all of it were hidden behind compute, its speed would be at most
step / max(step, exchange) of the ideal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from frame.gpt import Link, link_name
from frame.page import ALL, Column, Spread, draw_bars, picture, table_of

from megatron_edit.flags import flag

from .kinds import AUTO, IDEAL, STOCK, STOCK_INSTANCES, STOCKS, variants
from .runs import Measurement


@dataclass(frozen=True)
class Row:
    """All repeats of a kind on a link.

    Attributes:
        bandwidth: measured, payload bits per second.
        of_ideal: tokens/s over those of `ideal`.
        of_stock: tokens/s over those of `stock`.
        exposed: exposed seconds per sync, as EDiT records them.
        waited: of these, waiting for other replicas; on a busy machine they drift apart.
        lost: seconds per round beyond the ideal ones; EDiT only.
        of_instances: tokens/s over those of `stock-instances`.
        step_bytes: sent by a host in a step, mean over the measured steps, with headers.
        hidden_limit: share of the ideal if these bytes were hidden as far as possible; stock only.
        expected: share of the ideal that the last choice of `--edit-auto` expects.
    """

    rate: float | None
    kind: str
    bandwidth: Spread | None
    tokens_per_second: Spread | None
    step_seconds: Spread | None
    of_ideal: Spread | None
    of_stock: Spread | None
    exposed: Spread | None
    waited: Spread | None
    lost: Spread | None
    of_instances: Spread | None
    step_bytes: Spread | None
    hidden_limit: Spread | None
    expected: Spread | None


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

    def rows(self) -> list[Row]:
        """Return a row for each link and kind, in the order of measurement."""
        return [self._row(*case) for case in dict.fromkeys((r, k) for k, r, _ in self._runs)]

    def _row(self, rate: float | None, kind: str) -> Row:
        runs = [m for m in self._runs.values() if (m.kind, m.rate) == (kind, rate)]
        has_rounds = kind not in (IDEAL, AUTO, *STOCKS)  # of the same length
        return Row(
            rate=rate,
            kind=kind,
            bandwidth=Spread.of([b for (r, _), b in self._bandwidth.items() if r == rate]),
            tokens_per_second=Spread.of([m.tokens_per_second for m in runs]),
            step_seconds=Spread.of([self._tokens / m.tokens_per_second for m in runs]),
            of_ideal=Spread.of([x for m in runs if (x := self._ratio(m, IDEAL))]),
            of_stock=Spread.of([x for m in runs if (x := self._ratio(m, STOCK))]),
            exposed=Spread.of([sync["seconds"]["exposed"] for m in runs for sync in m.syncs]),
            waited=Spread.of([s["seconds"]["wait"] for m in runs for s in m.syncs]),
            lost=Spread.of([x for m in runs if has_rounds and (x := self._lost(m)) is not None]),
            of_instances=Spread.of([x for m in runs if (x := self._ratio(m, STOCK_INSTANCES))]),
            step_bytes=Spread.of([_step_bytes(m) for m in runs]),
            hidden_limit=Spread.of(
                [x for m in runs if kind in STOCKS and (x := self._hidden_limit(m))]
            ),
            expected=Spread.of([m.expected for m in runs if m.expected is not None]),
        )  # fmt: skip

    def _ratio(self, run: Measurement, other_kind: str) -> float | None:
        other = self._runs.get((other_kind, run.rate, run.repeat))
        return run.tokens_per_second / other.tokens_per_second if other else None

    def _lost(self, run: Measurement) -> float | None:
        ideal = self._runs.get((IDEAL, run.rate, run.repeat))
        if ideal is None:
            return None
        step, ideal_step = (self._tokens / m.tokens_per_second for m in (run, ideal))
        return self._tau * (step - ideal_step)

    def _hidden_limit(self, run: Measurement) -> float | None:
        """Return the limit with an exchange at every step, from numbers of the same repeat."""
        ideal = self._runs.get((IDEAL, run.rate, run.repeat))
        if ideal is None:
            return None
        step = self._tokens / ideal.tokens_per_second
        exchange = 8 * _step_bytes(run) / self._bandwidth[run.rate, run.repeat]
        return step / max(step, exchange)


def _step_bytes(run: Measurement) -> float:
    return max(run.window_bytes) / (run.window.last - run.window.first)


MAX_KINDS_WITH_NUMBERS = 6  # more kinds leave no room for numbers in the picture
COLUMNS = (
    Column("link", lambda row: link_name(row.rate)),
    Column("link measured (Mbit/s)", "bandwidth", "{:.1f}", 1e-6),
    Column("training", "kind"),
    Column("ms / iteration", "step_seconds", "{:.1f}", 1e3),
    Column("tokens/s", "tokens_per_second", "{:.0f}"),
    Column("of ideal", "of_ideal", "{:.3f}", of=ALL),
    Column("expected", "expected", "{:.3f}"),
    Column("if all hidden", "hidden_limit", "{:.3f}"),
    Column("x stock", "of_stock", "{:.2f}"),
    Column("x stock-instances", "of_instances", "{:.2f}"),
    Column("MB / iteration", "step_bytes", "{:.3f}", 1e-6),
    Column("exposed (ms / sync)", "exposed", "{:.1f}", 1e3),
    Column("of it waiting", "waited", "{:.1f}", 1e3),
    Column("lost (ms / round)", "lost", "{:.1f}", 1e3),
)


def markdown(rows: Sequence[Row]) -> str:
    """Return the table; numbers are medians unless stated."""
    return table_of(COLUMNS, rows)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Write the picture: tokens/s as a share of the ideal, by link."""
    links = list(dict.fromkeys(row.rate for row in rows))
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind != IDEAL))
    kinds.sort(key=lambda kind: kind in STOCKS)  # EDiT first
    is_crowded = len(kinds) > MAX_KINDS_WITH_NUMBERS
    with picture(path, figsize=(11, 5) if is_crowded else (8, 4.5)) as (figure, axes):
        from matplotlib import colormaps

        series = {
            _name(kind): {row.rate: row.of_ideal for row in rows if row.kind == kind}
            for kind in kinds
        }
        colors = colormaps["tab20" if is_crowded else "tab10"].colors  # type: ignore[attr-defined]
        draw_bars(axes, links, series, colors=colors, with_numbers=not is_crowded)
        axes.set_xticks(range(len(links)), [link_name(rate) for rate in links])
        axes.set_ylabel("tokens/s, part of the ideal (no exchange)")
        axes.set_xlabel("link between the hosts")
        axes.set_title("Speed by link: median, least and most of the repeats")
        if is_crowded:
            figure.legend(loc="outside right upper")
        else:
            axes.legend()


def _name(kind: str) -> str:
    """Return the name of a kind in the legend."""
    if kind == STOCK:
        return "stock DistOpt, overlapped"
    if kind == STOCK_INSTANCES:
        return "stock DistOpt, an instance per host"
    is_named = flag("strategy") in variants(1).get(kind, ())
    return kind if is_named else f"EDiT, {kind}"
