"""How long a replica waits for the others before it gives them up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta

from megatron_edit.replica.collectives import Group

MIN_SECONDS = 600.0
ROUNDS = 4


@dataclass
class Patience:
    """Lets the time-out of the sync group follow the length of the rounds.

    Attributes:
        group: the sync group.
        is_fixed: whether the user gave the time-out.
    """

    group: Group
    is_fixed: bool
    _began: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """The first round begins."""
        self._began = time.monotonic()

    def after_round(self) -> None:
        """A round is over: the next may take four times as long."""
        now = time.monotonic()
        length, self._began = now - self._began, now
        if not self.is_fixed:
            self.group.timeout = timedelta(seconds=max(MIN_SECONDS, ROUNDS * length))
