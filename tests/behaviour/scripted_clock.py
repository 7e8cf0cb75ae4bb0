"""A training script: `pretrain_gpt.py` under a clock on which a step of replica r lasts as told.

`CLOCK_SECONDS` holds the seconds of a step, by replica. One micro-batch a step, one rank a replica
(so LOCAL_RANK is the replica; RANK is given anew inside of it): time goes on when the script's
forward step is called, and at no other time. `pretrain_gpt.py` is looked for on the path; of the
plugin only `megatron_edit.method.clock` is touched.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from typing import Any

from megatron_edit.method.clock import PhaseClock

pretrain_gpt: Any = import_module("pretrain_gpt")


class ScriptedClock:
    """Shows nanoseconds that only `advance` changes.

    Attributes:
        step: nanoseconds that a step takes.
        now: nanoseconds that it shows.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.now = 0

    def advance(self) -> None:
        """A step goes by."""
        self.now += self.step

    def read(self) -> int:
        """What it shows, nanoseconds."""
        return self.now


def install(clock: ScriptedClock) -> None:
    """Let all phase clocks that are made from now on read `clock`, and steps advance it."""
    begin, forward_step = PhaseClock.__post_init__, pretrain_gpt.forward_step

    def scripted(self: PhaseClock) -> None:
        self.read = clock.read
        begin(self)

    def advancing(data_iterator: Any, model: Any) -> tuple[Any, Any]:
        clock.advance()
        result: tuple[Any, Any] = forward_step(data_iterator, model)
        return result

    PhaseClock.__post_init__ = scripted  # type: ignore[method-assign]
    pretrain_gpt.forward_step = advancing


if __name__ == "__main__":
    seconds = json.loads(os.environ["CLOCK_SECONDS"])[int(os.environ["LOCAL_RANK"])]
    install(ScriptedClock(round(seconds * 1e9)))
    pretrain_gpt.main()
