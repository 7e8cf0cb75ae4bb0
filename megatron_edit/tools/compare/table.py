"""The table of a comparison: its columns, what they mean, and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_edit.tools.compare.analysis import ComparisonRow
from megatron_edit.tools.compare.statistics import Spread
from megatron_edit.tools.monitor.texts import UNKNOWN


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: with the unit.
        meaning: a sentence, for below the table.
        cell: of a row.
    """

    title: str
    meaning: str
    cell: Callable[[ComparisonRow], str]


def _spread(spread: Spread | None, mean: str, deviation: str = "") -> str:
    """The mean and, where it is asked for and there is one, the deviation.

    Args:
        spread: of a quantity.
        mean, deviation: how they are formatted.
    """
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


COLUMNS = (
    Column("strategy", "with the flags that only it has", _name),
    Column(
        "validation loss",
        "nats per token, of the last evaluation; with several seeds the mean ± their standard "
        "deviation. `ideal` never syncs, so that its loss means nothing",
        lambda row: _spread(row.loss, ".4f", ".4f"),
    ),
    Column(
        "difference",
        "of that loss to the first strategy's, seed by seed; mean ± standard deviation",
        lambda row: _spread(row.difference, "+.4f", ".4f"),
    ),
    Column(
        "tokens/s",
        "of all replicas together, after the warm-up, without evaluations; a sync that lands in "
        "an evaluation is not in it",
        lambda row: _spread(row.speed, ",.0f", ",.0f"),
    ),
    Column(
        "share of ideal",
        "of the tokens/s of `ideal`, seed by seed: the same replicas, after the same warm-up "
        "never meeting again",
        lambda row: _spread(row.share, ".1%"),
    ),
    Column(
        "MB per step",
        "(10^6 bytes) sent by one replica to others, mean per step after the warm-up; payload. "
        "Syncs are counted, the synchronous steps of `ddp` and `stock` computed",
        lambda row: _megabytes(row.step_bytes, ".3f"),
    ),
    Column(
        "peak MB/s",
        "sent by one replica during its busiest sync: the bytes over the seconds from the meeting "
        "of the replicas to the landing of the last unit; of `ddp` and `stock`: bytes of a step "
        "over its seconds",
        lambda row: _megabytes(row.peak, ".1f"),
    ),
    Column(
        "extra memory, MB (bytes per parameter)",
        "persistent outer state of one replica, all of its ranks together",
        _memory,
    ),
)


def cells(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    """The table without its head; columns that nobody has anything for are there, too."""
    return [[column.cell(row) for column in COLUMNS] for row in rows]


def markdown_table(rows: Sequence[ComparisonRow]) -> str:
    """The table; what its columns mean is below it."""
    head = [column.title for column in COLUMNS]
    lines = [_line(head), _line("---" for _ in head), *map(_line, cells(rows))]
    meanings = [f"- *{column.title}*: {column.meaning}." for column in COLUMNS]
    return "\n".join([*lines, "", *meanings])


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
