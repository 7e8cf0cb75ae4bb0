"""The picture of the quickstart: losses of its runs, and bytes between their replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHING = 15  # iterations; single batches vary more than the two runs differ


@dataclass(frozen=True)
class Style:
    """Style of a run. Two runs with equal losses remain visible: a narrow line over a wide one."""

    color: str
    width: float
    marker: str
    marker_size: float


# The first run is drawn over the second.
STYLES = (Style("#1f4e9c", 1.4, "o", 5), Style("#f2a65a", 5.0, "s", 10))


@dataclass(frozen=True)
class Curve:
    """Losses and bytes of one run.

    Attributes:
        name: of the run.
        losses: training loss by iteration.
        validation: validation loss by iteration.
        bytes_total: payload between replicas in the run.
        bytes_synchronous: the part of it that EDiT's synchronous steps exchanged.
    """

    name: str
    losses: Mapping[int, float]
    validation: Mapping[int, float]
    bytes_total: float
    bytes_synchronous: float = 0


def draw(path: Path, curves: Sequence[Curve], *, warmup_steps: int, tokens_per_step: int) -> None:
    """Write the picture: training losses, validation losses and bytes, a panel each.

    Args:
        path: image file; its suffix is the format.
        curves: the runs.
        warmup_steps: end of EDiT's warm-up, marked by a line.
        tokens_per_step: for the label of the axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (training, validation, cost) = plt.subplots(
        1, 3, figsize=(11, 4.4), width_ratios=(5, 5, 3), layout="constrained", facecolor="white"
    )
    figure.suptitle("The same model on the same samples")
    for curve, style in reversed(list(zip(curves, STYLES, strict=False))):
        means = running_mean(list(curve.losses.values()), SMOOTHING)
        training.plot(
            list(curve.losses), means, color=style.color, linewidth=style.width, label=curve.name
        )
        validation.plot(
            list(curve.validation), list(curve.validation.values()), color=style.color,
            linewidth=style.width, marker=style.marker, markersize=style.marker_size,
            label=curve.name,
        )  # fmt: skip
    training.set_title(f"training loss, mean of {SMOOTHING} iterations", fontsize=10)
    validation.set_title("validation loss", fontsize=10)
    for axes in (training, validation):
        axes.axvline(warmup_steps, color="gray", linestyle=":", label="end of EDiT's warm-up")
        axes.set_xlabel(f"iteration ({tokens_per_step} tokens each)")
        axes.set_ylabel("loss per token (nats)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    _draw_bytes(cost, curves)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return means of `width` neighbouring values around each value; fewer at the ends."""
    reach = width // 2
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _draw_bytes(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw a bar for each run; EDiT's synchronous steps are hatched."""
    for place, (curve, style) in enumerate(zip(curves, STYLES, strict=False)):
        total, synchronous = curve.bytes_total / 1e6, curve.bytes_synchronous / 1e6
        axes.bar(place, total, color=style.color)
        text = f"{total:,.0f}"
        if synchronous:
            axes.bar(place, synchronous, color="none", edgecolor="white", hatch="//")
            text += f",\n{synchronous:,.0f} of them\nin synchronous\nsteps"
        axes.text(place, total, text, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(curves)), [curve.name.replace(", ", ",\n") for curve in curves])
    axes.margins(y=0.15)
    axes.set_ylabel("MB between replicas, whole run")
    axes.set_title("bytes exchanged", fontsize=10)
