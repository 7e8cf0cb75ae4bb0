"""Formatting of numbers for the page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_NAMES_SHOWN = 8
UNKNOWN = "–"  # noqa: RUF001 - a typographic dash
_UNITS = ((172_800.0, 86_400.0, "days"), (7_200.0, 3_600.0, "hours"), (180.0, 60.0, "minutes"))
_STEPS = ((86400.0, "d", 3600.0, "h"), (3600.0, "h", 60.0, "min"), (60.0, "min", 1.0, "s"))


def number(value: float | None, form: str = ".3g") -> str:
    """Return a formatted number, or a dash where there is none."""
    return UNKNOWN if value is None or not math.isfinite(value) else format(value, form)


def percent(share: float | None) -> str:
    """Return a share as a percentage."""
    return number(None if share is None else 100 * share, ".1f") + (
        " %" if share is not None and math.isfinite(share) else ""
    )


def milliseconds(seconds: float | None) -> str:
    """Return seconds formatted as milliseconds."""
    return number(None if seconds is None else seconds * 1e3, ",.1f")


def megabytes(size: float | None) -> str:
    """Return bytes formatted as megabytes (10^6)."""
    return number(None if size is None else size / 1e6, ",.2f")


def duration(seconds: float | None) -> str:
    """Return seconds formatted in the two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    for size, name, part, part_name in _STEPS:
        if seconds >= size:
            rest = int(seconds % size // part)
            return f"{int(seconds // size)} {name}" + (f" {rest} {part_name}" if rest else "")
    return f"{seconds:.0f} s"


def show_count(value: float) -> str:
    """Format a count: `6.74 billion`, `2.56 million`, `1024`."""
    for unit, factor in (("billion", 1e9), ("million", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f}"


def time_unit(length: float) -> tuple[float, str]:
    """Return seconds and name of the unit of an axis that is `length` seconds long."""
    found = ((scale, name) for least, scale, name in _UNITS if length >= least)
    return next(found, (1.0, "seconds"))


def join_names(names: Sequence[str]) -> str:
    """Return names as text, the first ones and their number where there are many."""
    more = f", ... ({len(names)} in all)" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
