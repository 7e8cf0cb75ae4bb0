"""One decision per replica: all its ranks meet after the same step, although clocks jitter."""

from __future__ import annotations

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.control import DelayedFlags, Flag
from megatron_edit.method.clock import NANOSECONDS, PhaseClock, TimeTrigger
from tests.harness import run_ranks

LATE_SECONDS = 2.0


def decide_with_jitter(seed: int, num_steps: int) -> dict[str, list[int]]:
    """Run with one clock per rank; returns the steps after which it meets, or asks to meet."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, jitter = dist.get_rank(), random.Random(seed * 100 + dist.get_rank())
    now = [jitter.randrange(10**15)]
    trigger = TimeTrigger(1.0, PhaseClock(lambda: now[0]))
    group = Group.of(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=60), "control")
    flags, met, asked = DelayedFlags(group), [], []
    for step in range(1, num_steps + 1):
        now[0] += int(jitter.uniform(0.02, 0.2) * NANOSECONDS)
        is_due = Flag.MEET in flags.read()
        if is_due:
            met.append(step)
            trigger.restart()
        is_asking = not is_due and trigger.after_step()
        if is_asking:
            asked.append(step)
        flags.post(Flag.MEET if is_asking else Flag.NONE)
    dist.destroy_process_group()
    return {"rank": [rank], "met": met, "asked": asked}


def post_late() -> dict[str, float]:
    """Post a flag, rank 0 late; returns the seconds until `post` and `read` returned."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = Group.of(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=60), "control")
    flags, is_first = DelayedFlags(group), dist.get_rank() == 0
    flags.post(Flag.NONE)
    flags.read()  # connections exist, and all ranks start at about the same time
    began = time.monotonic()
    if is_first:
        time.sleep(LATE_SECONDS)
    flags.post(Flag.MEET if is_first else Flag.NONE)
    posted = time.monotonic() - began
    assert flags.read() is Flag.MEET
    read = time.monotonic() - began
    dist.destroy_process_group()
    return {"posted": posted, "read": read}


@pytest.mark.parametrize(
    ("seed", "num_steps"),
    [(7, 2500), *(pytest.param(seed, 10_000, marks=pytest.mark.full) for seed in (7, 8, 9))],
)
def test_all_ranks_of_a_replica_meet_after_the_same_step(seed: int, num_steps: int) -> None:
    """Catches a rank that follows its own clock, so that the ranks hang."""
    target = "tests.distributed.test_decision:decide_with_jitter"
    results = [result.value for result in run_ranks(target, 4, (seed, num_steps), check=True)]
    first = results[0]
    assert len(first["met"]) > num_steps / 20
    assert all(result["met"] == first["met"] for result in results)
    assert first["met"] == [step + 1 for step in first["asked"]]  # one step late
    assert any(result["asked"] != first["asked"] for result in results)  # the clocks differ


def test_posting_a_flag_does_not_block() -> None:
    """Catches a `post` that waits for rank 0, which is late, and stalls training."""
    results = run_ranks("tests.distributed.test_decision:post_late", 3, check=True)
    for result in results[1:]:
        assert result.value["posted"] < LATE_SECONDS / 2
        assert result.value["read"] > LATE_SECONDS / 2  # rank 0 was late
