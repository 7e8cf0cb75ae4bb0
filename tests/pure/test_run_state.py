"""The state of a run across meetings and checkpoints, without communication."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.timeouts import AdaptiveTimeout
from megatron_edit.comm.wire import Wire
from megatron_edit.constants import FIRST_MOMENT, SECOND_MOMENT
from megatron_edit.engine import EngineState, ParamShard, Penalty, Progress, plan_units
from megatron_edit.engine.host import TimedRounds
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
from megatron_edit.engine.units import FragmentPlan
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
