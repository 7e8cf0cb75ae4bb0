"""Time-outs of the waits for other replicas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from megatron_edit.comm.collectives import Group
from megatron_edit.constants import MIN_TIMEOUT_SECONDS, TIMEOUT_ROUNDS


def set_timeout(group: Group, timeout: timedelta) -> None:
    """Set the time-out of collectives that begin from now on.

    Gloo receives it with each call; NCCL has only the group's own time-out, after which its
    watchdog ends the process.
    """
    group.timeout = timeout
    if group.runs_in_order:
        group.process_group._set_default_timeout(timeout)


@dataclass
class AdaptiveTimeout:
    """Adapts the time-outs between replicas to the length of the rounds.

    At meetings they apply only to replicas that make no progress: see `Meetings`.

    Attributes:
        groups: between replicas.
        is_fixed: whether the user gave the time-out.
        length: of the last round, seconds.
    """

    groups: Sequence[Group]
    is_fixed: bool
    length: float = 0.0
    _began: float = field(default_factory=time.monotonic)

    def begin(self, length: float = 0.0) -> None:
        """Begin the first round, or resume the round of a checkpoint.

        Args:
            length: seconds of the last round before it.
        """
        self._began = time.monotonic()
        self._allow(length)

    def after_round(self) -> None:
        """End a round: the next may take `TIMEOUT_ROUNDS` times as long."""
        now = time.monotonic()
        length, self._began = now - self._began, now
        self._allow(length)

    def _allow(self, length: float) -> None:
        self.length = length
        if not self.is_fixed:
            for group in self.groups:
                set_timeout(
                    group, timedelta(seconds=max(MIN_TIMEOUT_SECONDS, TIMEOUT_ROUNDS * length))
                )
