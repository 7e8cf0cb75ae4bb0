"""The page of a run, and of several runs side by side, with curves over tokens."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from megatron_edit.observe.records import VALIDATION
from megatron_edit.tools.compare.flags import model_of
from megatron_edit.tools.compare.readings import NUM_EXCLUDED_ITERATIONS
from megatron_edit.tools.monitor.charts import loss_charts, replica_charts, sync_charts
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
from megatron_edit.tools.pages.charts import (
    EMPTY,
    Curve,
    RunCurves,
    compare_charts,
    part_chart,
)
from megatron_edit.tools.pages.texts import duration

MAX_CHANGES_SHOWN, MAX_SYNCS_SHOWN = 50, 10


@dataclass(frozen=True)
class Runs:
    """Runs of which all files have been read, in the given order, with their curves."""

    runs: Sequence[MonitoredRun]
    curves: Sequence[RunCurves]

    @classmethod
    def of(cls, runs: Sequence[MonitoredRun]) -> Runs:
        """Return the runs with their names and curves.

        Raises:
            UsageError: a folder is given twice.
        """
        names = names_of([run.folder for run in runs])
        return cls(runs, [curves_of(name, run) for name, run in zip(names, runs, strict=True)])

    @property
    def names(self) -> list[str]:
        """The names of the runs."""
        return [each.name for each in self.curves]

    @property
    def results(self) -> dict[str, list[str]]:
        """The cells of the results, by quantity."""
        return cells_of(QUANTITIES, result_columns(self.runs, self.curves))

    @property
    def findings(self) -> list[Finding]:
        """All findings on a single run; errors and warnings, with names, on several."""
        if len(self.runs) == 1:
            return list_findings(self.runs[0])
        return [
            finding._replace(where=name)
            for name, run in zip(self.names, self.runs, strict=True)
            for finding in list_findings(run)
            if finding.level in SHOWN_LEVELS
        ]

    @property
    def settings(self) -> dict[str, list[str]]:
        """Settings that differ."""
        return differing_settings([run.facts for run in self.runs])

    def page(self) -> Page:
        """Return the page, with a column for each run."""
        read_at = max(run.read_at for run in self.runs)
        page = Page(
            title=f"{len(self.runs)} runs side by side",
            subtitle=_describe_runs(self.runs),
            names=self.names,
            results=self.results,
            meanings={each.title: each.meaning for each in QUANTITIES},
            findings=self.findings,
            sections=self._sections(),
            made=f"Read {time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(read_at))}.",
        )
        return page if len(self.runs) > 1 else _page_of(self.runs[0], page)

    def _sections(self) -> list[Section]:
        if len(self.runs) == 1:
            return _sections_of(self.runs[0], part_chart(self.curves).values())
        settings = [[name, *values] for name, values in self.settings.items()]
        table = Table("Settings that differ", ["setting", *self.names], settings)
        none = "None: these runs have the same settings, flags, layout, versions and machine."
        folders = "\n".join(
            f"{name}: {run.folder.resolve()}"
            for name, run in zip(self.names, self.runs, strict=True)
        )
        return [
            Section("Losses, speed and bytes", charts=list(compare_charts(self.curves).values())),
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


def _describe_runs(runs: Sequence[MonitoredRun]) -> str:
    """Return the model, and how many runs are over."""
    models = {model_of(run.facts.argv) for run in runs}
    model = models.pop() if len(models) == 1 else "different models"
    over = sum(run.is_over for run in runs)
    state = "All runs have ended" if over == len(runs) else f"{over} of {len(runs)} runs have ended"
    return f"{state}{f'; {model}' if model else ''}."


# ---- a single run


def _page_of(run: MonitoredRun, page: Page) -> Page:
    """Return the page of a single run: with its title, state and times."""
    parts = [describe_run(run)]
    if not run.is_over:
        if run.syncs.count:
            since = max(0.0, run.read_at - run.syncs.records[-1].time)
            parts.append(f"last sync {duration(since)} ago")
        parts.append(f"last write {duration(run.silence)} ago")
    left_out = ("strategy", "state", "problems")  # in the title, below it, and in the findings
    return replace(
        page,
        title=_title(run),
        subtitle="; ".join(parts) + ".",
        results={name: cells for name, cells in page.results.items() if name not in left_out},
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
    began_at = min([run.began_at, *(sync.time for sync in run.syncs.records[:1])])
    date = time.strftime("%Y-%m-%d", time.localtime(began_at))
    what = f" of {model}" if model else ""
    return f"{facts.strategy.name}: training{what} on {facts.host}, {date}"


def _sections_of(run: MonitoredRun, parts: Iterable[Chart]) -> list[Section]:
    facts = run.facts
    versions = ", ".join(f"{name} {text}" for name, text in sorted(facts.versions.items()))
    settings = [[name, UNSET if value is None else str(value)]
                for name, value in sorted(facts.config.items())]  # fmt: skip
    changes = [change_table(run, MAX_CHANGES_SHOWN)] if run.membership.changes else []
    return [
        Section("Loss", charts=loss_charts(run)),
        Section(
            "Replicas",
            describe_members(run) if facts.is_elastic else "",
            replica_charts(run),
            [replica_table(run), *changes],
        ),
        Section(
            "Syncs",
            charts=[*parts, *sync_charts(run)],
            tables=[sync_table(run, MAX_SYNCS_SHOWN)] if run.syncs.count else [],
        ),
        Section(
            "Settings",
            f"{versions}; host {facts.host}.",
            tables=[Table("Settings", ["setting", "value"], settings)],
            code=shlex.join(facts.argv),
            is_folded=True,
        ),
    ]


# ---- the progress of a run as curves over tokens: seconds, losses, bytes


def curves_of(name: str, run: MonitoredRun) -> RunCurves:
    """Return the curves of a run."""
    facts = run.facts
    found = [each.loss for each in run.evaluations.values()
             if each.split == VALIDATION and math.isfinite(each.loss)]  # fmt: skip
    scale = facts.seq_length if facts.has_unequal_steps else facts.batch_tokens
    seconds = _scaled(_clock(run), scale)
    known = [replica.losses for replica in run.replicas if replica.steps]
    training = run.losses if run.losses[0].size or not known else known[0]
    sent = np.cumsum(run.syncs.values(lambda sync: sync.wire_bytes))
    iterations = run.syncs.values(lambda sync: sync.iteration)
    return RunCurves(
        name,
        seconds=seconds,
        training=_scaled(training, scale),
        validation=_scaled(run.validation, scale),
        sent=_scaled((iterations, sent), facts.batch_tokens),
        final_loss=fmean(found) if found else None,
        speed=_speed(seconds, facts.warmup_steps, facts.batch_tokens),
        local=[step * facts.batch_tokens
               for step in (facts.warmup_steps, facts.last_local_step or facts.train_iters)],
        exposed=sum((sync.seconds[:3] for sync in run.syncs.records
                     if facts.has_local_steps(sync.iteration)), np.zeros(3)),
    )  # fmt: skip


def _scaled(curve: Curve, scale: float) -> Curve:
    return curve[0] * scale, curve[1]


def _speed(curve: Curve, warmup_steps: int, batch: int) -> float | None:
    """Return tokens per second after the warm-up; of all steps where there are none.

    Without evaluations, saves and the first steps, but with syncs. None where not known.
    """
    tokens, seconds = curve
    if tokens.size < 2:
        return None
    first_steps = tokens[0] + NUM_EXCLUDED_ITERATIONS * batch
    for start in (max(first_steps, warmup_steps * batch), first_steps, 0):
        kept = tokens >= start
        if kept.sum() >= 2:
            length = float(np.ptp(seconds[kept]))
            return float(np.ptp(tokens[kept])) / length if length > 0 else None
    return None


def _clock(run: MonitoredRun) -> Curve:
    """Return seconds of training by place on the x axis of the run's charts.

    Replicas that are present at the same time take equally long for the same progress; those of an
    elastic run come and go.
    """
    curves = [(x, y) for x, y in (replica.paces for replica in run.replicas) if x.size]
    if not curves:
        return EMPTY
    places = np.unique(np.concatenate([x for x, _ in curves]))
    sums, counts = np.zeros_like(places), np.zeros_like(places)
    for x, y in curves:
        index = np.searchsorted(x, places)  # a pace holds from the line before to its own
        is_known = (places >= x[0]) & (index < x.size)
        sums[is_known] += y[index[is_known]]
        counts += is_known
    paces = sums / np.maximum(1, counts)
    return places, np.cumsum(paces * np.diff(places, prepend=places[0]))
