"""Draw docs/pareto.png: the loss of all strategies and wire types against the bytes they send.

    python benchmarks/draw_pareto.py [--output FILE] [--print]

Reads benchmarks/results/convergence.json: runs of four replicas of 1.1 million parameters with
Adam, 960 steps of 8 samples. Each point is the mean over the seeds of one member of a question.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from frame.page import draw_or_print, picture
from frame.study import read_one

BENCHMARKS = Path(__file__).resolve().parent
RESULTS = BENCHMARKS / "results" / "convergence.json"
TARGET = BENCHMARKS.parent / "docs" / "pareto.png"
BASELINE = "marks: ddp"
MOST_PERCENT = 22.0  # runs with more loss are not drawn
# Families of points, by the first pattern that a run's name matches; other runs are not drawn.
FAMILIES = (
    ("EDiT, two bits and less", r"coarse: edit.*(int2|ternary|sign)", "#54a24b"),
    ("SparseLoCo", r"coarse: sparse-loco", "#72b7b2"),
    ("EDiT, int8 and int4", r"marks(-wire|-delay): .*int(8|4)", "#9ecae9"),
    ("EDiT, moments averaged", r"outer: N 4, |quality: recommended", "#e45756"),
    ("EDiT, fp32", r"coarse: edit, tau 64(, fp32.*)?$|marks: edit|strategies: edit|"
     r"marks-delay: edit", "#4c78a8"),
    ("A-EDiT", r"strategies: a-edit", "#1f3b5c"),
    ("DiLoCo, SlowMo, local SGD, streaming DiLoCo",
     r"marks: (diloco|post)|strategies: (diloco|slowmo|local|post|stream)", "#b279a2"),
)  # fmt: skip
_RUN = re.compile(r"(?P<member>.*), seed \d+$")
_NOTED = {
    "coarse: edit, tau 64, int2, nu 0.9, mu_o 0.6": "int2, tau 64",
    "coarse: edit, tau 64, ternary, nu 1, mu_o 0.5": "ternary, tau 64",
    "coarse: edit, tau 64, sign, nu 1, mu_o 0.5": "sign, tau 64",
    "coarse: sparse-loco, tau 64": "tau 64",
    "coarse: sparse-loco, tau 16": "tau 16",
    "marks: edit, tau 16": "fp32, tau 16",
    "marks-wire: edit, tau 16, int4": "int4, tau 16",
    "outer: N 4, tau 8: nu 0.9, mu_o 0.6": "tau 8",
    "outer: N 4, tau 128: nu 0.9, mu_o 0.6": "tau 128",
}


@dataclass(frozen=True)
class Point:
    """A member of a question.

    Attributes:
        member: its name.
        family: index in `FAMILIES`.
        fewer: bytes of a step of stock DDP over those of a step after the warm-up.
        percent: final validation loss above that of stock DDP; the mean over the seeds.
        seeds: how many.
    """

    member: str
    family: int
    fewer: float
    percent: float
    seeds: int


def points() -> list[Point]:
    """Return all points, by family and with fewer and fewer bytes."""
    runs = {run["what"]: run for run in read_one(RESULTS)["runs"]}
    by_member: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for what, run in runs.items():
        if (match := _RUN.match(what)) is not None:
            seed = what[len(match["member"]) :]
            base = runs.get(BASELINE + seed)
            if base is not None and run["bytes_per_step"]:
                by_member[match["member"]].append(
                    {"percent": 100 * (run["final_loss"] / base["final_loss"] - 1),
                     "fewer": base["bytes_per_step"] / run["bytes_per_step"]}
                )  # fmt: skip
    found = []
    for member, each in by_member.items():
        family = next((n for n, (_, pattern, _) in enumerate(FAMILIES)
                       if re.match(pattern, member)), None)  # fmt: skip
        if family is not None:
            fewer, percent = (mean(run[name] for run in each) for name in ("fewer", "percent"))
            found.append(Point(member, family, fewer, percent, len(each)))
    return sorted(found, key=lambda point: (point.family, point.fewer))


def front(found: Sequence[Point]) -> list[Point]:
    """Return the points beside which none has at most the loss and fewer bytes."""
    best: list[Point] = []
    for point in sorted(found, key=lambda point: (-point.fewer, point.percent)):
        if not best or point.percent < best[-1].percent:
            best.append(point)
    return best


def draw(path: Path) -> None:
    """Draw on a white background, which is readable on dark pages, too."""
    found = [point for point in points() if point.percent <= MOST_PERCENT]
    with picture(path, figsize=(9, 5.4), facecolor="white") as (_, axes):
        line = front(found)
        axes.plot([p.fewer for p in line], [p.percent for p in line], color="#bbbbbb", zorder=1,
                  drawstyle="steps-pre", linewidth=1)  # fmt: skip
        for number, (label, _, color) in enumerate(FAMILIES):
            own = [point for point in found if point.family == number]
            axes.scatter([p.fewer for p in own], [p.percent for p in own], color=color,
                         label=label, s=36, zorder=2)  # fmt: skip
        for point in found:
            if (note := _NOTED.get(point.member)) is not None:
                axes.annotate(note, (point.fewer, point.percent), xytext=(5, -10), fontsize=8,
                              textcoords="offset points")  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlabel("bytes of stock DDP's step in fp32 over those of a step after the warm-up")
        axes.set_ylabel("final validation loss above stock DDP's (%)")
        axes.set_title("Loss against bytes: 1.1 million parameters, 4 replicas, 960 steps of 8 "
                       "samples;\nmeans of one to three seeds; grey: the best for its bytes",
                       fontsize=10)  # fmt: skip
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def numbers() -> Iterator[str]:
    """Yield a line for each point, with a star if it is one of `front`."""
    best = front(points())
    for point in points():
        mark = " *" if point in best else ""
        yield (f"{point.member}: 1/{point.fewer:.1f}, {point.percent:+.2f} %, "
               f"{point.seeds} seeds{mark}")  # fmt: skip


if __name__ == "__main__":
    draw_or_print(__doc__, TARGET, draw, numbers)
