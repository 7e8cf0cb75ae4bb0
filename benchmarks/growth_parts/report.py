"""The results of benchmarks/growth.py for people: tables and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from frame.gpt import link_name
from frame.page import cells, error_lengths, picture, table

from .analysis import Fit, Row
from .cases import Sweep

BYTES_HEADER = (
    "sweep", "layers", "hidden", "N", "units", "parameters", "sent (MB / sync)",
    "interface (MB / sync)", "interface / sent", "control (bytes)", "control (%)",
    "ring factor", "2 (N - 1) / N",
)  # fmt: skip
SECONDS_HEADER = ("sweep", "layers", "hidden", "N", "link", "sync (ms): min", "median", "max",
                  "bound (ms)", "median / bound", "beyond, per unit (ms)")  # fmt: skip
FIT_HEADER = ("link", "of the", "a (ms)", "b (ns / byte)", "link alone (ns / byte)",
              "c (ms / unit)", "R^2", "largest residual (%)")  # fmt: skip
# The size that a sweep changes, and how the picture's axis calls it.
AXES: dict[str, tuple[str, Callable[[Row], float]]] = {
    "units": ("units", lambda row: row.units),
    "replicas": ("replicas", lambda row: row.case.num_replicas),
    "parameters": ("parameters (millions)", lambda row: row.parameters / 1e6),
}


def markdown(all_sweeps: Sequence[Sweep], rows: Sequence[Row], fits: Sequence[Fit]) -> str:
    """Three tables: bytes, seconds, fits."""
    chosen = [(sweep.name, row) for sweep in all_sweeps for row in _of(sweep, rows)]
    # Bytes are the same on every link; the interface is shown for the first.
    first = rows[0].rate if rows else None
    sent = [_sizes(name, row) + _bytes(row) for name, row in chosen if row.rate == first]
    took = [_seconds(name, row) for name, row in chosen]
    tables = [table(BYTES_HEADER, sent), table(SECONDS_HEADER, took)]
    if fits:
        tables.append(table(FIT_HEADER, [_fit(one) for one in fits]))
    return "\n\n".join(tables)


def _of(sweep: Sweep, rows: Sequence[Row]) -> list[Row]:
    return [row for case in sweep.cases for row in rows if row.case == case]


def _sizes(name: str, row: Row) -> list[str]:
    case = row.case
    return [name, *(str(n) for n in (case.num_layers, case.hidden_size, case.num_replicas))]


def _bytes(row: Row) -> list[str]:
    counted, n = row.interface_bytes, row.case.num_replicas
    return [
        str(row.units),
        str(row.parameters),
        f"{row.wire_bytes / 1e6:.3f}",
        f"{counted / 1e6:.3f}" if counted else "",
        f"{counted / row.wire_bytes:.4f}" if counted else "",
        str(row.control_bytes),
        f"{100 * row.control_share:.3f}",
        f"{row.ring_factor:.4f}",
        f"{2 * (n - 1) / n:.4f}",
    ]


def _seconds(name: str, row: Row) -> list[str]:
    spread = row.seconds
    return [
        *_sizes(name, row),
        link_name(row.rate),
        *cells(spread, "{:.1f}", 1e3),
        f"{1e3 * row.bound:.1f}",
        f"{spread.median / row.bound:.2f}" if row.bound else "",
        f"{1e3 * row.beyond_per_unit:.2f}",
    ]


def _fit(one: Fit) -> list[str]:
    return [
        link_name(one.rate),
        one.statistic,
        f"{1e3 * one.per_sync:.1f}",
        f"{1e9 * one.per_byte:.2f}",
        f"{1e9 * one.link_per_byte:.2f}",
        f"{1e3 * one.per_unit:.2f}",
        f"{one.r_squared:.4f}",
        f"{100 * max(map(abs, one.residuals.values())):.1f}",
    ]


def draw(path: Path, all_sweeps: Sequence[Sweep], rows: Sequence[Row]) -> None:
    """Writes the picture: seconds of a sync over each size, a colour per link; bounds dashed."""
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
        if rate is not None:  # without a limit there is no link to be bound by, only a copy
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
