"""The picture of the quickstart: training loss and validation loss of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.tools.pages.drawing import running_mean

SMOOTHING = 15  # iterations; single batches of a small run differ by more than the runs do


@dataclass(frozen=True)
class Curve:
    """One run: its name and its losses by iteration."""

    name: str
    losses: Mapping[int, float]
    validation: Mapping[int, float]


def draw(path: Path, curves: Sequence[Curve], *, warmup_steps: int, tokens_per_step: int) -> None:
    """Writes the picture.

    Args:
        path: image file; its suffix is the format.
        curves: the runs.
        warmup_steps: where the replicas stop averaging every step; marked by a line.
        tokens_per_step: for the label of the axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for curve, color in zip(curves, ("tab:blue", "tab:orange"), strict=False):
        steps, losses = list(curve.losses), list(curve.losses.values())
        axes.plot(steps, losses, color=color, alpha=0.2, linewidth=1)
        axes.plot(
            steps, running_mean(losses, SMOOTHING), color=color, label=f"{curve.name}: training"
        )
        axes.plot(
            list(curve.validation),
            list(curve.validation.values()),
            "o",
            color=color,
            markeredgecolor="black",
            label=f"{curve.name}: validation",
        )
    axes.axvline(warmup_steps, color="gray", linestyle=":", label="end of EDiT's warm-up")
    axes.set_title("The same model on the same samples")
    axes.set_xlabel(f"iteration ({tokens_per_step} tokens each)")
    axes.set_ylabel(f"loss per token (nats; mean of {SMOOTHING} iterations)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
