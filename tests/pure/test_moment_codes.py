"""Averages of the inner optimizer's moments: schedule, beta2, and access to the state."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_edit.constants import FIRST_MOMENT, SECOND_MOMENT
from megatron_edit.host.model.moments import (
    configured_beta2,
    create,
    num_counted_steps,
    read_counters,
    read_moment,
    scaled_beta2,
    write_counters,
    write_moment,
)
from megatron_edit.method.moments import (
    NO_MOMENTS,
    MomentRule,
    MomentSchedule,
    local_beta2,
)
from megatron_edit.method.settings import Settings

anything: Any = SimpleNamespace
CODED = MomentRule((FIRST_MOMENT, SECOND_MOMENT))


# ---- which moments, when


def test_moment_schedule_selects_every_kth_sync() -> None:
    """Syncs of each unit are counted: with fragments a unit takes part in every F-th sync. Catches
    an average although K exceeds the number of syncs."""
    every = MomentSchedule.of(Settings(average_moments="both", average_moments_every=3))
    assert [every.rule_of(sync, 1) == CODED for sync in range(1, 8)] == [
        sync in (3, 6) for sync in range(1, 8)
    ]
    chosen = [sync for sync in range(1, 13) if every.rule_of(sync, 2) == CODED]
    assert chosen == [5, 6, 11, 12]
    second = MomentSchedule.of(Settings(average_moments="second", average_moments_every=1))
    assert second.rule_of(1, 1).kinds == (SECOND_MOMENT,)
    assert (
        MomentSchedule.of(Settings(average_moments="none", average_moments_every=1)).rule_of(1, 1)
        == NO_MOMENTS
    )


def test_local_beta2_to_the_nth_power_is_beta2() -> None:
    """N local steps have the memory of one global step."""
    assert local_beta2(0.95, 4) ** 4 == pytest.approx(0.95, rel=1e-12)
    assert local_beta2(0.95, 1) == 0.95


# ---- one unit


# ---- Megatron's optimizers


def optimizer_of(**state: Tensor) -> tuple[Any, Tensor]:
    """Return an optimizer with the state of one main shard [2, 2], and the shard."""
    main = torch.zeros(2, 2)
    group = {"params": [main], "betas": (0.9, 0.95), "lr": 0.1}
    inner = anything(state={main: dict(state)}, param_groups=[group])
    return anything(optimizer=inner, param_groups=[group]), main


def test_moments_are_read_and_written_by_kind() -> None:
    """In the optimizer that has them; a main shard that was never stepped has none."""
    optimizer, main = optimizer_of(
        exp_avg=torch.arange(4.0).view(2, 2), exp_avg_sq=torch.ones(2, 2)
    )
    stub = anything(optimizer=None, param_groups=[])
    out = torch.full((4,), 7.0)
    read_moment([stub, optimizer], main, FIRST_MOMENT, out)
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]
    write_moment([stub, optimizer], main, SECOND_MOMENT, out)
    assert optimizer.optimizer.state[main]["exp_avg_sq"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    read_moment([optimizer], torch.zeros(4), FIRST_MOMENT, out.fill_(5.0))
    write_moment([optimizer], torch.zeros(4), FIRST_MOMENT, out)
    assert out.tolist() == [5.0] * 4 and len(optimizer.optimizer.state) == 1


def test_scaled_optimizer_state_uses_its_accessors() -> None:
    """Transformer Engine's Adam stores scales separately: catches codes written without a scale."""
    optimizer, main = optimizer_of(exp_avg=torch.ones(2, 2, dtype=torch.float16))
    scale = {"exp_avg": 4.0}

    def unscaled(key: Tensor, name: str) -> Tensor:
        return optimizer.optimizer.state[key][name].float() * scale[name]

    def set_scaled(key: Tensor, name: str, values: Tensor) -> None:
        scale[name] = float(values.max())
        optimizer.optimizer.state[key][name].copy_(values / scale[name])

    optimizer.optimizer.get_unscaled_state = unscaled
    optimizer.optimizer.set_scaled_state = set_scaled
    out = torch.empty(4)
    read_moment([optimizer], main, FIRST_MOMENT, out)
    assert out.tolist() == [4.0] * 4
    write_moment([optimizer], main, FIRST_MOMENT, torch.tensor([8.0, 4.0, 2.0, 1.0]))
    read_moment([optimizer], main, FIRST_MOMENT, out)
    assert out.tolist() == [8.0, 4.0, 2.0, 1.0] and scale["exp_avg"] == 8.0


def test_bias_correction_is_continuous_when_beta2_changes() -> None:
    """With a constant gradient every step moves by the learning rate, also with beta2^(1/N).

    Would catch updates that shrink by sqrt(1 - beta2'^c) at the switch, and a step count that fits
    only the second moment.
    """
    weight, common, size = torch.nn.Parameter(torch.zeros(1)), 3, 4
    adam = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), eps=0.0, weight_decay=0.0)
    inner: Any = anything(optimizer=adam, param_groups=adam.param_groups)
    for step in range(9):
        before = float(weight.detach())
        weight.grad = torch.full((1,), 0.5)
        local = step >= common
        with scaled_beta2([inner], size, common) if local else nullcontext():
            adam.step()
        assert before - float(weight.detach()) == pytest.approx(0.1, rel=1e-5)
        assert num_counted_steps([inner]) == step + 1


def stepped_adam(steps: int, loaded: int | None) -> tuple[Any, list[torch.nn.Parameter]]:
    """torch's Adam with two parameter groups after some steps; where it has loaded a checkpoint,
    Megatron has put that step count into the groups."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    adam = torch.optim.AdamW([{"params": weights[:2]}, {"params": weights[2:]}])
    inner: Any = anything(optimizer=adam, param_groups=adam.param_groups)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.ones(2)
        adam.step()
    if loaded is not None:
        for group in adam.param_groups:
            group["step"] = loaded
    return inner, weights


@pytest.mark.parametrize(("steps", "loaded"), [(0, None), (3, None), (20, 20), (40, 20)])
@pytest.mark.parametrize("donor_loaded", [None, 7])
def test_counters_are_known_by_name(
    steps: int, loaded: int | None, donor_loaded: int | None
) -> None:
    """One replica has loaded a checkpoint and the other one has not, or another one. Would catch
    counters that are matched by their order, and one that stays where a donor has none."""
    donor, _ = stepped_adam(30, donor_loaded)
    scale = anything(_growth_tracker=5, _hysteresis_tracker=1, _scale=torch.tensor([1024.0]))
    other = anything(_growth_tracker=0, _hysteresis_tracker=2, _scale=torch.tensor([8.0]))
    donor.grad_scaler = scale
    joiner, weights = stepped_adam(steps, loaded)
    joiner.grad_scaler = other
    create([joiner])
    copied = read_counters([donor])
    assert len(copied) == 3 + 3 + 2 * (donor_loaded is not None)
    write_counters([joiner], copied)
    assert read_counters([joiner]) == copied and num_counted_steps([joiner]) == 30
    groups = [group.get("step") for group in joiner.optimizer.param_groups]
    assert groups == [donor_loaded] * 2
    counts = [joiner.optimizer.state[weight]["step"] for weight in weights]
    assert all(isinstance(count, Tensor) and count == 30 for count in counts)
    assert (other._growth_tracker, other._hysteresis_tracker, float(other._scale)) == (5, 1, 1024)


def test_weight_decay_is_independent_of_bias_correction() -> None:
    """With a zero gradient, a weight moves only by the decay at the given rate."""
    weight = torch.nn.Parameter(torch.ones(1))
    adam = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), eps=1.0, weight_decay=0.5)
    inner: Any = anything(optimizer=adam, param_groups=adam.param_groups)
    for step in range(4):
        weight.grad = torch.zeros(1)
        with scaled_beta2([inner], 4, 2) if step >= 2 else nullcontext():
            adam.step()
    assert float(weight.detach()) == pytest.approx(0.95**4, rel=1e-6)
    assert (adam.param_groups[0]["lr"], adam.param_groups[0]["weight_decay"]) == (0.1, 0.5)


def test_beta2_is_scaled_only_inside_a_step() -> None:
    """It is restored also after a failed step, so that checkpoints contain the given value."""
    optimizer, _ = optimizer_of()
    sgd = anything(optimizer=None, param_groups=[{"params": []}])
    with pytest.raises(ValueError), scaled_beta2([optimizer, sgd], 4, 8):
        assert configured_beta2([optimizer, sgd]) == [local_beta2(0.95, 4)]
        raise ValueError
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
