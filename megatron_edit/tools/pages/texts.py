"""Formatting of numbers for the page and the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

MAX_NAMES_SHOWN = 8
MAX_NAME_LETTERS = 16  # of a name in a picture
UNKNOWN = "–"  # noqa: RUF001 - a typographic dash
_UNITS = ((172_800.0, 86_400.0, "days"), (7_200.0, 3_600.0, "hours"), (180.0, 60.0, "minutes"))
_STEPS = ((86400.0, "d", 3600.0, "h"), (3600.0, "h", 60.0, "min"), (60.0, "min", 1.0, "s"))


def number(value: float | None, form: str = ".3g") -> str:
    """Return a formatted number, or a dash where there is none."""
    return UNKNOWN if value is None or not math.isfinite(value) else format(value, form)


def percent(share: float | None) -> str:
    """Return a share as a percentage."""
    shown = number(None if share is None else 100 * share, ".1f")
    return shown if shown == UNKNOWN else f"{shown} %"


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


def clock_time(seconds: float) -> str:
    """Return the local time of Unix seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def plural(count: int, name: str) -> str:
    """Return a count with its noun: `1 sync`, `2 syncs`."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


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


def short_name(name: str, letters: int = MAX_NAME_LETTERS) -> str:
    """Return a name for a picture: the middle of a long one is left out."""
    if len(name) <= letters:
        return name
    half = (letters - 1) // 2
    return f"{name[:half]}\u2026{name[-half:]}"
