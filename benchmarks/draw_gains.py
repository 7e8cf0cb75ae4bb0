"""Draw docs/gains.png: EDiT's speed over slow links, and its cost in loss.

    python benchmarks/draw_gains.py [--output FILE] [--print]

Reads benchmarks/results/overlap_2cpu_202611.json, delayed_2cpu_202611.json and convergence.json.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from frame.gpt import link_name
from frame.page import Spread, draw_bars, draw_or_print, picture
from frame.study import read_one, read_series

BENCHMARKS = Path(__file__).resolve().parent
RESULTS = BENCHMARKS / "results"
TARGET = BENCHMARKS.parent / "docs" / "gains.png"
RATES = (None, 1e9, 100e6, 20e6)
STOCK, EDIT, DELAYED, TORCHFT = (
    "stock Megatron, its overlaps on",
    "EDiT, tau 40",
    "EDiT, tau 40, delay 8, int8",
    "torchft streaming DiLoCo, tau 40",
)
# By label: the kind of run in its study.
OVERLAP_KINDS = {STOCK: "stock", EDIT: "overlap"}
DELAYED_KINDS = {DELAYED: "staggered-int8", TORCHFT: "torchft-streaming"}
OVERLAP_SERIES = ("all links, three turns", "all links again")
# The parts with a delay of 8 steps, and torchft in the same repeats.
DELAYED_SERIES, DELAY = "a group for each layer", "delay 8"
FIRST_PART = 5  # earlier parts have steps of 128 tokens, or other connections
COLORS = {STOCK: "#9aa5b1", EDIT: "#4c78a8", DELAYED: "#9ecae9", TORCHFT: "#f58518"}
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Loss:
    """A setting of the convergence study: label and colour of its bar, and its runs."""

    label: str
    runs: str
    baseline: str = "marks: ddp"
    color: str = COLORS[EDIT]


LOSSES = (
    Loss("EDiT, tau 40", "marks-delay: edit, tau 40"),
    Loss("EDiT, tau 40, delay 8, int8,\nouter momentum 0.7",
         "marks-delay: 4 fragments, delay 8, outer-momentum 0.7, int8", color=COLORS[DELAYED]),
    Loss("DiLoCo, tau 16", "marks: diloco, tau 16", color="#b279a2"),
    Loss("EDiT, tau 16", "marks: edit, tau 16"),
    Loss("EDiT, tau 16, warm-up 25 %", "marks: edit, tau 16, warm-up 25 %"),
    Loss("EDiT, tau 16, warm-up 25 %,\n16 samples per step", "marks-batch: edit, 16 samples",
         baseline="marks-batch: ddp, 16 samples"),
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Final validation loss above that of stock DDP in percent: mean and standard deviation."""

    percent: float
    spread: float


def shares_of_ideal() -> dict[str, dict[float | None, Spread]]:
    """Return speed over that without exchange, by label and link, as spreads over the repeats."""
    ratios: dict[str, dict[float | None, list[float]]] = defaultdict(lambda: defaultdict(list))
    overlap = read_series(RESULTS / "overlap_2cpu_202611.json")
    for series in OVERLAP_SERIES:
        speed = {(run["kind"], run["rate"], run["repeat"]): run["tokens_per_second"]
                 for run in overlap[series]["runs"]}  # fmt: skip
        for label, kind in OVERLAP_KINDS.items():
            for (name, rate, repeat), tokens in speed.items():
                if name == kind:
                    ratios[label][rate].append(tokens / speed["ideal", rate, repeat])
    delayed = read_one(RESULTS / "delayed_2cpu_202611.json", DELAYED_SERIES)
    parts = {part["number"] for part in delayed["series"]
             if part["what"].startswith(DELAY) and part["number"] >= FIRST_PART}  # fmt: skip
    for label, kind in DELAYED_KINDS.items():
        for run in delayed["runs"]:
            if run["kind"] == kind and run["series"] in parts and run["of_ideal"] is not None:
                ratios[label][run["rate"]].append(run["of_ideal"])
    return {label: {rate: Spread.some(values) for rate, values in by_rate.items()}
            for label, by_rate in ratios.items()}  # fmt: skip


def costs() -> list[Cost]:
    """Return the cost of each of `LOSSES` over its baseline, seed by seed."""
    final = {
        run["what"]: run["final_loss"] for run in read_one(RESULTS / "convergence.json")["runs"]
    }
    found = []
    for loss in LOSSES:
        percents = [
            100 * (final[f"{loss.runs}, seed {seed}"] / final[f"{loss.baseline}, seed {seed}"] - 1)
            for seed in SEEDS
        ]
        found.append(Cost(mean(percents), stdev(percents)))
    return found


def draw(path: Path) -> None:
    """Draw both panels on a white background, which is readable on dark pages, too."""
    options: dict[str, Any] = {"figsize": (11, 4.6), "width_ratios": (3, 2), "facecolor": "white"}
    with picture(path, ncols=2, **options) as (figure, (speed, loss)):
        figure.suptitle("EDiT on two CPU cores over gloo: the speed it keeps over slow links, "
                        "and the loss that it costs", fontsize=12)  # fmt: skip
        _draw_speed(speed)
        _draw_loss(loss, costs())


def _draw_speed(axes: Any) -> None:
    found = shares_of_ideal()
    draw_bars(axes, RATES, found, colors=[COLORS[label] for label in found], with_numbers=False)
    for number, spreads in enumerate(found.values()):
        for x, rate in enumerate(RATES):
            where = x + (number - (len(found) - 1) / 2) * 0.8 / len(found)
            text = f"{spreads[rate].median:.2g}" if rate in spreads else "?"
            height = spreads[rate].max if rate in spreads else 0
            axes.text(where, height + 0.015, text, ha="center", va="bottom", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(RATES)), [link_name(rate) for rate in RATES])
    axes.set_ylim(0, 1.42)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.set_xlabel("link between two hosts, one replica on each")
    axes.set_ylabel("share of the speed without any exchange")
    axes.set_title(
        "5.2 million parameters; median, least and most of 3 to 12 repeats; ?: not measured",
        fontsize=9,
    )
    axes.legend(loc="upper center", ncols=2, fontsize=8, frameon=False)


def _draw_loss(axes: Any, found: Sequence[Cost]) -> None:
    places = range(len(found))
    axes.barh(places, [cost.percent for cost in found], color=[loss.color for loss in LOSSES],
              xerr=[cost.spread for cost in found], capsize=2)  # fmt: skip
    for place, cost in zip(places, found, strict=True):
        text = f"+{cost.percent:.2f} %"
        axes.text(cost.percent + cost.spread + 0.1, place, text, va="center", fontsize=8)
    axes.set_yticks(places, [loss.label for loss in LOSSES], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 8.5)
    axes.set_xlabel("final validation loss above stock DDP's (%)")
    axes.set_title("1.1 million parameters, 4 replicas, 960 steps of\n8 samples each; mean and "
                   "standard deviation of 3 seeds", fontsize=9)  # fmt: skip
    axes.grid(axis="x", alpha=0.3)


def numbers() -> Iterator[str]:
    """Yield the numbers of both panels, a line for each bar."""
    for label, by_rate in shares_of_ideal().items():
        for rate, spread in by_rate.items():
            yield (f"{label}; {link_name(rate)}: {spread.median:.4f} "
                   f"({spread.min:.4f}, {spread.max:.4f})")  # fmt: skip
    for loss, cost in zip(LOSSES, costs(), strict=True):
        yield f"{loss.runs}: {cost.percent:+.2f} % ({cost.spread:.2f})"


if __name__ == "__main__":
    draw_or_print(__doc__, TARGET, draw, numbers)
