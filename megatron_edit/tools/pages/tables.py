"""Tables of results: columns with a meaning, as cells of a page and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Column[Row]:
    """A column of a table.

    Attributes:
        title: with the unit.
        meaning: a sentence, printed below the table.
        cell: returns the text for a row.
    """

    title: str
    meaning: str
    cell: Callable[[Row], str]


def cells_of[Row](columns: Sequence[Column[Row]], rows: Iterable[Row]) -> list[list[str]]:
    """Return the cells of a table; empty columns are included."""
    return [[column.cell(row) for column in columns] for row in rows]


def markdown_lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    return "\n".join([_line(head), _line("---" for _ in head), *map(_line, rows)])


def markdown_of[Row](columns: Sequence[Column[Row]], rows: Iterable[Row]) -> str:
    """Return a table as Markdown, with the meaning of its columns below."""
    table = markdown_lines([column.title for column in columns], cells_of(columns, rows))
    return f"{table}\n\n{meanings_of(columns)}"


def meanings_of[Row](columns: Sequence[Column[Row]]) -> str:
    """Return the meaning of columns as a list in Markdown."""
    return "\n".join(f"- *{column.title}*: {column.meaning}." for column in columns)


def _line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
