"""For how long the hub waits, with a clock that the test moves.

Would catch: a wait without end, a replica that is taken out for the time that others or the hub
itself have spent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_edit.elastic.deadlines import (
    ABANDONING_SECONDS,
    COPY_ROUNDS,
    COPY_SECONDS,
    FORMING_SECONDS,
    GONE_SECONDS,
    MASS_SECONDS,
    OPENING_SECONDS,
    PROGRESS_SECONDS,
    RECENT_STEPS,
    SILENT_SECONDS,
    Deadlines,
    Liveness,
)
from megatron_edit.elastic.hub_state import (
    Disconnected,
    EpochOverdue,
    Late,
    LeaveReason,
    Lost,
    OpeningOverdue,
    Phase,
)
from megatron_edit.elastic.messages import Failed
from tests.harness.hub import HubDecisions

EVICTED = Lost(LeaveReason.EVICTED)


class Hub:
    """A hub's decisions and its clock. Replicas that are connected send heartbeats."""

    def __init__(self, *names: str, rounds: int = 0) -> None:
        self.run, self.now = HubDecisions(*names, rounds=rounds), 0.0
        self.liveness = Liveness()
        self.deadlines = Deadlines(self.liveness)
        self.silent: set[str] = set()
        self.progress: dict[str, int] = {}
        self.busy: set[str] = set()  # make progress all the time
        self.wait(0.5)

    def wait(self, seconds: float) -> list[tuple[str, Any]]:
        """Move the clock; the first inputs that follow, or none. They are not taken."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for each in self.run.state.roster:
                if each.is_connected and each.name not in self.silent:
                    self.liveness.heard(each.name, self.now)
                    self.progress[each.name] = self.progress.get(each.name, 0) + (
                        each.name in self.busy
                    )
                    count = (0, 0, self.progress[each.name])
                    self.liveness.progressed(each.name, count, self.now)
            if found := self.deadlines.tick(self.run.state, self.now):
                return found
        return []

    def wait_for(self, seconds: float) -> list[tuple[str, Any]]:
        """The inputs that follow after this time, and not before."""
        assert self.wait(seconds - 1.0) == []
        return self.wait(2.0)


def test_silent_replica_is_lost() -> None:
    hub = Hub("a", "b", "c", rounds=1)
    hub.silent = {"b"}
    assert hub.wait_for(SILENT_SECONDS) == [("b", Lost())]
    hub.run.take("b", Lost())
    hub.run.take("c", Disconnected())
    hub.liveness.disconnected("c", hub.now)
    hub.busy = {"a"}
    assert hub.wait_for(GONE_SECONDS) == [("c", Lost())]


def test_silence_of_most_replicas_is_the_fault_of_the_link() -> None:
    hub = Hub("a", "b", "c", rounds=1)
    hub.silent = {"b", "c"}
    assert [name for name, _ in hub.wait_for(MASS_SECONDS)] == ["b", "c"]
    # Connections that have ended are made again soon, if at all.
    killed = Hub("a", "b", "c", rounds=1)
    for name in "bc":
        killed.run.take(name, Disconnected())
        killed.liveness.disconnected(name, killed.now)
    found = killed.wait_for(GONE_SECONDS + SILENT_SECONDS)
    assert [name for name, _ in found] == ["b", "c"]


def test_times_begin_again_after_a_pause_of_the_hub() -> None:
    hub = Hub("a", "b", "c", rounds=1)
    hub.silent = {"b"}
    assert hub.wait(SILENT_SECONDS - 1.0) == []
    hub.now += 100.0
    assert hub.wait_for(SILENT_SECONDS) == [("b", Lost())]


def test_replica_without_progress_is_not_waited_for() -> None:
    """Only while others wait, and no longer than for ten of its steps."""
    hub = Hub("a", "b", rounds=1)
    assert hub.wait(10 * PROGRESS_SECONDS) == []
    hub.run.arrive("a")
    assert hub.wait_for(PROGRESS_SECONDS) == [("b", EVICTED)]
    slow = Hub("a", "b", rounds=1)
    for step in range(1, RECENT_STEPS + 1):
        slow.liveness.progressed("b", (step, 0, 0), 20.0 * step)
    slow.liveness.progressed("b", (RECENT_STEPS + 1, 0, 0), 20.0 * RECENT_STEPS + 1000.0)
    slow.now = 20.0 * RECENT_STEPS + 1000.0
    slow.wait(1.0)
    slow.run.arrive("a")
    slow.liveness.progressed("b", (RECENT_STEPS + 2, 0, 0), slow.now)
    slow.silent = {"b"}
    waited = [slow.now]
    while not any(given == EVICTED for _, given in slow.wait(0.5)):
        slow.liveness.heard("b", slow.now)
        assert slow.now - waited[0] < 300.0
    assert slow.now - waited[0] > 195.0  # the median of its steps is 20 s


def test_first_step_may_take_as_long_as_those_of_others() -> None:
    """A replica that has just joined, with steps of 30 s. Would catch: it is taken out after 60 s
    of its first step, before its own steps are known."""
    hub = Hub("a", "b", rounds=1)
    hub.silent = {"a", "b"}
    for step in range(1, 5):
        hub.liveness.progressed("a", (step, 0, 0), hub.now + 30.0 * step)
    hub.now += 120.0
    hub.silent = {"b"}
    hub.run.arrive("a")
    began = hub.now
    while not (found := [each for each in hub.wait(0.5) if each == ("b", EVICTED)]):
        hub.liveness.heard("b", hub.now)
        hub.liveness.progressed("b", (0, 0, 0), hub.now)
        assert hub.now - began < 400.0
    assert found and 295.0 < hub.now - began < 310.0


def test_exchange_goes_on_while_it_makes_progress() -> None:
    hub = Hub("a", "b", "c", rounds=1)
    hub.run.arrive("a", "b", "c")
    assert hub.run.state.phase is Phase.EXCHANGE
    hub.busy = {"b", "c"}
    assert hub.wait(5 * PROGRESS_SECONDS) == []
    hub.run.ready("a")
    assert hub.wait(5 * PROGRESS_SECONDS) == []
    hub.busy = {"b"}
    assert hub.wait_for(PROGRESS_SECONDS) == [("c", EVICTED)]


def test_exchange_without_any_progress_is_abandoned() -> None:
    hub = Hub("a", "b", rounds=1)
    hub.run.arrive("a", "b")
    assert hub.wait_for(PROGRESS_SECONDS) == [("", EpochOverdue(1))]
    hub.run.take("", EpochOverdue(1))
    hub.run.arrive("a")
    assert hub.wait_for(ABANDONING_SECONDS)[-1] == ("b", EVICTED)


def test_replica_that_does_not_arrive_after_an_abandoned_exchange_goes() -> None:
    """Progress of its heartbeats does not count: an exchange is put aside at once."""
    hub = Hub("a", "b", rounds=1)
    hub.run.arrive("a", "b")
    hub.run.take("a", Failed(1))
    hub.busy = {"a", "b"}
    hub.run.arrive("b")
    assert hub.wait_for(ABANDONING_SECONDS) == [("a", EVICTED)]
    hub.run.arrive("a")
    assert hub.run.state.phase is Phase.FORM and hub.wait(1.0) == []


def test_forming_takes_half_a_minute_at_most() -> None:
    hub = Hub("a", "b", rounds=1)
    hub.run.arrive("a", "b")
    hub.run.take("a", Failed(1))
    hub.run.arrive("a", "b")
    assert hub.wait_for(FORMING_SECONDS) == [("", EpochOverdue(2))]


def test_copies_are_waited_for_a_minute() -> None:
    hub = Hub("a", rounds=1)
    hub.run.take("b", hub.run.hello("b", 1))
    assert hub.wait(10.0) == []
    hub.run.arrive("a")
    ((name, late),) = hub.wait_for(COPY_SECONDS)
    assert name == "b" and isinstance(late, Late) and 60.0 < late.seconds < 62.0


def test_copies_stretch_a_long_round_at_most_fourfold() -> None:
    """Also where an exchange fails, and where another replica joins meanwhile."""
    hub = Hub("a", "b", rounds=1)
    began = hub.now
    hub.run.take("c", hub.run.hello("c", 2))
    assert hub.wait(100.0) == []
    hub.run.arrive("a")
    hub.wait(50.0)
    hub.run.arrive("b")
    ((name, late),) = hub.wait(1000.0)
    assert name == "c" and isinstance(late, Late)
    assert 4 * 150.0 <= hub.now - began < 4 * 150.0 + 4.0
    hub.run.take(name, late)
    hub.run.take("a", Failed(1))
    hub.run.arrive("a", "b")
    assert hub.run.state.phase is Phase.FORM, "the late one is not waited for in this round"
    hub.run.take("a", Failed(2))
    hub.run.take("d", hub.run.hello("d", 2))
    hub.run.arrive("a", "b")
    ((name, late),) = hub.wait(1000.0)
    assert name == "d" and isinstance(late, Late)
    assert COPY_ROUNDS * 150.0 <= late.seconds < COPY_ROUNDS * 150.0 + 4.0


def test_times_of_copies_do_not_count_what_the_hub_has_slept() -> None:
    hub = Hub("a", rounds=1)
    hub.run.take("b", hub.run.hello("b", 1))
    hub.now += 1000.0
    hub.wait(10.0)
    hub.run.arrive("a")
    assert [name for name, _ in hub.wait_for(COPY_SECONDS)] == ["b"]


def test_opening_waits_a_minute_once_the_minimum_is_there() -> None:
    hub = Hub()
    assert hub.wait(2 * OPENING_SECONDS) == []
    hub.run.take("a", hub.run.hello("a", 3))
    assert hub.wait_for(OPENING_SECONDS) == [("", OpeningOverdue())]
    hub.run.take("b", hub.run.hello("b", 3))
    hub.run.state = replace(hub.run.state, reached=1)  # which nobody has a checkpoint of
    assert hub.wait(2 * OPENING_SECONDS) == []


def test_ended_run_has_no_deadlines() -> None:
    hub = Hub("a", "b")
    for name in "ab":
        hub.run.arrive(name)
    hub.run.ready("a", digest="x")
    hub.run.ready("b", digest="y")
    hub.silent = {"a", "b"}
    assert hub.run.state.phase is Phase.ENDED and hub.wait(2 * MASS_SECONDS) == []
