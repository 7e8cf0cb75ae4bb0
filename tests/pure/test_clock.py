"""The clock and the trigger of A-EDiT."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.method.clock import NANOSECONDS, PhaseClock, TimeTrigger


class Hands:
    """A clock that stands where it is put."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.now = int(seconds * NANOSECONDS)

    def __call__(self) -> int:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += int(seconds * NANOSECONDS)


def test_a_millisecond_counts_after_weeks_of_uptime() -> None:
    """Catches a clock kept in fp32: at 10^6 s it steps by 62 ms."""
    hands = Hands(1e6)
    clock = PhaseClock(hands)
    hands.move(1e6)
    before = clock.seconds
    hands.move(0.001)
    assert abs(clock.seconds - before - 0.001) < 1e-6


def test_pauses_do_not_count() -> None:
    """Evaluations and saves: also twice in a row, and over a restart."""
    hands = Hands()
    clock = PhaseClock(hands)
    hands.move(2)
    clock.pause()
    hands.move(100)
    clock.pause()
    assert clock.seconds == 2
    clock.resume()
    clock.resume()
    hands.move(1)
    assert clock.seconds == 3
    clock.pause()
    clock.restart()
    hands.move(4)
    assert clock.seconds == 4


def test_the_total_is_of_all_phases() -> None:
    """For logs: catches a total that forgets a phase, counts a pause, or what was saved of a phase
    that another process began."""
    hands = Hands(50)
    clock = PhaseClock(hands)
    clock.set(7)
    hands.move(100)
    clock.resume()
    hands.move(2)
    assert (clock.seconds, clock.total_seconds) == (9, 2)
    clock.pause()
    hands.move(100)
    clock.restart()
    hands.move(3)
    assert (clock.seconds, clock.total_seconds) == (3, 5)
    clock.set(1)
    clock.resume()
    hands.move(1)
    assert (clock.seconds, clock.total_seconds) == (2, 6)


def test_it_asks_a_step_ahead() -> None:
    """Elapsed time and another step like the last: the phase ends at its length, not after it."""
    hands = Hands()
    trigger = TimeTrigger(10.0, PhaseClock(hands))
    answers = []
    for _ in range(5):
        hands.move(2)
        answers.append(trigger.after_step())
    assert answers == [False, False, False, True, True]  # after 8 s: the next step ends at 10 s
    trigger.restart()
    hands.move(2)
    assert not trigger.after_step()


@given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=60), st.floats(0.5, 20.0))
def test_a_phase_is_never_longer_than_a_step_beyond(steps: list[float], length: float) -> None:
    """Wherever it asks, the phase has not passed its length by more than the last step."""
    hands = Hands()
    trigger = TimeTrigger(length, PhaseClock(hands))
    for step in steps:
        hands.move(step)
        if trigger.after_step():
            assert trigger.clock.seconds + step >= length - 1e-6
            assert trigger.clock.seconds <= length + step
            return
    assert trigger.clock.seconds < length


def test_a_new_phase_asks_anew() -> None:
    """Catches a phase whose first step is measured from the end of the one before it."""
    hands = Hands()
    trigger = TimeTrigger(10.0, PhaseClock(hands))
    hands.move(9)
    assert trigger.after_step()
    trigger.restart()
    hands.move(6)
    assert trigger.after_step()  # another one of six seconds would be beyond ten
