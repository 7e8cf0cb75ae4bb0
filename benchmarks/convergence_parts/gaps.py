"""The picture of the page for users: loss above stock DDP's by interval, samples and size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from frame.page import picture

from megatron_edit.tools.pages.drawing import COLORS

from .answers import Answers, gap
from .fit import PUBLISHED, PowerLaw, loss_ratio
from .quality import LONG, SHORT, muon, plain, recommended
from .study import NUM_REPLICAS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Panel = Callable[["Axes"], None]


def draw_gaps(path: Path, answers: Answers) -> bool:
    """Write the picture: a panel for each axis with finished runs; False if none has."""
    panels = [panel for panel in (_by_tau(answers), _by_samples(answers), _by_size(answers))
              if panel is not None]  # fmt: skip
    if not panels:
        return False
    width = 5 * len(panels)
    options = {"figsize": (width, 4), "facecolor": "white", "squeeze": False}
    with picture(path, dpi=110, ncols=len(panels), **options) as (_, grid):
        for axes, panel in zip(grid.flat, panels, strict=True):
            panel(axes)
            axes.axhline(0, color="black", linewidth=0.8, linestyle=":")
            axes.set_ylabel("validation loss beside stock DDP (%)")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    return True


def tau_series(answers: Answers) -> dict[str, list[tuple[float, float, float]]]:
    """By label: tau, the gap to the DDP of the same inner optimizer, and its deviation."""
    muon_ddp = answers.line("quality-muon", muon("ddp"))
    wanted = {
        "EDiT": ("quality", plain, answers.baseline),
        "recommended setting": ("quality", recommended, answers.baseline),
        "recommended, Muon beside Muon": (
            "quality-muon", lambda tau: muon(recommended(tau)), muon_ddp,
        ),
    }  # fmt: skip
    found: dict[str, list[tuple[float, float, float]]] = {}
    for label, (question, name, base) in wanted.items():
        for tau in (SHORT, LONG):
            if (spread := gap(answers.line(question, name(tau)), base)) is not None:
                point = (float(tau), spread.mean, spread.deviation or 0.0)
                found.setdefault(label, []).append(point)
    return found


def _by_tau(answers: Answers) -> Panel | None:
    series = tau_series(answers)

    def panel(axes: Axes) -> None:
        for number, (label, points) in enumerate(series.items()):
            taus, means, deviations = zip(*points, strict=True)
            axes.errorbar(taus, _percent(means), yerr=_percent(deviations), fmt="o-", capsize=3,
                          color=COLORS[number], label=label)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks([SHORT, LONG], [str(SHORT), str(LONG)])
        axes.set_xlabel("tau, steps between two syncs")

    return panel if series else None


def _by_samples(answers: Answers) -> Panel | None:
    points = answers.sample_gaps()
    law = answers.samples_law()

    def panel(axes: Axes) -> None:
        _points(axes, points, "recommended setting, one seed")
        if law is not None:
            _curve(axes, points, law.at, "fit")
        axes.set_xscale("log", base=2)
        axes.set_xticks([n for n, _ in points], [str(int(n)) for n, _ in points])
        axes.set_xlabel("samples of a replica in a step")

    return panel if points else None


def _by_size(answers: Answers) -> Panel | None:
    points, law = answers.size_gaps(), answers.size_law()

    def panel(axes: Axes) -> None:
        _points(axes, points, "recommended setting, one seed")
        if law is not None:
            _curve(axes, points, lambda numel: _gap_of(law, numel), "fit")
        _curve(axes, points, lambda numel: _gap_of(PUBLISHED, numel), "DiLoCo, 2503.09799")
        axes.set_xscale("log")
        axes.set_xlabel("parameters of the model")

    return panel if points else None


def _gap_of(law: PowerLaw, num_parameters: float) -> float:
    return loss_ratio(law, NUM_REPLICAS, num_parameters) - 1


def _points(axes: Axes, points: Sequence[tuple[float, float]], label: str) -> None:
    places, gaps = zip(*points, strict=True)
    axes.plot(places, _percent(gaps), "o", color=COLORS[0], label=label)


def _curve(
    axes: Axes, points: Sequence[tuple[float, float]], law: Callable[[float], float], label: str
) -> None:
    places = [place for place, _ in points]
    style = "-" if label == "fit" else "--"
    axes.plot(places, _percent([law(place) for place in places]), style, label=label)


def _percent(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]
