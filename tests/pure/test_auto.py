"""The choice of `--edit-auto`: hand-computed cases, limits of the settings, and its tables."""

from __future__ import annotations

import dataclasses
import json
import math
from statistics import harmonic_mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.wire import Wire
from megatron_edit.command_line import config_from_argv
from megatron_edit.config import EditConfig
from megatron_edit.constants import FP32, INT8, MEASURED_STEPS, SIGN
from megatron_edit.engine import EngineSettings, tuning
from megatron_edit.engine.tuning import AutoTuner
from megatron_edit.method import auto
from megatron_edit.method.auto import (
    INTERVALS,
    LEAST_ROUNDS,
    AutoChoice,
    AutoSetting,
    Measurement,
    SyncSettings,
    auto_settings,
    calibrated,
    choose,
    leaves_prediction,
    mean_wait,
    predict,
    with_choice,
)
from megatron_edit.method.schedule import LaterSchedule
from megatron_edit.method.strategy import outer_preset

BYTES = {FP32: 8.0, INT8: 2.0, SIGN: 0.25}  # of an element
USUAL = SyncSettings(128, FP32, 1, 0, 0.8, 0.85, 128.0, "none", 1, 0.0)
LONG = 10_000  # local steps
OPEN = object()  # a setting that is chosen
MOMENTS: dict[str, Any] = {"average_moments": OPEN, "average_moments_every": OPEN}


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses in round numbers: each doubling of the interval costs 1 %."""
    losses = {FP32: 0.0, INT8: 0.001, SIGN: 0.02}
    monkeypatch.setattr(auto, "INTERVAL_LOSS", ((8, 0.01), (16, 0.02), (32, 0.03)))
    monkeypatch.setattr(auto, "WIRE_LOSS", losses)
    monkeypatch.setattr(auto, "MOMENT_LOSS", {("both", 1): -0.005, ("both", 4): -0.003})
    monkeypatch.setattr(auto, "FINAL_GAIN", {0.02: 0.003, 0.05: 0.006})
    monkeypatch.setattr(auto, "DELAY_LOSS", 0.04)
    monkeypatch.setattr(auto, "WARMUP_LOSS", ((0.01, 0.0), (0.1, 0.0)))


def setting(target: float = 0.97, units: tuple[int, ...] = (100,), **given: object) -> AutoSetting:
    """A setting in which everything is open but `given`, moments and the final phase."""
    closed = {"average_moments": "none", "average_moments_every": 1, "final_sync_fraction": 0.0}
    values = {"warmup_steps": 50, **closed, **given}
    opened = {name: value for name, value in values.items() if value is not OPEN}
    return AutoSetting(
        given=EditConfig(auto=True, auto_share=target, **opened),  # type: ignore[arg-type]
        unit_numels=units,
        payload=lambda numel, wire, moments: math.ceil(
            (BYTES[wire] + (4.0 if moments == "both" else 0.0)) * numel
        ),
        depth=1,
        num_replicas=2,
    )


def measured(rate: float, latency: float = 0.0) -> Measurement:
    """Steps of a second, and no local work."""
    return Measurement(1.0, 0.0, rate, latency, dict.fromkeys(BYTES, 0.0))


def chosen(rate: float, local_steps: int = LONG, **given: object) -> AutoChoice:
    """The choice after step 50."""
    return choose(setting(**given), measured(rate), 50, local_steps)  # type: ignore[arg-type]


# ---- hand-computed choices


def test_fast_link_gets_least_loss() -> None:
    """Everything reaches the target: the shortest interval, no delay, and of equal losses and
    speeds the first: fp32, one fragment."""
    found = chosen(math.inf)
    lr, momentum = outer_preset(8, FP32).values()
    assert found.settings == SyncSettings(8, FP32, 1, 0, lr, momentum, 8.0, "none", 1, 0.0)
    assert (found.share, found.exposed, found.since) == (1.0, 0.0, 50)
    assert found.loss == pytest.approx(0.01)


def test_slow_link_gets_least_loss_that_reaches_target() -> None:
    """An exchange takes 8 s in fp32, 2 s in int8, 0.25 s in sign.

    int8 with 2 steps of delay at tau 8 costs 0.01 + 0.001 + 0.04 x 2 / 8 = 0.021. sign reaches
    8 / 8.25 = 0.9697 there, less than 0.97; with one step of delay it costs 0.035.
    """
    found = chosen(100)
    lr, momentum = outer_preset(8, INT8).values()
    momentum = min(momentum, auto.MOST_MOMENTUM)
    assert found.settings == SyncSettings(8, INT8, 1, 2, lr, momentum, 8.0, "none", 1, 0.0)
    assert found.share == 1.0 and found.loss == pytest.approx(0.021)


def test_outer_momentum_is_at_most_what_costs_no_loss() -> None:
    """The preset of long rounds has more; what is given stays."""
    assert outer_preset(32, FP32)["outer_momentum"] > auto.MOST_MOMENTUM == 0.7
    found = chosen(math.inf, sync_interval=32).settings
    assert (found.outer_lr, found.outer_momentum) == (0.8, 0.7)
    assert chosen(math.inf, sync_interval=32, outer_momentum=0.9).settings.outer_momentum == 0.9


def test_moments_are_averaged_where_the_link_carries_them() -> None:
    """Both moments send 4 more bytes of an element: half as many as fp32.

    On a fast link they are averaged at each sync. At tau 8 syncs may take 0.247 s (0.97): one in
    fp32 takes 0.216 s at 3700 bytes per second, and moments add half of that, at every fourth sync
    an eighth. At 3400 bytes per second that is too much.
    """
    assert chosen(math.inf, **MOMENTS).settings.average_moments == "both"
    fixed = MOMENTS | {"delay_steps": 0, "sync_dtype": FP32, "sync_interval": 8, "fragments": 1}
    found = chosen(3700, **fixed)
    assert (found.settings.average_moments, found.settings.average_moments_every) == ("both", 4)
    exposed = (3 * 800 + 1200) / 4 / 3700
    assert found.share == pytest.approx(8 / (8 + exposed))
    assert found.loss == pytest.approx(0.007)
    assert found.slower.startswith("tau 8, fp32, moments both: 0.9")
    assert chosen(3400, **fixed).settings.average_moments == "none"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"average_moments": "none", "average_moments_every": OPEN}, ("none", 1)),
        ({"average_moments": OPEN, "average_moments_every": 4}, ("both", 4)),
        ({"average_moments": "both", "average_moments_every": OPEN}, ("both", 4)),
    ],
)
def test_moments_fit_to_what_is_given(
    given: dict[str, Any], expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a choice that the checks of the settings then refuse."""
    monkeypatch.setitem(auto.MOMENT_LOSS, ("none", 1), 0.01)
    found = chosen(10, **given).settings
    assert (found.average_moments, found.average_moments_every) == expected


@pytest.mark.parametrize(("averaging", "fraction"), [(0.399, 0.05), (0.41, 0.02), (1.01, 0.0)])
def test_final_phase_costs_little_time(averaging: float, fraction: float) -> None:
    """Its share times the averaging of a step, in steps, is at most 2 % of the time."""
    at = dataclasses.replace(measured(math.inf), averaging=averaging)
    found = choose(setting(final_sync_fraction=OPEN), at, 50, LONG)
    assert found.settings.final_sync_fraction == fraction
    assert found.loss == pytest.approx(0.01 - auto.FINAL_GAIN.get(fraction, 0.0))
    line = f"the last {round(100 * fraction)}% of training synchronous"
    assert (line in found.lines()[0]) == bool(fraction)


def test_checked_and_reduced_checkpoints_need_landings_at_once() -> None:
    """No delay and no fragments, without which the link would need sign at tau 16."""
    for flags in ({"check_commits": True}, {"inner_state": "leader"}):
        found = chosen(100, **flags).settings
        assert (found.delay_steps, found.fragments, found.sync_dtype) == (0, 1, SIGN)
    assert chosen(100).settings.delay_steps == 2


def test_uneven_replicas_are_told_about_a_edit() -> None:
    """Only where they lose more than 3 %, and the clock does not end the rounds already."""
    for evenness, is_told in ((0.96, True), (0.98, False)):
        at = dataclasses.replace(measured(math.inf), evenness=evenness)
        for each, expected in ((setting(), is_told), (timed(), False)):
            assert ("a-edit" in choose(each, at, 50, LONG).lines()[1]) == expected


@pytest.mark.parametrize(
    ("averaging", "end"),
    [(0.0, 1000), (3.0, 1000), (6.0, 500), (30.0, 200), (1e9, 200)],
)
def test_warmup_ends_where_it_has_cost_enough(averaging: float, end: int) -> None:
    """30 % of the time of 10,000 steps of a second, but not before 2 % of the steps."""
    at = dataclasses.replace(measured(math.inf), averaging=averaging)
    assert auto.warmup_end(at, 1000, 10_000) == end
    assert auto.warmup_end(dataclasses.replace(at, averaging=1e9), 1000, 100) == 20


def test_given_settings_restrict_choice() -> None:
    """Without a delay sign at tau 16 costs 0.04, and int8 needs tau 128 (0.051)."""
    found = chosen(100, delay_steps=0)
    lr, momentum = outer_preset(16, SIGN).values()
    assert found.settings == SyncSettings(16, SIGN, 1, 0, lr, momentum, 16.0, "none", 1, 0.0)
    assert found.share == pytest.approx(16 / 16.25) and found.exposed == pytest.approx(0.25)
    assert found.loss == pytest.approx(0.04)
    assert chosen(100, delay_steps=0, sync_dtype=INT8).settings.sync_interval == 128


def test_fastest_is_chosen_where_none_reaches_target() -> None:
    """fp32 without a delay reaches at most 256 / 264 = 0.9697."""
    found = chosen(100, delay_steps=0, sync_dtype=FP32)
    assert found.settings.sync_interval == 256 and found.share == pytest.approx(256 / 264)


def test_nearly_fastest_with_less_loss_is_chosen() -> None:
    """An exchange of 0.32 s: 0.995 at tau 64, 0.990 at 32, 0.980 at 16. The first two are equally
    fast, within the accuracy of a prediction."""
    found = chosen(2500, LEAST_ROUNDS * 64, target=0.999, delay_steps=0, sync_dtype=FP32)
    assert found.settings.sync_interval == 32


def test_faster_of_equal_losses_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All wire types cost nothing: the smallest payload."""
    for module in (auto, auto):
        monkeypatch.setattr(module, "WIRE_LOSS", dict.fromkeys(BYTES, 0.0))
    assert chosen(1e6).settings.sync_dtype == SIGN


def test_four_rounds_remain() -> None:
    """256 local steps allow tau 64, 255 do not; a very short phase gets the shortest interval."""
    found = [
        chosen(100, local_steps, delay_steps=0, sync_dtype=FP32).settings.sync_interval
        for local_steps in (256, 255, 31, 0)
    ]
    assert found == [64, 32, 8, 8]


@pytest.mark.parametrize(
    "given_values",
    [
        {"sync_interval": 24}, {"sync_dtype": SIGN}, {"fragments": 2}, {"delay_steps": 3},
        {"outer_lr": 0.5}, {"outer_momentum": 0.25},
    ],
    ids=lambda values: next(iter(values)),
)  # fmt: skip
@pytest.mark.parametrize("rate", [50, 1e9])
def test_given_settings_stay(rate: float, given_values: dict[str, object]) -> None:
    """On a slow link and a fast one, where another value would be better."""
    rules = setting(units=(40, 30, 30), **given_values)  # type: ignore[arg-type]
    found = choose(rules, measured(rate), 50, LONG).settings
    assert {name: getattr(found, name) for name in given_values} == given_values


def test_interval_exceeds_given_delay_and_fragments() -> None:
    """Catches a choice without candidates: too few local steps for four rounds of such a length."""
    assert chosen(1e9, 160, delay_steps=20).settings.sync_interval == 32
    assert chosen(1e9, fragments=12, units=(9,) * 12).settings.sync_interval == 16
    assert chosen(1e9, 100, delay_steps=100).settings.sync_interval == 101
    assert chosen(1e9, 100, fragments=60, units=(9,) * 60).settings.sync_interval == 60


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 2, 5, 12]),
    st.floats(1, 1e6),
    st.floats(0, 10),
    st.floats(0.01, 0.99),
    st.integers(0, 3000),
)
def test_chosen_settings_are_valid(
    units: int, rate: float, latency: float, target: float, local_steps: int
) -> None:
    """F <= units and tau, d < tau, four rounds, and no better candidate that reaches the target."""
    rules, at = setting(target, (50,) * units), measured(rate, latency)
    found = choose(rules, at, 20, local_steps)
    tau = found.settings.sync_interval
    assert found.settings.fragments <= min(units, tau) and found.settings.delay_steps < tau
    assert tau == INTERVALS[0] or LEAST_ROUNDS * tau <= local_steps
    assert dataclasses.replace(found, slower="") == predict(rules, at, found.settings, 20)
    for wire in BYTES:
        other = predict(rules, at, dataclasses.replace(found.settings, sync_dtype=wire), 20)
        assert other.share < target or other.loss >= found.loss


def test_latency_counts_at_meetings_and_exchanges() -> None:
    """Each of F meetings costs two messages, and each exchange waits for two. The time of a sync is
    without its meeting, as it is measured."""
    plain = predict(setting(), measured(math.inf, 0.1), USUAL, 0)
    assert plain.exposed == pytest.approx(0.2)
    assert plain.share == pytest.approx(USUAL.sync_interval / (USUAL.sync_interval + 0.4))


def test_meetings_wait_for_slowest() -> None:
    """0.1 s after one step, 0.4 s after the 16 of each of 4 parts of a round."""
    at = dataclasses.replace(measured(math.inf), wait=0.1)
    used = dataclasses.replace(USUAL, sync_interval=64, fragments=4)
    found = predict(setting(units=(1,) * 4), at, used, 0)
    assert found.share == pytest.approx(64 / (64 + 4 * 0.4)) and found.exposed == 0.0


def test_wait_is_that_of_steps_or_of_blocks() -> None:
    """Alternating steps of 1 and 3 s wait for 1 s each, and not after two of them. A replica that
    is slow in one half waits, or lets the others wait, for half a second after each step, and for
    one after two. One that is always slower does not count."""
    assert auto.mean_wait([[1, 3, 1, 3], [3, 1, 3, 1]]) == pytest.approx(1)
    halves = [[1.0] * 8, [1.0] * 4 + [3.0] * 4]
    assert auto.mean_wait(halves) == pytest.approx(1 / math.sqrt(2))
    assert auto.mean_wait([[1, 1, 1, 1], [3, 3, 3, 3]]) == 0.0
    assert auto.mean_wait([[1, 5, 2]]) == 0.0 and auto.mean_wait([[], []]) == 0.0


# ---- rounds that the clock ends


def timed(**given: object) -> AutoSetting:
    """A-EDiT with two replicas, whose rounds may be of any length."""
    values = {"strategy": "a-edit", "min_round_steps": 0} | given
    return setting(**values)  # type: ignore[arg-type]


def test_seconds_follow_from_steps_of_median_replica() -> None:
    """The link of `test_slow_link_gets_least_loss_that_reaches_target`, with steps of 1.5 s: an
    exchange of 2 s in int8 needs two steps of delay, and rounds of 8 steps last 12 s."""
    at = dataclasses.replace(measured(100), step=1.5, slowest=2.0)
    found = choose(timed(), at, 50, LONG)
    assert found.is_timed and found.settings == SyncSettings(
        8, INT8, 1, 2, 0.9, 0.6, 12.0, "none", 1, 0.0
    )
    assert found.loss == pytest.approx(0.021)  # that of edit with 8 steps
    used = with_choice(timed().given, found)
    assert (used.sync_seconds, used.sync_interval, used.delay_steps) == (12.0, 128, 2)
    assert found.lines()[0].startswith(
        "chosen after step 50: a sync every 12 s (about 8 steps) in int8, "
    )


@pytest.mark.parametrize(("fragments", "waited"), [(1, 0.5), (4, 0.8)])
def test_replicas_of_unequal_speed_meet_at_unequal_times(fragments: int, waited: float) -> None:
    """Those that take 1 s and 1.11 s are half a step apart after 8 steps, 0.2 s after two."""
    at = dataclasses.replace(measured(math.inf), evenness=0.9)
    settings = dataclasses.replace(USUAL, sync_interval=8, fragments=fragments)
    found = auto.predict(timed(units=(100,) * 4), at, settings, 50)
    assert found.share == pytest.approx(8 / (8 + waited))


def test_given_seconds_stay() -> None:
    """4.4 s are about 4 steps, and so is their loss."""
    found = choose(timed(sync_seconds=4.4), measured(math.inf), 50, LONG)
    assert (found.settings.sync_seconds, found.settings.sync_interval) == (4.4, 4)
    assert found.loss == auto.interval_loss(4)
    assert choose(timed(sync_seconds=0.2), measured(100), 50, LONG).settings.sync_interval == 1


def test_slowest_replica_makes_more_steps_than_delay_and_fragments() -> None:
    """A delay counts a replica's own steps, and a part without a step has weight 0. The slowest of
    them makes 2 steps in rounds of 8, so a delay of 2, as above, is too long for it."""
    at = dataclasses.replace(measured(100), slowest=4.0)
    tried = list(auto._candidates(timed(units=(9,) * 12), at, LONG))
    assert {max(s.delay_steps, s.fragments - 1) for s in tried if s.sync_interval == 8} == {0, 1}
    assert all(s.delay_steps < s.sync_interval / 4 for s in tried)
    delayed = choose(timed(delay_steps=5), at, 50, LONG).settings
    assert delayed.delay_steps == 5 and delayed.sync_interval >= 4 * 6
    slow = dataclasses.replace(measured(math.inf), slowest=30.0)
    assert choose(timed(), slow, 50, LONG).settings.sync_interval == 32


def test_rounds_are_long_enough_not_to_be_extended() -> None:
    """100 steps of two replicas are 50 each, and a quarter to spare makes 63."""
    for local_steps in (LONG, 0):
        found = choose(timed(min_round_steps=100), measured(math.inf), 50, local_steps)
        assert found.settings.sync_interval == (64 if local_steps else 63)
    four = dataclasses.replace(timed(min_round_steps=100), num_replicas=4)
    assert choose(four, measured(math.inf), 50, LONG).settings.sync_interval == 32


def test_replicas_at_own_speeds_wait_for_half_a_step_at_most() -> None:
    """After 16 steps they would wait for 4 x 0.1 s, but for 1 s after 100: then they make further
    steps. Each of four fragments has a meeting."""
    at = dataclasses.replace(measured(math.inf), wait=0.1)
    for steps, fragments, waits in ((16, 1, 0.4), (100, 1, 0.5), (64, 4, 4 * 0.4)):
        used = dataclasses.replace(USUAL, sync_interval=steps, fragments=fragments)
        found = predict(timed(units=(1,) * 4), at, used, 0)
        assert found.share == pytest.approx(steps / (steps + waits))


def test_fragments_meet_in_equal_times() -> None:
    """Three fragments of 2.6 s in a round of 8 s, and a delay of 3 s: the link carries each before
    the next one starts. Started by steps they have 2, 3 and 3 s: the second one waits 0.6 s for the
    link and is 0.2 s late."""
    used = dataclasses.replace(USUAL, sync_interval=8, fragments=3, delay_steps=3)
    at, units = measured(800 / 2.6), (100,) * 3
    assert predict(timed(units=units), at, used, 0).exposed == 0.0
    assert predict(setting(units=units), at, used, 0).exposed == pytest.approx(0.2 / 3)


def test_choice_of_older_version_has_seconds() -> None:
    """Catches a checkpoint of `edit` that cannot be resumed, or with `a-edit` only without them."""
    record = chosen(100).as_json()
    del record["settings"]["sync_seconds"], record["measured"]["slowest"], record["is_timed"]
    assert AutoChoice.from_json(record).settings.sync_seconds == 8.0


# ---- leaving a prediction


@pytest.mark.parametrize(
    ("predicted", "exposed", "leaves"),
    [
        (1.0, 2.0, False), (1.0, 2.1, True), (1.0, 0.5, False), (1.0, 0.4, True),
        # Less than the 0.5 s that the target allows is not told from nothing.
        (0.1, 0.9, False), (0.1, 1.1, True), (0.1, 0.0, False), (0.0, 1.1, True),
    ],
)  # fmt: skip
def test_prediction_is_left_by_factor_of_two(
    predicted: float, exposed: float, leaves: bool
) -> None:
    """Rounds of 10 s with two fragments at a target of 0.9: 0.5 s a sync are allowed."""
    used = dataclasses.replace(USUAL, sync_interval=10, fragments=2)
    choice = AutoChoice(used, 0.9, predicted, 0.0, 20, measured(100))
    # Fragments of unequal size: the mean of a round counts.
    syncs = [0.5 * exposed, 1.5 * exposed] * 2
    assert leaves_prediction(choice, syncs, 0.9) is leaves
    assert not leaves_prediction(choice, syncs[1:], 0.9), "too few syncs"
    usual = [0.5 * predicted, 1.5 * predicted]
    assert not leaves_prediction(choice, [*usual, *syncs[2:]], 0.9), "one round only"


def test_three_syncs_leave_prediction_without_fragments() -> None:
    """Rounds of 10 s at a target of 0.9: 1 s is allowed. Not in opposite directions."""
    used = dataclasses.replace(USUAL, sync_interval=10)
    choice = AutoChoice(used, 0.9, 1.5, 0.0, 20, measured(100))
    assert leaves_prediction(choice, [3.1, 9.0, 3.1], 0.9)
    assert leaves_prediction(choice, [0.1, 0.2, 0.7], 0.9)
    for syncs in ([3.1, 9.0], [3.1, 3.0, 3.1], [0.1, 9.0, 0.1]):
        assert not leaves_prediction(choice, syncs, 0.9)


def test_work_is_calibrated_by_observed_syncs() -> None:
    """Two fragments of a unit each of 100 elements, work of 0.01 s an element: a sync is expected
    to add 1 s of work and 1 s of exchange in int8; it adds 5 s, so work is four times as much."""
    rules = setting(units=(100, 100))
    used = dataclasses.replace(USUAL, sync_dtype=INT8, fragments=2)
    at = dataclasses.replace(measured(200), work=dict.fromkeys(BYTES, 0.01))
    assert predict(rules, at, used, 0).exposed == pytest.approx(2)
    found = calibrated(rules, at, used, 5.0)
    assert found.work == pytest.approx(dict.fromkeys(BYTES, 0.04))
    assert predict(rules, found, used, 0).exposed == pytest.approx(5)
    assert calibrated(rules, at, used, 1.9) == at
    assert calibrated(rules, at, used, 50.0).work == pytest.approx(found.work), "at most 4 times"


# ---- JSON and text


@pytest.mark.parametrize("rate", [123.456, math.inf])
def test_choice_round_trips_through_json(rate: float) -> None:
    """Bit for bit, and in standard JSON: also where there is no other replica to send to."""
    choice = chosen(rate)
    text = json.dumps(choice.as_json(), allow_nan=False)
    assert AutoChoice.from_json(json.loads(text)) == choice


def test_broken_choice_is_refused() -> None:
    """By the exceptions that the reader of a checkpoint expects."""
    record = chosen(100).as_json()
    with pytest.raises(TypeError):
        AutoChoice.from_json({**record, "mood": 1})
    with pytest.raises(KeyError):
        AutoChoice.from_json({"settings": record["settings"]})


def test_lines_name_settings_and_reasons() -> None:
    """What is chosen, what it is expected to cost, and from which measurements."""
    what, why, source = chosen(100).lines()
    assert what == (
        "chosen after step 50: a sync every 8 steps in int8, landing 2 steps later, outer learning "
        "rate 0.9, momentum 0.6"
    )
    assert why == (
        "expected: 1.000 of the speed without exchange, and a loss +2.1% over stock Megatron's (as "
        "for small models); less loss, but slower: tau 8, int8, delay 1: 0.889"
    )
    assert source == (
        "measured: a step 1 s, 0.0001 MB/s from each rank to other "
        "replicas, latency 0 ms, a wait for other replicas of 0 ms after one step"
    )


# ---- tables


def test_interval_loss_is_linear_in_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the measured intervals, and beyond them on both sides."""
    monkeypatch.setattr(auto, "INTERVAL_LOSS", ((4, 0.01), (16, 0.03), (64, 0.04)))
    found = [auto.interval_loss(tau) for tau in (2, 4, 8, 16, 32, 64, 256)]
    assert found == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.035, 0.04, 0.05])


def test_a_short_warmup_costs_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the steps with it, or of the given ones where settings are chosen again later; no
    more than the longest measured one gains."""
    monkeypatch.setattr(auto, "WARMUP_LOSS", ((0.025, 0.02), (0.1, 0.0), (0.4, -0.01)))
    shares = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
    found = [auto.warmup_loss(share) for share in shares]
    assert found == pytest.approx([0.02, 0.02, 0.01, 0.0, -0.005, -0.01, -0.01])
    assert chosen(math.inf, 950).loss == pytest.approx(0.01 + 0.01)
    assert chosen(100, 950).loss == pytest.approx(0.021 + 0.01)
    assert chosen(math.inf, 950, warmup_steps=25).loss == pytest.approx(0.01 + 0.02)


# ---- what the engine gets


def test_later_rounds_are_counted_from_their_first_step() -> None:
    """Rounds of 8 steps with two fragments, chosen after step 21 in a training with W 10: fragment
    0 syncs after steps 29, 37, ..., fragment 1 four steps later than each multiple of 8."""
    schedule = LaterSchedule(10, 8, 2, 21)
    synced = {s: list(f) for s in range(22, 46) if (f := schedule.fragments_after(s, 21, 8))}
    assert synced == {25: [1], 29: [0], 33: [1], 37: [0], 41: [1], 45: [0]}
    assert schedule.is_warmup(10) and not schedule.is_warmup(11)


def test_engine_settings_follow_choice() -> None:
    """Chosen wire type, delay, fragments and first step; what is given stays."""
    config = config_from_argv(
        [
            "--use-edit",
            "--edit-num-replicas",
            "2",
            "--edit-auto",
            "--edit-outer-lr",
            "0.5",
            "--edit-warmup-steps",
            "1000",
        ]
    )
    usual = EngineSettings(config, True, 1000, 5000)
    assert usual.used is config and usual.wire == Wire.of(FP32)
    assert config.open_settings == tuple(n for n in auto_settings("edit") if n != "outer_lr")
    chosen_settings = SyncSettings(32, INT8, 4, 2, 0.5, 0.7, 32.0, "none", 1, 0.0)
    choice = AutoChoice(chosen_settings, 0.98, 0.1, 0.02, 1500, measured(100))
    found = dataclasses.replace(usual, choice=choice)
    assert found.schedule == LaterSchedule(1000, 32, 4, 1500)
    assert found.wire == Wire.of(INT8) and found.landing.delay == 2
    assert found.used.outer_lr == 0.5 and found.used.outer_momentum == 0.7
    assert found.num_phases == usual.num_phases


# ---- The tables that `--edit-auto` chooses by: measured losses and outer settings


def test_measured_losses_increase_with_interval_and_delay() -> None:
    """Catches a wrong entry: a longer interval or delay would be chosen without a reason."""
    for wire in auto.WIRE_LOSS:
        by_interval = [auto.expected_loss(tau, wire, 0) for tau in INTERVALS]
        assert by_interval == sorted(set(by_interval)), wire
        by_delay = [auto.expected_loss(64, wire, delay) for delay in range(64)]
        assert by_delay == sorted(set(by_delay)), wire
        assert Wire.of(wire).payload_bytes(1000, 2) > 0


def test_outer_presets_are_valid_at_every_interval() -> None:
    """Below and beyond the measured intervals those of the nearest one."""
    for wire in auto.WIRE_LOSS:
        for tau in range(1, 600):
            lr, momentum = outer_preset(tau, wire).values()
            assert lr > 0 and 0 <= momentum < 1
        assert outer_preset(1, wire) == outer_preset(INTERVALS[0], wire)
        assert outer_preset(10**6, wire) == outer_preset(INTERVALS[-1], wire)
    assert outer_preset(None, "fp32") == outer_preset(128, "fp32")  # A-EDiT


# ---- choices from the records of a run with a hub

NAN = math.nan


def tuner_of(members: int, **given: Any) -> AutoTuner:
    """The tuner of a rank while `members` replicas take part, of nominally two; 400 blocks."""
    config = EditConfig(
        auto=True, hub="host:1", replica_name="a", nominal_replicas=2, warmup_steps=20, **given
    )
    groups: Any = SimpleNamespace(sync=SimpleNamespace(size=members), control=SimpleNamespace())
    return AutoTuner.of(EngineSettings(config, False, 400, 200), groups, torch.tensor([[70, 30]]))


def row_of(rate: float, latency: float, step: float, *steps: float) -> list[float]:
    """What a replica without local work has measured; the last steps are `step` if not given."""
    num_wires = tuner_of(1).num_measured - 4 - MEASURED_STEPS
    each = steps or (step,) * MEASURED_STEPS
    return [rate, latency, step, step / 4, *[step / 1e6] * num_wires, *each]


def choice_from(
    rows: list[list[float]], consumed: int = 60, **given: Any
) -> tuple[AutoChoice | None, AutoTuner]:
    """The choice from records with these rows, and the tuner that made it."""
    tuner = tuner_of(len(rows), **given)
    records = [ControlRecord(0, 30, 1, 0, 0, (), (), measured=row) for row in rows]
    return tuner.choose_from(records, consumed), tuner


def test_row_has_the_slowest_rank_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least rate and the longest times; of forward passes, which hide exchanges, and of each
    step the shortest. Catches a replica whose ranks write different rows."""
    monkeypatch.setattr(tuning, "_work_per_element", lambda wire, numel, groups: 1e-9)
    ranks, seen = [tuner_of(2), tuner_of(2)], list[torch.Tensor]()

    def note(mine: torch.Tensor) -> torch.Tensor:
        seen.append(mine)
        return mine[None]

    for factor, rank in zip((1, 2), ranks, strict=True):
        rank.links = (1e6 / factor, 0.01 * factor)
        rank.meter.steps += [9.0, *(factor * 0.1 + 0.01 * n for n in range(MEASURED_STEPS))]
        rank.meter.forwards += [0.03 * factor] * 4
        control: Any = rank.groups.control
        control.all_gather = note
        rank.row()
        control.all_gather = lambda mine: torch.stack(seen)
    found = [rank.row() for rank in ranks]
    assert found[0] == found[1] and len(found[0]) == ranks[0].num_measured
    rate, latency, step, forward, *work = found[0][:-MEASURED_STEPS]
    assert (rate, latency, forward) == (5e5, 0.02, 0.03) and set(work) == {1e-9}
    assert step == pytest.approx(0.245)
    steps = found[0][-MEASURED_STEPS:]
    assert steps == pytest.approx([0.1 + 0.01 * n for n in range(MEASURED_STEPS)])


def test_row_of_too_few_steps_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is measured once the settings are chosen, nor without `--edit-auto`."""
    monkeypatch.setattr(tuning, "_work_per_element", lambda wire, numel, groups: 1e-9)
    tuner = tuner_of(2)
    control: Any = tuner.groups.control
    control.all_gather = lambda mine: mine[None]
    tuner.meter.steps += [0.1] * (MEASURED_STEPS - 1)
    assert all(map(math.isnan, tuner.row()[-MEASURED_STEPS:]))
    assert math.isnan(tuner.row()[0]) and not math.isnan(tuner.row()[4])  # a joiner knows no links
    tuner.meter.last_step = None
    assert tuner.row() == [] and tuner.num_measured == 0
    plain = EngineSettings(EditConfig(), False, 400, 200)
    assert AutoTuner.of(plain, tuner.groups, tuner.unit_numels).num_measured == 0


@pytest.mark.parametrize("strategy", ["edit", "a-edit"])
def test_choice_is_from_the_values_of_all_records(strategy: str) -> None:
    """The slowest link; steps of the slowest replica, or of the median one where the clock ends
    rounds. Its step is that of the nominal replicas, as in the schedule."""
    uneven = [0.1, 0.3] * (MEASURED_STEPS // 2)
    rows = [row_of(4e5, 0.03, 0.2, *uneven), row_of(2e5, 0.01, 0.3), row_of(8e5, 0.02, 0.1)]
    found, tuner = choice_from(rows, strategy=strategy)
    work = {wire: 0.3 / 1e6 for wire in tuner._worked}
    wait = mean_wait([row[-MEASURED_STEPS:] for row in rows])
    step = 0.2 if strategy == "a-edit" else 0.3
    expected = Measurement(
        step, 0.025, 2e5, 0.03, work, wait, 0.3, evenness=harmonic_mean([0.2, 0.3, 0.1]) / 0.3
    )
    assert found == choose(tuner._setting(), expected, 30, (400 - 60) // 3)
    assert found is not None and found.since == 30 and wait > 0
    assert choice_from([*rows, row_of(NAN, NAN, 0.1)], strategy=strategy)[0] is not None


@pytest.mark.parametrize("joined", [(0,), (1,), (0, 1)], ids=str)
def test_links_of_joiners_are_not_known(joined: tuple[int, ...]) -> None:
    """Those of the others count; where none is known, the choice waits for an exchange."""
    rows = [row_of(2e5, 0.01, 0.2), row_of(4e5, 0.03, 0.2)]
    for number in joined:
        rows[number][:2] = [NAN, NAN]
    found, _ = choice_from(rows)
    if len(joined) == 2:
        assert found is None
        return
    assert found is not None
    rate, latency = (4e5, 0.03) if joined == (0,) else (2e5, 0.01)
    assert (found.measured.rate, found.measured.latency) == (rate, latency)
    assert AutoChoice.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_choice_is_that_of_those_that_have_measured_steps() -> None:
    """Would catch a choice that replicas which join again and again put off without end."""
    complete, short = row_of(2e5, 0.01, 0.2), row_of(NAN, NAN, 0.2, *[NAN] * MEASURED_STEPS)
    found, _ = choice_from([complete, short])
    assert found is not None and found.measured.rate == 2e5
    assert choice_from([short, short])[0] is None
    assert choice_from([[], []])[0] is None  # settings are chosen already


def test_replica_alone_chooses_as_without_links() -> None:
    """Would catch: no choice, or a division by the replicas that it waits for."""
    found, _ = choice_from([row_of(math.inf, 0.0, 0.2)])
    assert found is not None and found.measured.wait == 0.0
    assert found.settings.sync_dtype == FP32 and found.settings.delay_steps == 0
    assert found.share == pytest.approx(1.0, abs=1e-2)
