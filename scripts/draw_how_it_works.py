"""Draw docs/dev/how-it-works.png: the phases of a run, and one sync in the forward pass.

python scripts/draw_how_it_works.py [--output FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from script_errors import OneLineParser, exit_code_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGET = Path(__file__).resolve().parents[1] / "docs" / "dev" / "how-it-works.png"
WARMUP, INNER, WIRE, OUTER, SHARED = "#9aa5b1", "#4c78a8", "#f58518", "#54a24b", "#b279a2"
NUM_WARMUP, TAU, NUM_ROUNDS = 4, 6, 3
UNITS = ("embedding", "layer 1", "layer 2", "layer 3", "layer 4", "final")


@dataclass(frozen=True)
class Block:
    """A time span in a lane, with its color and text."""

    lane: float
    start: float
    length: float
    color: str
    text: str = ""


def main() -> int:
    """Write the picture."""
    parser = OneLineParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=TARGET, help="(default: %(default)s)")
    draw(parser.parse_args().output)
    return 0


def draw(path: Path) -> None:
    """Draw both panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (phases, sync) = pyplot.subplots(2, 1, figsize=(10, 5.6), height_ratios=(3, 4))
    _draw_phases(phases)
    _draw_sync(sync)
    figure.tight_layout(h_pad=2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_phases(axes: Axes) -> None:
    """Draw two replicas: averaged gradients, then rounds; a sync spans both."""
    end = NUM_WARMUP + NUM_ROUNDS * TAU
    blocks = [
        Block(lane, step, 0.9, WARMUP if step < NUM_WARMUP else INNER)
        for lane in (1, 0)
        for step in range(end)
    ]
    _draw_blocks(axes, blocks)
    for step in range(NUM_WARMUP):
        axes.annotate("", (step + 0.45, 0.62), (step + 0.45, 0.38), arrowprops=_arrow(WARMUP))
    for number in range(1, NUM_ROUNDS + 1):
        x = NUM_WARMUP + number * TAU - 0.05
        axes.plot([x, x], [-0.42, 1.42], color=WIRE, linewidth=3)
        axes.text(x, 1.5, f"sync {number}", color=WIRE, ha="center", va="bottom", fontsize=9)
    x = NUM_WARMUP - 0.05
    axes.plot([x, x], [-0.42, 1.42], color=OUTER, linewidth=2, linestyle=":")
    axes.text(x, 1.5, "switch: anchor", color=OUTER, ha="center", va="bottom", fontsize=9)
    axes.text(NUM_WARMUP / 2, -0.55, "warm-up: gradients\nare averaged at every step",
              ha="center", va="top", fontsize=9, color="#555555")  # fmt: skip
    axes.text((NUM_WARMUP + end) / 2, -0.55, "rounds of tau steps: no exchange between "
              "replicas between two syncs",
              ha="center", va="top", fontsize=9, color=INNER)  # fmt: skip
    _set_lanes(axes, {1: "replica 0", 0: "replica 1"}, (-0.2, end + 0.2), (-1.3, 1.9))
    axes.set_title("A run", loc="left", fontsize=11)


def _draw_sync(axes: Axes) -> None:
    """Draw one sync of one replica: compute and link, with the outer steps between layers."""
    begin, exchange_length, layer_length = 4.2, 2.1, 2.2
    blocks = [
        Block(2, 0, 3, INNER, "optimizer, last step"), Block(2, 3.1, 1, SHARED, "norms"),
        Block(1, 4.0, 0.25, SHARED),
    ]  # fmt: skip
    now = begin + 0.1
    landed = begin
    for unit in UNITS:
        landed += exchange_length
        blocks.append(Block(1, landed - exchange_length + 0.05, exchange_length - 0.1, WIRE, unit))
        start = max(now, landed)
        blocks.append(Block(2, start, 0.28, OUTER))
        blocks.append(Block(2, start + 0.3, layer_length - 0.5, INNER, unit))
        now = start + layer_length - 0.15
    blocks.append(Block(2, now, 3, INNER, "backward ..."))
    _draw_blocks(axes, blocks)
    axes.text(4.2, 0.35, "control records: norms, losses and counts of all replicas; from them "
              "every rank computes\nwhich replicas are left out, and the weights",
              fontsize=9, color=SHARED, ha="left", va="top")  # fmt: skip
    axes.text(4.2, -0.45, "green: average, clip, Nesterov outer step of one unit, "
              "just before its layer computes", fontsize=9, color=OUTER,
              ha="left", va="top")  # fmt: skip
    _set_lanes(axes, {2: "compute", 1: "link"}, (-0.2, now + 3.2), (-0.9, 2.6))
    axes.set_title("A sync, in the forward pass of one replica: while a layer computes, "
                   "the next units are exchanged", loc="left", fontsize=11)  # fmt: skip


def _draw_blocks(axes: Axes, blocks: Sequence[Block]) -> None:
    for each in blocks:
        axes.broken_barh([(each.start, each.length)], (each.lane - 0.3, 0.6), color=each.color)
        axes.text(each.start + each.length / 2, each.lane, each.text, ha="center", va="center",
                  fontsize=8, color="white")  # fmt: skip


def _arrow(color: str) -> dict[str, object]:
    return {"arrowstyle": "<->", "color": color, "shrinkA": 0, "shrinkB": 0}


def _set_lanes(
    axes: Axes, names: dict[int, str], width: tuple[float, float], height: tuple[float, float]
) -> None:
    axes.set_yticks(list(names), list(names.values()))
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.set_xlim(*width)
    axes.set_ylim(*height)
    for side in axes.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    sys.exit(exit_code_of("draw_how_it_works", main))
