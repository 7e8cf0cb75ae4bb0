"""The state of a run across meetings and checkpoints, and plans of meetings."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.comm.control import ControlRecord, Flag
from megatron_edit.comm.streams import NoStreams
from megatron_edit.comm.timeouts import AdaptiveTimeout
from megatron_edit.comm.wire import Wire
from megatron_edit.constants import FIRST_MOMENT, SECOND_MOMENT
from megatron_edit.engine import (
    EditEngine,
    EngineState,
    Host,
    ParamShard,
    Penalty,
    Progress,
    TimedRounds,
    plan_units,
)
from megatron_edit.engine.plan import (
    MeetingOutcome,
    RoundPlan,
    RoundRules,
    RoundState,
    plan_round,
)
from megatron_edit.engine.rounds.synchronous import CommonStop
from megatron_edit.engine.rounds.trigger import ClockTrigger, StepTrigger
from megatron_edit.engine.state import MeanLoss, RunState, StepLosses
from megatron_edit.engine.sync.manager import SyncManager
from megatron_edit.engine.sync.reports import Footprint, SyncReports
from megatron_edit.engine.units import FragmentPlan, select_units
from megatron_edit.method.clock import NANOSECONDS, PhaseClock, TimeTrigger
from megatron_edit.method.detector import DetectorConfig
from megatron_edit.method.landing import DIRECT_COPY, LandingRule
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.moments import MomentRule
from megatron_edit.method.schedule import QuadraticSchedule, StepSchedule
from tests.harness.memory_network import Network, two_phase_groups

anything: Any = SimpleNamespace
PENALTY = Penalty(
    DetectorConfig(3.0, 0.5, 0, 3), True, None, False, step_share=0.0, loss_check=None
)
LATE = replace(DIRECT_COPY, delay=3)


def rules_with(landing: LandingRule = LATE, **fields: Any) -> RoundRules:
    """The rules of rounds of four steps."""
    return RoundRules(PENALTY, landing, **{"schedule": StepSchedule(0, 4, 1), **fields})


def record(norms: tuple[float, ...], **fields: Any) -> ControlRecord:
    """The control record of a replica after four steps."""
    usual = {"round": 0, "step": 4, "inner_steps": 4, "samples": 8, "schedule_position": 16}
    return ControlRecord(**{**usual, "losses": (), "norms": norms, **fields})


def meet(
    before: RoundState, records: list[ControlRecord], units: tuple[int, ...] = (0, 1),
    rules: RoundRules | None = None, *, is_last: bool = False,
) -> RoundPlan:  # fmt: skip
    """The plan of a meeting of two replicas that syncs some of two units."""
    return plan_round(before, records, units, rules or rules_with(), is_last=is_last)


def test_sync_of_a_fragment_changes_only_its_units() -> None:
    """Its detectors and steps, and not those of other units. Catches steps that are counted twice,
    and replicas that are taken for equal after a sync of some units."""
    before, records = RoundState.fresh(2, 2, None), [record((1.0, math.nan)), record((2.0, 0.0))]
    first = meet(before, records, (0,), rules_with(DIRECT_COPY))
    assert first.outcome is MeetingOutcome.SYNC and first.after.count == 1
    assert first.after.unit_steps.tolist() == [[0, 4], [0, 4]]
    assert first.after.detectors.accepted.tolist() == [[1, 0], [1, 0]]
    assert not first.after.replicas_identical
    assert before.unit_steps.tolist() == [[0, 0], [0, 0]] and before.count == 0
    both = meet(
        first.after, [record((1.0, 1.0)), record((2.0, 1.0))], rules=rules_with(DIRECT_COPY)
    )
    assert both.after.unit_steps.tolist() == [[0, 0], [0, 0]] and both.after.replicas_identical
    assert both.after.detectors.accepted.tolist() == [[2, 1], [2, 1]]


def test_plan_takes_rate_and_schedule_of_the_furthest_replica() -> None:
    """A replica that skipped steps is behind."""
    schedule = QuadraticSchedule(0, 4, 1, growth=0.02)
    records = [
        record((1.0, 1.0), inner_lr=1e-3, next_lr=1e-3, schedule_position=16),
        record((1.0, 1.0), inner_lr=2e-3, next_lr=2e-3, schedule_position=24),
    ]
    plan = meet(RoundState.fresh(2, 2, None), records, rules=rules_with(schedule=schedule))
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
        plan = meet(before, records, rules=rules_with(min_steps=10))
        assert plan.outcome is outcome, (target, counts)
    final = BlockAssignment(2, 24).next_round([8, 2])
    assert final.is_final
    plan = meet(replace(before, assignment=final), records, rules=rules_with(min_steps=100))
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
    assert replace(again, **kept) == replace(saved.replica, **kept)
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
    assert not any(meeting and (meeting.is_last or meeting.ends_rounds) for meeting in meetings)
    progress.is_last_step = True
    last = trigger.meeting_after(9, is_requested=False)
    assert (
        last is not None and last.selection.has_all_units and last.is_last and not last.ends_rounds
    )
    progress.begins_final_phase = True
    last = trigger.meeting_after(9, is_requested=False)
    assert last is not None and last.is_last and last.ends_rounds


def test_round_ends_with_the_last_assigned_block() -> None:
    """The clock may end it earlier, but not a final round."""
    state = run_state(TimeTrigger(10.0, PhaseClock()), BlockAssignment(2, 9))
    state.losses = MeanLoss()
    trigger = ClockTrigger(fragments_of(1), TimedRounds(10.0, 0.0, 9, None), anything(), state)
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
    trigger = ClockTrigger(fragments_of(2), TimedRounds(10.0, 0.0, 9, None), anything(), state)
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


def test_delayed_syncs_land_after_their_due_step() -> None:
    """Not one step later; syncs that land at the next meeting have no due step."""
    syncs: Any = anything(pending=[anything(plan=anything(due=due)) for due in (7, 8, None, 9)])
    assert [sync.plan.due for sync in SyncManager.due(syncs, 8)] == [7, 8]


@pytest.mark.parametrize("wire", [Wire.of("fp32"), Wire.of("int8")])
def test_wire_bytes_count_only_units_that_were_sent(wire: Wire) -> None:
    """Control records and units that are not rolled back, sent by all ranks of a replica."""
    groups = anything(sync=anything(size=3, places=None))
    footprint = Footprint(torch.tensor([[100, 50, 7], [90, 40, 7]]), 80, 0)
    reports = SyncReports(groups, anything(), wire, footprint)
    rollback = torch.tensor([False, True])
    moments = MomentRule((FIRST_MOMENT, SECOND_MOMENT))
    plan = anything(
        selection=anything(indices=[0, 2]), decision=anything(rollback=rollback), moments=moments
    )
    sent = [wire.payload_bytes(numel, 3) for numel in (100, 90)]
    # Of each moment: two phases to two others, chunks of 34 or 30 codes with an exponent.
    sent += [2 * 2 * 2 * 36, 2 * 2 * 2 * 32]
    assert reports.wire_bytes(plan) == 2 * 80 + sum(sent)


def test_all_replicas_stop_together_in_warm_up() -> None:
    """One step after the request, whichever replica got it. Catches one that stops alone."""
    replicas = [CommonStop(group) for group in two_phase_groups(3, Network())]
    for wanted, stops in ((None, False), (1, False), (None, True), (None, False)):
        found = [stop.after_step(r == wanted) for r, stop in enumerate(replicas)]
        assert found == [stops] * 3


# ---- Plans of A-EDiT meetings, computed from the control records, and its trigger


MEETING_PENALTY = Penalty(
    DetectorConfig(3.0, 0.02, 20, 3), True, None, False, step_share=0.0, loss_check=None
)
RULES = RoundRules(
    MEETING_PENALTY, DIRECT_COPY, StepSchedule(0, 4, 1), min_steps=10
)  # rounds of 10 steps


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
        MEETING_PENALTY,
        landing,
        StepSchedule(0, 4, 1),
        min_steps=float(draw(st.integers(0, 8))),
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


# ---- What follows an optimizer step: landings, the meeting, and the parameter gather


class Step:
    """Run `EditEngine.after_step` for step 10 with stand-ins and record the calls.

    Args:
        due: syncs that land after the step.
        meeting: the meeting after the step; None if there is none.
        lands_in_forward: whether landings wait for the forward pass, which gathers.
        is_warmup: whether gradients are averaged.
    """

    def __init__(
        self,
        due: tuple[str, ...] = (),
        meeting: str | None = None,
        *,
        lands_in_forward: bool = False,
        is_warmup: bool = False,
    ) -> None:
        self.calls: list[Any] = []
        self.host = anything(awaits_gather=not (is_warmup or lands_in_forward))
        self.host.gather_parameters = self._gather
        self.engine = anything(
            state=anything(step=9, launch_steps=9, timer=None),
            status=anything(is_warmup=is_warmup, is_stop_seen=False),
            host=self.host,
            syncs=anything(
                due=lambda step: due if step == 10 else (),
                begin_landing=self._record("land"), land_all=self._land_all, poll=lambda: None,
                agree_on_next_steps=lambda: None,
            ),
            _trigger=anything(meeting_after=self._meeting_after(meeting)),
            _meet=self._record("meet"), _context=nullcontext,
            _should_request_meeting=lambda: False,
            _land_unless_in_forward=(lambda: None) if lands_in_forward else self._land_all,
            _common_stop=anything(after_step=self._record("stop?")),
            elastic=None, _report_progress=lambda: None,
            _end_warmup_if_due=lambda: self.calls.append("end?"),
            _tuner=anything(meter=anything(end_step=self._end_step)),
            _board=anything(is_seen=False, heartbeat=anything(steps_of_others=0)),
            _flags=anything(post=lambda flags, steps: None, read=lambda: Flag.MEET),
        )  # fmt: skip
        EditEngine.after_step(self.engine)

    def _meeting_after(self, meeting: str | None) -> Any:
        """Return a fake `meeting_after` that checks its arguments."""

        def meeting_after(step: int, *, is_requested: bool) -> str | None:
            assert (step, is_requested) == (10, True)
            return meeting

        return meeting_after

    def _record(self, name: str) -> Any:
        return lambda what: self.calls.append((name, what))

    def _end_step(self, step: int) -> None:
        assert step == 10

    def _land_all(self) -> None:
        self.calls.append("landed")
        self._gather()

    def _gather(self) -> None:
        self.calls.append("gather")
        self.host.awaits_gather = False


def test_step_inside_round_gathers_unless_forward_does() -> None:
    """Catches parameters that are never gathered, and a second gather in the forward pass."""
    assert Step().calls == ["gather"]
    assert Step(lands_in_forward=True).calls == []


def test_landing_gathers_once() -> None:
    """Catches a second gather of parameters that the landing has gathered."""
    assert Step(due=("old",)).calls == [("land", "old"), "landed", "gather"]
    assert Step(due=("old",), lands_in_forward=True).calls == [("land", "old")]


def test_warmup_step_gathers_nothing() -> None:
    """Megatron has gathered already: catches a second gather at every step."""
    assert Step(is_warmup=True).calls == [("stop?", False), "end?"]


def test_late_digests_are_compared_once() -> None:
    """Only digests of the units that sync are used up.

    Catches a comparison with digests of an earlier sync, and a non-finite unit that keeps its
    inner moments.
    """
    params = [ParamShard(name, name, torch.zeros(2), True, None) for name in ("a", "b")]
    zeroed: list[str] = []

    def zero(shard: Any) -> int:
        zeroed.append(shard.name)
        return 1

    groups = anything(sync=anything(rank=0, streams=NoStreams()))
    outer = anything(prefetch=lambda *_: iter(()))
    host = anything(zero_nonfinite_moments=zero)
    reporter = anything(on_local_message=lambda text: None)
    syncs = anything(
        _reports=anything(late_digests={0: 1.0, 1: 2.0}), _reporter=reporter, _host=host,
        _groups=groups, _settings=anything(landing=DIRECT_COPY),
        _context=lambda: anything(groups=groups, outer=outer, together_numel=0),
    )  # fmt: skip
    selection = select_units(plan_units(params, ["a", "b"], ["a", "b"]), [1])
    assert SyncManager.late_digests(syncs, selection) == {1: 2.0}
    plan = anything(
        selection=selection, rules=anything(landing=DIRECT_COPY),
        decision=anything(norms=torch.tensor([[math.nan]])),
    )  # fmt: skip
    partial(SyncManager.prepare, syncs)(plan, 0.0, 0.0)
    assert syncs._reports.late_digests == {0: 1.0} and zeroed == ["b"]
