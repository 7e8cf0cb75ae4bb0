"""Which cases still fit into the time, and which were left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .cases import Case


class Plan:
    """The time of all cases.

    A case is expected to take its estimate, scaled by the time that the finished ones took beyond
    theirs.

    Args:
        cases: in order.
        lacking: what a case needs that the machine has not, by name.
        end: on `clock`, by which all must be over.
        clock: seconds.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        lacking: Mapping[str, str],
        end: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cases, self._lacking, self._end, self._clock = cases, lacking, end, clock
        self._is_over: set[str] = set()
        self._measured = self._estimated = 0.0

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return max(0.0, self._end - self._clock())

    def expected(self, case: Case) -> float:
        """Return the seconds that a case is expected to take."""
        return case.seconds * (self._measured / self._estimated if self._estimated else 1.0)

    def end(self, case: Case, seconds: float | None) -> None:
        """Note that a case is over, and the seconds that it took; None if it failed."""
        self._is_over.add(case.name)
        if seconds is not None:
            self._measured += seconds
            self._estimated += case.seconds

    def left_out(self) -> list[dict[str, Any]]:
        """Return the cases that are not over, and why: software, or time that is short."""
        return [
            {"case": case.name, "seconds": self.expected(case),
             "lacking": self._lacking.get(case.name, "more time (--budget)")}
            for case in self._cases
            if case.name not in self._is_over
        ]  # fmt: skip
