"""Rates, sizes and durations as people write them, and as they read them."""

from __future__ import annotations

import math
import re

from megatron_edit.errors import UsageError
from megatron_edit.tools.plan.limits import LEAST, MOST, shortened

_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ]*)(?:/s)?\s*$")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
RATE_UNITS = {
    **{f"{prefix}{unit}": factor for prefix, factor in _PREFIXES.items()
       for unit in ("bit", "bps", "b")},
    **{f"{prefix}B": 8 * factor for prefix, factor in _PREFIXES.items()},
}  # fmt: skip
SIZE_UNITS = {f"{prefix}B": factor for prefix, factor in (_PREFIXES | _BINARY).items()}
_RANGE = f"from {LEAST:g} to {MOST:g}"
TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0}


def parse_rate(flag: str, text: str) -> float:
    """Bits per second of `10Gbit`, `100Mbit/s`, `1.25GB/s`.

    Raises:
        UsageError: it is none, or not above 0.
    """
    rule = f"a rate above 0 with its unit, {_RANGE} bit/s"
    return _parse(flag, text, RATE_UNITS, rule, "give for example 10Gbit")


def parse_bytes(flag: str, text: str) -> float:
    """Bytes of `80GB` or `80GiB`.

    Raises:
        UsageError: it is none, or not above 0.
    """
    rule = f"a size above 0 with its unit, {_RANGE} B"
    return _parse(flag, text, SIZE_UNITS, rule, "give for example 80GB")


def parse_seconds(flag: str, text: str, *, least: float = 0.0) -> float:
    """Seconds of `2.5`, `350ms`, `10min`; above 0, or from 0 on where `least` is below 0.

    Raises:
        UsageError: it is none, or out of range.
    """
    rule = "a duration above 0" if least >= 0 else "a duration of 0 or more"
    remedy = "give for example 0.35 or 350ms"
    return _parse(flag, text, TIME_UNITS, f"{rule}, {_RANGE} s", remedy, least)


def _parse(
    flag: str, text: str, units: dict[str, float], rule: str, remedy: str, least: float = 0.0
) -> float:
    found = _NUMBER.match(text)
    value = math.nan
    if found is not None and found[2] in units:
        value = float(found[1]) * units[found[2]]
    if not (LEAST <= value <= MOST or (value == 0 and least < 0)):
        raise UsageError(f"{flag} {shortened(text)}", f"must be {rule}", remedy)
    return value


def show_bytes(value: float) -> str:
    """`3.37 GB`; decimal prefixes, as networks and GPUs have them."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= factor:
            digits = ".3g" if value < 999.5 * factor else ".0f"
            return f"{value / factor:{digits}} {unit}"
    return f"{value:.0f} B"


def show_seconds(value: float) -> str:
    """`1.25 s`, `84 ms`, `12 min`."""
    if not math.isfinite(value):
        return "never"
    if value >= 600:
        return f"{value / 60:.0f} min" if value < 36000 else f"{value / 3600:.1f} h"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 or value == 0 else f"{value * 1e6:.0f} µs"


def show_rate(bits_per_second: float) -> str:
    """`10 Gbit/s`."""
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.4g} {unit}"
    return f"{bits_per_second:.4g} bit/s"


def show_count(value: float) -> str:
    """`6.74 billion`, `2.56 million`, `1024`."""
    for unit, factor in (("billion", 1e9), ("million", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f}"
