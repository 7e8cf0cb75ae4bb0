"""Presentation of results: spreads over repeats, and Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

ALL = ("min", "median", "max")


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum of several values."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of the values; None where there are none."""
        return cls(min(values), median(values), max(values)) if values else None

    @classmethod
    def some(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        found = cls.of(values)
        assert found is not None, "a spread of no values"
        return found


@dataclass(frozen=True)
class Column:
    """A column of a Markdown table, or several adjacent ones for a spread.

    Attributes:
        head: of the first column; the others are headed by the name of their number.
        get: attribute or key of a row, or a function of it; gives a text, a number, a `Spread`, or
            None for empty cells.
        form: format of a number.
        factor: multiplied to each number.
        of: numbers of a spread to show.
    """

    head: str
    get: str | Callable[[Any], Any]
    form: str = "{}"
    factor: float = 1.0
    of: Sequence[str] = ("median",)

    @property
    def heads(self) -> list[str]:
        """Headings of the columns."""
        first = self.head if len(self.of) == 1 else f"{self.head}: {self.of[0]}"
        return [first, *self.of[1:]]

    def cells(self, row: Any) -> list[str]:
        """Return the cells of a row."""
        if callable(self.get):
            value = self.get(row)
        else:
            value = row[self.get] if isinstance(row, Mapping) else getattr(row, self.get)
        if value is None:
            return [""] * len(self.of)
        if isinstance(value, str):
            return [value]
        numbers = [getattr(value, it) for it in self.of] if isinstance(value, Spread) else [value]
        return [self.form.format(x if self.factor == 1 else x * self.factor) for x in numbers]


def table_of(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """Return a Markdown table with a line for each row."""
    heads = [head for column in columns for head in column.heads]
    return table(heads, ([cell for column in columns for cell in column.cells(r)] for r in rows))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of texts."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def target_line(text: str, value: float, bound: float, *, is_least: bool = False) -> str:
    """Return a list item that compares a value with its target."""
    passes = value >= bound if is_least else value <= bound
    wanted = f"{'>=' if is_least else '<='} {bound:g}"
    return f"- {text} {value:.3f}, wanted {wanted}: {'pass' if passes else 'MISS'}"
