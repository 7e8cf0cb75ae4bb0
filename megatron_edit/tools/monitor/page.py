"""The page of a run, and of several runs side by side."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from megatron_edit.tools.compare.flags import model_of
from megatron_edit.tools.monitor import charts
from megatron_edit.tools.monitor.curves import RunCurves, smoothing_tokens
from megatron_edit.tools.monitor.findings import list_findings
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.summary import (
    QUANTITIES,
    SHOWN_LEVELS,
    UNSET,
    change_table,
    describe_members,
    describe_run,
    differing_settings,
    names_of,
    replica_table,
    result_columns,
    sync_table,
)
from megatron_edit.tools.pages import (
    Chart,
    Finding,
    Page,
    Section,
    Table,
    cells_of,
    markdown_meanings,
    markdown_table,
)
from megatron_edit.tools.pages.drawing import (
    COLORS,
    EMPTY,
    LINE_STYLES,
    Curve,
    Drawing,
    plot_losses,
    show_tokens,
    smoothed,
    svg_drawing,
)
from megatron_edit.tools.pages.texts import duration, number, short_name, show_count, time_unit

MAX_CHANGES_SHOWN, MAX_SYNCS_SHOWN = 50, 10
MAX_NAME_LETTERS = 40
SHOWN_SHARE = 0.9  # of the losses: the others may be above the axis
NUM_PLACES = 200  # points of a curve of speeds


@dataclass(frozen=True)
class Runs:
    """Several runs of which all files have been read, in the given order."""

    curves: Sequence[RunCurves]
    width: float  # tokens over which losses and speeds are averaged in the curves

    @classmethod
    def of(cls, runs: Sequence[MonitoredRun]) -> Runs:
        """Return the runs with their names and curves.

        Raises:
            UsageError: a folder is given twice.
        """
        names = names_of([run.folder for run in runs])
        named = [RunCurves.of(name, run) for name, run in zip(names, runs, strict=True)]
        return cls(named, smoothing_tokens(named))

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        return [each.name for each in self.curves]

    @property
    def results(self) -> dict[str, list[str]]:
        """The cells of the results, by quantity."""
        return cells_of(QUANTITIES, result_columns(self.curves, self.width))

    @property
    def findings(self) -> list[Finding]:
        """All findings on a single run; errors and warnings, with names, on several."""
        if len(self.curves) == 1:
            return list_findings(self.curves[0].run)
        return [
            finding._replace(where=each.name)
            for each in self.curves
            for finding in list_findings(each.run)
            if finding.level in SHOWN_LEVELS
        ]

    @property
    def settings(self) -> dict[str, list[str]]:
        """Settings that differ."""
        return differing_settings([each.run.facts for each in self.curves])

    def page(self) -> Page:
        """Return the page, with a column for each run."""
        read_at = max(each.run.read_at for each in self.curves)
        page = Page(
            title=f"{len(self.curves)} runs side by side",
            subtitle=_describe_runs(self.curves),
            names=self.names,
            results=self.results,
            meanings={each.title: each.meaning for each in QUANTITIES},
            findings=self.findings,
            sections=self._sections(),
            made=f"Read {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(read_at))}.",
        )
        return page if len(self.curves) > 1 else _page_of(self.curves[0].run, page)

    def _sections(self) -> list[Section]:
        if len(self.curves) == 1:
            return _sections_of(self.curves[0].run)
        settings = [[name, *values] for name, values in self.settings.items()]
        table = Table("Settings that differ", ["setting", *self.names], settings)
        none = "None: these runs have the same settings, flags, layout, versions and machine."
        folders = "\n".join(f"{each.name}: {each.run.folder.resolve()}" for each in self.curves)
        return [
            Section("Losses, speed and bytes", charts=_charts_of(self.curves, self.width)),
            Section(table.title, "" if settings else none, tables=[table] if settings else []),
            Section("Folders", code=folders, is_folded=True),
        ]

    def markdown(self) -> str:
        """Return the results, findings and settings that differ, for the console."""
        results = self.results
        parts = [
            markdown_table(["run", *self.names], [[name, *row] for name, row in results.items()]),
            markdown_meanings(each for each in QUANTITIES if each.title in results),
        ]
        if found := self.findings:
            parts.append("\n".join(f"- {each.where}, {each.level}: {each.text}" for each in found))
        if settings := self.settings:
            values = [[name, *each] for name, each in settings.items()]
            parts.append(markdown_table(["setting that differs", *self.names], values))
        return "\n\n".join(parts)


def _describe_runs(runs: Sequence[RunCurves]) -> str:
    """Return the model, and how many runs are over."""
    models = {model_of(each.run.facts.argv) for each in runs}
    model = models.pop() if len(models) == 1 else "different models"
    over = sum(each.run.is_over for each in runs)
    state = "All runs have ended" if over == len(runs) else f"{over} of {len(runs)} runs have ended"
    return f"{state}{f'; {model}' if model else ''}."


# ---- a single run


def _page_of(run: MonitoredRun, page: Page) -> Page:
    """Return the page of a single run: with its title, state and times."""
    parts = [describe_run(run)]
    if not run.is_over:
        if run.syncs.last_time is not None:
            parts.append(f"last sync {duration(max(0.0, run.read_at - run.syncs.last_time))} ago")
        parts.append(f"last write {duration(run.silence)} ago")
    left_out = ("strategy", "state", "problems")  # in the title, below it, and in the findings
    return Page(
        title=_title(run),
        subtitle="; ".join(parts) + ".",
        names=page.names,
        results={name: cells for name, cells in page.results.items() if name not in left_out},
        meanings=page.meanings,
        findings=page.findings,
        sections=page.sections,
        state=run.state,
        state_text=run.state_text,
        progress=run.progress,
        made=f"{page.made[:-1]} from {run.folder.resolve()}",
    )


def _title(run: MonitoredRun) -> str:
    """Return strategy, model, machine and date of the start.

    The date is the earlier one of `run.json` and the first sync: a copied file may be newer.
    """
    facts, model = run.facts, model_of(run.facts.argv)
    known = [at for at in (run.began_at, run.syncs.first_time) if at is not None]
    date = time.strftime("%Y-%m-%d", time.localtime(min(known, default=run.read_at)))
    what = f" of {model}" if model else ""
    return f"{facts.strategy.name}: training{what} on {facts.host}, {date}"


def _sections_of(run: MonitoredRun) -> list[Section]:
    facts, has_syncs = run.facts, bool(run.syncs.count)
    versions = ", ".join(f"{name} {text}" for name, text in sorted(facts.versions.items()))
    settings = [[name, UNSET if value is None else str(value)]
                for name, value in sorted(facts.config.items())]  # fmt: skip
    by_replica = [charts.speed_chart]
    by_sync: list[charts.Maker] = []
    if has_syncs:
        by_replica += [charts.replica_norm_chart, charts.score_chart, charts.anomaly_chart]
        by_sync = [charts.unit_norm_chart, charts.weight_chart, charts.clip_chart]
    changes = [change_table(run, MAX_CHANGES_SHOWN)] if run.membership.changes else []
    return [
        Section("Loss", charts=charts.make_charts(run, charts.loss_chart, charts.validation_chart)),
        Section(
            "Replicas",
            describe_members(run) if facts.is_elastic else "",
            charts.make_charts(run, charts.member_chart, *by_replica),
            [replica_table(run), *changes],
        ),
        Section(
            "Syncs",
            charts=charts.make_charts(run, charts.time_chart, charts.byte_chart, *by_sync),
            tables=[sync_table(run, MAX_SYNCS_SHOWN)] if has_syncs else [],
        ),
        Section(
            "Settings",
            f"{versions}; host {facts.host}.",
            tables=[Table("Settings", ["setting", "value"], settings)],
            code=shlex.join(facts.argv),
            is_folded=True,
        ),
    ]


# ---- charts of several runs


def _charts_of(runs: Sequence[RunCurves], width: float) -> list[Chart]:
    """Return all charts that the runs have data for."""
    found = []
    if any(run.training[0].size or run.validation[0].size for run in runs):
        found.append(_loss_by_tokens(runs, width))
    if any(run.training[0].size and run.seconds[0].size for run in runs):
        found.append(_loss_by_time(runs, width))
    if any(_speeds(run, width)[0].size for run in runs):
        found.append(_speed_chart(runs, width))
    if any(run.sent[0].size for run in runs):
        found.append(_byte_chart(runs))
    return found


def _loss_by_tokens(runs: Sequence[RunCurves], width: float) -> Chart:
    with _chart("loss-tokens") as drawing:
        _plot_losses(drawing, runs, width)
    note = f"Lines: training, each point a mean over {show_count(width)} tokens."
    if any(run.validation[0].size for run in runs):
        note += " Markers: validation."
    losses = {run.name: run.final_loss for run in runs if run.final_loss is not None}
    text = "Training losses of all runs."
    if losses:
        best = min(losses, key=losses.__getitem__)
        text = f"The lowest validation loss at the end is {losses[best]:.4f}, of {best}."
    return Chart("Loss by tokens", drawing.svg, text, note)


def _loss_by_time(runs: Sequence[RunCurves], width: float) -> Chart:
    longest = max(float(np.max(run.seconds[1], initial=0)) for run in runs)
    scale, unit = time_unit(longest)
    timed = [run for run in runs if run.seconds[0].size]
    with _chart("loss-time", f"{unit} of training") as drawing:
        _plot_losses(drawing, runs, width, scale)
    text = f"The same losses by time: {len(timed)} of {len(runs)} runs are shown."
    if len(timed) == len(runs):
        text = "The same losses by time in training."
    return Chart("Loss by time", drawing.svg, text, "Without start-up, evaluations and saves.")


def _plot_losses(
    drawing: Drawing, runs: Sequence[RunCurves], width: float, scale: float | None = None
) -> None:
    """Plot the losses of all runs by tokens, or by time in units of `scale` seconds."""
    curves = [smoothed(*run.training, width) for run in runs]
    highest = charts.limit_y_axis(drawing.axes, [losses for _, losses in curves], SHOWN_SHARE)
    for index, (run, training) in enumerate(zip(runs, curves, strict=True)):
        marks, found = run.validation
        validation = marks[found <= highest], found[found <= highest]
        if scale is not None:
            training, validation = (
                (run.seconds_at(tokens) / scale, losses)
                for tokens, losses in (training, validation)
            )
        plot_losses(drawing.axes, index, _label(run), training, validation)


def _speed_chart(runs: Sequence[RunCurves], width: float) -> Chart:
    with _chart("speeds") as drawing:
        _plot_lines(drawing, runs, [_speeds(run, width) for run in runs], 1e-3)
        drawing.axes.set_ylabel("thousand tokens/s")
    known = {run.name: run.speed for run in runs if run.speed is not None}
    text = "Tokens per second of all replicas together."
    if known:
        best = max(known, key=known.__getitem__)
        text = f"{text[:-1]}; fastest after the warm-up: {best}, {number(known[best], ',.0f')}."
    return Chart("Speed", drawing.svg, text, "With waits and syncs.")


def _speeds(run: RunCurves, width: float) -> Curve:
    """Return tokens per second, means over `width` tokens or less."""
    tokens = run.seconds[0]
    if tokens.size < 2:
        return EMPTY
    places = np.linspace(tokens[0], tokens[-1], NUM_PLACES)
    half = max(width, float(np.ptp(tokens)) / NUM_PLACES) / 2
    first, last = np.maximum(tokens[0], places - half), np.minimum(tokens[-1], places + half)
    lengths = run.seconds_at(last) - run.seconds_at(first)
    known = lengths > 0
    return places[known], (last - first)[known] / lengths[known]


def _byte_chart(runs: Sequence[RunCurves]) -> Chart:
    with _chart("bytes") as drawing:
        _plot_lines(drawing, runs, [run.sent for run in runs], 1e-6, drawstyle="steps-post")
        drawing.axes.set_ylabel("MB sent by one replica")
    text = "Bytes that one replica has sent to others in syncs."
    return Chart("Bytes between replicas", drawing.svg, text, "Payload; 1 MB = 10^6 bytes.")


@contextmanager
def _chart(name: str, x: str = "") -> Iterator[Drawing]:
    """Draw in the block; the x axis, of tokens unless it has a name, is added."""
    with svg_drawing(f"runs-{name}", height=3.4) as drawing:
        yield drawing
        if x:
            drawing.axes.set_xlabel(x)
        else:
            show_tokens(drawing.axes)
        drawing.axes.set_xlim(left=0)


def _plot_lines(
    drawing: Drawing,
    runs: Sequence[RunCurves],
    curves: Sequence[Curve],
    scale: float,
    drawstyle: str = "default",
) -> None:
    for index, (run, (tokens, values)) in enumerate(zip(runs, curves, strict=True)):
        if tokens.size:
            drawing.axes.plot(
                tokens, values * scale, color=COLORS[index % len(COLORS)],
                linestyle=LINE_STYLES[index // len(COLORS) % len(LINE_STYLES)],
                drawstyle=drawstyle, label=_label(run),
            )  # fmt: skip
    drawing.axes.set_ylim(bottom=0)


def _label(run: RunCurves) -> str:
    return short_name(run.name, MAX_NAME_LETTERS)
