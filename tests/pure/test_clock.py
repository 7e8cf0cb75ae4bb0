"""The clock and the trigger of A-EDiT."""

from __future__ import annotations

import random

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


def meeting_times(
    step_seconds: list[float], length: float, *, delay: float, draw: random.Random
) -> list[float]:
    """Simulate a phase of replicas with steps of about these seconds; return when each arrives.

    Args:
        step_seconds: of each replica, by which they vary by up to 5 % either way.
        length: of the phase.
        delay: age of what replicas know about each other, seconds.
        draw: source of the variation.
    """
    clocks = [ManualClock() for _ in step_seconds]
    triggers = [TimeTrigger(length, PhaseClock(clock)) for clock in clocks]
    published: list[list[tuple[float, float]]] = [[] for _ in step_seconds]
    ends = [step * draw.uniform(0.95, 1.05) for step in step_seconds]
    lasts, found = [0.0 for _ in step_seconds], [0.0 for _ in step_seconds]
    is_requested = [False for _ in step_seconds]
    while not all(found):
        replica = min((r for r in range(len(ends)) if not found[r]), key=ends.__getitem__)
        now = ends[replica]
        clocks[replica].move(now - lasts[replica])
        lasts[replica] = now
        if is_requested[replica]:
            found[replica] = now
            continue
        known = [
            next((arrival for time, arrival in reversed(each) if time <= now - delay), 0.0)
            for number, each in enumerate(published)
            if number != replica and not found[number]
        ]
        is_requested[replica] = triggers[replica].after_step(max(known, default=0.0))
        arrival = triggers[replica].arrival
        assert arrival is not None
        published[replica].append((now, arrival))
        ends[replica] = now + step_seconds[replica] * draw.uniform(0.95, 1.05)
    return found


@given(
    st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5),
    st.floats(4.0, 10.0),
    st.floats(0.0, 0.1),
    st.integers(0, 1000),
)
def test_nobody_meets_early_or_much_after_the_slowest(
    step_seconds: list[float], length: float, delay: float, seed: int
) -> None:
    """Would catch replicas that wait for each other's predictions, and never meet."""
    times = meeting_times(step_seconds, length, delay=delay, draw=random.Random(seed))
    assert min(times) >= length - 0.1 * max(step_seconds)
    assert max(times) <= length + 1.2 * max(step_seconds) + delay


def test_fast_replica_waits_for_a_step_of_its_own() -> None:
    """Would catch: it waits for up to a step of the slowest, which takes four times as long."""
    waits = []
    for seed in range(200):
        draw = random.Random(seed)
        steps = [0.07, 0.07, 0.28]
        times = meeting_times(steps, draw.uniform(4.0, 4.5), delay=0.1, draw=draw)
        waits += [max(times) - time for time in times[:2]]
    waits.sort()
    assert sum(waits) / len(waits) < 0.07  # half of a step of its own, and the variation
    assert waits[len(waits) * 9 // 10] < 0.14


def test_arrival_does_not_depend_on_other_replicas() -> None:
    """Would catch a prediction that grows while a replica goes on for others, which see it."""
    manual = ManualClock()
    trigger = TimeTrigger(10.0, PhaseClock(manual))
    assert trigger.arrival is None
    found: list[tuple[bool, float | None]] = []
    for _ in range(7):
        manual.move(3)
        found.append((trigger.after_step(20.5), trigger.arrival))
    assert found == [(False, 12)] * 4 + [(True, 12)] * 3  # 18 s is the last end before 20.5 s
    trigger.restart()
    assert trigger.arrival is None
