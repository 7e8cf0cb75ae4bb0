"""The clock and the trigger of A-EDiT."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.method.clock import NANOSECONDS, PhaseClock, TimeTrigger


class ManualClock:
    """A clock that advances only by `move`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.now = int(seconds * NANOSECONDS)

    def __call__(self) -> int:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += int(seconds * NANOSECONDS)


def test_clock_resolves_milliseconds_after_weeks_of_uptime() -> None:
    """Catches a clock kept in fp32, whose resolution at 10^6 s is 62 ms."""
    manual = ManualClock(1e6)
    clock = PhaseClock(manual)
    manual.move(1e6)
    before = clock.seconds
    manual.move(0.001)
    assert abs(clock.seconds - before - 0.001) < 1e-6


def test_pauses_are_excluded_from_phase() -> None:
    """Catches pauses (evaluations, saves) that count, also if repeated or followed by a restart."""
    manual = ManualClock()
    clock = PhaseClock(manual)
    manual.move(2)
    clock.pause()
    manual.move(100)
    clock.pause()
    assert clock.seconds == 2
    clock.resume()
    clock.resume()
    manual.move(1)
    assert clock.seconds == 3
    clock.pause()
    clock.restart()
    manual.move(4)
    assert clock.seconds == 4


def test_total_seconds_sums_all_phases() -> None:
    """Catches a total that misses a phase, or counts a pause or time restored from a checkpoint."""
    manual = ManualClock(50)
    clock = PhaseClock(manual)
    clock.set(7)
    manual.move(100)
    clock.resume()
    manual.move(2)
    assert (clock.seconds, clock.total_seconds) == (9, 2)
    clock.pause()
    manual.move(100)
    clock.restart()
    manual.move(3)
    assert (clock.seconds, clock.total_seconds) == (3, 5)
    clock.set(1)
    clock.resume()
    manual.move(1)
    assert (clock.seconds, clock.total_seconds) == (2, 6)


def test_trigger_fires_one_step_ahead() -> None:
    """It fires once another step like the last would exceed the length of the phase."""
    manual = ManualClock()
    trigger = TimeTrigger(10.0, PhaseClock(manual))
    answers = []
    for _ in range(5):
        manual.move(2)
        answers.append(trigger.after_step())
    assert answers == [False, False, False, True, True]  # after 8 s: the next step ends at 10 s
    trigger.restart()
    manual.move(2)
    assert not trigger.after_step()


@given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=60), st.floats(0.5, 20.0))
def test_phase_exceeds_its_length_by_at_most_one_step(steps: list[float], length: float) -> None:
    """When the trigger fires, the phase has passed its length by no more than the last step."""
    manual = ManualClock()
    trigger = TimeTrigger(length, PhaseClock(manual))
    for step in steps:
        manual.move(step)
        if trigger.after_step():
            assert trigger.clock.seconds + step >= length - 1e-6
            assert trigger.clock.seconds <= length + step
            return
    assert trigger.clock.seconds < length


def test_restarted_trigger_measures_its_first_step() -> None:
    """Catches a first step that is measured from the end of the previous phase."""
    manual = ManualClock()
    trigger = TimeTrigger(10.0, PhaseClock(manual))
    manual.move(9)
    assert trigger.after_step()
    trigger.restart()
    manual.move(6)
    assert trigger.after_step()  # another six seconds would exceed ten
