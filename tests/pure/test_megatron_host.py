"""What `MegatronHost` reports to the engine: steps, samples, schedule. No model is built."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_edit.comm.placement import Placement
from megatron_edit.config import EditConfig
from megatron_edit.constants import MUON
from megatron_edit.host.model import counters
from megatron_edit.host.model import megatron_host as module
from megatron_edit.host.model.megatron_host import MegatronHost

anything: Any = SimpleNamespace


class Schedule:
    """A stand-in for Megatron's scheduler: the rate rises over 16 samples, then decays."""

    lr_warmup_steps, max_lr = 16, 1.0

    def __init__(self) -> None:
        self.num_steps = 0

    def get_lr(self, group: dict[str, float]) -> float:
        """Return the rate at `num_steps`."""
        if self.num_steps <= 16:
            return group["max_lr"] * self.num_steps / 16
        return group["max_lr"] * (1 - (self.num_steps - 16) / 100)

    def step(self, increment: int) -> None:
        """Advance the schedule."""
        self.num_steps += increment


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> MegatronHost:
    """Return the host of replica 1 of two; its one rank makes two micro-batches of 2 per step."""
    planned = anything(units=None, unit_of={}, origins={}, has_tied_stages=False)
    monkeypatch.setattr(module, "plan_model", lambda *_: planned)
    monkeypatch.setattr(counters, "get_num_microbatches", lambda: 2)
    args = Namespace(
        iteration=0, curr_iteration=0, train_iters=6, iterations_to_skip=[], micro_batch_size=2,
        data_parallel_size=2, consumed_train_samples=0, train_samples=None,
    )  # fmt: skip
    inner = anything(param_groups=[{"max_lr": 0.5}, {"max_lr": 2.0}])
    unused: Any = None
    schedule: Any = Schedule()
    placement, config = Placement(2, 1, 1, 0, True), EditConfig()
    return MegatronHost(args, [], inner, schedule, unused, placement, config)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"optimizer": "adam"}, 2.0**-19),
        ({"optimizer": "adam", "exp_avg_dtype": torch.bfloat16}, 2.0**-19),  # has no effect alone
        ({"optimizer": MUON}, 2.0**-7),
        ({"exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.bfloat16}, 2.0**-7),
        ({"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16}, 2.0**-3),
    ],
)
def test_error_of_an_update_is_that_of_its_coarsest_type(
    host: MegatronHost, settings: dict[str, object], error: float
) -> None:
    """Would catch rounding of bf16 or fp8 moments that is taken for drift, and drift of fp32
    moments that is taken for rounding."""
    vars(host.arguments).update(
        {"optimizer": "adam", "use_precision_aware_optimizer": "optimizer" not in settings}
        | settings
    )
    assert host.update_error == 2 * error


def step(host: MegatronHost, iteration: int) -> None:
    """Count one iteration of Megatron, from 1; its schedule advances afterwards."""
    host.arguments.curr_iteration = iteration - 1
    host.counters.count_step(was_applied=True)


def test_inner_lr_and_next_lr_follow_schedule(host: MegatronHost) -> None:
    """The largest rate of all groups; in the schedule's warm-up, `next_lr` is its peak."""
    schedule: Any = host.counters._scheduler
    schedule.num_steps = 8
    assert (host.progress().inner_lr, host.progress().next_lr) == (1.0, 2.0)
    schedule.num_steps = 26
    step(host, 1)
    progress = host.progress()
    assert (progress.inner_lr, progress.next_lr) == pytest.approx((1.8, 1.64))
    assert schedule.num_steps == 26


def test_pending_schedule_is_not_counted_twice(host: MegatronHost) -> None:
    """After a resume at a meeting the schedule has advanced already.

    Catches a rate or position that counts the pending samples twice.
    """
    schedule: Any = host.counters._scheduler
    schedule.num_steps = 40
    host.counters.set_pending_schedule(8)
    progress = host.progress()
    assert (progress.schedule_position, progress.pending_schedule) == (32, 8)
    step(host, 1)
    assert host.progress().schedule_position == 40
