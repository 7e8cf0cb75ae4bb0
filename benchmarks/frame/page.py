"""Results for people: spreads of repeats, cells and tables of Markdown, pictures."""

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
    """Of several values."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where there are no values."""
        return cls(min(values), median(values), max(values)) if values else None

    @classmethod
    def some(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        found = cls.of(values)
        assert found is not None, "a spread of no values"
        return found

    @property
    def relative_range(self) -> float:
        """(max - min) / median."""
        return (self.max - self.min) / self.median if self.median else 0.0

    def over(self, other: float) -> Spread:
        """Each of them over a number."""
        return Spread(self.min / other, self.median / other, self.max / other)


@dataclass(frozen=True)
class Column:
    """A column of a Markdown table, or several beside each other.

    Attributes:
        head: of the first; those after it are headed by what they are of the spread.
        get: attribute or key of a row, or a function of it; finds a text, a number, a `Spread`, or
            None for empty cells.
        form: of a number.
        factor: to multiply it by.
        of: which numbers of a spread are shown.
    """

    head: str
    get: str | Callable[[Any], Any]
    form: str = "{}"
    factor: float = 1.0
    of: Sequence[str] = ("median",)

    @property
    def heads(self) -> list[str]:
        """Of all of them."""
        first = self.head if len(self.of) == 1 else f"{self.head}: {self.of[0]}"
        return [first, *self.of[1:]]

    def cells(self, row: Any) -> list[str]:
        """Of a row."""
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
    """A Markdown table with a line for each row."""
    heads = [head for column in columns for head in column.heads]
    return table(heads, ([cell for column in columns for cell in column.cells(r)] for r in rows))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of texts."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mark_line(text: str, value: float, bound: float, *, is_least: bool = False) -> str:
    """A line of a list that holds a value to its mark."""
    passes = value >= bound if is_least else value <= bound
    wanted = f"{'>=' if is_least else '<='} {bound:g}"
    return f"- {text} {value:.3f}, wanted {wanted}: {'pass' if passes else 'MISS'}"


@contextmanager
def picture(path: Path, *, dpi: int = DPI, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, an array where there are several; written to `path` in the end.

    Args:
        path: of the picture.
        dpi: of it.
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
    """From the medians down to the least, and up to the most, as matplotlib wants them."""
    return [[s.median - s.min for s in spreads], [s.max - s.median for s in spreads]]


def draw_bars[K: Hashable](
    axes: Any,
    groups: Sequence[K],
    series: Mapping[str, Mapping[K, Spread | None]],
    *,
    colors: Sequence[Any] | None = None,
    with_numbers: bool = True,
) -> None:
    """Bars of medians side by side, with the least and the most.

    Args:
        axes: where to; groups stand at 0, 1, 2, ...
        groups: from left to right.
        series: by label: what there is for each group.
        colors: one for each series; the usual ones, if left out.
        with_numbers: whether to write the medians above the bars.
    """
    width = 0.8 / max(1, len(series))  # none where all have failed
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
