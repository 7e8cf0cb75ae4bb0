"""The report of the study: a Markdown page with tables, and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frame.page import Column, picture, table, table_of

from megatron_edit.tools.compare.pictures import MARKERS
from megatron_edit.tools.pages.drawing import COLORS

from .answers import FindRun, Line, make_lines
from .study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _difference(line: Line) -> str | None:
    if line.difference is None or line.relative is None:
        return None
    spread = line.difference.deviation
    deviation = "" if spread is None else f" ± {spread:.4f}"
    return (f"{line.difference.mean:+.4f}{deviation} ({line.relative.mean:+.2%}) "
            f"to {line.member.base}")  # fmt: skip


COLUMNS = (
    Column("", lambda line: line.member.label),
    Column("runs", lambda line: f"{len(line.records)} of {line.planned}"),
    Column("validation loss", lambda line: line.loss and line.loss.text("{:.4f}".format)),
    Column("difference", _difference),
    Column("lower in", lambda line: line.difference and f"{line.num_better} of "
           f"{line.difference.num}"),
    Column("MB per step", lambda line: line.bytes_per_step and line.bytes_per_step.mean, "{:.3f}",
           1e-6),
    Column("effective replicas", lambda line: line.effective and line.effective.mean, "{:.2f}"),
    Column("left out, by replica", "left_out"),
)  # fmt: skip
EXPLANATION = """\
*Validation loss*: nats per token at the end, mean ± standard deviation over the seeds.
*Difference*: to the line that is named, seed by seed, mean ± standard deviation; *lower in*: of how
many pairs. Fewer than three pairs are no result. *MB per step*: 10^6 bytes sent by one replica per
step after the warm-up (`ddp`: computed). *Effective replicas*: 1 / sum of squared weights, median
over syncs and units. *Left out*: share of syncs and units in which a replica was taken for an
outlier, by replica."""


def markdown(study: Study, find: FindRun, corpus: dict[str, Any], drawing: str) -> str:
    """Return the Markdown page.

    Args:
        study: all questions.
        find: returns finished runs.
        corpus: summary of the corpus.
        drawing: file name of the picture.
    """
    size = study.size
    intro = (
        f"GPT of {size.num_layers} layers and hidden size {size.hidden_size}, sequence "
        f"{size.seq_length}, vocabulary {size.vocab_size}; {size.train_iters} steps of "
        f"{size.micro_batch_size} samples for each replica of one rank; AdamW, peak rate "
        f"{size.lr:g}, cosine; fp32. Text: {corpus['source']}, {corpus['train']['tokens']:,} "
        f"tokens. Seeds {', '.join(map(str, study.seeds))}. Warm-up {size.train_iters // 10} "
        "steps, where nothing else is said."
    )
    parts = ["# Convergence", intro, EXPLANATION, f"![Losses at the end]({drawing})"]
    for question in study.questions:
        lines = make_lines(question, find)
        if any(line.records for line in lines):
            shown = [line for line in lines if line.records]
            is_sweep = bool(question.axis)
            tables = _sweep(lines, question.axis) if is_sweep else table_of(COLUMNS, shown)
            parts += [f"## {question.title}", tables, *_unfinished(lines)]
    versions = sorted({
        ", ".join(f"{name} {text}" for name, text in sorted(record.versions.items()))
        for question in study.questions
        for line in make_lines(question, find)
        for record in line.records.values()
    })  # fmt: skip
    return "\n\n".join([*parts, "Versions: " + ("; ".join(versions) or "none yet") + "."]) + "\n"


def _unfinished(lines: Sequence[Line]) -> list[str]:
    """Return lists of the members without a finished run."""
    groups = {
        "Not in this version": [line for line in lines if line.refusal],
        "Not run yet": [line for line in lines if not line.records and not line.refusal],
    }
    return [
        f"{what}: {'; '.join(line.member.label for line in found)}."
        for what, found in groups.items()
        if found
    ]


def _sweep(lines: Sequence[Line], axis: str) -> str:
    """Return a table with a row for each curve, and the place of its minimum."""
    places = sorted({line.member.place for line in lines})
    series = list(dict.fromkeys(line.member.series for line in lines if line.records))
    found = {(line.member.series, line.member.place): line.loss for line in lines}
    header = [axis, *(f"{place:g}" for place in places), "lowest at"]
    rows = []
    for name in series:
        losses = {place: loss for place in places if (loss := found.get((name, place)))}
        texts = [losses[p].text("{:.4f}".format) if p in losses else "" for p in places]
        finite = {place: loss.mean for place, loss in losses.items() if math.isfinite(loss.mean)}
        lowest = min(finite, key=lambda place: finite[place], default=math.nan)
        is_complete = len(losses) == len(places)
        rows.append([name, *texts, f"{lowest:g}" if is_complete else ""])
    return table(header, rows)


def draw(path: Path, study: Study, find: FindRun) -> bool:
    """Write the picture, a panel per question with two finished lines; False if there is none."""
    answered = [(q, make_lines(q, find)) for q in study.questions]
    # A single line has nothing to be compared with.
    answered = [(q, ls) for q, ls in answered if sum(bool(line.records) for line in ls) > 1]
    if not answered:
        return False
    rows = -(-len(answered) // 2)
    columns = min(2, len(answered))
    with picture(
        path, dpi=110, nrows=rows, ncols=columns, figsize=(7 * columns, 4.5 * rows), squeeze=False
    ) as (_, grid):
        for axes in grid.flat[len(answered) :]:
            axes.set_axis_off()
        for axes, (question, lines) in zip(grid.flat, answered, strict=False):
            if question.axis:
                _draw_sweep(axes, lines, question.axis)
            else:
                _draw_dots(axes, lines)
            axes.set_title(question.title, fontsize=11)
            axes.grid(alpha=0.3)
    return True


def _draw_dots(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw a row for each member: its seeds, and their mean."""
    shown = [line for line in lines if line.records]
    for place, line in enumerate(shown):
        losses = [record.final_loss for record in line.records.values()]
        axes.plot(losses, [place] * len(losses), "o", color=COLORS[0], alpha=0.5, markersize=5)
        if line.loss is not None:
            axes.plot([line.loss.mean], [place], "|", color="black", markersize=14)
    axes.set_yticks(range(len(shown)), [line.member.label for line in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("validation loss at the end (nats); dots: seeds, bar: mean")


def _draw_sweep(axes: Axes, lines: Sequence[Line], axis: str) -> None:
    """Draw a curve for each series."""
    series: dict[str, list[Line]] = {}
    for line in lines:
        if line.loss is not None:
            series.setdefault(line.member.series, []).append(line)
    for number, (name, found) in enumerate(series.items()):
        places = [line.member.place for line in found]
        means = [line.loss.mean for line in found if line.loss is not None]
        style = "--" if name.startswith("ddp") else "-"
        axes.plot(places, means, MARKERS[number % len(MARKERS)] + style, label=name,
                  color=COLORS[number % len(COLORS)])  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel(axis)
    axes.set_ylabel("validation loss at the end (nats)")
    axes.legend(fontsize=8)
