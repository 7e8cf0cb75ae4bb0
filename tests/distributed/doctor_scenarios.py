"""Functions that the ranks of test_doctor_links.py run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron_edit.comm import worlds as world
from megatron_edit.tools.cli import doctor as command
from megatron_edit.tools.cli import main
from megatron_edit.tools.doctor import launch

AHEAD_SECONDS = 5.0


def doctor(*words: str, clock_of: int | None = None, blind: int | None = None) -> None:
    """Run the doctor with short measurements and without Megatron.

    Args:
        words: further words of the command line.
        clock_of: rank whose clock is ahead.
        blind: rank that does not see the shared folder.
    """
    launch.LONG_SECONDS, launch.PATIENCE_SECONDS = 0.02, 0.3
    rank, now = int(os.environ["RANK"]), time.time
    if rank == clock_of:
        time.time = lambda: now() + AHEAD_SECONDS
    if rank == blind:
        look_for = launch._look_for
        launch._look_for = lambda path: look_for(Path("/nowhere") / path.name)
    code = main(["doctor", *words])
    if code:
        raise SystemExit(code)


def with_faults(words: list[str]) -> None:
    """Run `doctor` where rank 1's clock is ahead and rank 3 does not see the folder."""
    doctor(*words, clock_of=1, blind=3)


def with_interface(words: list[str], name: str, ranks: list[int]) -> None:
    """Run `doctor` where some ranks have `GLOO_SOCKET_IFNAME` set."""
    if int(os.environ["RANK"]) in ranks:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    doctor(*words)


def with_exited_rank(words: list[str], exited: int) -> None:
    """Run `doctor` where a rank exits before the ranks connect to each other."""
    vars(world)["MIN_TIMEOUT_SECONDS"], vars(command)["GRACE_SECONDS"] = 4.0, 0.5
    if int(os.environ["RANK"]) == exited:
        launch._all_ranks_group = lambda world: os._exit(0)
    doctor(*words)
