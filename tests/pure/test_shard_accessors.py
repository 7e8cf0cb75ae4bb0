"""Main shards in the state of an optimizer, and parameters in eight bits, with stand-ins of
Transformer Engine's Adam and tensors."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_edit.engine import ParamShard, plan_units
from megatron_edit.errors import UsageError
from megatron_edit.host.model.shard_access import AdamShard, HybridShard, join_remainder, split_fp32
from megatron_edit.host.model.moments import reset, zero_nonfinite

anything: Any = SimpleNamespace


class FakeAdam:
    """Keeps main parameters and moments as Transformer Engine's `FusedAdam` does.

    Args:
        main: type of main parameters; int16 are remainders.
        has_begun: whether it has made a step, and has a state.
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
        """Moments have a scale; main parameters are as they are."""
        value = self.state[param][state_name]
        return value.float() * self.scale if state_name == "exp_avg" else value

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Refuses the wrong type, as the real one."""
        value = self.state[param][state_name]
        is_remainder = value.dtype == torch.int16
        assert unscaled_state.dtype == (torch.int16 if is_remainder else torch.float32)
        value.copy_(unscaled_state / self.scale if state_name == "exp_avg" else unscaled_state)


def numbers() -> Tensor:
    """fp32 whose low halves are anything, halves among them; either sign, large and small."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.manual_seed(1))
    bits[:8] = (bits[:8] & ~0xFFFF) | 0x8000
    values = bits.to(torch.int32).view(torch.float32)
    return values[values.isfinite() & (values.abs() < 1e38)]


def test_remainders_lose_no_bit() -> None:
    """Catches a main parameter that loses its low half at each sync, or is off by a rounding."""
    values = numbers()
    rounded, remainder = split_fp32(values)
    assert rounded.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert torch.equal(join_remainder(rounded, remainder).view(torch.int32), values.view(torch.int32))
    is_tie = (values.view(torch.int32) & 0xFFFF) == 0x8000  # the kernels round these up
    assert torch.equal(rounded[~is_tie], values[~is_tie].to(torch.bfloat16))
    assert is_tie.sum() >= 4


@pytest.mark.parametrize("main", [torch.float32, torch.int16])
def test_a_unit_through_adam(main: torch.dtype) -> None:
    """Taken, given and published without a loss; both what Adam keeps and what the model reads."""
    model = torch.arange(1.0, 5.0).to(torch.bfloat16)
    held = AdamShard(FakeAdam(model, main), model)
    param = ParamShard("a", "final", held, True, None, source=model)
    (shard,) = plan_units([param], ["final"], ["final"]).shards
    assert shard.numel == 4 and shard.gather(torch.empty(4)).tolist() == [1.0, 2.0, 3.0, 4.0]
    values = numbers()[:4].clone()
    shard.scatter(values)
    shard.publish()
    assert torch.equal(shard.gather(torch.empty(4)), values)
    assert torch.equal(model, split_fp32(values)[0] if main == torch.int16 else values.bfloat16())
    param.write(param.read().mul_(0.5))  # as a mix lands: what was read may be Adam's own
    assert torch.equal(shard.gather(torch.empty(4)), values * 0.5)


def test_before_the_first_step_the_model_is_all_there_is() -> None:
    """Catches a start that makes a state which Adam would take for its own."""
    model = torch.arange(1.0, 5.0).to(torch.bfloat16)
    adam = FakeAdam(model, torch.float32, has_begun=False)
    held = AdamShard(adam, model)
    assert held.read().tolist() == [1.0, 2.0, 3.0, 4.0]
    held.write(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    assert model.tolist() == [5.0, 6.0, 7.0, 8.0] and not any(adam.state.values())


def test_a_hybrid_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own. Catches a shard that was looked up once: a load makes them anew."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    model = torch.arange(1.0, 5.0).to(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(
        [{"params": [model]}], cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW, param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False, lr=0.1,
    )  # fmt: skip
    held, values = HybridShard(optimizer, model), numbers()[:4].clone()
    first = optimizer.param_to_inner_param[model]
    for _ in range(2):
        held.write(values)
        assert torch.equal(held.read(), values) and torch.equal(model, values.bfloat16())
        optimizer._init_sub_optimizers()  # as after a load
        values = values * 0.5
    assert optimizer.param_to_inner_param[model] is not first


def test_moments_beside_main_parameters() -> None:
    """Zeroed through their scale; the main parameters are no moments, and survive a reset."""
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


def test_a_hybrid_optimizer_forgets_in_all_its_parts() -> None:
    """Their states, and its own view of them; not what they step."""
    parameter = torch.ones(2)
    parts = [anything(state={parameter: {"exp_avg": torch.ones(2)}}) for _ in range(2)]
    whole = anything(
        state={parameter: {"master_param": parameter}}, param_groups=[{"step": 2}],
        sub_optimizers=parts,
    )  # fmt: skip
    reset([anything(optimizer=whole)])
    assert not whole.state and not any(part.state for part in parts) and parameter.sum() == 2.0


class Quantizing:
    """As Megatron's distributed optimizer: parameters, of which this rank has shards or none."""

    def __init__(self, group: str, *entries: tuple[Any, Tensor | None, int | None]) -> None:
        self.data_parallel_group = group
        self._entries = entries

    def _get_fp8_params_and_shard_fp32_from_fp8(self) -> tuple[list[Any], ...]:
        return tuple(map(list, zip(*self._entries, strict=True)))

    def _expand_quantized_param_shard_for_cast(self, *entry: Any) -> tuple[list[Any], ...]:
        return tuple([part] for part in entry)


def test_parameters_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by Megatron's function, unit by unit: by ranks without a shard of the unit, too,
    as it is collective. Catches a parameter that is left as the last step made it."""
    from megatron_edit.host.model import quantized

    calls: list[Any] = []
    name = "megatron.core.fp8_utils.quantize_param_shard"
    monkeypatch.setattr(name, lambda *arguments: calls.append(arguments))
    a, b, c, expert = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
    unit_of = {a: ("a", "layer.1"), b: ("b", "layer.1"), c: ("c", "final"), expert: ("e", "final")}
    main = torch.ones(1)
    dense = Quantizing("dense", (a, main, 1), (b, None, None), (c, None, None))
    experts = Quantizing("experts", (expert, None, None))
    publish = quantized.quantizers_of([dense, experts], unit_of)
    names = ["embedding", "layer.1", "final"]
    plan = plan_units([], names, names, publish)  # this rank's part of the units is empty
    for shard in plan.shards:
        shard.publish()
    assert [len(models) for models, *_ in calls] == [2, 1, 1]
    models, mains, starts, group = calls[0]
    assert models[0] is a and models[1] is b and mains[0] is main and mains[1] is None
    assert starts == [1, None] and group == "dense"
    assert [call[0][0] is wanted for call, wanted in zip(calls[1:], (c, expert), strict=True)]
    assert calls[2][3] == "experts"
    with pytest.raises(UsageError, match=r"0\.19 or newer"):
        quantized.quantizers_of([anything()], unit_of)


@pytest.mark.parametrize("is_eight_bits", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
def test_who_writes_what_the_model_reads(
    is_held: bool, is_eight_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target of a copy, or nothing where Adam's accessor or a quantisation does it."""
    from megatron_edit.host.model import optimizer as module

    monkeypatch.setattr(module, "is_quantized", lambda parameter: is_eight_bits)
    buffer, main = torch.zeros(8, dtype=torch.bfloat16), torch.ones(3)
    parameter: Any = torch.nn.Parameter(torch.ones(3))
    held = AdamShard(FakeAdam(main, torch.float32), main)
    optimizer: Any = anything(
        main_of=lambda parameter, key: held if is_held else key,
        _get_model_param_range_map=lambda _: {"gbuf_world_in_bucket": anything(start=2, end=5)},
        model_param_gbuf_map={parameter: (0, None, 0)},
        buffers=[anything(buckets=[anything(param_data=buffer)])],
    )
    target = module.EditDistributedOptimizer.target_of(optimizer, parameter, main)
    if is_held or is_eight_bits:
        assert target is None
        return
    assert target is not None and target.data_ptr() == buffer[2:].data_ptr() and len(target) == 3


@pytest.mark.parametrize("is_held", [False, True])
def test_where_main_shards_are(is_held: bool) -> None:
    """Of 16-bit parameters with Megatron or in Adam; of fp32 parameters always in the model."""
    from megatron_edit.host.model.optimizer import EditDistributedOptimizer as Optimizer

    half, whole = torch.ones(2).half(), torch.ones(2)
    models = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    copies = [None] if is_held else [torch.ones(2)]
    optimizer: Any = anything(
        is_stub_optimizer=False, holds_main_shards=is_held, optimizer=FakeAdam(half, torch.float32),
        model_float16_groups=[models[:1]], shard_float16_groups=[[half]],
        shard_fp32_from_float16_groups=[copies],
        model_fp32_groups=[models[1:]], shard_fp32_groups=[[whole]],
    )  # fmt: skip
    keys = [key for _, key in Optimizer.main_shards(optimizer)]
    assert keys[0] is (half if is_held else copies[0]) and keys[1] is whole
    mains = [Optimizer.main_of(optimizer, models[0], key) for key in keys]
    assert isinstance(mains[0], AdamShard) == is_held and isinstance(mains[1], Tensor)
