"""The results of benchmarks/overlap.py for people: a table and a picture; and what it ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_edit.flags import flag

from .analysis import Row, Spread
from .kinds import IDEAL, STOCK, link_name, variants
from .rivals import RIVALS
from .runs import REPOSITORY

PACKAGES = ("megatron-edit", "megatron-core", "torch", "numpy")
CROWDED = 6  # kinds; of more, the picture has no room for numbers
HEADER = (
    "link", "link measured (Mbit/s)", "training", "ms / iteration", "tokens/s",
    "of ideal: min", "median", "max", "limit", "of limit: min", "median", "x stock",
    "exposed (ms / sync)", "of it waiting", "lost (ms / round)",
)  # fmt: skip


def markdown(rows: Sequence[Row]) -> str:
    """The table; medians where no more is said."""
    lines = [_line(HEADER), _line("---" for _ in HEADER)]
    for row in rows:
        limit = row.limit if row.of_limit else None
        cells = [
            link_name(row.rate),
            _middle(row.bandwidth, "{:.1f}", 1e-6),
            row.kind,
            _middle(row.step_seconds, "{:.1f}", 1e3),
            _middle(row.tokens_per_second, "{:.0f}"),
            *_ends(row.of_ideal),
            _middle(limit, "{:.3f}"),
            *_ends(row.of_limit)[:2],
            _middle(row.of_stock, "{:.2f}"),
            _middle(row.exposed, "{:.1f}", 1e3),
            _middle(row.waited, "{:.1f}", 1e3),
            _middle(row.lost, "{:.1f}", 1e3),
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _middle(spread: Spread | None, form: str, factor: float = 1.0) -> str:
    return form.format(spread.median * factor) if spread else ""


def _ends(spread: Spread | None) -> list[str]:
    return [f"{x:.3f}" for x in (spread.min, spread.median, spread.max)] if spread else [""] * 3


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Writes the picture: tokens/s as parts of the ideal, by link; the limit as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    links = list(dict.fromkeys(row.rate for row in rows))
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind != IDEAL))
    kinds.sort(key=lambda kind: (kind == STOCK, kind in RIVALS))  # EDiT first
    width = 0.8 / max(1, len(kinds))  # none where all have failed
    is_crowded = len(kinds) > CROWDED
    size = (11, 5) if is_crowded else (8, 4.5)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    colors = plt.get_cmap("tab20" if is_crowded else "tab10").colors  # type: ignore[attr-defined]
    for number, kind in enumerate(kinds):
        found = {row.rate: row.of_ideal for row in rows if row.kind == kind}
        cases = [(x, s) for x, rate in enumerate(links) if (s := found.get(rate)) is not None]
        shift = (number - (len(kinds) - 1) / 2) * width
        middles = [s.median for _, s in cases]
        errors = [[s.median - s.min for _, s in cases], [s.max - s.median for _, s in cases]]
        bars = axes.bar(
            [x + shift for x, _ in cases], middles, width * 0.95, yerr=errors,
            capsize=0 if is_crowded else 3, label=_name(kind), color=colors[number],
        )  # fmt: skip
        if not is_crowded:
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
    limits = {row.rate: row.limit.median for row in rows if row.limit and row.of_limit}
    for number, (rate, limit) in enumerate(limits.items()):
        x = links.index(rate)
        label = "_nolegend_" if number else "limit of the exact method"
        axes.hlines(limit, x - 0.45, x + 0.45, colors="black", linestyles="dashed", label=label)
    axes.set_xticks(range(len(links)), [link_name(rate) for rate in links])
    axes.set_ylabel("tokens/s, part of the ideal (no exchange)")
    axes.set_xlabel("link between the hosts")
    axes.set_title("Speed by link: median, least and most of the repeats")
    axes.grid(axis="y", alpha=0.3)
    if is_crowded:
        figure.legend(loc="outside right upper")
    else:
        axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _name(kind: str) -> str:
    """In the legend."""
    if kind == STOCK:
        return "stock DistOpt, overlapped"
    is_named = kind in RIVALS or flag("strategy") in variants(1).get(kind, ())
    return kind if is_named else f"EDiT, {kind}"


def environment() -> dict[str, Any]:
    """Versions and machine, for the record."""
    versions: dict[str, Any] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None  # run from a checkout
    return versions | {
        "commit": _output("git", "-C", str(REPOSITORY), "rev-parse", "HEAD"),
        "changed_files": len(
            _output("git", "-C", str(REPOSITORY), "status", "--porcelain").splitlines()
        ),
        "iproute2": _output("ip", "-V"),
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "")


def _output(*argv: str) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
