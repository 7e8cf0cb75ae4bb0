"""The results of a comparison as files for people: Markdown, pictures, one HTML page."""

from __future__ import annotations

import json
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_edit.tools.compare.analysis import ComparisonResult, make_rows
from megatron_edit.tools.compare.flags import model_of
from megatron_edit.tools.compare.pictures import Picture, draw, smoothing_tokens
from megatron_edit.tools.compare.table import COLUMNS, cells, markdown_table
from megatron_edit.tools.pages.rendering import render

TEMPLATE = Path(__file__).with_name("page.html")


def summary(outcome: ComparisonResult) -> str:
    """For the console."""
    return f"{_subtitle(outcome)}\n\n{markdown_table(make_rows(outcome))}"


def write_report(folder: Path, outcome: ComparisonResult) -> Path:
    """Write compare.md, compare.json, compare.html and the pictures; the path of the page."""
    pictures = draw(folder, outcome)
    rows = json.dumps([asdict(row) for row in make_rows(outcome)])
    known = json.loads(rows, parse_constant=lambda _: None)  # of a run that diverged there is null
    record = {"rows": known, "failures": _failures(outcome)}
    texts = {
        "compare.json": json.dumps(record, indent=1, allow_nan=False) + "\n",
        "compare.md": _markdown(outcome, pictures),
        "compare.html": _html(outcome, pictures),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "compare.html"


def _title(outcome: ComparisonResult) -> str:
    setting = outcome.plan[0].setting
    model = model_of(setting.flags)
    on = f" on {model}" if model else ""
    day = time.strftime("%Y-%m-%d")
    return f"Comparison of {', '.join(outcome.compared)}{on}, {socket.gethostname()}, {day}"


def _curves(outcome: ComparisonResult) -> str:
    """How the curves are to be read."""
    tokens = smoothing_tokens(outcome)
    return (
        f"Curves are of the first seed; each training loss is a mean over {tokens / 1e6:.3g} "
        "million tokens."
    )


def _subtitle(outcome: ComparisonResult) -> str:
    """Model, layout and length, as far as they are known."""
    setting, place = outcome.plan[0].setting, outcome.plan[0].placement
    ranks = place.ranks_per_replica
    parts = [f"{place.num_replicas} replicas of {ranks} rank{'s' if ranks > 1 else ''}"]
    readings = list(outcome.readings.values())
    if readings:
        first = readings[0]
        parts.insert(0, f"{first.num_parameters / 1e6:.1f} million parameters")
        parts.append(f"{first.iterations} iterations")
        if tokens := max((p.tokens for r in readings for p in r.training), default=0.0):
            parts.append(f"{tokens / 1e6:.3g} million tokens")
    seeds = [run.seed for run in outcome.plan if run.entry == outcome.plan[0].entry]
    if seeds != [None]:
        parts.append(f"seeds {', '.join(map(str, seeds))}")
    if setting.link:
        parts.append(f"link: {setting.link}")
    return "; ".join(parts) + "."


def _versions(outcome: ComparisonResult) -> str:
    """Of the plugin and what is below it; more than one line where runs differ."""
    found = {
        ", ".join(f"{name} {text}" for name, text in sorted(reading.versions.items()))
        for reading in outcome.readings.values()
        if reading.versions
    }
    if len(found) > 1:
        return "Runs were made with different versions: " + "; ".join(sorted(found)) + "."
    return (found.pop() if found else "versions: not known") + "."


def _commands(outcome: ComparisonResult) -> list[str]:
    """One for each entry, without seed and folders."""
    lines = {
        run.entry.label: shlex.join([str(run.setting.script), *run.entry.words(run.setting.flags)])
        for run in outcome.plan
    }
    return [f"# {label}\n{line}" for label, line in lines.items()]


def _failures(outcome: ComparisonResult) -> list[str]:
    return [f"{run.name} {text}" for run, text in outcome.failures.items()]


def _markdown(outcome: ComparisonResult, pictures: Sequence[Picture]) -> str:
    parts = [f"# {_title(outcome)}", _subtitle(outcome)]
    if failures := _failures(outcome):
        parts.append("Failed:\n\n" + "\n".join(f"- {text}" for text in failures))
    parts.append(markdown_table(make_rows(outcome)))
    if pictures:
        parts += [f"![{picture.title}]({picture.path.name})" for picture in pictures]
        parts.append(_curves(outcome))
    parts.append(_versions(outcome))
    parts.append("```\n" + "\n".join(_commands(outcome)) + "\n```")
    return "\n\n".join(parts) + "\n"


def _html(outcome: ComparisonResult, pictures: Sequence[Picture]) -> str:
    """The page; it needs no other file and no network."""
    from markupsafe import Markup  # comes with jinja2

    values: dict[str, Any] = {
        "title": _title(outcome),
        "subtitle": _subtitle(outcome),
        "failures": _failures(outcome),
        "columns": [{"title": c.title, "meaning": c.meaning.replace("`", "")} for c in COLUMNS],
        "rows": cells(make_rows(outcome)),
        "pictures": [picture._replace(svg=Markup(picture.svg)) for picture in pictures],
        "curves": _curves(outcome),
        "versions": _versions(outcome),
        "runs": _commands(outcome),
    }
    return render(TEMPLATE, values)
