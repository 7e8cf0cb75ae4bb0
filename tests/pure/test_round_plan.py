"""Plans of A-EDiT meetings, computed from the control records, and its trigger."""

from __future__ import annotations

import copy
import math
from dataclasses import FrozenInstanceError, replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.timeouts import AdaptiveTimeout
from megatron_edit.engine import Host, Penalty, TimedRounds
from megatron_edit.engine.plan import (
    MeetingOutcome,
    RoundPlan,
    RoundRules,
    RoundState,
    plan_round,
)
from megatron_edit.engine.rounds.trigger import ClockTrigger
from megatron_edit.engine.state import MeanLoss, RunState
from megatron_edit.method.clock import PhaseClock, TimeTrigger
from megatron_edit.method.detector import DetectorConfig
from megatron_edit.method.landing import DIRECT_COPY
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.schedule import StepSchedule

PENALTY = Penalty(
    DetectorConfig(3.0, 0.02, 20, 3), True, None, False, step_share=0.0, loss_check=None
)
RULES = RoundRules(PENALTY, DIRECT_COPY, StepSchedule(0, 4, 1), min_steps=10)  # rounds of 10 steps


def fresh(target: int = 100) -> RoundState:
    """The state of two replicas and one unit, with `target` blocks in the training."""
    return RoundState.fresh(2, 1, BlockAssignment(2, target))


def meet(before: RoundState, *steps: int) -> RoundPlan:
    """The plan of a meeting after `steps` of each replica in the round."""
    records = [ControlRecord(0, n, n, 2 * n, 0, losses=(), norms=(1.0,)) for n in steps]
    return plan_round(before, records, [0], RULES, is_last=False)


@pytest.mark.parametrize("is_extended", [False, True])
def test_due_actions_are_postponed_at_one_meeting_only(is_extended: bool) -> None:
    """After a resume at a meeting, only that meeting postpones saves and evaluations that are due,
    also where it extends the round."""
    state = replace(fresh(), resumes_at_meeting=True)
    if is_extended:
        plan = meet(state, 4, 4)
        assert plan.outcome is MeetingOutcome.EXTEND and plan.after.count == 0
        state = plan.after
    plan = meet(state, 6, 6)
    assert plan.outcome is MeetingOutcome.SYNC and plan.is_assigned and plan.after.count == 1
    assert plan.next_meeting_without_step is (not is_extended) and not plan.after.resumes_at_meeting


def test_ledger_is_exhausted_where_loaded_steps_reach_the_target() -> None:
    """Catches a ledger that refuses a frontier beyond its target, and one that a checkpoint would
    take for samples not consumed yet."""
    timer = TimeTrigger(10.0, PhaseClock(lambda: 0))
    timeout = AdaptiveTimeout((), is_fixed=True)
    state = RunState(fresh(), MeanLoss(), timer.clock, timeout, timer)
    unused: Any = None
    trigger = ClockTrigger(unused, TimedRounds(1.0, 0.0, 100, None), cast(Host, unused), state)
    state.step = 30
    trigger.begin_warmup()
    assert trigger.assignment == BlockAssignment(2, 100, 60) and not trigger.is_over
    state.step = 60
    trigger.begin_warmup()
    assert trigger.assignment == BlockAssignment(2, 120, 120) and trigger.is_over
    assert state.inner_steps == 0 and state.assignment_epoch == 2


@pytest.mark.parametrize("steps", [(6, 6), (1, 1), (6, 0)])
def test_plan_copies_the_records_it_was_made_from(steps: tuple[int, int]) -> None:
    """Would catch: a frozen plan that keeps the caller's list, which may still change."""
    is_stopping = not all(steps)
    records = [
        ControlRecord(0, n, n, 2 * n, 0, (), norms=(1.0,), is_stopping=int(is_stopping and not n))
        for n in steps
    ]
    plan = plan_round(fresh(), records, [0], RULES, is_last=False)
    before = plan.samples
    records.clear()
    assert plan.samples == before and len(plan.records) == 2


# ---- properties of the pure function

NUM_UNITS = 3


@st.composite
def gathered(draw: st.DrawFn) -> tuple[RoundState, list[ControlRecord], list[int], RoundRules]:
    """Draw inputs of a meeting: counted or timed, some norms not finite, some replicas idle."""
    replicas = draw(st.integers(1, 4))
    is_timed = draw(st.booleans())
    counts = draw(st.lists(st.integers(0, 6), min_size=replicas, max_size=replicas))
    if not is_timed:
        counts = [max(counts)] * replicas
    blocks = draw(st.integers(40, 60))
    assignment = BlockAssignment(replicas, blocks) if is_timed else None
    before = RoundState.fresh(replicas, NUM_UNITS, assignment)
    size = st.one_of(st.floats(1e-6, 1e6), st.sampled_from([0.0, math.nan, math.inf, 1e38]))
    row = st.lists(size, min_size=NUM_UNITS, max_size=NUM_UNITS)
    records = [
        ControlRecord(
            round=0, step=count, inner_steps=count, samples=4 * count, schedule_position=count,
            losses=(), norms=draw(row), is_stopping=int(draw(st.integers(0, 9)) == 0),
            inner_lr=0.1 * count,
        )
        for count in counts
    ]  # fmt: skip
    units = sorted(draw(st.sets(st.integers(0, NUM_UNITS - 1), min_size=1)))
    landing = draw(
        st.sampled_from([DIRECT_COPY, replace(DIRECT_COPY, delay=2), replace(DIRECT_COPY, mix=0.5)])
    )
    rules = RoundRules(
        PENALTY, landing, StepSchedule(0, 4, 1), min_steps=float(draw(st.integers(0, 8)))
    )
    return before, records, units, rules


def values_of(state: RoundState) -> list[Any]:
    """All values of a state, comparable."""
    tables = [tensor.tolist() for tensor in vars(state.detectors).values()]
    rest = (
        state.count,
        state.replicas_identical,
        state.length,
        state.assignment,
        state.resumes_at_meeting,
    )
    return [str(tables), state.unit_steps.tolist(), *rest]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(meeting=gathered(), is_last=st.booleans())
def test_plan_round_is_pure_and_deterministic(
    meeting: tuple[RoundState, list[ControlRecord], list[int], RoundRules], is_last: bool
) -> None:
    """Two ranks compute the same plan, and the state before it is not modified."""
    before, records, units, rules = meeting
    kept = copy.deepcopy(values_of(before))
    first, second = (plan_round(before, records, units, rules, is_last=is_last) for _ in range(2))
    assert values_of(before) == kept
    assert values_of(first.after) == values_of(second.after)
    assert first.outcome is second.outcome and str(first.decision) == str(second.decision)
    with pytest.raises(FrozenInstanceError):
        first.outcome = MeetingOutcome.SYNC  # type: ignore[misc]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(meeting=gathered(), is_last=st.booleans())
def test_plan_invariants_of_stop_extension_and_sync(
    meeting: tuple[RoundState, list[ControlRecord], list[int], RoundRules], is_last: bool
) -> None:
    """A stop is no sync; an extension changes no state; a sync accounts for every step, its weights
    are zero for rejected replicas and sum to one, and it changes no other unit."""
    before, records, units, rules = meeting
    plan = plan_round(before, records, units, rules, is_last=is_last)
    if any(record.is_stopping for record in records):
        assert (
            plan.outcome is MeetingOutcome.STOP and plan.after is before and plan.decision is None
        )
        return
    total = sum(record.inner_steps for record in records)
    if plan.outcome is MeetingOutcome.EXTEND:
        assert before.assignment is not None and total < rules.min_steps
        assert values_of(plan.after) == values_of(before)
        return
    decision, after = plan.decision, plan.after
    assert decision is not None and plan.outcome is MeetingOutcome.SYNC and after.count == 1
    others = [unit for unit in range(NUM_UNITS) if unit not in units]
    assert bool((after.unit_steps[:, units] == 0).all())
    steps = torch.tensor([[record.inner_steps] for record in records])
    assert after.unit_steps[:, others].tolist() == steps.expand(-1, len(others)).tolist()
    assert (
        after.detectors.of_units(others).to_lists() == before.detectors.of_units(others).to_lists()
    )
    left_out = decision.verdict.anomalous
    assert bool((decision.weights[left_out] == 0).all())
    for unit in range(len(units)):
        share = float(decision.weights[:, unit].sum())
        assert share == pytest.approx(1.0) or bool(left_out[:, unit].all())
        if bool(left_out[:, unit].all()):
            assert bool(decision.rollback[unit])
    idle = steps.flatten() == 0
    assert bool(left_out[idle].all()) and not bool(after.detectors.accepted[idle].any())
    is_whole = len(units) == NUM_UNITS
    assert after.replicas_identical is (is_whole and plan.landing.is_direct_copy)
    assert plan.landing == (DIRECT_COPY if is_last else rules.landing)
    assert plan.inner_lr == max(record.inner_lr for record in records)
    if before.assignment is not None:
        assert plan.is_assigned and after.assignment is not None
        assert after.assignment.frontier - len(after.assignment.holes) == total
