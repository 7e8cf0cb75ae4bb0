"""A training script: `pretrain_gpt.py` with a clock on which a step of a replica takes a set time.

`CLOCK_SECONDS` holds the seconds per step, by replica. With one micro-batch per step and one rank
per replica, LOCAL_RANK is the replica (RANK is rewritten in it). Time advances only when the
script's forward step is called. `pretrain_gpt.py` is imported from the path; of the plugin only
`megatron_edit.method.clock` is patched, and what heartbeats, which come in real time, tell about
the arrival of other replicas (not in older versions).
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from typing import Any

from megatron_edit.comm.heartbeat import HeartbeatMonitor
from megatron_edit.method.clock import PhaseClock

pretrain_gpt: Any = import_module("pretrain_gpt")


class ScriptedClock:
    """A clock that only `advance` moves.

    Attributes:
        step: nanoseconds per step.
        now: current time, nanoseconds.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.now = 0

    def advance(self) -> None:
        """Advance by one step."""
        self.now += self.step

    def read(self) -> int:
        """Return the current time, nanoseconds."""
        return self.now


def install(clock: ScriptedClock) -> None:
    """Make all new phase clocks read `clock`, and each forward step advance it."""
    begin, forward_step = PhaseClock.__post_init__, pretrain_gpt.forward_step

    def scripted(self: PhaseClock) -> None:
        self.read = clock.read
        begin(self)

    def advancing(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        clock.advance()
        result: tuple[Any, Any] = forward_step(data_iterator, model)
        return result

    PhaseClock.__post_init__ = scripted  # type: ignore[method-assign]
    HeartbeatMonitor.latest_arrival = lambda self: 0.0  # type: ignore[method-assign]
    pretrain_gpt.forward_step = advancing


if __name__ == "__main__":
    seconds = json.loads(os.environ["CLOCK_SECONDS"])[int(os.environ["LOCAL_RANK"])]
    install(ScriptedClock(round(seconds * 1e9)))
    pretrain_gpt.main()
