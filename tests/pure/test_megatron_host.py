"""What the engine learns of Megatron's loop, and when: steps, samples, the schedule. No model is
built."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_edit.comm.placement import Placement
from megatron_edit.config import EditConfig
from megatron_edit.host.model import megatron_host as module
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.host.training import TrainingLoop

anything: Any = SimpleNamespace


class Schedule:
    """Of Megatron: a rate that rises to its peak over 16 samples, then falls with each sample."""

    lr_warmup_steps, max_lr = 16, 1.0

    def __init__(self) -> None:
        self.num_steps = 0

    def get_lr(self, group: dict[str, float]) -> float:
        """At `num_steps`."""
        if self.num_steps <= 16:
            return group["max_lr"] * self.num_steps / 16
        return group["max_lr"] * (1 - (self.num_steps - 16) / 100)

    def step(self, increment: int) -> None:
        """Move on."""
        self.num_steps += increment


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> MegatronHost:
    """Of replica 1 of two, with micro-batches of 2 on one rank and two of them in a step."""
    planned = anything(units=None, unit_of={}, origins={}, has_tied_stages=False)
    monkeypatch.setattr(module, "plan_model", lambda *_: planned)
    monkeypatch.setattr(module, "get_num_microbatches", lambda: 2)
    args = Namespace(
        iteration=0, curr_iteration=0, train_iters=6, iterations_to_skip=[], micro_batch_size=2,
        data_parallel_size=2, consumed_train_samples=0, train_samples=None,
    )  # fmt: skip
    inner = anything(param_groups=[{"max_lr": 0.5}, {"max_lr": 2.0}])
    nobody: Any = None
    schedule: Any = Schedule()
    placement, config = Placement(2, 1, 1, 0, True), EditConfig()
    return MegatronHost(args, [], inner, schedule, nobody, placement, config)


def step(host: MegatronHost, iteration: int, *, was_applied: bool = True) -> None:
    """Megatron makes an iteration, counted from 1; its schedule moves on after the count."""
    host.arguments.curr_iteration = iteration - 1
    host._count_step(was_applied=was_applied)


def test_a_skipped_step_moves_no_schedule(host: MegatronHost) -> None:
    """fp16 overflowed: its samples are consumed. Catches a schedule that is told to be ahead."""
    step(host, 1)
    assert (host.progress().samples, host.progress().pending_schedule) == (4, 8)
    step(host, 2, was_applied=False)
    assert (host.progress().samples, host.progress().pending_schedule) == (8, 0)


def test_iterations_that_the_user_skips_are_consumed(host: MegatronHost) -> None:
    """Without a step; and where only such are left, the one before is the last."""
    host.arguments.iterations_to_skip = [2, 3, 6]
    step(host, 1)
    assert not host.progress().is_last_step
    step(host, 4)
    assert host.progress().samples == 16 and not host.progress().is_last_step
    step(host, 5)
    assert host.progress().samples == 20 and host.progress().is_last_step
    assert [host.iteration_of(number, 5, 3) for number in (1, 2, 3)] == [1, 4, 5]
    host.arguments.iterations_to_skip = []
    assert not host.progress().is_last_step
    step(host, 6)
    assert host.progress().is_last_step


def test_rates_of_this_step_and_the_next(host: MegatronHost) -> None:
    """The largest of all groups; while the schedule warms up, the peak that it comes to."""
    schedule: Any = host._scheduler
    schedule.num_steps = 8
    assert (host.progress().inner_lr, host.progress().next_lr) == (1.0, 2.0)
    schedule.num_steps = 26
    step(host, 1)
    progress = host.progress()
    assert (progress.inner_lr, progress.next_lr) == pytest.approx((1.8, 1.64))
    assert schedule.num_steps == 26


def test_a_replica_that_goes_back_to_its_meeting(host: MegatronHost) -> None:
    """Its schedule has moved on already: catches a rate, or a position, that counts it twice."""
    schedule: Any = host._scheduler
    schedule.num_steps = 40
    host.set_pending_schedule(8)
    progress = host.progress()
    assert (progress.schedule_position, progress.pending_schedule) == (32, 8)
    step(host, 1)
    assert host.progress().schedule_position == 40


@pytest.mark.parametrize("is_warmup", [False, True])
def test_a_step_in_its_order(is_warmup: bool) -> None:
    """The sync that lands is closed first, the gather is left to the engine in the rounds, and a
    step counts before the engine is told. Catches a gather of what a landing replaces at once, and
    one that is left out for ever."""
    calls: list[Any] = []

    def note(name: str) -> Any:
        return lambda *_, **given: calls.append((name, *given.values()) if given else name)

    class Optimizer:
        """Of Megatron."""

        def step(self) -> tuple[bool, float, None]:
            """It was applied."""
            calls.append("step")
            return True, 1.0, None

        def zero_grad(self) -> None:
            """The first call of a training step."""
            calls.append("zero")

    engine = anything(
        before_step=note("close"), after_step=note("meet"), status=anything(is_warmup=is_warmup)
    )
    host = anything(
        loop=anything(begin_step=note("begin")), _count_step=note("count"),
        _defer_gather=lambda is_deferred: calls.append(("defer", is_deferred)),
        _beta2_of_step=nullcontext,
    )  # fmt: skip
    host.attempt_step = partial(MegatronHost.attempt_step, host)
    optimizer: Any = Optimizer()
    hooks: Any = anything(_patcher=Patcher("Megatron"))
    TrainingLoop._hook_step(hooks, engine, host, anything(begin_step=note("stamp")), optimizer)
    optimizer.zero_grad()
    assert optimizer.step() == (True, 1.0, None)
    assert calls == [
        "stamp", "zero", "close", "begin", ("defer", not is_warmup), "step", ("defer", False),
        ("count", True), "meet",
    ]  # fmt: skip
    hooks._patcher.undo()
    assert vars(optimizer) == {}


@pytest.mark.parametrize("was_applied", [True, False])
@pytest.mark.parametrize("lands_in_forward", [True, False])
def test_who_gathers_after_a_step(
    host: MegatronHost, monkeypatch: pytest.MonkeyPatch, was_applied: bool, lands_in_forward: bool
) -> None:
    """The engine does, once, where the step has left it out and no forward pass does: catches a
    gather at every step, one of a step that fp16 skipped, and one that is left out."""
    gathered: list[bool] = []
    handles = {1: "handle"} if lands_in_forward else {}
    chunk = anything(
        ddp_config=anything(use_distributed_optimizer=True),
        remove_forward_pre_hook_handles=handles,
        start_param_sync=lambda *, force_sync: gathered.append(force_sync),
    )  # fmt: skip
    timer = anything(start=lambda: None, stop=lambda: None)
    monkeypatch.setattr("megatron.training.get_timers", lambda: lambda name, log_level: timer)
    monkeypatch.setattr(host, "_model", [chunk])
    for defers in (False, True):
        host.attempt_step(lambda: (was_applied, 1.0, None), defers_gather=defers)
        assert host.awaits_gather == (defers and was_applied and not lands_in_forward)
        host.gather_parameters()
        assert not host.awaits_gather
    assert gathered == [True, True]
