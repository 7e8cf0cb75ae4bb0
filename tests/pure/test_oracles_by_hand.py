"""Hand-computed values of the NumPy oracles, so that oracles and engine do not share an error."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.reference.oracle import (
    DetectorOracle,
    OracleSettings,
    clip_factor,
    median_of,
    unit_weights,
    weighted_average,
)
from tests.reference.outer_rules import NO_PENALTY, StrategySettings, settings_for
from tests.reference.schedules import QsrSchedule, StaggeredSchedule
from tests.reference.strategies import Simulation

# alpha 1/2 keeps every number below exact in binary.
QUICK = OracleSettings(threshold=3.0, alpha=0.5, warmup_syncs=1, patience=2)


def detector_after(*norms: float, settings: OracleSettings = QUICK) -> DetectorOracle:
    """A detector that has observed `norms`."""
    detector = DetectorOracle(settings)
    for norm in norms:
        detector.observe(norm)
    return detector


def test_detector_statistics_of_two_values() -> None:
    """Catches: a first value averaged with zero, a variance around the old mean."""
    # 4 starts: mean 4, var 0. 8: mean 4/2 + 8/2 = 6, var 0/2 + (8 - 6)^2/2 = 2, one update.
    detector = detector_after(4.0, 8.0)
    assert (detector.mean, detector.var) == (6.0, 2.0)
    assert (detector.updates, detector.accepted, detector.rejected) == (1, 2, 0)
    # sigma^2 = 2 / (1 - 1/2) = 4.
    assert detector.corrected_sigma() == 2.0


def test_detector_bound_is_strict_and_bias_corrected() -> None:
    """Catches: >= in place of >, and a missing bias correction (12 would have z = 4.2)."""
    # bound 3 * max(2, 0.06) = 6; 12 - 6 = 6 is not more, 12.5 - 6 = 6.5 is.
    at_bound = detector_after(4.0, 8.0).observe(12.0)
    above = detector_after(4.0, 8.0).observe(12.5)
    assert (at_bound.anomalous, at_bound.score) == (False, 3.0)
    assert (above.anomalous, above.score) == (True, 3.25)


def test_detector_tolerates_three_percent_after_constant_norms() -> None:
    """Catches: the floor of sigma lost, so that the first rounding difference is an anomaly."""
    # mean 100, var 0: bound 3 * max(0, 1) = 3.
    assert not detector_after(100.0, 100.0).observe(103.0).anomalous
    judgement = detector_after(100.0, 100.0).observe(103.5)
    assert (judgement.anomalous, judgement.score) == (True, 3.5)


def test_detector_is_armed_after_warmup_with_positive_mean() -> None:
    """Catches: arming on the first value, on a zero mean, or one sync early or late."""
    assert not detector_after(4.0).armed  # no update yet, although warmup_syncs is 1
    assert detector_after(4.0, 4.0).armed
    assert not detector_after(0.0, 0.0, 0.0).armed
    patient = OracleSettings(alpha=0.5, warmup_syncs=4)
    assert not detector_after(4.0, 4.0, 4.0, settings=patient).armed
    assert detector_after(4.0, 4.0, 4.0, 4.0, settings=patient).armed
    unarmed = detector_after(4.0, 4.0, 4.0, settings=patient).observe(1e9)
    assert not unarmed.anomalous
    assert math.isnan(unarmed.score)


def test_rejected_norm_does_not_change_statistics() -> None:
    """Catches: a detector poisoned by the value it has just rejected."""
    detector = detector_after(4.0, 8.0, 1e6)
    assert (detector.mean, detector.var, detector.updates) == (6.0, 2.0, 1)
    assert detector.rejected == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_norm_neither_counts_nor_resets_rejections(bad: float) -> None:
    """Catches: a NaN that counts as a rejection, or resets the count of rejections."""
    detector = detector_after(4.0, 8.0, 20.0, bad)
    assert (detector.accepted, detector.rejected) == (2, 1)
    assert DetectorOracle(QUICK).observe(bad).anomalous  # armed or not


def test_detector_restarts_after_change_of_regime() -> None:
    """Catches: a lock-out after a level shift, and statistics of before it that are kept."""
    # Patience 2: two rejections, then 20 is accepted although 20 - 6 > 6.
    detector = detector_after(4.0, 8.0, 20.0, math.nan, 20.0)
    assert not detector.observe(20.0).anomalous
    assert (detector.mean, detector.var) == (20.0, 0.0)
    assert (detector.updates, detector.accepted, detector.rejected) == (0, 1, 0)
    # Unarmed again: 1000 is accepted, mean 20/2 + 1000/2 = 510.
    assert not detector.observe(1000.0).anomalous
    assert detector.mean == 510.0


def test_normal_norm_after_patience_continues_history() -> None:
    """Catches: a restart although the value fits the old statistics."""
    # 6 is the mean: mean stays 6, var 2/2 + 0 = 1, second update, count of rejections reset.
    detector = detector_after(4.0, 8.0, 20.0, 20.0, 6.0)
    assert (detector.mean, detector.var) == (6.0, 1.0)
    assert (detector.updates, detector.accepted, detector.rejected) == (2, 3, 0)


def test_weights_equal_hand_computed_values() -> None:
    """Catches: a wrong sign in the exponent, a wrong median, an anomalous norm in the median."""
    # T = 1: exp(0) : exp(-ln 2) = 2 : 1.
    assert unit_weights([0.0, math.log(2.0)], [False, False], temperature=1.0) == pytest.approx(
        [2 / 3, 1 / 3], rel=1e-15
    )
    # auto: the median of 1 and 3 is 2, so the ratio is exp((3 - 1) / 2) = e.
    weights = unit_weights([1.0, 1e9, 3.0], [False, True, False], temperature=None)
    assert weights[1] == 0.0
    assert weights[0] / weights[2] == pytest.approx(math.e, rel=1e-15)
    assert sum(weights) == pytest.approx(1.0, rel=1e-15)
    assert median_of([4.0, 1.0, 2.0]) == 2.0
    assert median_of([8.0, 1.0, 2.0, 4.0]) == 3.0


def test_weights_of_degenerate_norms() -> None:
    """Catches: 0/0 at large norms, at a zero median, and where no replica is accepted."""
    none_rejected = [False, False, False]
    assert unit_weights([1e300] * 3, none_rejected, temperature=1.0) == [1 / 3] * 3
    assert unit_weights([0.0, 5.0, 0.0], none_rejected, temperature=None) == [1 / 3] * 3
    assert unit_weights([1.0, 9.0, math.nan], [False, False, True], temperature=1.0, uniform=True)[
        :2
    ] == [0.5, 0.5]
    assert unit_weights([math.nan, math.inf], [True, True], temperature=None) == [0.0, 0.0]


def test_average_ignores_nonfinite_excluded_replica() -> None:
    """Catches: 0 * inf in the sum."""
    deltas = [np.array([1.0, 2.0]), np.array([np.inf, np.nan])]
    assert weighted_average(deltas, [1.0, 0.0], [False, True]).tolist() == [1.0, 2.0]


def test_clip_factor_equals_hand_computed_values() -> None:
    """Catches: a factor above 1, a missing epsilon, a disabled clip taken for a clip of zero."""
    assert clip_factor(9.999999, 5.0) == pytest.approx(0.5, rel=1e-15)
    assert clip_factor(5.0, 5.0) < 1.0
    assert clip_factor(1.0, 5.0) == 1.0
    assert clip_factor(1e30, None) == 1.0


# ---- Hand-computed values of the strategy oracle: schedules, CO2, SlowMo, landings, ends


NAN, INF = math.nan, math.inf


def scalar_run(
    settings: StrategySettings, rows: Sequence[Sequence[float]], **more: Any
) -> Simulation:
    """Run one unit of one element, from 0; rows[step][replica] are the displacements."""
    simulation = Simulation.start(len(rows[0]), {"u": np.zeros(1)}, settings)
    for row in rows:
        simulation.step([{"u": np.array([x])} for x in row], **more)
    return simulation


def state(simulation: Simulation) -> tuple[list[float], float, float]:
    """Parameters of all replicas, anchor and momentum of the unit."""
    thetas = [float(theta["u"][0]) for theta in simulation.theta]
    return thetas, float(simulation.anchor["u"][0]), float(simulation.momentum["u"][0])


# ---- the outer step of a sync


def plain(**more: Any) -> StrategySettings:
    """EDiT that syncs at every step, with mu_o = 1/2."""
    return settings_for("edit", **{"tau": 1, "outer_lr": 1.0, "outer_momentum": 0.5, **more})


def test_two_rounds_equal_hand_computed_values() -> None:
    """Catches: heavy-ball in place of Nesterov, the old momentum in the step, a wrong sign."""
    settings = plain(outer_lr=0.5, penalty=NO_PENALTY)
    # D = 1 and 3, average 2; b = 2; A = -(2 + 2/2)/2.
    run = scalar_run(settings, [[-1.0, -3.0]])
    assert state(run) == ([-1.5, -1.5], -1.5, 2.0)
    assert run.records[-1].norms == (1.0, 3.0) and run.records[-1].update_norm == 2.0
    # Average 1; b = 2/2 + 1; A = -1.5 - (1 + 2/2)/2.
    run.step([{"u": np.array([-1.0])}] * 2)
    assert state(run) == ([-2.5, -2.5], -2.5, 2.0)


def test_momentum_uses_clipped_average() -> None:
    """Catches: a momentum that takes the average before it is clipped."""
    run = scalar_run(plain(penalty=OracleSettings(max_norm=2.5)), [[-5.0]])
    # norm 5, c = 2.5 / 5.000001; b = c D; A = -(1 + 1/2) c D.
    factor = 2.5 / 5.000001
    assert run.records[-1].clip == pytest.approx(factor, rel=1e-15)
    assert state(run)[1:] == pytest.approx((-7.5 * factor, 5 * factor), rel=1e-15)


def test_unit_without_accepted_replica_is_rolled_back() -> None:
    """Catches: momentum applied or decayed in a roll-back."""
    before = state(scalar_run(plain(), [[-1.0, -1.0]]))
    lost = scalar_run(plain(), [[-1.0, -1.0], [NAN, INF]])
    assert state(lost) == before
    assert lost.records[-1].rolled_back and lost.records[-1].weights == (0.0, 0.0)


def test_sync_of_one_replica_without_momentum_changes_nothing() -> None:
    """Catches: an outer step that is not the identity at N = 1, nu = 1, mu_o = 0."""
    assert state(scalar_run(plain(outer_momentum=0.0), [[0.25], [-0.5]]))[:2] == ([-0.25], -0.25)


# ---- schedules


def starts(schedule: Any, last: int) -> dict[int, list[int]]:
    """Groups that start after each step up to `last`; steps without any are left out."""
    rows = {s: list(schedule.groups_starting(s)) for s in range(1, last + 1)}
    return {s: groups for s, groups in rows.items() if groups}


def test_staggered_schedule_starts() -> None:
    """Catches: a first round of full length, offsets rounded up, groups that start in warm-up."""
    # W = 5, tau = 7, F = 3: offsets 0, floor(7/3) = 2, floor(14/3) = 4.
    assert starts(StaggeredSchedule(7, warmup_steps=5, fragments=3), 20) == {
        7: [1], 9: [2], 12: [0], 14: [1], 16: [2], 19: [0],
    }  # fmt: skip
    assert starts(StaggeredSchedule(2), 5) == {2: [0], 4: [0]}
    # As many groups as steps: one after every step.
    assert starts(StaggeredSchedule(3, fragments=3), 4) == {1: [1], 2: [2], 3: [0], 4: [1]}
    with pytest.raises(ValueError, match="fragments 4"):
        StaggeredSchedule(3, fragments=4)
    with pytest.raises(ValueError, match="delay 3"):
        StaggeredSchedule(3, delay=3)


def test_qsr_schedule_starts() -> None:
    """Catches: the rate at the end of a round, not its start; rounding up; no lower bound."""
    rates = [0.2, 1.0, 0.9, 0.5, 0.25, 0.3, 0.7, 0.1, 0.1, 0.1, 0.1, 0.1, 0.0]
    # W = 1: the first round starts with step 2. (1/1)^2 is less than tau = 2; (1/0.5)^2 = 4.
    schedule = QsrSchedule(2, 1.0, lambda s: rates[s - 1], warmup_steps=1)
    assert [schedule.interval(s) for s in (2, 4, 6)] == [2, 4, 11]
    assert starts(schedule, 13) == {3: [0], 7: [0]}  # the third comes after 7 + (1/0.1)^2 steps
    shorter = QsrSchedule(2, 0.23, lambda s: rates[s - 1], warmup_steps=1)
    # Rounds start with 2, 4, 6 (0.23/0.3 < 1) and 8: 2.3 squared is 5.29, so 7 + 5 = 12; then the
    # rate is 0.
    assert starts(shorter, 13) == {3: [0], 5: [0], 7: [0], 12: [0]}
    assert shorter.interval(13) is None


# ---- CO2


CO2 = settings_for("co2", tau=1, outer_momentum=0.5)
THREE_ROUNDS = [[-4.0, -8.0], [-2.0, -6.0], [-1.0, -1.0]]


def test_co2_averages_land_one_round_later() -> None:
    """Catches: an average used in its own round, a wrong anchor, theta not reset."""
    run = Simulation.start(2, {"u": np.zeros(1)}, CO2)
    expected = [
        # Round 1 sends D = 6; nothing has arrived: back to 0.
        ([0.0, 0.0], 0.0, 0.0),
        # Round 2 sends D = 0 - (-4) = 4; 6 arrives: m = 6, A = -6.
        ([-6.0, -6.0], -6.0, 6.0),
        # Round 3 sends D = -6 - (-7) = 1; 4 arrives: m = 3 + 4 = 7, A = -13.
        ([-13.0, -13.0], -13.0, 7.0),
    ]
    for row, values in zip(THREE_ROUNDS, expected, strict=True):
        run.step([{"u": np.array([x])} for x in row])
        assert state(run) == values


def test_co2_ends_with_everything_landed() -> None:
    """Catches: a last round that is lost at the end of training, or lands on the wrong anchor."""
    run = scalar_run(CO2, THREE_ROUNDS[:2])
    run.step([{"u": np.array([-1.0])}] * 2, last=True)
    # As above, then D = 1 lands, too: m = 3.5 + 1 = 4.5, A = -13 - 4.5.
    assert state(run) == ([-17.5, -17.5], -17.5, 4.5)
    assert not run.pending


def test_co2_gap_and_clip_act_on_the_momentum() -> None:
    """Catches: Lambda on the momentum, a clamp of the step in place of m, a clamped m not kept."""
    settings = settings_for("co2", tau=1, outer_momentum=0.5, co2_gap=2.0, outer_lr=3.0)
    # m = 6/2 = 3, A = -9; then m = 1.5 + 4/2 = 3.5, A = -9 - 10.5.
    assert state(scalar_run(settings, THREE_ROUNDS))[1:] == (-19.5, 3.5)
    clipped = settings_for("co2", tau=1, outer_momentum=0.5, co2_clip=3.25)
    # m = clamp(6) = 3.25, A = -3.25; then m = 1.625 + 4 = 5.625 -> 3.25, A = -6.5.
    assert state(scalar_run(clipped, THREE_ROUNDS))[1:] == (-6.5, 3.25)
    below = settings_for("co2", tau=1, outer_momentum=0.5, co2_clip=3.25)
    assert state(scalar_run(below, [[6.0], [0.0]]))[1:] == (3.25, -3.25)


def test_co2_leaves_out_nonfinite_replicas() -> None:
    """Catches: a NaN in the average, a momentum that decays when no replica is finite."""
    assert state(scalar_run(CO2, [[-4.0, NAN], [0.0, 0.0]])) == ([-4.0, -4.0], -4.0, 4.0)
    lost = scalar_run(CO2, [[-4.0, -4.0], [NAN, INF], [0.0, 0.0]])
    assert state(lost) == ([-4.0, -4.0], -4.0, 4.0)
    with pytest.raises(ValueError, match="no delay"):
        settings_for("co2", tau=4, delay=1)


# ---- SlowMo


def test_slowmo_equals_hand_computed_values() -> None:
    """Catches: u in units of parameters, alpha or the learning rate missing from the step."""
    settings = settings_for("slowmo", tau=1, outer_lr=2.0, outer_momentum=0.5)
    run = scalar_run(settings, [[-1.0, -3.0]], lr=0.5)
    # D = 2, u = 2/0.5 = 4, A = -2 * 0.5 * 4 = -4.
    assert state(run) == ([-4.0, -4.0], -4.0, 4.0)
    run.step([{"u": np.array([-1.0])}] * 2, lr=0.25)
    # u = 2 + 1/0.25 = 6, A = -4 - 2 * 0.25 * 6 = -7: a smaller rate scales the old u, too.
    assert state(run) == ([-7.0, -7.0], -7.0, 6.0)


def test_slowmo_at_rate_zero_averages() -> None:
    """Catches: a division by zero, a momentum that decays or acts without a step."""
    run = scalar_run(settings_for("slowmo", tau=1), [[-1.0, -3.0]], lr=0.5)
    run.step([{"u": np.array([x])} for x in (-1.0, -3.0)], lr=0.0)
    assert state(run) == ([-4.0, -4.0], -4.0, 4.0)


# ---- delay and mix


def nesterov(strategy: str, **more: Any) -> StrategySettings:
    """Settings with nu = 1, mu_o = 1/2, and no penalty; every number below is exact."""
    return settings_for(
        strategy, tau=4, outer_lr=1.0, outer_momentum=0.5, penalty=NO_PENALTY, **more
    )


# After step 4: -4 and -12; D = 8, A' = -(8 + 4) = -12, b = 8. Two steps more: -5 and -16.
DELAYED = [[-1.0, -3.0]] * 4 + [[-0.5, -2.0]] * 2


def test_delayed_landing_keeps_progress() -> None:
    """Catches: progress lost or counted twice, mix on the wrong side, a landing a step off."""
    early = scalar_run(nesterov("edit", fragments=1, delay=2, mix=0.0), DELAYED[:5])
    assert state(early) == ([-4.5, -14.0], 0.0, 0.0)
    plain = scalar_run(nesterov("edit", fragments=1, delay=2, mix=0.0), DELAYED)
    assert state(plain) == ([-12.0 - 1.0, -12.0 - 4.0], -12.0, 8.0)
    mixed = scalar_run(nesterov("edit", fragments=1, delay=2, mix=0.25), DELAYED)
    assert state(mixed) == ([-5 / 4 - 39 / 4, -16 / 4 - 48 / 4], -12.0, 8.0)


def test_streaming_diloco_landing_drops_progress() -> None:
    """Catches: progress that is kept although the publication drops it."""
    run = scalar_run(nesterov("streaming-diloco", fragments=1, delay=2, mix=0.25), DELAYED)
    assert state(run) == ([-5 / 4 - 9.0, -16 / 4 - 9.0], -12.0, 8.0)


@pytest.mark.parametrize("strategy", ["edit", "streaming-diloco", "diloco"])
def test_nonfinite_replica_takes_the_anchor(strategy: str) -> None:
    """Catches: non-finite values kept through mix or progress, NaN from 0 * inf."""
    settings = nesterov(strategy, fragments=1, delay=2, mix=0.25)
    left_out = scalar_run(settings, [[-1.0, NAN], *DELAYED[1:]])
    # Only replica 0 is averaged: D = 4, A' = -6. Replica 1 is NaN until the landing.
    assert state(left_out)[0][1] == left_out.anchor["u"] == -6.0
    during = scalar_run(settings, [*DELAYED[:5], [-0.5, INF]])
    # Its snapshot was finite, so it is averaged; its parameters at the landing are not.
    assert state(during)[0][1] == during.anchor["u"] == -12.0
    none_finite = scalar_run(settings, [[NAN, INF], *DELAYED[1:]])
    assert state(none_finite) == ([0.0, 0.0], 0.0, 0.0)


def test_anomalous_replica_takes_the_anchor() -> None:
    """Catches: an anomalous replica that is left out of the average but keeps its progress."""
    penalty = OracleSettings(warmup_syncs=2, weighting=False, max_norm=None)
    settings = settings_for(
        "edit", tau=2, delay=1, mix=0.5, outer_lr=1.0, outer_momentum=0.0, penalty=penalty
    )
    # The norm of replica 1 at its third sync is x100 of those before.
    run = scalar_run(settings, [[-1.0, -1.0]] * 5 + [[-1.0, -400.0], [-1.0, -1.0]])
    assert run.records[-1].left_out == (False, True)
    assert run.theta[1]["u"] == run.anchor["u"]
    assert run.theta[0]["u"] == run.anchor["u"] - 1.0  # its progress, whatever the mix


# ---- the end of training


def test_end_lands_early_and_syncs_the_rest() -> None:
    """Catches: a partial round lost, a result landed after the next one, mix at the end."""
    settings = nesterov("edit", fragments=1, delay=3, mix=0.5)
    run = scalar_run(settings, DELAYED[:5])
    run.step([{"u": np.array([x])} for x in DELAYED[5]], last=True)
    # Landed early: A = -12, b = 8, theta = (-5 - 13)/2 = -9 and (-16 - 16)/2 = -16.
    # The rest: D = -3 and 4, average 1/2; b = 4 + 1/2; A = -12 - (1/2 + 9/4).
    assert state(run) == ([-14.75, -14.75], -14.75, 4.5)
    assert not run.pending


def test_end_at_a_sync_syncs_once() -> None:
    """Catches: a second sync with zero pseudo-gradients, which momentum would turn into a step."""
    settings = nesterov("edit", fragments=1)
    run = scalar_run(settings, DELAYED[:3])
    run.step([{"u": np.array([x])} for x in DELAYED[3]], last=True)
    assert state(run) == ([-12.0, -12.0], -12.0, 8.0)
    assert len(run.records) == 1
    # With mix, the regular sync of that step would leave the replicas different.
    mixed = scalar_run(nesterov("edit", fragments=1, mix=0.5), DELAYED[:3])
    mixed.step([{"u": np.array([x])} for x in DELAYED[3]], last=True)
    assert state(mixed) == state(run)


def test_end_with_fragments_syncs_every_group_once() -> None:
    """Catches: groups not synced at the end, or synced at their step and again at the end."""
    settings = settings_for("local-sgd", tau=4, fragments=2)
    run = Simulation.start(2, {"a": np.zeros(1), "b": np.zeros(1)}, settings)
    for step in range(1, 5):
        run.step([{"a": np.array([x]), "b": np.array([x])} for x in (-1.0, -3.0)], last=step == 4)
    assert [(r.unit, r.step) for r in run.records] == [("b", 2), ("a", 4), ("b", 4)]
    for theta in run.theta:
        assert (float(theta["a"][0]), float(theta["b"][0])) == (-8.0, -8.0)


# ---- replicas at their own speeds


def test_aedit_weights_by_steps_of_the_round() -> None:
    """Catches: steps counted since the start, a weight or verdict for a replica without steps."""
    penalty = OracleSettings(weighting=False, max_norm=None)
    settings = settings_for(
        "a-edit", tau=1, rho=1.0, outer_lr=1.0, outer_momentum=0.0, penalty=penalty
    )
    run = Simulation.start(3, {"u": np.zeros(1)}, settings)
    for replica in (0, 0, 0, 1):
        run.advance(replica, {"u": np.array([-4.0])})
    run.meet([0])
    # 3 steps of 4 to -12, 1 of 4 to -4: -10. Replica 2 has none.
    assert run.records[-1].weights == (0.75, 0.25, 0.0)
    assert state(run)[0] == [-10.0] * 3
    assert [row["u"].accepted for row in run.detectors] == [1, 1, 0]
    run.advance(2, {"u": np.array([-1.0])})
    run.meet([0])
    assert run.records[-1].weights == (0.0, 0.0, 1.0)
    # rho 1/2: half uniform, half by steps.
    half = Simulation.start(2, {"u": np.zeros(1)}, settings_for(
        "a-edit", tau=1, rho=0.5, penalty=penalty))  # fmt: skip
    for replica in (0, 0, 0, 1):
        half.advance(replica, {"u": np.array([-4.0])})
    half.meet([0])
    assert half.records[-1].weights == (0.625, 0.375)


def test_aedit_delay_counts_steps_of_each_replica() -> None:
    """Catches: a landing that waits for the slowest replica, or is pending when its group meets."""
    settings = settings_for(
        "a-edit", tau=9, delay=2, outer_lr=1.0, outer_momentum=0.0, penalty=NO_PENALTY
    )
    run = Simulation.start(2, {"u": np.zeros(1)}, settings)
    run.advance(0, {"u": np.array([-2.0])})
    run.advance(1, {"u": np.array([-4.0])})
    run.meet([0])  # A' = -3, in flight
    for _ in range(2):
        run.advance(0, {"u": np.array([-1.0])})
    assert state(run)[0] == [-5.0, -4.0]  # -3 - 2; replica 1 has not moved
    run.advance(1, {"u": np.array([-1.0])})
    run.meet([0])  # lands on replica 1 first: -3 - 1
    assert run.records[-1].norms == (2.0, 1.0)


def test_default_penalty_of_each_strategy() -> None:
    """Catches: the strategy `edit` without its penalty."""
    assert settings_for("edit", tau=4).penalty == OracleSettings()
    assert settings_for("diloco", tau=4).penalty == NO_PENALTY
