"""The state of a run across meetings and checkpoints, and plans of meetings."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.timeouts import AdaptiveTimeout
from megatron_edit.engine import (
    EngineSettings,
    EngineState,
    Host,
    ParamShard,
    Progress,
    plan_units,
)
from megatron_edit.engine.plan import (
    MeetingOutcome,
    RoundPlan,
    RoundState,
    plan_round,
)
from megatron_edit.engine.rounds.synchronous import CommonStop
from megatron_edit.engine.rounds.trigger import ClockTrigger, StepTrigger
from megatron_edit.engine.state import MeanLoss, RunState, StepLosses
from megatron_edit.engine.units import FragmentPlan
from megatron_edit.method.clock import NANOSECONDS, PhaseClock, TimeTrigger
from megatron_edit.method.landing import DIRECT_COPY
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.schedule import StepSchedule
from tests.harness.engine_settings import settings_of
from tests.harness.memory_network import Network, two_phase_groups

anything: Any = SimpleNamespace
LATE = replace(DIRECT_COPY, delay=3)


def rules_with(**fields: Any) -> EngineSettings:
    """The settings of rounds of four steps, whose syncs land late."""
    learning: dict[str, Any] = {
        "anomaly_alpha": 0.5,
        "anomaly_warmup_syncs": 0,
        "no_loss_check": True,
    }
    return settings_of(**learning, **{"delay_steps": 3, **fields})


def record(norms: tuple[float, ...], **fields: Any) -> ControlRecord:
    """The control record of a replica after four steps."""
    usual = {"round": 0, "step": 4, "inner_steps": 4, "samples": 8, "schedule_position": 16}
    return ControlRecord(**{**usual, "losses": (), "norms": norms, **fields})


def meet(
    before: RoundState, records: list[ControlRecord], units: tuple[int, ...] = (0, 1),
    rules: EngineSettings | None = None, *, is_last: bool = False,
) -> RoundPlan:  # fmt: skip
    """The plan of a meeting of two replicas that syncs some of two units."""
    return plan_round(before, records, units, rules or rules_with(), is_last=is_last)


def test_sync_of_a_fragment_changes_only_its_units() -> None:
    """Its detectors and steps, and not those of other units. Catches steps that are counted twice,
    and replicas that are taken for equal after a sync of some units."""
    before, records = RoundState.fresh(2, 2, None), [record((1.0, math.nan)), record((2.0, 0.0))]
    first = meet(before, records, (0,), rules_with(delay_steps=0))
    assert first.outcome is MeetingOutcome.SYNC and first.after.count == 1
    assert first.after.unit_steps.tolist() == [[0, 4], [0, 4]]
    assert first.after.detectors.accepted.tolist() == [[1, 0], [1, 0]]
    assert not first.after.replicas_identical
    assert before.unit_steps.tolist() == [[0, 0], [0, 0]] and before.count == 0
    both = meet(
        first.after, [record((1.0, 1.0)), record((2.0, 1.0))], rules=rules_with(delay_steps=0)
    )
    assert both.after.unit_steps.tolist() == [[0, 0], [0, 0]] and both.after.replicas_identical
    assert both.after.detectors.accepted.tolist() == [[2, 1], [2, 1]]


def test_plan_takes_rate_and_schedule_of_the_furthest_replica() -> None:
    """A replica that skipped steps is behind."""
    records = [
        record((1.0, 1.0), inner_lr=1e-3, next_lr=1e-3, schedule_position=16),
        record((1.0, 1.0), inner_lr=2e-3, next_lr=2e-3, schedule_position=24),
    ]
    plan = meet(RoundState.fresh(2, 2, None), records, rules=rules_with(interval="qsr", qsr_a=0.02))
    assert (plan.inner_lr, plan.schedule_position, plan.after.length) == (2e-3, 24, 100)


@pytest.mark.parametrize("is_last", [False, True])
def test_last_sync_lands_at_once(is_last: bool) -> None:
    """Catches a last sync that is exchanged and never lands."""
    records = [record((1.0, 1.0)), record((1.0, 1.0))]
    plan = meet(RoundState.fresh(2, 2, None), records, is_last=is_last)
    assert plan.landing == (DIRECT_COPY if is_last else LATE)
    assert plan.after.replicas_identical is is_last


def test_meeting_with_a_stopping_replica_is_no_sync() -> None:
    """Detectors learn nothing from it."""
    before = RoundState.fresh(2, 2, None)
    plan = meet(before, [record((1.0, 1.0)), record((1.0, 1.0), is_stopping=1)])
    assert plan.outcome is MeetingOutcome.STOP and plan.after is before and plan.decision is None


def test_units_are_rolled_back_without_accepted_replica_or_on_overflow() -> None:
    """Units with at least one accepted replica and a finite average are not rolled back."""
    records = [record((math.nan, math.nan)), record((math.nan, 1.0))]
    plan = meet(RoundState.fresh(2, 2, None), records)
    assert plan.decision is not None and plan.decision.rollback.tolist() == [True, False]
    assert plan.decision.excluded[0].tolist()[:2] == [True, True]
    assert not plan.decision.excluded[1, 1]
    huge = meet(RoundState.fresh(2, 2, None), [record((1e38, 1e30)), record((1e38, 1e30))])
    assert huge.decision is not None and huge.decision.rollback.tolist() == [True, False]


def test_timed_round_is_extended_while_it_has_too_few_steps() -> None:
    """Unless no block of samples is left: catches a wait for steps without samples."""
    for target, counts, outcome in (
        (100, (3, 4), MeetingOutcome.EXTEND),
        (100, (6, 6), MeetingOutcome.SYNC),
        (8, (4, 1), MeetingOutcome.SYNC),
    ):
        before = RoundState.fresh(2, 2, BlockAssignment(2, target))
        records = [record((1.0, 1.0), inner_steps=count) for count in counts]
        plan = meet(before, records, rules=rules_with(strategy="a-edit", min_round_steps=10))
        assert plan.outcome is outcome, (target, counts)
    final = BlockAssignment(2, 24).next_round([8, 2])
    assert final.is_final
    plan = meet(
        replace(before, assignment=final),
        records,
        rules=rules_with(strategy="a-edit", min_round_steps=100),
    )
    assert plan.outcome is MeetingOutcome.SYNC


def run_state(
    timer: TimeTrigger | None = None, assignment: BlockAssignment | None = None
) -> RunState:
    """The state of replica 0 of two, with two units, four steps after the switch."""
    clock = PhaseClock(lambda: 7 * NANOSECONDS) if timer is None else timer.clock
    state = RunState(
        RoundState.fresh(2, 2, assignment), StepLosses(4), clock, AdaptiveTimeout((), True), timer
    )
    state.step = 6
    state.begin_rounds(4)
    state.step = 10
    return state


def test_sync_begins_a_new_round() -> None:
    """The next round begins at this step; a meeting with a stop begins none."""
    state, losses = run_state(), list[tuple[int, list[float]]]()
    reporter: Any = SimpleNamespace(on_losses=lambda first, means: losses.append((first, means)))
    records = [record((1.0, 1.0)), record((1.0, 1.0))]
    assert (state.inner_steps, state.replicas_identical) == (4, False)
    state.apply(plan_round(state.rounds, records, [1], rules_with(), is_last=False), reporter, 0)
    assert (state.round_start, state.inner_steps, state.rounds.count) == (10, 0, 1)
    assert not state.has_replica_stopped
    stopping = [record((1.0, 1.0)), record((1.0, 1.0), is_stopping=1)]
    state.step = 12
    state.apply(plan_round(state.rounds, stopping, [1], rules_with(), is_last=False), reporter, 0)
    assert state.has_replica_stopped and state.round_start == 10


def test_run_state_round_trip_through_a_checkpoint() -> None:
    """Except for what belongs to the process. Catches a field that is dropped, and a clock that
    starts its phase again."""
    now = [3 * NANOSECONDS]
    state = run_state(TimeTrigger(10.0, PhaseClock(lambda: now[0])), BlockAssignment(2, 100))
    state.begin_phase()
    now[0] += 4 * NANOSECONDS
    assert state.timer is not None and state.timer.after_step() is False
    state.is_waiting, state.suppressed_until_step = True, 17
    state.rounds = replace(state.rounds, count=5, resumes_at_meeting=True, length=4)
    for step in (9, 10):
        state.losses.note(step, float(step))
    progress = Progress(40, 80, 8, is_last_step=False)
    request = {"is_asking": True, "is_warmup": False}
    saved = EngineState(
        state.replica_entry(progress, (), **request), state.rounds, False, {}, (), 1.5, 17
    )
    assert saved.replica.inner_steps == 4 and saved.replica.is_asking
    later = PhaseClock(lambda: 1000 * NANOSECONDS)
    fresh = RunState(
        RoundState.fresh(2, 2, None), StepLosses(4), later, AdaptiveTimeout((), True),
        TimeTrigger(10.0, later),
    )  # fmt: skip
    fresh.load_state_dict(saved)
    again = fresh.replica_entry(progress, (), **request)
    assert fresh.assignment_epoch == 1 and fresh.timer is not None and fresh.timer.last == 4.0
    assert fresh.rounds is saved.rounds and fresh.suppressed_until_step == 17
    # The loss of the last step before a meeting belongs to the round after the meeting.
    assert (again.losses, again.last_loss_step) == ((9.0,), 9)
    assert (saved.replica.losses, saved.replica.last_loss_step) == ((9.0, 10.0), 10)
    kept: dict[str, Any] = {"losses": (), "last_loss_step": 0}
    assert structs.replace(again, **kept) == structs.replace(saved.replica, **kept)
    fresh.begin_phase()
    assert fresh.losses.payload() == (9.0, 10.0) and fresh.clock.seconds == 0.0


def test_all_fragments_sync_after_the_last_step() -> None:
    """Whichever step is the last; before it, each fragment syncs at its own steps."""
    state, progress = run_state(), anything(is_last_step=False, begins_final_phase=False)
    host = anything(progress=lambda: progress)
    trigger = StepTrigger(StepSchedule(6, 4, 2), fragments_of(2), host, state)
    meetings = [trigger.meeting_after(step, is_requested=False) for step in (6, 7, 8, 9, 10)]
    assert [meeting and meeting.selection.indices for meeting in meetings] == [
        None, None, (1,), None, (0,)
    ]  # fmt: skip
    assert not any(meeting and meeting.is_last for meeting in meetings) and not trigger.ends_rounds
    progress.is_last_step = True
    last = trigger.meeting_after(9, is_requested=False)
    assert last is not None and last.selection.has_all_units and last.is_last
    assert not trigger.ends_rounds
    progress.begins_final_phase = True
    last = trigger.meeting_after(9, is_requested=False)
    assert last is not None and last.is_last and trigger.ends_rounds


def test_round_ends_with_the_last_assigned_block() -> None:
    """The clock may end it earlier, but not a final round."""
    state = run_state(TimeTrigger(10.0, PhaseClock()), BlockAssignment(2, 9))
    state.losses = MeanLoss()
    trigger = ClockTrigger(fragments_of(1), settings_of(9, strategy="a-edit"), anything(), state)
    due = []
    for state.step in range(6, 11):  # blocks 0, 2, 4, 6 and 8
        due.append(trigger.meeting_after(state.step + 1, is_requested=False) is not None)
    assert due == [False, False, False, False, True]
    state.step = 7
    assert trigger.meeting_after(8, is_requested=True) is not None
    state.rounds = replace(state.rounds, assignment=BlockAssignment(2, 9, 0, (), (5, 4)))
    assert trigger.meeting_after(8, is_requested=True) is None


def test_timed_meetings_alternate_fragments() -> None:
    """Meeting j = 1, 2, ... syncs fragment j mod F, the last one all of them. Catches a final round
    that does not sync a fragment."""
    state = run_state(TimeTrigger(10.0, PhaseClock()), BlockAssignment(2, 9))
    trigger = ClockTrigger(fragments_of(2), settings_of(9, strategy="a-edit"), anything(), state)
    due = []
    for count in range(3):
        state.rounds = replace(state.rounds, count=count)
        due.append(trigger.next_meeting().selection.indices)
    assert due == [(1,), (0,), (1,)] and not trigger.next_meeting().is_last
    state.rounds = replace(state.rounds, assignment=BlockAssignment(2, 9, 0, (), (5, 4)))
    assert trigger.next_meeting().selection.has_all_units and trigger.next_meeting().is_last


def fragments_of(number: int) -> FragmentPlan:
    """Two units split into fragments."""
    params = [ParamShard(name, name, torch.zeros(2), True, None) for name in ("a", "b")]
    return FragmentPlan.of(plan_units(params, ["a", "b"], ["a", "b"]), number)


def test_all_replicas_stop_together_in_warm_up() -> None:
    """One step after the request, whichever replica got it. Catches one that stops alone."""
    replicas = [CommonStop(group) for group in two_phase_groups(3, Network())]
    for wanted, stops in ((None, False), (1, False), (None, True), (None, False)):
        found = [stop.after_step(r == wanted) for r, stop in enumerate(replicas)]
        assert found == [stops] * 3


# ---- Plans of A-EDiT meetings, computed from the control records, and its trigger


RULES = settings_of(strategy="a-edit", min_round_steps=10, no_loss_check=True)


def fresh(target: int = 100) -> RoundState:
    """The state of two replicas and one unit, with `target` blocks in the training."""
    return RoundState.fresh(2, 1, BlockAssignment(2, target))


def meet_all(before: RoundState, *steps: int) -> RoundPlan:
    """The plan of a meeting after `steps` of each replica in the round."""
    records = [ControlRecord(0, n, n, 2 * n, 0, losses=(), norms=(1.0,)) for n in steps]
    return plan_round(before, records, [0], RULES, is_last=False)


@pytest.mark.parametrize("is_extended", [False, True])
def test_due_actions_are_postponed_at_one_meeting_only(is_extended: bool) -> None:
    """After a resume at a meeting, only that meeting postpones saves and evaluations that are due,
    also where it extends the round."""
    state = replace(fresh(), resumes_at_meeting=True)
    if is_extended:
        plan = meet_all(state, 4, 4)
        assert plan.outcome is MeetingOutcome.EXTEND and plan.after.count == 0
        state = plan.after
    plan = meet_all(state, 6, 6)
    assert plan.outcome is MeetingOutcome.SYNC and plan.is_assigned and plan.after.count == 1
    assert plan.next_meeting_without_step is (not is_extended) and not plan.after.resumes_at_meeting


def test_ledger_is_exhausted_where_loaded_steps_reach_the_target() -> None:
    """Catches a ledger that refuses a frontier beyond its target, and one that a checkpoint would
    take for samples not consumed yet."""
    timer = TimeTrigger(10.0, PhaseClock(lambda: 0))
    timeout = AdaptiveTimeout((), is_fixed=True)
    state = RunState(fresh(), MeanLoss(), timer.clock, timeout, timer)
    unused: Any = None
    host = cast(Host, SimpleNamespace(samples_of=lambda blocks: 4 * blocks))
    trigger = ClockTrigger(unused, settings_of(100, strategy="a-edit"), host, state)
    state.step = 30
    trigger.begin_warmup()
    assert trigger.assignment == BlockAssignment(2, 100, 60) and not trigger.is_over
    state.step = 60
    trigger.begin_warmup()
    assert trigger.assignment == BlockAssignment(2, 120, 120) and trigger.is_over
    assert state.inner_steps == 0 and state.assignment_epoch == 2
    # Blocks are counted anew where other replicas had consumed 50 of them before.
    cast(Any, host).samples_of = lambda blocks: 4 * (50 + blocks)
    state.step = 30
    trigger.begin_warmup()
    assert trigger.assignment == BlockAssignment(2, 50, 10)
    assert state.rounds.first_block == 50 and state.rounds.num_consumed == 60


@pytest.mark.parametrize("has_final_phase", [False, True])
def test_final_phase_follows_the_last_block(has_final_phase: bool) -> None:
    """Not before, and not where the training ends with it."""
    state = run_state(TimeTrigger(10.0, PhaseClock()), BlockAssignment(2, 9))
    settings = replace(settings_of(9, strategy="a-edit"), has_final_phase=has_final_phase)
    trigger = ClockTrigger(fragments_of(1), settings, anything(), state)
    assert not trigger.ends_rounds
    state.rounds = replace(state.rounds, assignment=BlockAssignment(2, 9, 9))
    assert trigger.ends_rounds is has_final_phase
    state.count_from(5)
    assert (state.step, state.inner_steps) == (5, 0)


# ---- rounds of one step, in warm-up and final phase of a run with a hub


def with_hub(**fields: Any) -> EngineSettings:
    """A training of 40 blocks of two nominal replicas: a warm-up of 5 steps, a final phase after
    step 15, and rounds of four steps between them."""
    given = {"hub": "host:1", "replica_name": "a", "nominal_replicas": 2, "warmup_steps": 5}
    return replace(settings_of(40, **{**given, **fields}), last_local_step=15)


def state_at(consumed: int, replicas: int) -> RunState:
    """The state at the begin of a round of some replicas."""
    state = run_state(None, BlockAssignment(replicas, 40, consumed))
    state.step = 6
    return state


@pytest.mark.parametrize("strategy", ["edit", "a-edit"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_rounds_of_warm_up_and_final_phase_have_one_step(replicas: int, strategy: str) -> None:
    """And the last round before the final phase as many as its blocks need. Catches a phase that
    counts steps of the present replicas, not of the nominal ones, and a border that is one off."""
    found, settings = {}, with_hub(strategy=strategy, fragments=2)
    for consumed in range(40):
        state = state_at(consumed, replicas)
        trigger = ClockTrigger(fragments_of(2), settings, anything(), state)
        is_synchronous = state.rounds.is_synchronous(trigger.settings)
        assert is_synchronous is (consumed < 10 or consumed >= 30), consumed
        assert trigger.next_meeting().is_last is is_synchronous
        assert trigger.next_meeting().selection.has_all_units is is_synchronous
        while trigger.meeting_after(state.step + 1, is_requested=False) is None:
            state.step += 1
        found[consumed] = state.inner_steps + 1
    most = 2 if strategy == "edit" else 40  # of tau steps, for each of two fragments
    for consumed, steps in found.items():
        left = -(-(30 - consumed) // replicas)
        expected = min(most, left) if 10 <= consumed < 30 else 1
        assert steps == expected, (consumed, steps)


def test_final_phase_without_hub_has_no_rounds() -> None:
    """Nor has the warm-up: gradients are averaged in them."""
    settings = replace(settings_of(40, strategy="a-edit", warmup_steps=5), last_local_step=15)
    for consumed in (0, 9, 30, 39):
        assert not settings.is_synchronous(consumed)
        assert not state_at(consumed, 2).rounds.is_synchronous(settings)
    assert settings.has_final_round and not with_hub(strategy="a-edit").has_final_round


@pytest.mark.parametrize(("consumed", "is_synchronous"), [(8, True), (10, False), (32, True)])
def test_synchronous_meeting_changes_no_history(consumed: int, is_synchronous: bool) -> None:
    """Neither detectors nor losses, and no moments are averaged. Catches losses of a warm-up, which
    fall fast, in the history that later ones are compared with."""
    settings = with_hub(average_moments="both", anomaly_warmup_syncs=0)
    before = RoundState.fresh(2, 2, BlockAssignment(2, 40, consumed))
    records = [record((norm, 1.0), inner_steps=1, round_loss=3.0) for norm in (1.0, 2.0)]
    plan = meet(before, records, rules=settings)
    assert plan.decision is not None and plan.decision.is_synchronous is is_synchronous
    assert (plan.decision.weights[0, 0] == 0.5) == is_synchronous
    assert (plan.after.detectors is before.detectors) is is_synchronous
    assert (plan.after.loss_history is before.loss_history) is is_synchronous
    assert bool(plan.moments.kinds) is not is_synchronous
    assert plan.after.assignment is not None and plan.after.assignment.num_consumed == consumed + 2


# ---- properties of the pure function

NUM_UNITS = 3


@st.composite
def gathered(draw: st.DrawFn) -> tuple[RoundState, list[ControlRecord], list[int], EngineSettings]:
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
    fields: dict[str, Any] = draw(st.sampled_from([{}, {"delay_steps": 2}, {"mix": 0.5}]))
    if is_timed:
        fields = fields | {"strategy": "a-edit", "min_round_steps": draw(st.integers(0, 8))}
    rules = settings_of(no_loss_check=True, **fields)
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


@settings(deadline=None, derandomize=True, max_examples=300)
@given(meeting=gathered(), is_last=st.booleans())
def test_plan_invariants_of_stop_extension_and_sync(
    meeting: tuple[RoundState, list[ControlRecord], list[int], EngineSettings], is_last: bool
) -> None:
    """A stop is no sync; an extension changes no state; a sync accounts for every step, its weights
    are zero for rejected replicas and sum to one, and it changes no other unit. Two ranks compute
    the same plan, and neither changes the state before it."""
    before, records, units, rules = meeting
    kept = copy.deepcopy(values_of(before))
    plan, again = (plan_round(before, records, units, rules, is_last=is_last) for _ in range(2))
    assert values_of(before) == kept and values_of(plan.after) == values_of(again.after)
    assert plan.outcome is again.outcome and str(plan.decision) == str(again.decision)
    assert plan.records == tuple(records)
    if any(record.is_stopping for record in records):
        assert (
            plan.outcome is MeetingOutcome.STOP and plan.after is before and plan.decision is None
        )
        return
    total = sum(record.inner_steps for record in records)
    if plan.outcome is MeetingOutcome.EXTEND:
        assert before.assignment is not None and total < rules.min_round_steps
        assert values_of(plan.after) == values_of(before)
        return
    decision, after = plan.decision, plan.after
    assert decision is not None and plan.outcome is MeetingOutcome.SYNC and after.count == 1
    others = [unit for unit in range(NUM_UNITS) if unit not in units]
    assert bool((after.unit_steps[:, units] == 0).all())
    steps = torch.tensor([[record.inner_steps] for record in records])
    assert after.unit_steps[:, others].tolist() == steps.expand(-1, len(others)).tolist()
    for name, table in vars(after.detectors.of_units(others)).items():
        assert torch.equal(table, getattr(before.detectors.of_units(others), name)), name
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
