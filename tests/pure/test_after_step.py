"""What follows an optimizer step: landings, the meeting, and the parameter gather."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_edit.comm.control import Flag
from megatron_edit.comm.streams import NoStreams
from megatron_edit.engine import EditEngine, ParamShard, plan_units
from megatron_edit.engine.plan import MeetingOutcome
from megatron_edit.engine.sync.manager import SyncManager
from megatron_edit.engine.units import select_units
from megatron_edit.method.landing import DIRECT_COPY

anything: Any = SimpleNamespace


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


def test_due_syncs_land_before_meeting() -> None:
    """Catches pseudo-gradients that miss a due result, and a gather that is skipped if a meeting
    follows without a landing."""
    step = Step(due=("old",), meeting="all units")
    assert step.calls == [("land", "old"), "landed", "gather", ("meet", "all units")]
    assert Step(meeting="all units").calls == [("meet", "all units"), "gather"]
    assert step.engine.state.step == step.engine.state.launch_steps == 10


def test_warmup_step_gathers_nothing() -> None:
    """Megatron has gathered already: catches a second gather at every step."""
    assert Step(is_warmup=True).calls == [("stop?", False), "end?"]


class Round:
    """Run one meeting of the engine with stand-ins and record the calls.

    Args:
        lands_in_forward: whether the sync lands in the forward pass.
        outcome: outcome of the meeting.
    """

    def __init__(
        self, *, lands_in_forward: bool, outcome: MeetingOutcome = MeetingOutcome.SYNC,
        checks_commit: bool = False,
    ) -> None:  # fmt: skip
        self.calls: list[str] = []
        plan = anything(outcome=outcome, landing=DIRECT_COPY, samples=0)
        syncs = anything(
            of_units=lambda selection: [],
            prepare=lambda plan, began, waited, *, checks_commit: self.calls.append("prepare"),
            check_commit=lambda sync, plan: self.calls.append("check"),
            start=lambda sync: self.calls.append("start"),
            land_all=lambda: self.calls.append("land"),
        )
        engine = anything(
            state=anything(
                timeout=anything(after_round=lambda: None),
                apply=lambda plan, reporter, samples: self.calls.append("apply"),
            ),
            syncs=syncs, settings=anything(landing=DIRECT_COPY, checks_commit=checks_commit),
            reporter=None,
            _plan_round=lambda meeting: (plan, 0.0), _land=lambda syncs: None, elastic=None,
            _outcomes=anything(
                sync_plan=lambda plan, selection: None,
                commit=lambda plan: self.calls.append("commit"),
            ),
            _land_unless_in_forward=lambda: None, _lands_in_forward=lands_in_forward,
        )  # fmt: skip
        self.has_synced = EditEngine._meet_once(engine, anything(selection=None))


def test_blocking_round_commits_after_exchange() -> None:
    """Catches schedules, counters, detectors and ledger updated before the exchange is over."""
    assert Round(lands_in_forward=False).calls == ["prepare", "start", "land", "commit"]
    checked = Round(lands_in_forward=False, checks_commit=True)
    assert checked.calls == ["prepare", "start", "check", "land", "commit"]


def test_overlapped_round_commits_before_exchange() -> None:
    """Training continues at once: catches steps of the next round that use the old state."""
    assert Round(lands_in_forward=True).calls == ["commit", "prepare", "start"]


@pytest.mark.parametrize("outcome", [MeetingOutcome.EXTEND, MeetingOutcome.STOP])
def test_meeting_without_sync_commits_nothing(outcome: MeetingOutcome) -> None:
    """Catches a sync in a round that is extended or that a replica has left."""
    meeting = Round(lands_in_forward=False, outcome=outcome)
    assert meeting.calls == ["apply"] and not meeting.has_synced


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
