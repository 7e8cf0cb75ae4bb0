"""Analysis, table and picture of benchmarks/overlap.py.

Every run is compared with the others of its link and repeat. A sync without delay can hide its
exchange behind only one forward pass: it includes all inner steps of the round, and its result is
needed in the next forward pass. Its speed is therefore at most
round / (round + max(0, exchange - forward)) of the ideal speed. Stock Megatron exchanges at every
step: even if all of it were hidden behind compute, its speed would be at most
step / max(step, exchange) of the ideal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from frame.gpt import Link, link_name
from frame.page import ALL, Column, Spread, draw_bars, picture, table_of

from megatron_edit.flags import flag

from .kinds import AUTO, IDEAL, RIVALS, STOCK, STOCK_INSTANCES, STOCKS, sends_all_at_once, variants
from .runs import Measurement

ADAPTING_SYNCS = 5  # within which `--edit-auto` has new settings where a link changes


@dataclass(frozen=True)
class Row:
    """All repeats of a kind on a link.

    Attributes:
        bandwidth: measured, payload bits per second.
        of_ideal: tokens/s over those of `ideal`.
        limit: of syncs without delay, as a share of the ideal; None without bytes of an EDiT run.
        of_limit: `of_ideal` over `limit`; EDiT only.
        of_stock: tokens/s over those of `stock`.
        exposed: exposed seconds per sync, as EDiT records them.
        waited: of these, waiting for other replicas; on a busy machine they drift apart.
        lost: seconds per round beyond the ideal ones; EDiT and rivals.
        link_bytes: bytes on the link, with headers, over the payload of the syncs; EDiT only.
        of_instances: tokens/s over those of `stock-instances`.
        step_bytes: sent by a host in a step, mean over the measured steps, with headers.
        hidden_limit: share of the ideal if these bytes were hidden as far as possible; stock only.
        expected: share of the ideal that the last choice of `--edit-auto` expects.
        later: share of the ideal after `ADAPTING_SYNCS` syncs; EDiT only, where that many and more
            were measured.
    """

    rate: float | None
    kind: str
    bandwidth: Spread | None
    tokens_per_second: Spread | None
    step_seconds: Spread | None
    of_ideal: Spread | None
    limit: Spread | None
    of_limit: Spread | None
    of_stock: Spread | None
    exposed: Spread | None
    waited: Spread | None
    lost: Spread | None
    link_bytes: Spread | None
    of_instances: Spread | None
    step_bytes: Spread | None
    hidden_limit: Spread | None
    expected: Spread | None
    later: Spread | None


def exact_limit(*, round_seconds: float, exchange: float, forward: float) -> float:
    """Return the highest share of the ideal speed without delay; arguments in seconds."""
    return round_seconds / (round_seconds + max(0.0, exchange - forward))


class Analysis:
    """Compares measurements.

    Args:
        tau: sync interval.
        tokens_per_iteration: of the whole job.
        forward_share: share of the forward pass in an ideal step.
    """

    def __init__(
        self,
        measurements: Sequence[Measurement],
        links: Sequence[Link],
        *,
        tau: int,
        tokens_per_iteration: int,
        forward_share: float,
    ) -> None:
        self._runs = {(m.kind, m.rate, m.repeat): m for m in measurements}
        self._bandwidth = {(link.rate, link.repeat): link.bandwidth for link in links}
        self._tau = tau
        self._tokens = tokens_per_iteration
        self._forward_share = forward_share

    def rows(self) -> list[Row]:
        """Return a row for each link and kind, in the order of measurement."""
        return [self._row(*case) for case in dict.fromkeys((r, k) for k, r, _ in self._runs)]

    def _row(self, rate: float | None, kind: str) -> Row:
        runs = [m for m in self._runs.values() if (m.kind, m.rate) == (kind, rate)]
        has_rounds = kind not in (IDEAL, AUTO, *STOCKS)  # of the same length
        is_edit = has_rounds and kind not in RIVALS
        limits = {m.repeat: self._limit(m) for m in runs}
        return Row(
            rate=rate,
            kind=kind,
            bandwidth=Spread.of([b for (r, _), b in self._bandwidth.items() if r == rate]),
            tokens_per_second=Spread.of([m.tokens_per_second for m in runs]),
            step_seconds=Spread.of([self._tokens / m.tokens_per_second for m in runs]),
            of_ideal=Spread.of([x for m in runs if (x := self._ratio(m, IDEAL))]),
            limit=Spread.of([x for x in limits.values() if x]),
            of_limit=Spread.of(
                [x / y for m in runs if is_edit and (x := self._ratio(m, IDEAL))
                 and (y := limits[m.repeat])]
            ),
            of_stock=Spread.of([x for m in runs if (x := self._ratio(m, STOCK))]),
            exposed=Spread.of([sync["seconds"]["exposed"] for m in runs for sync in m.syncs]),
            waited=Spread.of([s["seconds"]["wait"] for m in runs for s in m.syncs]),
            lost=Spread.of([x for m in runs if has_rounds and (x := self._lost(m)) is not None]),
            link_bytes=Spread.of([m.window_bytes[0] / _payload(m) for m in runs if m.syncs]),
            of_instances=Spread.of([x for m in runs if (x := self._ratio(m, STOCK_INSTANCES))]),
            step_bytes=Spread.of([_step_bytes(m) for m in runs]),
            hidden_limit=Spread.of(
                [x for m in runs if kind in STOCKS and (x := self._hidden_limit(m))]
            ),
            expected=Spread.of([m.choices[-1]["share"] for m in runs if m.choices]),
            later=Spread.of([x for m in runs if (x := self._later(m))]),
        )  # fmt: skip

    def _ratio(self, run: Measurement, other_kind: str) -> float | None:
        other = self._runs.get((other_kind, run.rate, run.repeat))
        return run.tokens_per_second / other.tokens_per_second if other else None

    def _later(self, run: Measurement) -> float | None:
        ideal = self._runs.get((IDEAL, run.rate, run.repeat))
        seconds = run.seconds_after(ADAPTING_SYNCS)
        if ideal is None or not seconds:
            return None
        return self._tokens / ideal.tokens_per_second / fmean(seconds)

    def _lost(self, run: Measurement) -> float | None:
        ideal = self._runs.get((IDEAL, run.rate, run.repeat))
        if ideal is None:
            return None
        step, ideal_step = (self._tokens / m.tokens_per_second for m in (run, ideal))
        return self._tau * (step - ideal_step)

    def _limit(self, run: Measurement) -> float | None:
        """Return the limit, from ideal step, link and bytes of the same repeat."""
        ideal = self._runs.get((IDEAL, run.rate, run.repeat))
        if ideal is None or not (wire_bytes := self._exact_bytes()):
            return None
        step = self._tokens / ideal.tokens_per_second
        return exact_limit(
            round_seconds=self._tau * step,
            exchange=8 * wire_bytes / self._bandwidth[run.rate, run.repeat],
            forward=self._forward_share * step,
        )

    def _hidden_limit(self, run: Measurement) -> float | None:
        """Return the limit with an exchange at every step, from numbers of the same repeat."""
        ideal = self._runs.get((IDEAL, run.rate, run.repeat))
        if ideal is None:
            return None
        step = self._tokens / ideal.tokens_per_second
        exchange = 8 * _step_bytes(run) / self._bandwidth[run.rate, run.repeat]
        return step / max(step, exchange)

    def _exact_bytes(self) -> float:
        """Return the bytes of a sync of all units in fp32; 0 where none was measured."""
        sent: dict[str, list[int]] = {}
        for run in self._runs.values():
            if run.kind not in RIVALS and sends_all_at_once(run.kind, self._tau):
                sent.setdefault(run.kind, []).extend(sync["wire_bytes"] for sync in run.syncs)
        return max((median(values) for values in sent.values() if values), default=0.0)


def _payload(run: Measurement) -> int:
    return sum(sync["wire_bytes"] for sync in run.syncs)


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
    Column(f"after {ADAPTING_SYNCS} syncs", "later", "{:.3f}"),
    Column("limit", lambda row: row.limit if row.of_limit else None, "{:.3f}"),
    Column("of limit", "of_limit", "{:.3f}", of=("min", "median")),
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
    """Write the picture: tokens/s as a share of the ideal, by link; the limit as a line."""
    links = list(dict.fromkeys(row.rate for row in rows))
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind != IDEAL))
    kinds.sort(key=lambda kind: (kind in STOCKS, kind in RIVALS))  # EDiT first
    is_crowded = len(kinds) > MAX_KINDS_WITH_NUMBERS
    with picture(path, figsize=(11, 5) if is_crowded else (8, 4.5)) as (figure, axes):
        from matplotlib import colormaps

        series = {
            _name(kind): {row.rate: row.of_ideal for row in rows if row.kind == kind}
            for kind in kinds
        }
        colors = colormaps["tab20" if is_crowded else "tab10"].colors  # type: ignore[attr-defined]
        draw_bars(axes, links, series, colors=colors, with_numbers=not is_crowded)
        limits = {row.rate: row.limit.median for row in rows if row.limit and row.of_limit}
        for number, (rate, limit) in enumerate(limits.items()):
            x = links.index(rate)
            label = "_nolegend_" if number else "limit of the exact method"
            axes.hlines(limit, x - 0.45, x + 0.45, colors="black", linestyles="dashed", label=label)
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
    is_named = kind in RIVALS or flag("strategy") in variants(1).get(kind, ())
    return kind if is_named else f"EDiT, {kind}"
