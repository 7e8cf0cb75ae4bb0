"""What A-EDiT decides at a meeting, from the records alone; and what its trigger asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.timeouts import AdaptiveTimeout
from megatron_edit.engine import Host, Penalty
from megatron_edit.engine.rounds.plan import Outcome, RoundPlan, RoundRules, RoundState, plan_round
from megatron_edit.engine.rounds.trigger import ClockTrigger
from megatron_edit.engine.state import MeanLoss, RunState
from megatron_edit.method.clock import PhaseClock, TimeTrigger
from megatron_edit.method.detector import DetectorConfig
from megatron_edit.method.landing import DIRECT_COPY
from megatron_edit.method.ledger import Dealing
from megatron_edit.method.schedule import StepSchedule

PENALTY = Penalty(DetectorConfig(3.0, 0.02, 20, 3), True, None, False)
RULES = RoundRules(PENALTY, DIRECT_COPY, StepSchedule(0, 4), min_steps=10)  # rounds of 10 steps


def fresh(target: int = 100) -> RoundState:
    """Two replicas, one unit, and so many blocks of samples in the whole training."""
    return RoundState.fresh(2, 1, Dealing(2, target))


def meet(before: RoundState, *steps: int) -> RoundPlan:
    """A meeting after so many steps of each replica in the round."""
    records = [ControlRecord(0, n, n, 2 * n, 0, losses=(), norms=(1.0,)) for n in steps]
    return plan_round(before, records, [0], RULES, is_last=False)


@pytest.mark.parametrize("is_extended", [False, True])
def test_what_is_due_is_put_off_once(is_extended: bool) -> None:
    """A replica rejoins outside of a step: only that meeting puts off what is due, also where the
    round goes on after it."""
    state = replace(fresh(), is_rejoined=True)
    if is_extended:
        plan = meet(state, 4, 4)
        assert plan.outcome is Outcome.EXTEND and plan.after.count == 0
        state = plan.after
    plan = meet(state, 6, 6)
    assert plan.outcome is Outcome.SYNC and plan.is_dealt and plan.after.count == 1
    assert plan.is_followed is (not is_extended) and not plan.after.is_rejoined


def test_more_steps_loaded_than_asked_for() -> None:
    """Training is over: catches a ledger that refuses a frontier beyond its target, and one that a
    checkpoint would take for samples that are still to consume."""
    timer = TimeTrigger(10.0, PhaseClock(lambda: 0))
    timeout = AdaptiveTimeout((), is_fixed=True)
    state = RunState(fresh(), MeanLoss(), timer.clock, timeout, timer)
    nobody: Any = None
    trigger = ClockTrigger(0, 1, 100, cast(Host, nobody), state)
    state.step = 30
    trigger.begin_together()
    assert trigger.dealing == Dealing(2, 100, 60) and not trigger.is_over
    state.step = 60
    trigger.begin_together()
    assert trigger.dealing == Dealing(2, 120, 120) and trigger.is_over
    assert state.inner_steps == 0 and state.num_dealings == 2
