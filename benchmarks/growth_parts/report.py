"""Analysis, the fit seconds = a + b bytes + c units, tables and picture of benchmarks/growth.py.

Seconds are those of a sync without waiting, `exposed - wait`: where hosts share cores, replicas
reach the meeting at different times, which is not a cost of the sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from frame.gpt import Link, link_name
from frame.page import ALL, Column, Spread, error_lengths, picture, table_of
from netlab import burst_bytes

from megatron_edit.comm.control import record_bytes

from .cases import DEFAULT_REPLICAS, Case, Sweep
from .runs import Reading

# The minimum over several syncs is least disturbed by other programs.
STATISTICS = ("median", "min")
BYTES_PER_PARAMETER = 4  # averages are sent in fp32
MIN_FITTED_CASES = 4  # more than the three coefficients, so that residuals are meaningful


@dataclass(frozen=True)
class Row:
    """All syncs of a case on a link.

    Attributes:
        wire_bytes: payload that a replica sent per sync, as recorded by EDiT.
        control_bytes: of these, its control record, sent to every other replica.
        ring_factor: the other bytes over 4 bytes per parameter; a ring sends 2 (N - 1) / N.
        interface_bytes: sent by a host's interface per sync, with headers and acknowledgements.
        seconds: of a sync, without waiting.
        bound: seconds that the link alone needs for `wire_bytes`.
    """

    case: Case
    rate: float | None
    units: int
    parameters: int
    wire_bytes: int
    control_bytes: int
    ring_factor: float
    interface_bytes: float | None
    seconds: Spread
    bound: float

    @property
    def control_share(self) -> float:
        """Share of control records in the bytes."""
        return self.control_bytes / self.wire_bytes

    @property
    def interface_share(self) -> float | None:
        """Bytes of the interface over those recorded by EDiT."""
        return self.interface_bytes / self.wire_bytes if self.interface_bytes else None

    @property
    def of_bound(self) -> float | None:
        """Seconds over the bound; None without one."""
        return self.seconds.median / self.bound if self.bound else None

    @property
    def beyond_per_unit(self) -> float:
        """Seconds of the median sync beyond the bound, per unit."""
        return (self.seconds.median - self.bound) / self.units


@dataclass(frozen=True)
class Fit:
    """The fit of one link, over the cases with the default number of replicas.

    Attributes:
        statistic: of a case's seconds that is fitted: "median" or "min".
        per_sync: a, seconds.
        per_byte: b, seconds.
        per_unit: c, seconds.
        link_per_byte: seconds that the link alone needs for a byte.
        r_squared: of the seconds themselves.
        residuals: per case of the fit, (measured - fitted) / measured.
    """

    rate: float | None
    statistic: str
    per_sync: float
    per_byte: float
    per_unit: float
    link_per_byte: float
    r_squared: float
    residuals: dict[str, float]

    @property
    def largest_residual(self) -> float:
        """Largest absolute residual."""
        return max(map(abs, self.residuals.values()))


def bound_seconds(wire_bytes: float, rate: float | None, bandwidth: float) -> float:
    """Return the minimal time in which a link can carry the bytes of a sync."""
    return max(0.0, wire_bytes - burst_bytes(rate)) * 8 / bandwidth


class Analysis:
    """Rows and fits of what was read.

    Args:
        tau: sync interval: a control record has room for as many losses.
    """

    def __init__(self, readings: Sequence[Reading], links: Sequence[Link], *, tau: int) -> None:
        self._readings, self._tau = readings, tau
        rates = dict.fromkeys(link.rate for link in links)
        self._bandwidth = {
            rate: median(link.bandwidth for link in links if link.rate == rate) for rate in rates
        }

    def rows(self) -> list[Row]:
        """Return a row for each link and case, in the order of measurement."""
        found: dict[tuple[float | None, Case], list[Reading]] = {}
        for one in self._readings:
            case = Case(one.num_layers, one.hidden_size, one.num_replicas)
            found.setdefault((one.rate, case), []).append(one)
        order = list(self._bandwidth)
        rows = [self._row(rate, case, readings) for (rate, case), readings in found.items()]
        return sorted(rows, key=lambda row: order.index(row.rate))

    def _row(self, rate: float | None, case: Case, readings: Sequence[Reading]) -> Row:
        one = readings[0]
        wire_bytes = round(median(n for reading in readings for n in reading.wire_bytes))
        others = case.num_replicas - 1
        control = others * record_bytes(self._tau, one.units, 0)
        seconds = [s["exposed"] - s["wait"] for reading in readings for s in reading.seconds]
        counted = [n for reading in readings for n in reading.interface_bytes or ()]
        return Row(
            case=case,
            rate=rate,
            units=one.units,
            parameters=one.parameters,
            wire_bytes=wire_bytes,
            control_bytes=control,
            ring_factor=(wire_bytes - control) / (BYTES_PER_PARAMETER * one.parameters),
            interface_bytes=median(counted) if counted else None,
            seconds=Spread.some(seconds),
            bound=bound_seconds(wire_bytes, rate, self._bandwidth[rate]),
        )

    def fits(self) -> list[Fit]:
        """Return a fit for each statistic of every link with enough cases."""
        rows = [row for row in self.rows() if row.case.num_replicas == DEFAULT_REPLICAS]
        by_rate = {rate: [row for row in rows if row.rate == rate] for rate in self._bandwidth}
        return [
            fit(some, statistic, 8 / self._bandwidth[rate])
            for rate, some in by_rate.items()
            if len(some) >= MIN_FITTED_CASES
            for statistic in STATISTICS
        ]


def fit(rows: Sequence[Row], statistic: str, link_per_byte: float) -> Fit:
    """Fit by least squares of the relative residuals, so that long syncs do not dominate."""
    terms = np.array([[1.0, row.wire_bytes, row.units] for row in rows])
    seconds = np.array([getattr(row.seconds, statistic) for row in rows])
    # Scale the columns to similar size, else the smallest would be treated as rank deficient.
    scale = np.abs(terms).max(axis=0)
    weighted = terms / scale / seconds[:, None]
    solution = np.linalg.lstsq(weighted, np.ones(len(rows)), rcond=None)[0] / scale
    errors = seconds - terms @ solution
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return Fit(
        rate=rows[0].rate,
        statistic=statistic,
        per_sync=float(solution[0]),
        per_byte=float(solution[1]),
        per_unit=float(solution[2]),
        link_per_byte=link_per_byte,
        r_squared=1.0 - float((errors**2).sum()) / spread if spread else 1.0,
        residuals={
            str(row.case): float(error / time)
            for row, error, time in zip(rows, errors, seconds, strict=True)
        },
    )


SIZES = (
    Column("sweep", lambda each: each[0]),
    Column("layers", lambda each: each[1].case.num_layers),
    Column("hidden", lambda each: each[1].case.hidden_size),
    Column("N", lambda each: each[1].case.num_replicas),
)
BYTES = (
    *SIZES,
    Column("units", lambda each: each[1].units),
    Column("parameters", lambda each: each[1].parameters),
    Column("sent (MB / sync)", lambda each: each[1].wire_bytes / 1e6, "{:.3f}"),
    Column("interface (MB / sync)", lambda each: each[1].interface_bytes, "{:.3f}", 1e-6),
    Column("interface / sent", lambda each: each[1].interface_share, "{:.4f}"),
    Column("control (bytes)", lambda each: each[1].control_bytes),
    Column("control (%)", lambda each: each[1].control_share, "{:.3f}", 100),
    Column("ring factor", lambda each: each[1].ring_factor, "{:.4f}"),
    Column("2 (N - 1) / N", lambda each: 2 - 2 / each[1].case.num_replicas, "{:.4f}"),
)
SECONDS = (
    *SIZES,
    Column("link", lambda each: link_name(each[1].rate)),
    Column("sync (ms)", lambda each: each[1].seconds, "{:.1f}", 1e3, of=ALL),
    Column("bound (ms)", lambda each: each[1].bound, "{:.1f}", 1e3),
    Column("median / bound", lambda each: each[1].of_bound, "{:.2f}"),
    Column("beyond, per unit (ms)", lambda each: each[1].beyond_per_unit, "{:.2f}", 1e3),
)
FITS = (
    Column("link", lambda fit: link_name(fit.rate)),
    Column("of the", "statistic"),
    Column("a (ms)", "per_sync", "{:.1f}", 1e3),
    Column("b (ns / byte)", "per_byte", "{:.2f}", 1e9),
    Column("link alone (ns / byte)", "link_per_byte", "{:.2f}", 1e9),
    Column("c (ms / unit)", "per_unit", "{:.2f}", 1e3),
    Column("R^2", "r_squared", "{:.4f}"),
    Column(
        "largest residual (%)", lambda fit: max(map(abs, fit.residuals.values())), "{:.1f}", 100
    ),
)
# By sweep: label of the x axis, and the size that changes.
AXES: dict[str, tuple[str, Callable[[Row], float]]] = {
    "units": ("units", lambda row: row.units),
    "replicas": ("replicas", lambda row: row.case.num_replicas),
    "parameters": ("parameters (millions)", lambda row: row.parameters / 1e6),
}


def markdown(all_sweeps: Sequence[Sweep], rows: Sequence[Row], fits: Sequence[Fit]) -> str:
    """Return three tables: bytes, seconds, fits."""
    chosen = [(sweep.name, row) for sweep in all_sweeps for row in _of(sweep, rows)]
    # Bytes are the same on every link; those of the interface are shown for the first.
    first = [each for each in chosen if each[1].rate == rows[0].rate]
    tables = [table_of(BYTES, first), table_of(SECONDS, chosen)]
    if fits:
        tables.append(table_of(FITS, fits))
    return "\n\n".join(tables)


def _of(sweep: Sweep, rows: Sequence[Row]) -> list[Row]:
    return [row for case in sweep.cases for row in rows if row.case == case]


def draw(path: Path, all_sweeps: Sequence[Sweep], rows: Sequence[Row]) -> None:
    """Write the picture: seconds of a sync by size, a colour per link; bounds dashed."""
    with picture(path, ncols=3, figsize=(13, 4.4), sharey=True) as (_, panels):
        for axes, sweep in zip(panels, all_sweeps, strict=True):
            label, size = AXES[sweep.name]
            _draw_sweep(axes, _of(sweep, rows), size)
            axes.set(xscale="log", yscale="log", xlabel=label, title=_title(sweep))
            sizes = sorted({size(row) for row in _of(sweep, rows)})
            axes.set_xticks(sizes, [f"{x:.3g}" for x in sizes])
            axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("seconds per sync, without waiting")
        entries = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
        panels[0].legend([entries[name] for name in sorted(entries)], sorted(entries), fontsize=8)


def _draw_sweep(axes: Any, rows: Sequence[Row], size: Callable[[Row], float]) -> None:
    for number, rate in enumerate(dict.fromkeys(row.rate for row in rows)):
        some = sorted((row for row in rows if row.rate == rate), key=size)
        places, spreads = [size(row) for row in some], [row.seconds for row in some]
        middles, errors = [s.median for s in spreads], error_lengths(spreads)
        style: dict[str, Any] = {"color": f"C{number}"}
        axes.errorbar(places, middles, errors, marker="o", capsize=3,
                      label=link_name(rate), **style)  # fmt: skip
        if rate is not None:  # without a limit the link gives no bound
            axes.plot(places, [row.bound for row in some], linestyle="dashed",
                      label=f"{link_name(rate)}: the link alone", **style)  # fmt: skip


def _title(sweep: Sweep) -> str:
    sizes = {
        "layers": {case.num_layers for case in sweep.cases},
        "hidden": {case.hidden_size for case in sweep.cases},
        "N": {case.num_replicas for case in sweep.cases},
    }
    held = [f"{name} {found.pop()}" for name, found in sizes.items() if len(found) == 1]
    return ", ".join(held)
