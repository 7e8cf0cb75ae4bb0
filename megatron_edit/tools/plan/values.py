"""Parsing, range checks and formatting of values on a command line.

Values beyond the limits describe no training, and would overflow arithmetic or the tables of ranks
and layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from megatron_edit.errors import UsageError
from megatron_edit.tools.compare.flags import canonical

LEAST, MOST = 1e-12, 1e18  # bits per second, bytes, seconds, TFLOP/s
MOST_COUNTED = 10**12
MOST_RANKS = 1_000_000
_MOST_SHOWN = 40  # characters of a value

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ]*(?:/[sS])?)\s*")
_DECIMAL = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
_PREFIXES = {prefix.lower(): factor for prefix, factor in _DECIMAL.items()} | {
    f"{prefix}i": 1024.0**power for power, prefix in enumerate("kmgt", start=1)
}
# Small letters but for B, a byte; b is a bit.
_RATE_UNITS = {
    f"{prefix}{unit}{second}": bits * factor
    for prefix, factor in _PREFIXES.items()
    for unit, bits in (("bit", 1), ("b", 1), ("byte", 8), ("B", 8))
    for second in ("", "/s", "ps")
}
_SIZE_UNITS = {f"{p}{unit}": factor for p, factor in _PREFIXES.items() for unit in ("B", "byte")}
_TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0}
_RANGE = f"from {LEAST:g} to {MOST:g}"


class TrainingFlags:
    """The flags of a training's command line.

    Args:
        argv: flags and values; a later flag overrides an earlier one of the same name.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._values = canonical(argv)

    def has(self, name: str) -> bool:
        """Return whether the flag is given."""
        return name in self._values

    def text(self, name: str, default: str, known: Sequence[str] = ()) -> str:
        """Return the single value of a flag.

        Args:
            known: the values that it may have; empty for any.

        Raises:
            UsageError: it has none, several, or another one.
        """
        values = self._values.get(name, [default])
        given = " ".join([name, *values])
        if len(values) != 1:
            raise UsageError(given, "must have one value", "correct the flag, or drop it")
        if known and values[0] not in known:
            raise UsageError(given, f"must be of {', '.join(known)}", "correct it")
        return values[0]

    def count(self, name: str, default: int | None = None, most: int = MOST_COUNTED) -> int:
        """Return the value of a flag as an integer of at least 1.

        Args:
            default: where it is missing.

        Raises:
            UsageError: it is not an integer in range, or missing without a default.
        """
        if not self.has(name):
            if default is None:
                raise UsageError(f"{name} (not given)", "the planner needs it", f"add {name}")
            return default
        text = self.text(name, "")
        # Python refuses to convert integers of thousands of digits.
        if not text.isdecimal() or len(text) > 100 or not 1 <= int(text) <= most:
            rule = f"must be a whole number from 1 to {most}"
            raise UsageError(f"{name} {shortened(text)}", rule, "correct it")
        return int(text)


def shortened(text: str) -> str:
    """Return the value, truncated if it is too long for a line."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def check_ranks(name: str, ranks: int) -> None:
    """Check that a number of ranks or replicas can be planned.

    Raises:
        UsageError: it is below 1, or too large.
    """
    given = f"{name} {shortened(str(ranks))}"
    if ranks < 1:
        raise UsageError(given, "must be at least 1", "give more")
    if ranks > MOST_RANKS:
        raise UsageError(given, f"must be at most {MOST_RANKS}", "give fewer")


def check_number(name: str, value: float | None, most: float = MOST) -> None:
    """Check that a number can be used in a plan.

    Args:
        value: None where it is not given.

    Raises:
        UsageError: it is out of range.
    """
    if value is not None and not LEAST <= value <= most:
        rule = f"must be from {LEAST:g} to {most:g}"
        raise UsageError(f"{name} {value:g}", rule, "correct it, or leave it out")


def parse_rate(flag: str, text: str) -> float:
    """Parse bits per second: `10Gbit`, `100 mbit/s`, `1.25GB/s`.

    Raises:
        UsageError: it is not a rate, or not above 0.
    """
    rule = f"a rate above 0 with its unit, {_RANGE} bit/s (b: bits, B: bytes)"
    return _parse(flag, text, _RATE_UNITS, rule, "give for example 10Gbit")


def parse_bytes(flag: str, text: str) -> float:
    """Parse bytes: `80GB`, `80GiB`.

    Raises:
        UsageError: it is not a size, or not above 0.
    """
    rule = f"a size above 0 with its unit, {_RANGE} B"
    return _parse(flag, text, _SIZE_UNITS, rule, "give for example 80GB")


def parse_seconds(flag: str, text: str, *, least: float = 0.0, needs_unit: bool = False) -> float:
    """Parse seconds: `350ms`, `10min`, `2.5`; above 0, or at least 0 where `least` is below 0.

    Args:
        least: below 0 to allow 0.
        needs_unit: whether a number without a unit is refused, unless it is 0.

    Raises:
        UsageError: it is not a duration, or out of range.
    """
    rule = "a duration above 0" if least >= 0 else "a duration of 0 or more"
    rule = f"{rule}, {_RANGE} s{', with its unit' if needs_unit else ''}"
    units = _TIME_UNITS if needs_unit else {**_TIME_UNITS, "": 1.0}
    remedy = "give for example 30ms" if needs_unit else "give for example 0.35 or 350ms"
    return _parse(flag, text, units, rule, remedy, least)


def _parse(
    flag: str, text: str, units: dict[str, float], rule: str, remedy: str, least: float = 0.0
) -> float:
    """Parse a number and its unit. The case of letters matters in `B` and `b` only."""
    value = math.nan
    if (found := _QUANTITY.fullmatch(text)) is not None:
        unit = re.sub(r"B(?!(?i:ps|/s)?$)|[^B]", lambda letter: letter[0].lower(), found[2])
        is_zero = not unit and float(found[1]) == 0
        value = 0.0 if is_zero else float(found[1]) * units.get(unit, math.nan)
    if not (LEAST <= value <= MOST or (value == 0 and least < 0)):
        raise UsageError(f"{flag} {shortened(text)}", f"must be {rule}", remedy)
    return value


def show_bytes(value: float) -> str:
    """Format bytes with decimal prefixes, as is usual for networks and GPUs: `3.37 GB`."""
    prefix, factor = _prefix_of(value)
    digits = ".3g" if prefix and value < 999.5 * factor else ".0f"
    return f"{value / factor:{digits}} {prefix}B"


def show_rate(bits_per_second: float) -> str:
    """Format a rate: `10 Gbit/s`."""
    prefix, factor = _prefix_of(bits_per_second)
    return f"{bits_per_second / factor:.4g} {prefix}bit/s"


def _prefix_of(value: float) -> tuple[str, float]:
    """Return the decimal prefix for a value, and its factor."""
    return next(((p, f) for p, f in _DECIMAL.items() if abs(value) >= f), ("", 1.0))


def show_seconds(value: float) -> str:
    """Format seconds: `1.25 s`, `84 ms`, `12 min`."""
    if value >= 600:
        return f"{value / 60:.0f} min" if value < 36000 else f"{value / 3600:.1f} h"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 or value == 0 else f"{value * 1e6:.0f} µs"
