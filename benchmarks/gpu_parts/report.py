"""The page and the picture of benchmarks/gpu_check.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frame.page import picture, table


def markdown(summary: Mapping[str, Any], failures: Sequence[str]) -> str:
    """All of it."""
    head = f"{summary['device']} x {summary['num_devices']}, "
    head += f"{summary['copy_rate'] / 1e9:.0f} GB/s read and written in a copy"
    verdict = "\n".join(f"- FAILED: {line}" for line in failures) or "All checks passed."
    parts = [head, verdict, _cases(summary["rows"])]
    if summary["sync_costs"]:
        parts += [_costs(summary["sync_costs"]), _marks(summary["marks"])]
    return "\n\n".join(parts)


def _cases(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["case", "between replicas", "syncs", "replicas equal", "loss", "from the CPU's",
              "step (ms)", "exposed per sync (ms)", "beyond the median step",
              "device bytes per parameter", "beyond stock"]  # fmt: skip
    lines = [
        [
            row["case"],
            row["backend"] or "",
            str(row["syncs"]),
            ("yes" if row["are_equal"] else "NO") if row["syncs"] else "",
            f"{row['first_loss']:.3f} -> {row['last_loss']:.3f}",
            _cell(row["distance"], "{:.2%}"),
            f"{row['step_ms']:.1f}",
            f"{row['exposed_ms']:.1f}" if row["syncs"] else "",
            f"{row['share_beyond_median_step']:.1%}",
            _cell(row["bytes_per_parameter"], "{:.1f}"),
            _cell(row["bytes_beyond_stock"], "{:+.1f}"),
        ]
        for row in rows
    ]
    return table(header, lines)


def _costs(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["one sync", "launches", "per unit", "device (ms)", "least (ms)",
              "bytes per element", "least"]  # fmt: skip
    lines = [
        [
            row["case"],
            str(row["launches"]),
            f"{row['launches_per_unit']:.1f}",
            _cell(row["device_ms"], "{:.2f}"),
            f"{row['least_ms']:.2f}",
            _cell(row["bytes_per_element"], "{:.0f}"),
            str(row["least_bytes_per_element"]),
        ]
        for row in rows
    ]
    return table(header, lines)


def _marks(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["case", "mark", "count", "launches", "host (ms)", "device (ms)", "transfers (ms)",
              "bytes per element"]  # fmt: skip
    lines = [
        [
            row["case"],
            row["mark"],
            str(row["count"]),
            str(row["launches"]),
            f"{row['host_ms']:.2f}",
            _cell(row["device_ms"], "{:.2f}"),
            _cell(row["transfer_ms"], "{:.2f}"),
            _cell(row["bytes_per_element"], "{:.0f}"),
        ]
        for row in rows
    ]
    return table(header, lines)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Time beyond the median step, and device memory, of each case."""
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
