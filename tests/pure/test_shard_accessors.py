"""Main shards kept in optimizer state, and quantized parameters, with stand-ins of Transformer
Engine's Adam and tensors."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_edit.engine import ParamShard, plan_units
from megatron_edit.errors import UsageError
from megatron_edit.host.model.moments import reset, zero_nonfinite
from megatron_edit.host.model.optimizer import AdamShard, HybridShard, join_remainder, split_fp32

anything: Any = SimpleNamespace


class FakeAdam:
    """Keeps main parameters and moments like Transformer Engine's `FusedAdam`.

    Args:
        main: dtype of main parameters; int16 means remainders.
        has_begun: whether it has made a step and has state.
    """

    def __init__(self, parameter: Tensor, main: torch.dtype, *, has_begun: bool = True) -> None:
        self.param_groups: Any = [{"params": [parameter], "step": 3}]
        self.state: Any = defaultdict(dict)
        if has_begun:
            self.state[parameter] = {
                "exp_avg": torch.ones(parameter.numel(), dtype=torch.float16),
                "master_param": torch.zeros(parameter.numel(), dtype=main),
            }
            if main == torch.float32:
                self.state[parameter]["master_param"].copy_(parameter)
        self.scale = 4.0

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """Return state without its scale; only moments have one."""
        value = self.state[param][state_name]
        return value.float() * self.scale if state_name == "exp_avg" else value

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store state with its scale; asserts the dtype, like the real one."""
        value = self.state[param][state_name]
        is_remainder = value.dtype == torch.int16
        assert unscaled_state.dtype == (torch.int16 if is_remainder else torch.float32)
        value.copy_(unscaled_state / self.scale if state_name == "exp_avg" else unscaled_state)


def numbers() -> Tensor:
    """fp32 values of all magnitudes and signs with random low halves, ties included."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.manual_seed(1))
    bits[:8] = (bits[:8] & ~0xFFFF) | 0x8000
    values = bits.to(torch.int32).view(torch.float32)
    return values[values.isfinite() & (values.abs() < 1e38)]


def test_fp32_remainder_round_trip_is_exact() -> None:
    """Catches a main parameter that loses its low half at each sync, or is rounded."""
    values = numbers()
    rounded, remainder = split_fp32(values)
    assert rounded.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert torch.equal(
        join_remainder(rounded, remainder).view(torch.int32), values.view(torch.int32)
    )
    is_tie = (values.view(torch.int32) & 0xFFFF) == 0x8000  # the kernels round these up
    assert torch.equal(rounded[~is_tie], values[~is_tie].to(torch.bfloat16))
    assert is_tie.sum() >= 4


@pytest.mark.parametrize("main", [torch.float32, torch.int16])
def test_unit_in_adam_state_is_read_written_and_published(main: torch.dtype) -> None:
    """Values are exact both in Adam's state and in the parameters that the model reads."""
    model = torch.arange(1.0, 5.0).to(torch.bfloat16)
    accessor = AdamShard(FakeAdam(model, main), model)
    param = ParamShard("a", "final", accessor, True, None, source=model)
    (shard,) = plan_units([param], ["final"], ["final"]).shards
    assert shard.numel == 4 and shard.gather(torch.empty(4)).tolist() == [1.0, 2.0, 3.0, 4.0]
    values = numbers()[:4].clone()
    shard.scatter(values)
    shard.publish()
    assert torch.equal(shard.gather(torch.empty(4)), values)
    assert torch.equal(model, split_fp32(values)[0] if main == torch.int16 else values.bfloat16())
    param.write(param.read().mul_(0.5))  # as a landing with a mix: `read` may return Adam's tensor
    assert torch.equal(shard.gather(torch.empty(4)), values * 0.5)


def test_adam_shard_before_the_first_step_uses_the_model() -> None:
    """Catches a write that creates state which Adam would take for its own."""
    model = torch.arange(1.0, 5.0).to(torch.bfloat16)
    adam = FakeAdam(model, torch.float32, has_begun=False)
    accessor = AdamShard(adam, model)
    assert accessor.read().tolist() == [1.0, 2.0, 3.0, 4.0]
    accessor.write(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    assert model.tolist() == [5.0, 6.0, 7.0, 8.0] and not any(adam.state.values())


def test_hybrid_shard_follows_parameters_rebuilt_by_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's `HybridDeviceOptimizer` replaces its parameters in a load. Catches a shard that
    keeps the old one."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    model = torch.arange(1.0, 5.0).to(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(
        [{"params": [model]}], cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW, param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False, lr=0.1,
    )  # fmt: skip
    accessor, values = HybridShard(optimizer, model), numbers()[:4].clone()
    first = optimizer.param_to_inner_param[model]
    for _ in range(2):
        accessor.write(values)
        assert torch.equal(accessor.read(), values) and torch.equal(model, values.bfloat16())
        optimizer._init_sub_optimizers()  # as after a load
        values = values * 0.5
    assert optimizer.param_to_inner_param[model] is not first


def test_moments_are_zeroed_without_main_parameters() -> None:
    """Moments are zeroed through their scale; main parameters survive that and a reset."""
    model = torch.ones(4).to(torch.bfloat16)
    adam = FakeAdam(model, torch.float32)
    state = adam.state[model]
    state["exp_avg"][1] = state["master_param"][2] = torch.nan
    inner = anything(optimizer=adam)
    assert zero_nonfinite([inner], model) == 1
    assert state["exp_avg"].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert state["master_param"].isnan().tolist() == [False, False, True, False]
    reset([inner])
    assert state["exp_avg"].tolist() == [0.0] * 4 and state["master_param"][0] == 1.0
    assert "step" not in adam.param_groups[0]


def test_reset_clears_all_sub_optimizers() -> None:
    """State of the hybrid optimizer and of its sub-optimizers is cleared; parameters are kept."""
    parameter = torch.ones(2)
    parts = [anything(state={parameter: {"exp_avg": torch.ones(2)}}) for _ in range(2)]
    hybrid = anything(
        state={parameter: {"master_param": parameter}}, param_groups=[{"step": 2}],
        sub_optimizers=parts,
    )  # fmt: skip
    reset([anything(optimizer=hybrid)])
    assert not hybrid.state and not any(part.state for part in parts) and parameter.sum() == 2.0


class Quantizing:
    """Stand-in of Megatron's distributed optimizer, with parameters and shards of this rank."""

    def __init__(self, group: str, *entries: tuple[Any, Tensor | None, int | None]) -> None:
        self.data_parallel_group = group
        self._entries = entries

    def _get_fp8_params_and_shard_fp32_from_fp8(self) -> tuple[list[Any], ...]:
        return tuple(map(list, zip(*self._entries, strict=True)))

    def _expand_quantized_param_shard_for_cast(self, *entry: Any) -> tuple[list[Any], ...]:
        return tuple([part] for part in entry)


def test_quantized_parameters_are_published_by_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's function is collective: ranks without a shard of the unit call it, too.
    Catches a parameter that keeps its value of the last step."""
    from megatron_edit.host.model import optimizer

    calls: list[Any] = []
    name = "megatron.core.fp8_utils.quantize_param_shard"
    monkeypatch.setattr(name, lambda *arguments: calls.append(arguments))
    a, b, c, expert = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
    unit_of = {a: ("a", "layer.1"), b: ("b", "layer.1"), c: ("c", "final"), expert: ("e", "final")}
    main = torch.ones(1)
    dense = Quantizing("dense", (a, main, 1), (b, None, None), (c, None, None))
    experts = Quantizing("experts", (expert, None, None))
    publish = optimizer.quantizers_of([dense, experts], unit_of)
    names = ["embedding", "layer.1", "final"]
    plan = plan_units([], names, names, publish)  # this rank has no shard of the units
    for shard in plan.shards:
        shard.publish()
    assert [len(models) for models, *_ in calls] == [2, 1, 1]
    models, mains, starts, group = calls[0]
    assert models[0] is a and models[1] is b and mains[0] is main and mains[1] is None
    assert starts == [1, None] and group == "dense"
    assert [call[0][0] is wanted for call, wanted in zip(calls[1:], (c, expert), strict=True)]
    assert calls[2][3] == "experts"
    with pytest.raises(UsageError, match=r"0\.19 or newer"):
        optimizer.quantizers_of([anything()], unit_of)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("is_in_adam", [False, True])
def test_copy_target_of_a_main_shard(
    is_in_adam: bool, is_quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None where Adam's accessor or a quantizer writes the model's parameter."""
    from megatron_edit.host.model import optimizer as module

    monkeypatch.setattr(module, "is_quantized", lambda parameter: is_quantized)
    buffer, main = torch.zeros(8, dtype=torch.bfloat16), torch.ones(3)
    parameter: Any = torch.nn.Parameter(torch.ones(3))
    accessor = AdamShard(FakeAdam(main, torch.float32), main)
    optimizer: Any = anything(
        main_of=lambda parameter, key: accessor if is_in_adam else key,
        _get_model_param_range_map=lambda _: {"gbuf_world_in_bucket": anything(start=2, end=5)},
        model_param_gbuf_map={parameter: (0, None, 0)},
        buffers=[anything(buckets=[anything(param_data=buffer)])],
    )
    target = module.EditDistributedOptimizer.target_of(optimizer, parameter, main)
    if is_in_adam or is_quantized:
        assert target is None
        return
    assert target is not None and target.data_ptr() == buffer[2:].data_ptr() and len(target) == 3


@pytest.mark.parametrize("is_in_adam", [False, True])
def test_location_of_main_shards(is_in_adam: bool) -> None:
    """16-bit parameters have theirs in Megatron's copies or in Adam, fp32 ones in the model."""
    from megatron_edit.host.model.optimizer import EditDistributedOptimizer as Optimizer

    half, full = torch.ones(2).half(), torch.ones(2)
    models = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    copies = [None] if is_in_adam else [torch.ones(2)]
    optimizer: Any = anything(
        is_stub_optimizer=False, holds_main_shards=is_in_adam,
        optimizer=FakeAdam(half, torch.float32),
        model_float16_groups=[models[:1]], shard_float16_groups=[[half]],
        shard_fp32_from_float16_groups=[copies],
        model_fp32_groups=[models[1:]], shard_fp32_groups=[[full]],
    )  # fmt: skip
    keys = [key for _, key in Optimizer.main_shards(optimizer)]
    assert keys[0] is (half if is_in_adam else copies[0]) and keys[1] is full
    mains = [Optimizer.main_of(optimizer, models[0], key) for key in keys]
    assert isinstance(mains[0], AdamShard) == is_in_adam and isinstance(mains[1], Tensor)
