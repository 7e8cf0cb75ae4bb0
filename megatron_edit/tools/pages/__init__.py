"""The HTML page of all commands: results with a column for each run, findings, pictures, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_edit.tools.pages.drawing import COLORS, DARK_COLORS
from megatron_edit.tools.pages.texts import UNKNOWN

LEVELS = ("error", "warning", "note")  # worst first


class Finding(NamedTuple):
    """A problem in sentences, with a remedy; `where` names the run where there are several."""

    level: str
    text: str
    where: str = ""


class Chart(NamedTuple):
    """A picture and its content in a sentence; no picture where all values are the same."""

    title: str
    svg: str
    text: str
    note: str = ""  # how to read the picture


class Table(NamedTuple):
    """A table of texts, the first of each row being its name."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


class Section(NamedTuple):
    """A part of a page under a heading of its own."""

    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    code: str = ""
    is_folded: bool = False


@dataclass(frozen=True)
class Column[Row]:
    """A quantity of several rows (runs, or strategies) and its meaning, a sentence."""

    title: str
    meaning: str
    cell: Callable[[Row], str]


def cells_of[Row](columns: Sequence[Column[Row]], rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the cells of each quantity that at least one row has, by its title."""
    found = {column.title: [column.cell(row) for row in rows] for column in columns}
    return {title: cells for title, cells in found.items() if set(cells) != {UNKNOWN}}


@dataclass(frozen=True)
class Page:
    """The contents of a page."""

    title: str
    subtitle: str
    names: Sequence[str]  # of the runs
    results: dict[str, list[str]]  # by quantity, a text for each run
    meanings: dict[str, str]  # of the quantities
    findings: Sequence[Finding]
    sections: Sequence[Section]
    state: str = ""  # of a single run
    state_text: str = ""
    progress: float | None = None
    made: str = ""

    @property
    def results_table(self) -> Table:
        """The results with a column for each run."""
        rows = [[title, *cells] for title, cells in self.results.items()]
        return Table("Results", ["run", *self.names], rows)

    def html(self) -> str:
        """Return the page, which needs no other file and no network."""
        import jinja2

        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        template = environment.get_template("page.html")
        page = template.render(page=self, colors=COLORS, dark_colors=DARK_COLORS) + "\n"
        # Surrogate escapes, as in the name of a folder that is not UTF-8, cannot be encoded.
        return page.encode("utf-8", "backslashreplace").decode("utf-8")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines
    )


def markdown_meanings[Row](columns: Iterable[Column[Row]]) -> str:
    """Return the meaning of quantities as a list in Markdown."""
    return "\n".join(f"- *{column.title}*: {column.meaning}." for column in columns)
