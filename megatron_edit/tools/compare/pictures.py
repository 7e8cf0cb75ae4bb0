"""The pictures of a comparison: loss by tokens, loss by time, bytes by step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_edit.tools.compare.analysis import ComparisonResult, is_synchronous
from megatron_edit.tools.compare.readings import Point, Reading
from megatron_edit.tools.pages.drawing import COLORS, png_axes, running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_SHARE = 25  # a running mean takes that part of a curve
MARKS = "osD^vPX*<>hd"


def draw(folder: Path, outcome: ComparisonResult) -> dict[str, Path]:
    """Write the pictures; their files by what they show. Without any reading there are none.

    Args:
        folder: takes `compare-<name>.png`.
        outcome: of the comparison; the curves are those of the first seed.
    """
    shown = _first_seeds(outcome)
    if not shown:
        return {}
    files = {}
    for title, name, fill in (
        ("Loss by tokens", "tokens", _loss_by_tokens),
        ("Loss by time in training", "time", _loss_by_time),
        ("Bytes sent by one replica, by step", "bytes", _bytes_by_step),
    ):
        path = folder / f"compare-{name}.png"
        with png_axes(path, title) as axes:
            fill(axes, outcome, shown)
        files[title] = path
    return files


def _first_seeds(outcome: ComparisonResult) -> dict[str, Reading]:
    """For each entry the reading of the first seed that has one."""
    found = {label: list(outcome.of_label(label).values()) for label in outcome.labels}
    return {label: readings[0] for label, readings in found.items() if readings}


def _loss_by_tokens(axes: Axes, outcome: ComparisonResult, shown: dict[str, Reading]) -> None:
    _losses(axes, outcome, shown, lambda point: point.tokens / 1e6)
    axes.set_xlabel("million tokens of all replicas")


def _loss_by_time(axes: Axes, outcome: ComparisonResult, shown: dict[str, Reading]) -> None:
    _losses(axes, outcome, shown, lambda point: point.seconds)
    axes.set_xlabel("seconds of training, without evaluations")


def _losses(
    axes: Axes,
    outcome: ComparisonResult,
    shown: dict[str, Reading],
    place: Callable[[Point], float],
) -> None:
    """Training as thin lines, smoothed; validation as marks."""
    for label in outcome.compared:
        reading = shown.get(label)
        if reading is None:
            continue
        color, mark = _style(outcome, label)
        points = reading.training
        smooth = running_mean([p.loss for p in points], max(1, len(points) // WIDTH_SHARE))
        axes.plot([place(p) for p in points], smooth, color=color, alpha=0.45, linewidth=1)
        marks = reading.validation
        losses = [p.loss for p in marks]
        axes.plot([place(p) for p in marks], losses, mark, color=color, markersize=5, label=label)
    axes.set_ylabel("loss per token (nats); marks: validation")


def _bytes_by_step(axes: Axes, outcome: ComparisonResult, shown: dict[str, Reading]) -> None:
    """Stairs, a stair for each exchange; on a scale on which equal factors look alike."""
    by_label = {run.entry.label: run for run in outcome.plan}
    for label in outcome.compared:
        reading = shown.get(label)
        if reading is None:
            continue
        sent = [(step, float(size)) for step, size in reading.syncs]
        if is_synchronous(by_label[label]):
            steps = range(reading.warmup_steps + 1, reading.iterations + 1)
            sent = [(step, reading.step_bytes) for step in steps]
        color, _ = _style(outcome, label)
        width = max(1.2, 4.5 - 0.8 * outcome.compared.index(label))  # equal ones show below others
        sums = list(accumulate(size / 1e6 for _, size in sent))
        ends = [(reading.iterations, sums[-1])] if sums else []  # flat to the end
        points = [*zip((step for step, _ in sent), sums, strict=True), *ends]
        axes.step([p[0] for p in points], [p[1] for p in points], where="post", color=color,
                  label=label, linewidth=width)  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("MB since the end of the warm-up")
    if any(reading.bytes_per_step for reading in shown.values()):
        axes.set_yscale("log")


def _style(outcome: ComparisonResult, label: str) -> tuple[str, str]:
    number = outcome.compared.index(label)
    return COLORS[number % len(COLORS)], MARKS[number % len(MARKS)]
