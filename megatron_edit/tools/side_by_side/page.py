"""Several runs on one HTML page, and their summary for the console."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.tools.compare.flags import model_of
from megatron_edit.tools.monitor.findings import MonitorFinding, list_findings
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.pages import render
from megatron_edit.tools.pages.tables import markdown_lines, meanings_of
from megatron_edit.tools.side_by_side.names import names_of
from megatron_edit.tools.side_by_side.pictures import make_charts, smoothing_tokens
from megatron_edit.tools.side_by_side.progress import RunCurves
from megatron_edit.tools.side_by_side.results import QUANTITIES, SHOWN_LEVELS, lines_of
from megatron_edit.tools.side_by_side.settings import DifferingSetting, differing_settings

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class SideBySide:
    """Several runs of which all files have been read.

    Attributes:
        runs: in the given order.
        width: tokens over which losses and speeds are averaged in the curves.
    """

    runs: Sequence[RunCurves]
    width: float

    @classmethod
    def of(cls, runs: Sequence[MonitoredRun]) -> SideBySide:
        """Return the runs with their names and curves.

        Args:
            runs: read already, their `run.json` included.

        Raises:
            UsageError: a folder is given twice.
        """
        names = names_of([run.folder for run in runs])
        named = [RunCurves.of(name, run) for name, run in zip(names, runs, strict=True)]
        return cls(named, smoothing_tokens(named))

    @property
    def problems(self) -> list[tuple[str, MonitorFinding]]:
        """Errors and warnings, with the name of the run."""
        return [(run.name, finding) for run in self.runs for finding in list_findings(run.run)
                if finding.level in SHOWN_LEVELS]  # fmt: skip

    @property
    def settings(self) -> list[DifferingSetting]:
        """Settings that differ."""
        return differing_settings([run.run.facts for run in self.runs if run.run.facts])


def render_runs(found: SideBySide) -> str:
    """Return the HTML page; it needs no other file and no network."""
    from markupsafe import Markup  # comes with jinja2

    runs, read_at = found.runs, max(run.run.read_at for run in found.runs)
    values: dict[str, Any] = {
        "title": f"{len(runs)} runs side by side",
        "subtitle": _subtitle(runs),
        "quantities": QUANTITIES,
        "lines": lines_of(runs, found.width),
        "problems": found.problems,
        "charts": [chart._replace(svg=Markup(chart.svg))
                   for chart in make_charts(runs, found.width)],
        "names": [run.name for run in runs],
        "settings": found.settings,
        "folders": [(run.name, run.run.folder.resolve()) for run in runs],
        "made": f"Read {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(read_at))}.",
    }  # fmt: skip
    return render(TEMPLATE, values)


def describe_runs(found: SideBySide) -> str:
    """Return the summary for the console, in Markdown: results, problems, settings that differ."""
    names = [run.name for run in found.runs]
    lines = lines_of(found.runs, found.width)
    parts = [markdown_lines(["run", *names], lines), meanings_of(QUANTITIES)]
    if problems := found.problems:
        parts.append("\n".join(f"- {name}, {each.level}: {each.text}" for name, each in problems))
    if settings := found.settings:
        values = [[each.name, *each.values] for each in settings]
        parts.append(markdown_lines(["setting that differs", *names], values))
    return "\n\n".join(parts)


def _subtitle(runs: Sequence[RunCurves]) -> str:
    """Return the model, and how many runs are over."""
    models = {model_of(run.run.facts.argv) for run in runs if run.run.facts}
    model = models.pop() if len(models) == 1 else "different models"
    over = sum(run.run.is_over for run in runs)
    state = "All runs have ended" if over == len(runs) else f"{over} of {len(runs)} runs have ended"
    return f"{state}{f'; {model}' if model else ''}."
