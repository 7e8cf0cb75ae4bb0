"""Presentation of results: spreads over repeats, Markdown tables, pictures."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

DPI = 130
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

    @property
    def relative_range(self) -> float:
        """(max - min) / median."""
        return (self.max - self.min) / self.median if self.median else 0.0

    def over(self, other: float) -> Spread:
        """Return the spread divided by a number."""
        return Spread(self.min / other, self.median / other, self.max / other)


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


@contextmanager
def picture(path: Path, *, dpi: int = DPI, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Draw on a figure and its axes (an array for several); written to `path` at the end.

    Args:
        path: of the picture.
        dpi: dots per inch.
        options: of matplotlib's `subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(layout="constrained", **options)
    try:
        yield figure, axes
        figure.savefig(path, dpi=dpi)
    finally:
        plt.close(figure)


def error_lengths(spreads: Sequence[Spread]) -> list[list[float]]:
    """Return the distances from median to minimum and to maximum, as for `yerr` of matplotlib."""
    return [[s.median - s.min for s in spreads], [s.max - s.median for s in spreads]]


def draw_bars[K: Hashable](
    axes: Any,
    groups: Sequence[K],
    series: Mapping[str, Mapping[K, Spread | None]],
    *,
    colors: Sequence[Any] | None = None,
    with_numbers: bool = True,
) -> None:
    """Draw grouped bars of medians, with error bars from minimum to maximum.

    Args:
        axes: to draw on; groups are at 0, 1, 2, ...
        groups: from left to right.
        series: by label: the spread of each group.
        colors: one per series; matplotlib's by default.
        with_numbers: whether to write the medians above the bars.
    """
    width = 0.8 / max(1, len(series))  # no series where all runs have failed
    for number, (label, found) in enumerate(series.items()):
        cases = [(x, s) for x, group in enumerate(groups) if (s := found.get(group)) is not None]
        shift = (number - (len(series) - 1) / 2) * width
        spreads = [spread for _, spread in cases]
        style = {"color": colors[number]} if colors else {}
        bars = axes.bar(
            [x + shift for x, _ in cases], [s.median for s in spreads], width * 0.95,
            yerr=error_lengths(spreads), capsize=3 if with_numbers else 0, label=label, **style,
        )  # fmt: skip
        if with_numbers:
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.grid(axis="y", alpha=0.3)
