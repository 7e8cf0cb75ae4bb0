"""Parts of the method: outer rules, norms, weights by steps, schedules, projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_edit.config import EditConfig, phase_warning
from megatron_edit.constants import BF16, FP32
from megatron_edit.engine.plan import decide, mean_round_loss
from megatron_edit.engine.state import MeanLoss, StepLosses
from megatron_edit.errors import UsageError
from megatron_edit.method import norms as tested
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.norms import (
    fused_sum_of_squares,
    num_parts,
    projection,
    sum_differs,
    sum_of_squares,
)
from megatron_edit.method.outer import Averaging, outer_rule
from megatron_edit.method.schedule import (
    LossSchedule,
    RoundStart,
    StagewiseSchedule,
    last_local,
)
from megatron_edit.method.settings import Settings
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.method.weights import blend_step_weights
from tests.reference.outer_rules import PRESETS, landed, outer_step, settings_for
from tests.reference.wire import AllReduce, Residuals

SIZE = 50
STRATEGIES_WITH_STEPS = sorted(PRESETS)


def arrays(count: int, seed: int = 0) -> list[np.ndarray]:
    """Standard normal numbers, float64 [SIZE] each, exact in fp32."""
    numbers = np.random.default_rng(seed).normal(size=(count, SIZE)).astype(np.float32)
    return list(numbers.astype(np.float64))


def fp32(array: np.ndarray) -> torch.Tensor:
    """Copy to a tensor in fp32."""
    return torch.tensor(array, dtype=torch.float32)


@pytest.mark.parametrize("lr", [0.1, 0.0])
@pytest.mark.parametrize("strategy", STRATEGIES_WITH_STEPS)
def test_outer_steps_equal_the_reference(strategy: str, lr: float) -> None:
    """Three steps in a row; CO2 with a gap and a bound that both bind."""
    more: dict[str, Any] = {"co2_gap": 2.0, "co2_clip": 0.5} if strategy == "co2" else {}
    settings = settings_for(strategy, tau=8, **more)
    rule = outer_rule(EditConfig(strategy=strategy, **more))
    anchor, momentum = arrays(1)[0], np.zeros(SIZE)
    ours, ours_momentum = fp32(anchor), fp32(momentum)
    for average in arrays(3, seed=1):
        anchor, momentum = outer_step(settings, anchor, momentum, average, lr=lr)
        rule.step_(ours, ours_momentum, fp32(average), clip=1.0, inner_lr=lr)
    np.testing.assert_allclose(ours.numpy(), anchor, rtol=1e-5, atol=1e-5)
    if strategy not in ("local-sgd", "post-local-sgd"):  # they have no momentum
        np.testing.assert_allclose(ours_momentum.numpy(), momentum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_averaging_has_the_bits_of_fp32(clip: float) -> None:
    """The anchor minus the average, each product and difference rounded to fp32; the momentum
    becomes zero. Catches a fused multiply-add, and a step that the momentum enters."""
    anchor, momentum, average = (each.astype(np.float32) for each in arrays(3))
    ours, kept = fp32(anchor), fp32(momentum)
    Averaging().step_(ours, kept, fp32(average), clip=clip, inner_lr=0.1)
    assert ours.numpy().tobytes() == (anchor - np.float32(clip) * average).tobytes()
    assert kept.numpy().tobytes() == np.zeros_like(momentum).tobytes()


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("mix", [0.0, 0.3])
@pytest.mark.parametrize("strategy", ["edit", "streaming-diloco", "co2"])
def test_landings_equal_the_reference(strategy: str, mix: float, delay: int) -> None:
    """With and without progress to keep. Catches progress that is lost, counted twice, or kept
    where the publication drops it; and a landing that wrongly claims equal replicas."""
    its = STRATEGIES[strategy]
    if its.lands_at_next_meeting and (mix or delay):
        return
    rule = LandingRule(delay, mix, its.keeps_progress, its.lands_at_next_meeting)
    theta, snapshot, anchor = arrays(3)
    if rule.is_immediate:
        snapshot = theta
    wanted = landed(settings_for(strategy, tau=8), theta, snapshot, anchor, mix=mix)
    kept = fp32(snapshot) if rule.needs_snapshot else None
    ours = rule.merge_(fp32(theta), fp32(anchor), kept)
    np.testing.assert_allclose(ours.numpy(), wanted, rtol=1e-5, atol=1e-5)
    assert rule.is_direct_copy == (delay == 0 and mix == 0.0 and strategy != "co2")
    assert rule.is_direct_copy or rule.merges or not its.keeps_progress


# ---- Sums of squares: precision, range and memory


MEBIBYTE = 1 << 20


@pytest.mark.parametrize("numel", [0, 1, 1000, MEBIBYTE, 3 * MEBIBYTE + 17])
def test_sum_of_squares_equals_float64(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    expected = np.square(values.numpy().astype(np.float64)).sum()
    assert sum_of_squares(values).item() == pytest.approx(expected, rel=1e-12)


def test_sum_of_squares_is_finite_where_fp32_values_are() -> None:
    """Squares of large fp32 values overflow fp32."""
    assert torch.isfinite(sum_of_squares(torch.full((10,), 3e38)))
    for bad in (torch.inf, torch.nan):
        assert not torch.isfinite(sum_of_squares(torch.tensor([1.0, bad])))


def test_sum_of_squares_makes_no_full_float64_copy() -> None:
    """torch converts before it reduces, which would take twice the memory of the tensor."""
    values = torch.ones(8 * MEBIBYTE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        sum_of_squares(values)
    largest = max(event.cpu_memory_usage for event in recorded.events())
    assert 0 < largest <= 8 * MEBIBYTE


def test_gpu_takes_one_norm_kernel_for_all_parts() -> None:
    """On a GPU, here `meta`. Catches thousands of launches for the norms of a large model."""
    found = NormCounter()
    with found:
        sum_of_squares(*torch.empty(40, MEBIBYTE, device="meta"))
    assert found.num_norms == 1


def test_fused_sum_equals_float64() -> None:
    """Over parts of different sizes, also empty ones; large values do not overflow fp32."""
    parts = [torch.randn(numel) for numel in (0, 1, 1000, 70_001)] + [torch.full((3,), 3e38)]
    expected = sum(np.square(part.numpy().astype(np.float64)).sum() for part in parts)
    for total in (fused_sum_of_squares(parts), sum_of_squares(*parts)):
        assert total.dtype == torch.float64
        assert total.item() == pytest.approx(expected, rel=1e-12)
    assert fused_sum_of_squares(parts[:1]).item() == 0.0


class NormCounter(TorchDispatchMode):  # type: ignore[misc]
    """Counts calls of norms."""

    num_norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it if it is a norm."""
        self.num_norms += "norm" in str(func)
        return func(*args, **(kwargs or {}))


# ---- Decisions of a sync about replicas that made fewer steps, or none


STEPS = torch.tensor([[5, 5], [0, 0], [7, 7]])
PENALTY = Settings()


def test_replica_without_steps_has_no_weight_or_verdict() -> None:
    """Its pseudo-gradient is zero: softmax(-norm) would give it the most."""
    norms = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    decision, learned = decide(norms, DetectorState.fresh(3, 2), PENALTY, STEPS, range(2))
    assert decision.weights.tolist() == [[0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]
    assert learned.accepted.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert not bool(decision.rollback.any())
    assert decision.norms.equal(norms)  # reported unchanged


def test_synchronous_decision_has_equal_weights_of_finite_replicas_with_steps() -> None:
    """Whatever armed detectors and shares of steps would say; no detector learns from it. Units
    without such a replica are rolled back."""
    nan = math.nan
    norms = torch.tensor(
        [[1.0, nan, nan], [1e6, 2.0, math.inf], [3.0, 5.0, 0.0]], dtype=torch.float64
    )
    steps = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 0]])
    fresh = DetectorState.fresh(3, 3)
    armed = replace(fresh, mean=fresh.mean + 1.0, updates=fresh.updates + 30,
                    accepted=fresh.accepted + 30)  # fmt: skip
    penalty = replace(PENALTY, step_weight=0.5, weight_temperature=1.0)
    decision, learned = decide(norms, armed, penalty, steps, range(3), is_synchronous=True)
    assert decision.weights.tolist() == [[0.5, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert decision.verdict.anomalous.tolist() == [
        [False, True, True], [False, False, True], [True, True, True]
    ]  # fmt: skip
    assert decision.rollback.tolist() == [False, False, True] and decision.is_synchronous
    assert learned is armed
    usual, _ = decide(norms, armed, penalty, steps, range(3))
    assert usual.verdict.anomalous[1, 0] and not usual.is_synchronous


def test_step_weights_are_blended_over_the_accepted() -> None:
    """w <- (1 - rho) w + rho * steps / sum steps; rejected replicas keep weight 0, sums stay 1."""
    weights = torch.tensor([[0.75, 0.5], [0.25, 0.5], [0.0, 0.0]], dtype=torch.float64)
    steps = torch.tensor([[30.0] * 2, [10.0] * 2, [60.0] * 2], dtype=torch.float64)
    accepted = torch.tensor([[True, True], [True, True], [False, False]])
    assert blend_step_weights(weights, accepted, steps, 0.0) is weights
    blended = blend_step_weights(weights, accepted, steps, 0.5)
    assert blended.tolist() == [[0.75, 0.625], [0.25, 0.375], [0.0, 0.0]]
    assert blend_step_weights(weights, accepted, steps, 1.0)[:, 1].tolist() == [0.75, 0.25, 0.0]
    none = torch.zeros(3, 1, dtype=torch.float64)
    assert blend_step_weights(none, none.bool(), steps[:, :1], 0.5).tolist() == [[0.0]] * 3


def test_accepted_replica_of_weight_zero_keeps_its_step_share() -> None:
    """Would catch: weight 0 taken for a rejection."""
    norms = torch.tensor([[10.0], [900.0]], dtype=torch.float64)  # exp(-890 / T) is 0 at T = 1
    penalty = replace(PENALTY, weight_temperature=1.0, step_weight=0.5)
    steps = torch.tensor([[7], [7]])
    decision, _ = decide(norms, DetectorState.fresh(2, 1), penalty, steps, [0])
    assert decision.weights.tolist() == [[0.75], [0.25]]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_blended_columns_sum_to_one(share: float) -> None:
    """For any share, so that the average keeps its scale."""
    weights = torch.softmax(torch.randn(5, 7, dtype=torch.float64), dim=0)
    steps = torch.tensor([[1.0], [2.0], [3.0], [4.0], [50.0]], dtype=torch.float64).expand(5, 7)
    blended = blend_step_weights(weights, torch.ones(5, 7, dtype=torch.bool), steps, share)
    assert torch.allclose(blended.sum(dim=0), torch.ones(7, dtype=torch.float64))


# ---- Lengths of rounds and the final synchronous phase, against their formulas


def records(*losses: float) -> Any:
    """Control records with the mean losses of a round."""
    return [SimpleNamespace(round_loss=loss) for loss in losses]


@given(st.integers(0, 5000), st.integers(0, 1000))
def test_last_local_step_begins_before_the_final_share(total: int, thousandths: int) -> None:
    """Step i (from 1) is local if i - 1 < (1 - X) T: by counting, in exact fractions."""
    share = 1 - Fraction(thousandths, 1000)
    expected = sum(i - 1 < share * total for i in range(1, total + 1))
    assert last_local(total, thousandths / 1000) == expected


def test_last_local_step_is_exact_for_decimal_shares() -> None:
    """0.9 and 0.1 are not exact in binary. Would catch: a step more or less by rounding."""
    found = [last_local(10, x / 10) for x in range(11)]
    assert found == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert last_local(960, 0.05) == 912


@given(st.integers(0, 50), st.integers(1, 20), st.integers(1, 6), st.integers(1, 300))
def test_interval_doubles_in_each_stage(warmup: int, tau: int, stages: int, local: int) -> None:
    """tau 2^k in stage k of equal parts of (W, L], found here by the edges of the stages."""
    schedule = StagewiseSchedule(warmup, tau, 1, stages, warmup + local)
    edges = [Fraction(local * k, stages) for k in range(1, stages)]
    for step in range(warmup, warmup + local):
        stage = sum(step - warmup >= edge for edge in edges)
        assert schedule.round_length(RoundStart(step, 1.0)) == tau * 2**stage


def test_stagewise_interval_beyond_the_last_local_step() -> None:
    """A start beyond it, and more stages than steps, give a finite length and no error."""
    schedule = StagewiseSchedule(4, 8, 1, 10**6, 10)
    assert schedule.round_length(RoundStart(4, 1.0)) == 8
    assert schedule.round_length(RoundStart(500, 1.0)) == 2**53
    assert StagewiseSchedule(4, 8, 1, 3, 4).round_length(RoundStart(4, 1.0)) == 8


@given(st.integers(1, 200), st.floats(0.01, 20), st.floats(0.01, 20))
def test_adacomm_rounds_follow_the_square_root_of_the_loss(
    tau: int, loss: float, first: float
) -> None:
    """ceil(tau sqrt(F / F_0)), at least 1."""
    expected = max(1, math.ceil(tau * np.sqrt(loss / first)))
    schedule = LossSchedule(0, tau, 1)
    assert schedule.round_length(RoundStart(0, 1.0, loss, first)) == expected


@pytest.mark.parametrize(
    ("loss", "first"),
    [(None, None), (None, 2.0), (2.0, None), (0.0, 1.0), (1.0, 0.0), (-1.0, 1.0),
     (math.nan, 1.0), (math.inf, 1.0), (1e308, 1e-308)],
)  # fmt: skip
def test_adacomm_round_is_tau_for_unusable_losses(loss: float | None, first: float | None) -> None:
    """Missing, nonpositive, and non-finite losses give no error."""
    assert LossSchedule(0, 7, 1).round_length(RoundStart(0, 1.0, loss, first)) == 7


def test_mean_round_loss_ignores_nonfinite_losses() -> None:
    """The mean over the replicas with a finite loss; None without any."""
    assert mean_round_loss(records(3.0, 1.0)) == 2.0
    assert mean_round_loss(records(3.0, math.nan)) == 3.0
    assert mean_round_loss(records(math.inf, math.nan)) is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"final_sync_fraction": 1.5}, "at least 0 and at most 1"),
        ({"final_sync_fraction": -0.1}, "at least 0 and at most 1"),
        ({"final_sync_fraction": math.nan}, "at least 0 and at most 1"),
        (
            {
                "warmup_dtype": "int8",
                "strategy": "a-edit",
                "hub": "h:1",
                "replica_name": "a",
                "nominal_replicas": 2,
            },
            "gradients are not averaged",
        ),
        ({"final_sync_fraction": 0.1, "strategy": "ddp"}, "no effect with"),
        ({"interval": "adacomm", "strategy": "a-edit"}, "no effect with"),
        ({"stl_stages": 4}, "no effect without --edit-interval stl"),
        ({"interval": "stl", "stl_stages": 0}, "at least 1"),
        ({"interval": "stl", "fragments": 2}, "change their length"),
        ({"interval": "adacomm", "fragments": 2}, "change their length"),
        ({"interval": "stl", "qsr_a": 0.1}, "other schedules do not take it"),
    ],
)
def test_invalid_schedule_settings_are_refused(flags: dict[str, Any], words: str) -> None:
    """The error names the rule that is violated."""
    with pytest.raises(UsageError, match=words):
        EditConfig(use_edit=True, **flags)


def test_warning_where_no_local_step_precedes_the_final_phase() -> None:
    """Where the phase begins in the warm-up; not with X = 1, which is intended."""
    config = EditConfig(use_edit=True, warmup_steps=10, final_sync_fraction=0.5)
    assert "there is no local step" in str(phase_warning(config, 20))
    assert "there is no local step" not in str(phase_warning(config, 22))
    full = EditConfig(use_edit=True, warmup_steps=10, final_sync_fraction=1)
    assert phase_warning(full, 20) is None


# ---- Losses in a checkpoint, also if it is resumed with another kind of rounds (fixed or varying)


SILENT_REPORTER: Any = SimpleNamespace(on_losses=lambda first, losses, samples=0: None)


def test_losses_round_trip_through_checkpoint() -> None:
    """Resume in the middle of a round with the same kind of rounds."""
    steps, again = StepLosses(4), StepLosses(4)
    for step, loss in enumerate((3.0, math.nan, 2.0), start=5):
        steps.note(step, loss)
    again.restore(steps.payload(), steps.last_step)
    assert again.last_step == 7 and str(again.payload()) == str(steps.payload())
    mean, same = MeanLoss(), MeanLoss()
    mean.note(5, 3.0)
    mean.note(6, 2.0)
    same.restore(mean.payload(), mean.last_step)
    assert same.payload() == mean.payload()
    assert mean.payload()[:5] == (2.0, 3.0, 1.0, 5.0, 2.0)
    older = MeanLoss()
    older.restore((5.0, 2.0), 0)
    assert older.mean() == 2.5


def test_loss_of_waiting_replica_belongs_to_next_round() -> None:
    """Would catch a mean with one step more than in a run without interruption."""
    mean, again = MeanLoss(), MeanLoss()
    for step, loss in enumerate((3.0, 2.0, 7.0)):
        mean.note(step, loss)
    again.restore(mean.payload(), 0, is_waiting=True)
    assert again.mean() == 2.5
    records: Any = [SimpleNamespace(losses=(5.0, 2.0), step=3, samples=1)] * 2
    again.report(records, SILENT_REPORTER, 2)
    again.begin_phase()
    assert again.mean() == again.forget() == 7.0 and math.isnan(again.mean())


def test_varying_rounds_resume_losses_of_fixed_rounds() -> None:
    """Would catch two losses that are read as a sum and a count."""
    mean = MeanLoss()
    mean.restore((3.0, 2.0), last_step=6)
    assert mean.payload()[3:5] == (5.0, 2.0)
    mean.restore((), last_step=0)
    assert mean.payload()[3:5] == (5.0, 2.0)


def test_fixed_rounds_discard_saved_mean() -> None:
    """Would catch a sum and a count that are read as losses of two steps."""
    steps = StepLosses(4)
    steps.restore((5.0, 2.0), last_step=0)
    assert steps.payload() == ()


def test_step_losses_are_averaged_over_replicas() -> None:
    """Over the replicas that have the loss; NaN if none has it.

    Catches losses reported for neighbouring steps, or twice.
    """
    reported: list[tuple[int, list[float]]] = []
    reporter: Any = SimpleNamespace(
        on_losses=lambda first, losses: reported.append((first, losses))
    )
    mine = StepLosses(4)
    for step, loss in ((7, 1.0), (8, math.nan), (9, math.nan)):
        mine.note(step, loss)
    other = (3.0, 5.0, math.nan)
    records: Any = [SimpleNamespace(losses=losses) for losses in (mine.payload(), other)]
    mine.report(records, reporter, 0)
    ((first, means),) = reported
    assert first == 7 and means[:2] == [2.0, 5.0] and math.isnan(means[2])
    assert mine.payload() == ()


@pytest.mark.parametrize("resumed_after", [None, 2, 3, 4, 6])
def test_round_has_the_losses_of_its_own_steps(resumed_after: int | None) -> None:
    """Of rounds that end after steps 3 and 5, each loss known after its meeting; with a resume
    between any two steps. Would catch a round's last loss in the next line, or in one of its own,
    and a line that a resume loses."""
    reported: list[tuple[int, list[float], int]] = []
    reporter: Any = SimpleNamespace(on_losses=lambda *found: reported.append(found))
    mine = MeanLoss()
    for step in range(1, 7):
        if step - 1 == resumed_after:
            saved, mine = mine.payload(), MeanLoss()
            mine.restore(saved, 0)
        if step in (3, 5, 6):  # the last one is the end of training
            losses = mine.payload()[-mine.capacity :]
            records: Any = [SimpleNamespace(losses=x, step=step) for x in (losses, (0.0, 0.0))]
            mine.report(records, reporter, 8 * step)
        mine.note(step, float(step))
    assert reported == [(3, [2.0], 24), (5, [4.5], 40)]


# ---- Projections that compare an average with its addends


SIZES = st.sampled_from([0, 1, 7, 1023, 1024, 1025, 40_000, 65_536, 65_537, 200_000])


def draw_addends(count: int, numel: int, seed: int, kind: str) -> list[Tensor]:
    """Values of like and of very different size, equal ones, and some that nearly cancel."""
    torch.manual_seed(seed)
    if kind == "equal":
        return [torch.full((numel,), 0.1 * (rank + 1)) for rank in range(count)]
    if kind == "tiny":
        return [torch.randn(numel) * 1e-41 for _ in range(count)]
    values = [torch.randn(numel) for _ in range(count)]
    if kind == "wide":
        return [value * 10.0 ** torch.randint(-30, 30, (numel,)) for value in values]
    if kind == "cancel" and count > 1:
        values[-1] = -sum(values[:-1], torch.zeros(numel))
    return values


def sum_over_wire(addends: list[Tensor], wire: str) -> Tensor:
    """The sum, with the rounding of the wire, in fp32."""

    def coded(values: Tensor) -> Tensor:
        return values.bfloat16().float() if wire == BF16 else values

    total = torch.zeros_like(addends[0])
    for addend in addends:
        total += coded(addend)
    return coded(total)


def differs(addends: list[Tensor], average: Tensor, wire: str = FP32) -> bool:
    """Whether the check finds a difference."""
    table = torch.stack([projection(addend) for addend in addends])
    return sum_differs(table, projection(average), wire)


@settings(deadline=None, max_examples=120)
@given(
    count=st.integers(1, 9),
    numel=SIZES,
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["like", "equal", "wide", "cancel", "tiny"]),
    wire=st.sampled_from([FP32, BF16]),
)
def test_rounding_is_no_difference(count: int, numel: int, seed: int, kind: str, wire: str) -> None:
    addends = draw_addends(count, numel, seed, kind)
    assert not differs(addends, sum_over_wire(addends, wire), wire)


def sum_with_residuals(addends: list[Tensor], wire: str, rounds: int) -> tuple[Tensor, Tensor]:
    """Exchange the same addends over and over, with error feedback.

    Returns:
        What each replica has sent in the last exchange, as projections [N, parts, 2]; the sum.
    """
    values, size = [addend.numpy() for addend in addends], len(addends)
    residuals = Residuals.zeros(size, len(values[0]))
    for _ in range(rounds):
        before = Residuals([each.copy() for each in residuals.sent], residuals.summed.copy())
        average = torch.from_numpy(AllReduce(values).sum(wire, residuals))
    bound = torch.tensor([-1.0, 1.0])
    table = torch.stack([projection(addend) for addend in addends])
    for errors, sign in ((before, 1.0), (residuals, bound)):
        of_sum = [errors.summed, *(np.zeros_like(errors.summed) for _ in values[1:])]
        for replica, parts in enumerate(zip(errors.sent, of_sum, strict=True)):
            for part in parts:
                table[replica] += projection(torch.from_numpy(part)) * sign
    return table, average


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 9),
    numel=st.sampled_from([1, 1023, 40_000, 65_537]),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["like", "equal", "cancel", "tiny"]),
    wire=st.sampled_from(["int8", "int4"]),
    rounds=st.integers(1, 3),
)
def test_lost_bits_are_in_the_residuals(
    count: int, numel: int, seed: int, kind: str, wire: str, rounds: int
) -> None:
    """What an encoded sum lacks is what the residuals hold: rounding in fp32 explains the rest, so
    that a change of a single element is found behind any encoding."""
    addends = draw_addends(count, numel, seed, kind)
    table, average = sum_with_residuals(addends, wire, rounds)
    assert not sum_differs(table, projection(average), wire)
    if kind == "like":
        average[numel // 2] += 0.5 * count
        assert sum_differs(table, projection(average), wire)


@pytest.mark.parametrize("numel", [1500, 1 << 16, 3 << 19, (3 << 19) + 1])
def test_projection_is_that_of_one_fixed_vector(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many parts are converted at once, as devices differ in that."""
    torch.manual_seed(0)
    values = torch.randn(numel)
    found = projection(values)
    for number in (1, 3, 100):
        monkeypatch.setattr(tested, "_PARTS_AT_ONCE", {"cpu": number})
        torch.testing.assert_close(projection(values), found, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(found[:, 1], projection(values.abs())[:, 0], rtol=1e-12, atol=0)
    assert len(found) == num_parts(numel)


def flip_exponent(values: Tensor) -> None:
    values.view(torch.int32)[7] ^= 1 << 30


def change_one(values: Tensor) -> None:
    """By less than the mean element."""
    values[70_000 % len(values)] += 0.5


def swap_parts(values: Tensor) -> None:
    values[:2048] = values[:2048].roll(1024)


def swap_neighbours(values: Tensor) -> None:
    values[:2] = values[:2].flip(0)


def lose_a_part(values: Tensor) -> None:
    values[100:200] = 0.0


def add_nan(values: Tensor) -> None:
    values[0] = torch.nan


@pytest.mark.parametrize(
    "change",
    [flip_exponent, change_one, swap_parts, swap_neighbours, lose_a_part, add_nan],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("numel", [4096, 1 << 20])
def test_changes_are_found(change: Callable[[Tensor], None], numel: int) -> None:
    addends = draw_addends(4, numel, 1, "like")
    average = sum_over_wire(addends, FP32)
    change(average)
    assert differs(addends, average)


def test_addend_that_changed_on_the_way_is_found() -> None:
    addends = draw_addends(3, 4096, 2, "like")
    sent = [addend.clone() for addend in addends]
    sent[1].view(torch.int32)[3000] ^= 1 << 30
    assert differs(addends, sum_over_wire(sent, FP32), FP32)
    assert differs(addends, sum_over_wire(sent, BF16), BF16)
