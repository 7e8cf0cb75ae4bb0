"""Progress of A-EDiT in samples of all replicas, and Megatron's log lines with it."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_edit.comm.control import DelayedFlags, Flag
from megatron_edit.comm.heartbeat import HeartbeatMonitor, ReplicaProgress
from megatron_edit.host.model.counters import LoopControl
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.method.ledger import SampleOrder
from tests.harness.memory_network import Network, two_phase_groups

anything: Any = SimpleNamespace
BATCH, STEP = 8, 4  # samples of a global batch, and of one step of one of two replicas


class Run:
    """Replica 0 of two in A-EDiT, after a warm-up of two steps: 16 of 80 samples."""

    def __init__(self, start: int = 0, target: int = 20, **args: Any) -> None:
        self.args = Namespace(
            global_batch_size=BATCH, train_iters=10, curr_iteration=1, consumed_train_samples=0,
            eval_interval=None, save_interval=None, non_persistent_save_interval=None,
            exit_interval=None, start_eval_at_iter=None, **args,
        )  # fmt: skip
        loop = LoopControl(self.args, anything(num_steps=0))
        loop.override_intervals(2 * BATCH, is_over=False)
        status = anything(
            was_warmup_step=False, is_final_phase=False, steps_of_others=2, records=(),
            assignment=anything(target=target),
        )  # fmt: skip
        self.engine = anything(
            settings=anything(assigns_blocks=True, is_timed=True), status=status, elastic=None
        )
        self.counters = anything(
            loop=loop, samples=2 * STEP, samples_per_step=STEP, samples_at_start=(0, 0),
            order=SampleOrder(start), iteration=2, last_local_iteration=10,
            with_consumed_samples=nullcontext,
        )  # fmt: skip
        self.host = anything(arguments=self.args, counters=self.counters)
        self.progress = RunProgress(self.engine, self.host, 0, 2)

    def step(self, reported: int = 0, gathered: int = 0) -> tuple[int, int]:
        """Make a step; the progress after it.

        Args:
            reported: steps of the other replica that its heartbeat has reported.
            gathered: samples of the other replica in the records of a meeting after the step.
        """
        self.counters.samples += STEP
        self.args.curr_iteration += 1
        self.engine.status.steps_of_others = max(reported, self.engine.status.steps_of_others)
        if gathered:
            self.engine.status.records = [
                anything(samples=self.counters.samples),
                anything(samples=gathered),
            ]
        return self.progress.iteration, self.progress.samples


def test_progress_counts_samples_of_all_replicas() -> None:
    """Catches a count of only this replica's steps, one that decreases, one that exceeds the true
    count, and an end at another number than `--train-iters`."""
    run = Run()
    assert (run.progress.iteration, run.progress.samples) == (2, 16)
    assert run.step() == (2, 20)  # the other has not reported steps
    assert run.step(reported=5) == (4, 36)
    assert run.step(gathered=24) == (5, 44)  # a meeting is exact
    assert run.step(reported=6) == (6, 48)  # a late report does not decrease the count
    assert run.step(reported=11) == (9, 72)
    assert run.step(gathered=48) == (10, 80)


def test_progress_reaches_the_end_without_a_partial_block() -> None:
    """After a change of replicas a run may end three samples short: it is over nevertheless."""
    run = Run(start=17, target=15)
    assert run.progress.iteration_at(17 + 14 * STEP) == 9
    assert run.progress.iteration_at(17 + 15 * STEP) == 10  # 77 of 80
    assert run.progress.iteration_at(100) == 12  # beyond the target
    assert run.progress.iteration_at(0) == 1  # Megatron treats 0 as no iteration


def test_progress_counts_common_steps_in_the_final_phase() -> None:
    """The phase begins after 44 samples, of which this replica counts half. Catches samples that
    were reported in the rounds: the other replica had made more steps than this one."""
    run = Run()
    assert run.step(reported=7) == (5, 40)
    run.engine.status.is_final_phase = True
    run.counters.samples, run.counters.samples_at_start = 22, (22, 22)
    assert (run.progress.iteration, run.progress.samples) == (6, 44)
    assert run.step(reported=8) == (7, 52)


@pytest.mark.parametrize("fails", [False, True])
def test_steps_of_other_replicas_reach_all_ranks(fails: bool) -> None:
    """Through the shared store, and to all ranks of the replica. Catches a replica that counts its
    own steps, and steps that are added again after a failure, so that the sum is too large."""
    store: Any = dist.HashStore()
    steps = [3, 4, 7]
    monitors = [HeartbeatMonitor(r, 3, partial(_place, steps, r), is_reporting=True)
                for r in range(3)]  # fmt: skip
    for _ in range(2):
        for monitor in monitors:
            monitor.exchange(store)
    assert [monitor.steps_of_others for monitor in monitors] == [11, 10, 7]
    steps[1] = 9
    if fails:
        failing_store: Any = anything(set=store.set, add=_fail)
        with pytest.raises(RuntimeError):
            monitors[1].exchange(failing_store)
    for monitor in reversed(monitors):
        monitor.exchange(store)
    assert monitors[0].steps_of_others == (11 if fails else 16)
    ranks = [DelayedFlags(group) for group in two_phase_groups(2, Network())]
    for rank, flags in enumerate(ranks):
        flags.post(Flag.MEET, 16 if rank == 0 else 99)
    assert [(flags.read(), flags.steps_of_others) for flags in ranks] == [(Flag.MEET, 16)] * 2


def _place(steps: list[int], replica: int) -> ReplicaProgress:
    return ReplicaProgress(0, 0, steps[replica])


def _fail(key: str, amount: int) -> int:
    raise RuntimeError("the store does not answer")
