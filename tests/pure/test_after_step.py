"""What follows an optimizer step: landings, the meeting, and who gathers the parameters."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_edit.comm.flags import Flag
from megatron_edit.engine import EditEngine, ParamShard, plan_units
from megatron_edit.engine.plan import MeetingOutcome
from megatron_edit.engine.sync.manager import SyncManager
from megatron_edit.engine.units import select
from megatron_edit.method.landing import DIRECT_COPY

anything: Any = SimpleNamespace


class Step:
    """Step 10 of an engine, and what was done on the way.

    Args:
        due: syncs that land after it.
        meeting: after it; None where there is none.
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
                begin_landing=self._note("land"), land_all=self._land_all, poll=lambda: None,
            ),
            _trigger=anything(meeting_after=self._asked(meeting)),
            _meet=self._note("meet"), _context=nullcontext,
            _asks_for_meeting=lambda: False,
            _land_unless_in_forward=(lambda: None) if lands_in_forward else self._land_all,
            _common_stop=anything(after_step=self._note("stop?")),
            _end_warmup_if_due=lambda: self.calls.append("end?"),
            _board=anything(is_seen=False, heartbeat=anything(steps_of_others=0)),
            _flags=anything(post=lambda flags, steps: None, read=lambda: Flag.MEET),
        )  # fmt: skip
        EditEngine.after_step(self.engine)

    def _asked(self, meeting: str | None) -> Any:
        """Of the trigger: what is told and asked is that of the step being attempted."""

        def meeting_after(step: int, *, is_asked: bool) -> str | None:
            assert (step, is_asked) == (10, True)
            return meeting

        return meeting_after

    def _note(self, name: str) -> Any:
        return lambda what: self.calls.append((name, what))

    def _land_all(self) -> None:
        self.calls.append("landed")
        self._gather()

    def _gather(self) -> None:
        self.calls.append("gather")
        self.host.awaits_gather = False


def test_a_step_inside_a_round() -> None:
    """Catches parameters that nobody gathers, and ones that are gathered though the next forward
    pass does it."""
    assert Step().calls == ["gather"]
    assert Step(lands_in_forward=True).calls == []


def test_a_landing_gathers_once() -> None:
    """Catches a second gather, of what the landing has gathered."""
    assert Step(due=("old",)).calls == [("land", "old"), "landed", "gather"]
    assert Step(due=("old",), lands_in_forward=True).calls == [("land", "old")]


def test_what_is_due_lands_before_the_meeting() -> None:
    """Catches a meeting whose pseudo-gradients miss a result that has come, and a gather that a
    meeting without a landing leaves out."""
    step = Step(due=("old",), meeting="all units")
    assert step.calls == [("land", "old"), "landed", "gather", ("meet", "all units")]
    assert Step(meeting="all units").calls == [("meet", "all units"), "gather"]
    assert step.engine.state.step == step.engine.state.launch_steps == 10


def test_a_warm_up_step() -> None:
    """Megatron has gathered: catches a second gather at every step."""
    assert Step(is_warmup=True).calls == [("stop?", False), "end?"]


class Round:
    """A meeting of an engine, and what was done on the way.

    Args:
        lands_in_forward: whether the sync lands in the forward pass.
        outcome: of the meeting.
    """

    def __init__(
        self, *, lands_in_forward: bool, outcome: MeetingOutcome = MeetingOutcome.SYNC
    ) -> None:
        self.calls: list[str] = []
        plan = anything(outcome=outcome, landing=DIRECT_COPY)
        syncs = anything(
            of_units=lambda selection: [],
            prepare=lambda plan, began, waited: self.calls.append("prepare"),
            start=lambda sync: self.calls.append("start"),
            land_all=lambda: self.calls.append("land"),
        )
        engine = anything(
            state=anything(
                timeout=anything(after_round=lambda: None),
                apply=lambda plan, reporter: self.calls.append("apply"),
            ),
            syncs=syncs, settings=anything(landing=DIRECT_COPY), reporter=None,
            _plan_round=lambda meeting: (plan, 0.0), _sync_plan=lambda plan, selection: None,
            _commit=lambda plan: self.calls.append("commit"), _land=lambda syncs: None,
            _land_unless_in_forward=lambda: None, _lands_in_forward=lands_in_forward,
        )  # fmt: skip
        self.has_synced = EditEngine._hold_meeting(engine, anything(selection=None))


def test_a_round_is_committed_after_a_blocking_exchange() -> None:
    """Catches schedules, counters, detectors and ledger that move before the exchange is over."""
    assert Round(lands_in_forward=False).calls == ["prepare", "start", "land", "commit"]


def test_a_round_is_committed_at_an_overlapped_meeting() -> None:
    """Training goes on at once: catches steps of the next round by the state of the last one."""
    assert Round(lands_in_forward=True).calls == ["commit", "prepare", "start"]


@pytest.mark.parametrize("outcome", [MeetingOutcome.EXTEND, MeetingOutcome.LEAVE])
def test_a_meeting_without_a_sync(outcome: MeetingOutcome) -> None:
    """Catches a sync of a round that goes on, or of one that a replica has left."""
    meeting = Round(lands_in_forward=False, outcome=outcome)
    assert meeting.calls == ["apply"] and not meeting.has_synced


def test_a_meeting_compares_late_digests_once() -> None:
    """Of the units that sync; others keep theirs. Catches a comparison with digests of an earlier
    sync, and a unit that is broken on this replica and keeps its inner moments."""
    params = [ParamShard(name, name, torch.zeros(2), True, None) for name in ("a", "b")]
    zeroed: list[str] = []

    def zero(shard: Any) -> int:
        zeroed.append(shard.name)
        return 1

    host = anything(zero_nonfinite_moments=zero)
    reporter = anything(on_local_message=lambda text: None)
    syncs = anything(
        _reports=anything(late_digests={0: 1.0, 1: 2.0}), _reporter=reporter, _host=host,
        _groups=anything(sync=anything(rank=0)), _settings=anything(landing=DIRECT_COPY),
        _context=lambda: anything(groups=None, outer=anything(stages=lambda *_: iter(()))),
    )  # fmt: skip
    selection = select(plan_units(params, ["a", "b"], ["a", "b"]), [1])
    assert SyncManager.late_digests(syncs, selection) == {1: 2.0}
    plan = anything(
        selection=selection, rules=anything(landing=DIRECT_COPY),
        decision=anything(norms=torch.tensor([[math.nan]])),
    )  # fmt: skip
    partial(SyncManager.prepare, syncs)(plan, 0.0, 0.0)
    assert syncs._reports.late_digests == {0: 1.0} and zeroed == ["b"]
