"""The report of a comparison: a table in Markdown, plots and an HTML page."""

from __future__ import annotations

import json
import math
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from megatron_edit.tools.compare.entries import IDEAL
from megatron_edit.tools.compare.flags import model_of
from megatron_edit.tools.compare.readings import Reading
from megatron_edit.tools.compare.runs import ComparisonResult, Seed
from megatron_edit.tools.pages import (
    Chart,
    Column,
    Finding,
    Page,
    Section,
    cells_of,
    markdown_meanings,
    markdown_table,
)
from megatron_edit.tools.pages.charts import RunCurves, compare_charts
from megatron_edit.tools.pages.texts import UNKNOWN, show_count

CURVES = "Curves are of the first seed."


def summary(outcome: ComparisonResult) -> str:
    """Return the summary for the console."""
    return f"{_subtitle(outcome)}\n\n{results_table(make_rows(outcome))}"


def write_report(folder: Path, outcome: ComparisonResult) -> Path:
    """Write compare.md, compare.json, compare.html and the plots; return the page's path."""
    charts = compare_charts(_curves(outcome), folder)
    rows = json.dumps([asdict(row) for row in make_rows(outcome)])
    known = json.loads(rows, parse_constant=lambda _: None)  # null for a run that diverged
    record = {"rows": known, "failures": _failures(outcome)}
    texts = {
        "compare.json": json.dumps(record, indent=1, allow_nan=False) + "\n",
        "compare.md": _markdown(outcome, charts),
        "compare.html": _page(outcome, charts).html(),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "compare.html"


def _title(outcome: ComparisonResult) -> str:
    model = model_of(outcome.plan[0].setting.flags)
    on = f" on {model}" if model else ""
    day = time.strftime("%Y-%m-%d")
    return f"Comparison of {', '.join(outcome.compared)}{on}, {socket.gethostname()}, {day}"


def _subtitle(outcome: ComparisonResult) -> str:
    """Return model, layout and length, as far as they are known."""
    setting, place = outcome.plan[0].setting, outcome.plan[0].placement
    ranks = place.ranks_per_replica
    parts = [f"{place.num_replicas} replicas of {ranks} rank{'s' if ranks > 1 else ''}"]
    readings = list(outcome.readings.values())
    if readings:
        first = readings[0]
        parts.insert(0, f"{first.num_parameters / 1e6:.1f} million parameters")
        parts.append(f"{first.iterations} iterations")
        if tokens := max(float(r.curves.seconds[0][-1]) for r in readings):
            parts.append(f"{show_count(tokens)} tokens")
    seeds = [run.seed for run in outcome.plan if run.entry == outcome.plan[0].entry]
    if seeds != [None]:
        parts.append(f"seeds {', '.join(map(str, seeds))}")
    if setting.link:
        parts.append(f"link: {setting.link}")
    return "; ".join(parts) + "."


def _versions(outcome: ComparisonResult) -> str:
    """Return the versions of the plugin and its dependencies, and whether runs differ."""
    found = {
        ", ".join(f"{name} {text}" for name, text in sorted(reading.versions.items()))
        for reading in outcome.readings.values()
        if reading.versions
    }
    if len(found) > 1:
        return "Runs were made with different versions: " + "; ".join(sorted(found)) + "."
    return (found.pop() if found else "versions: not known") + "."


def _commands(outcome: ComparisonResult) -> list[str]:
    """Return the command of each entry, without seed and folders."""
    lines = {
        run.entry.label: shlex.join([str(run.setting.script), *run.entry.words(run.setting.flags)])
        for run in outcome.plan
    }
    return [f"# {label}\n{line}" for label, line in lines.items()]


def _failures(outcome: ComparisonResult) -> list[str]:
    return [f"{run.name} {text}" for run, text in outcome.failures.items()]


def _markdown(outcome: ComparisonResult, charts: Mapping[str, Chart]) -> str:
    parts = [f"# {_title(outcome)}", _subtitle(outcome)]
    if failures := _failures(outcome):
        parts.append("Failed:\n\n" + "\n".join(f"- {text}" for text in failures))
    parts.append(results_table(make_rows(outcome)))
    parts += [f"![{chart.title}](compare-{name}.png)" for name, chart in charts.items()]
    parts += [CURVES] if charts else []
    parts.append(_versions(outcome))
    parts.append("```\n" + "\n".join(_commands(outcome)) + "\n```")
    return "\n\n".join(parts) + "\n"


def _page(outcome: ComparisonResult, charts: Mapping[str, Chart]) -> Page:
    rows = make_rows(outcome)
    return Page(
        title=_title(outcome),
        subtitle=_subtitle(outcome),
        names=[_name(row) for row in rows],
        results=cells_of(COLUMNS, rows),
        meanings={column.title: column.meaning.replace("`", "") for column in COLUMNS},
        findings=[Finding("error", text) for text in _failures(outcome)],
        sections=[
            Section("Losses, speed and bytes", CURVES if charts else "", list(charts.values())),
            Section("Versions and commands", _versions(outcome),
                    code="\n".join(_commands(outcome))),
        ],
    )  # fmt: skip


def _curves(outcome: ComparisonResult) -> list[RunCurves]:
    """Return the curves of each entry's first seed that has a reading."""
    found = (list(outcome.of_label(label).values()) for label in outcome.compared)
    return [readings[0].curves for readings in found if readings]


# ---- the table


def _spread(spread: Spread | None, mean: str, deviation: str = "") -> str:
    """Format the mean and, where there is one and it has a format, the deviation."""
    if spread is None:
        return UNKNOWN
    is_shown = deviation and spread.deviation is not None
    text = f" ± {spread.deviation:{deviation}}" if is_shown else ""
    return f"{spread.mean:{mean}}{text}"


def _megabytes(spread: Spread | None, form: str) -> str:
    return UNKNOWN if spread is None else f"{spread.mean * 1e-6:{form}}"


def _memory(row: ComparisonRow) -> str:
    if not row.state_bytes:
        return UNKNOWN if row.state_bytes is None else "0"
    each = row.state_bytes / max(1, row.num_parameters)
    return f"{row.state_bytes / 1e6:.1f} ({each:.1f})"


def _name(row: ComparisonRow) -> str:
    failed = [seed for seed in row.failed if seed != "None"]
    note = f" (failed: seed {', '.join(failed)})" if failed else " (failed)" if row.failed else ""
    return row.label + note


COLUMNS: tuple[Column[ComparisonRow], ...] = (
    Column(
        "validation loss",
        "nats per token, of the last evaluation; with several seeds the mean ± their standard "
        "deviation. `ideal` never syncs, so its loss is not comparable",
        lambda row: _spread(row.loss, ".4f", ".4f"),
    ),
    Column(
        "difference",
        "of that loss to the first strategy's, seed by seed; mean ± standard deviation",
        lambda row: _spread(row.difference, "+.4f", ".4f"),
    ),
    Column(
        "tokens/s",
        "of all replicas together, after the warm-up, without evaluations and without syncs that "
        "land in an evaluation",
        lambda row: _spread(row.speed, ",.0f", ",.0f"),
    ),
    Column(
        "share of ideal",
        "of the tokens/s of `ideal`, seed by seed: the same replicas, which never sync after the "
        "same warm-up",
        lambda row: _spread(row.share, ".1%"),
    ),
    Column(
        "MB per step",
        "(10^6 bytes) sent by one replica to others, mean per step after the warm-up; payload. "
        "Syncs are counted, the synchronous steps of `ddp`, `stock` and `stock-instances` computed",
        lambda row: _megabytes(row.step_bytes, ".3f"),
    ),
    Column(
        "peak MB/s",
        "sent by one replica during its busiest sync: the bytes over the seconds from the meeting "
        "of the replicas to the landing of the last unit; of synchronous steps: their bytes over "
        "their seconds",
        lambda row: _megabytes(row.peak, ".1f"),
    ),
    Column(
        "extra memory, MB (bytes per parameter)",
        "persistent outer state of one replica, all of its ranks together",
        _memory,
    ),
)


def results_table(rows: Sequence[ComparisonRow]) -> str:
    """Return the table as Markdown, a line for each strategy, with the meaning of its columns."""
    head = Column[ComparisonRow]("strategy", "with its own flags", _name)
    columns = (head, *COLUMNS)
    lines = [[column.cell(row) for column in columns] for row in rows]
    table = markdown_table([column.title for column in columns], lines)
    return f"{table}\n\n{markdown_meanings(columns)}"


# ---- the rows of the table, computed from the runs


@dataclass(frozen=True)
class Spread:
    """Mean and spread of several values of one quantity."""

    mean: float
    # Standard deviation of the values (not of their mean); None for a single one.
    deviation: float | None
    num: int  # number of values

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Compute it from the known values; None without any, NaN if one is not finite."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        if not all(map(math.isfinite, known)):  # a run that diverged
            return cls(math.nan, None, len(known))
        return cls(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


@dataclass(frozen=True)
class ComparisonRow:
    """The row of one entry of the comparison. None where not known."""

    label: str
    loss: Spread | None
    difference: Spread | None  # of `loss` to that of the first entry with a loss, seed by seed
    speed: Spread | None  # tokens per second of all replicas, after the warm-up
    share: Spread | None  # `speed` as a share of that of `ideal` with the same seed
    step_bytes: Spread | None  # sent by one replica per step, after the warm-up
    peak: Spread | None  # bytes per second of the busiest exchange of a replica
    state_bytes: int | None  # of the outer state of one replica
    num_parameters: int
    failed: tuple[str, ...]  # seeds without a result, as text


def make_rows(outcome: ComparisonResult) -> list[ComparisonRow]:
    """Return a row for each entry, in the given order."""
    first = next((label for label in outcome.compared if outcome.of_label(label)), None)
    base = _losses(outcome, first) if first is not None else {}
    ideal = _values(outcome.of_label(IDEAL), lambda r: r.curves.speed)
    return [_row(outcome, label, base if label != first else {}, ideal) for label in outcome.labels]


def _row(
    outcome: ComparisonResult, label: str, base: Mapping[Seed, float], ideal: Mapping[Seed, float]
) -> ComparisonRow:
    found = outcome.of_label(label)
    losses = _losses(outcome, label) if label in outcome.compared else {}
    speeds = _values(found, lambda r: r.curves.speed)
    readings = list(found.values())
    states = [r.state_bytes for r in readings if r.state_bytes is not None]
    failed = [str(run.seed) for run in outcome.failures if run.entry.label == label]
    return ComparisonRow(
        label=label,
        loss=Spread.of(list(losses.values())),
        difference=Spread.of([losses[seed] - base[seed] for seed in losses if seed in base]),
        speed=Spread.of(list(speeds.values())),
        share=Spread.of([speeds[seed] / ideal[seed] for seed in speeds if ideal.get(seed)]),
        step_bytes=Spread.of([r.bytes_per_step for r in readings]),
        peak=Spread.of([r.peak_bytes_per_second for r in readings]),
        state_bytes=max(states, default=None),
        num_parameters=max((r.num_parameters for r in readings), default=0),
        failed=tuple(failed),
    )


def _losses(outcome: ComparisonResult, label: str) -> dict[Seed, float]:
    return _values(outcome.of_label(label), lambda r: r.curves.final_loss)


def _values(
    readings: Mapping[Seed, Reading], value: Callable[[Reading], float | None]
) -> dict[Seed, float]:
    found = {seed: value(reading) for seed, reading in readings.items()}
    return {seed: number for seed, number in found.items() if number is not None}
