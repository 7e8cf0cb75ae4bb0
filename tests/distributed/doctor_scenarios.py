"""What ranks do in test_doctor_links.py."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron_edit.comm import worlds as world
from megatron_edit.tools.cli import doctor as command
from megatron_edit.tools.cli import main
from megatron_edit.tools.doctor import launch, links

AHEAD_SECONDS = 5.0


def doctor(*words: str, clock_of: int | None = None, blind: int | None = None) -> None:
    """The command, with short exchanges.

    Args:
        words: of the command line, without Megatron.
        clock_of: rank whose clock is ahead.
        blind: rank that does not see the shared folder.
    """
    links.LONG_SECONDS, launch.PATIENCE_SECONDS = 0.02, 0.3
    rank, now = int(os.environ["RANK"]), time.time
    if rank == clock_of:
        time.time = lambda: now() + AHEAD_SECONDS
    if rank == blind:
        poll = launch._poll
        launch._poll = lambda path, content: poll(Path("/nowhere") / path.name, content)
    code = main(["doctor", "--no-host", *words])
    if code:
        raise SystemExit(code)


def with_faults(words: list[str]) -> None:
    """See `doctor`: rank 1 is ahead, rank 3 is blind."""
    doctor(*words, clock_of=1, blind=3)


def with_interface(words: list[str], name: str, ranks: list[int]) -> None:
    """See `doctor`: these ranks are told to use an interface."""
    if int(os.environ["RANK"]) in ranks:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    doctor(*words)


def with_one_that_leaves(words: list[str], leaver: int) -> None:
    """See `doctor`: a rank is gone when the others connect to each other."""
    vars(world)["LEAST_TIMEOUT_SECONDS"], vars(command)["GRACE_SECONDS"] = 4.0, 0.5
    if int(os.environ["RANK"]) == leaver:
        launch._everybody = lambda world: os._exit(0)
    doctor(*words)
