"""Numbers of a file that may be damaged: taken only where something can be made of them."""

from __future__ import annotations

import math
from typing import Any

LARGEST_COUNT = 2**53  # as a float it is still exact
LARGEST_NUMBER = 1e100  # squares and sums of such are finite; float32 ends at 3e38


def whole(value: Any, least: int = 0) -> int:
    """A whole number.

    Raises:
        TypeError, ValueError: it is none, is below `least`, or larger than anything can be.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a {type(value).__name__} where a whole number must be")
    if not least <= value <= LARGEST_COUNT or value != int(value):
        raise ValueError("a number that cannot be a count")
    return int(value)


def finite(value: Any, least: float = -LARGEST_NUMBER) -> float:
    """A number.

    Raises:
        TypeError, ValueError: it is none, is below `least`, or larger than anything can be.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a {type(value).__name__} where a number must be")
    if not least <= value <= LARGEST_NUMBER:
        raise ValueError("a number out of range")
    return float(value)


def finite_or_nan(value: Any) -> float:
    """A number; NaN where the file has null.

    Raises:
        TypeError, ValueError: it is neither.
    """
    return math.nan if value is None else finite(value)
