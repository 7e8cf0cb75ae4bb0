"""Encoded averages of gradients, compared with the reference. Each replica is a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.wire import Wire
from megatron_edit.constants import BF16, FP32, INT8, WARMUP_DTYPES
from megatron_edit.engine.rounds.synchronous import GradientAverager
from tests.harness.memory_network import (
    Network,
    in_order_groups,
    run_in_threads,
    two_phase_groups,
)
from tests.reference.wire import AllReduce, Residuals

anything: Any = SimpleNamespace
NUMELS = [700, 0, 5, 1300]  # of the gradient shards
NUM_STEPS = 4
CODED = WARMUP_DTYPES[1:]
F32 = np.float32


def gradients_of(replica: int, step: int) -> list[Any]:
    """Return reproducible random gradients, fp32, of each shard."""
    rng = np.random.default_rng([replica, step])
    return [rng.standard_normal(numel).astype(F32) * F32(1 + replica) for numel in NUMELS]


class Replicas:
    """The gradient averagers of some replicas, of one rank each.

    Args:
        dtype: on the wire.
        size: number of replicas.
        make_groups: creates their sync groups.

    Attributes:
        scale: loss scale of fp16; None for none.
    """

    def __init__(
        self,
        dtype: str,
        size: int,
        make_groups: Callable[[int, Network], list[Group]] = two_phase_groups,
    ) -> None:
        self.groups = make_groups(size, Network(patience=20.0))
        self.shards: list[list[Tensor]] = [[] for _ in range(size)]
        self.scale: Tensor | None = None
        self.averagers = [self._averager(Wire.of(dtype), r) for r in range(size)]

    def _averager(self, wire: Wire, replica: int) -> GradientAverager:
        host = anything(
            gradient_shards=lambda: self.shards[replica], linear_buffers=lambda: (),
            tied_gradients=lambda **_: (), loss_scale=lambda: self.scale,
        )  # fmt: skip
        return GradientAverager(wire, host, anything(sync=self.groups[replica], ties={}))

    def average(self, gradients: Sequence[Sequence[Any]]) -> list[list[Tensor]]:
        """Average these gradients [replica][shard]; return those of each replica."""
        self.shards[:] = [[torch.as_tensor(each).clone() for each in mine] for mine in gradients]
        run_in_threads([lambda a=a: a.average(None) for a in self.averagers])  # type: ignore[misc]
        return self.shards


def expected_of(
    gradients: Sequence[Sequence[Any]], dtype: str, residuals: Sequence[Residuals | None]
) -> list[Any]:
    """Return the reference's averages of each shard. Mutates the residuals."""
    share = F32(1.0 / len(gradients))
    return [
        AllReduce([mine[i] * share for mine in gradients]).sum(dtype, residuals[i])
        for i in range(len(NUMELS))
    ]


@pytest.mark.parametrize("make_groups", [two_phase_groups, in_order_groups], ids=["gloo", "nccl"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", CODED)
def test_encoded_averages_equal_the_reference(
    dtype: str, size: int, make_groups: Callable[[int, Network], list[Group]]
) -> None:
    """Bit for bit over several steps, on all replicas, with the bytes that the wire announces.
    Catches a residual that is lost, doubled or used for another shard, and a missing share."""
    replicas = Replicas(dtype, size, make_groups)
    has_residual = dtype == INT8
    residuals = [Residuals.zeros(size, numel) if has_residual else None for numel in NUMELS]
    for step in range(NUM_STEPS):
        given = [gradients_of(replica, step) for replica in range(size)]
        expected = expected_of(given, dtype, residuals)
        for mine in replicas.average(given):
            for ours, theirs in zip(mine, expected, strict=True):
                np.testing.assert_array_equal(ours.numpy(), theirs)
    wire = Wire.of(dtype)
    announced = NUM_STEPS * sum(wire.payload_bytes(numel, size) for numel in NUMELS)
    assert [group.payload_bytes for group in replicas.groups] == [announced] * size
    counts = [len(averager.state_dict()) for averager in replicas.averagers]
    assert counts == [len(NUMELS) * has_residual] * size


def test_error_feedback_sends_what_a_step_has_lost() -> None:
    """A gradient far below the scale of its block arrives on average. Without feedback it is 0 at
    every step; a residual at one end alone loses it at the other."""
    replicas, total = Replicas(INT8, 2), torch.zeros(256)
    gradients = np.full(256, 1e-3, dtype=F32)
    gradients[0] = 1.0
    num_steps = 64
    for _ in range(num_steps):
        total += replicas.average([[gradients]] * 2)[0][0]
    assert total[1:].mean().item() == pytest.approx(num_steps * 1e-3, rel=0.15)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", CODED)
def test_nonfinite_gradients_reach_all_replicas_and_no_later_step(dtype: str, value: float) -> None:
    """All see them, and so skip the same steps; afterwards averages are finite. Catches a NaN that
    stays in a residual, and one that is sent as a finite number."""
    replicas = Replicas(dtype, 2)
    replicas.average([gradients_of(replica, 0) for replica in range(2)])
    given = [gradients_of(replica, 1) for replica in range(2)]
    given[1][3][300] = value
    first, second = replicas.average(given)
    assert not first[3][300].isfinite()
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert first[0].isfinite().all() and first[3][:256].isfinite().all()
    for averager in replicas.averagers:
        for residual in averager.state_dict():
            assert residual.sent.isfinite().all() and residual.summed.isfinite().all()
            assert residual.sent.numel() < 1300 or residual.sent[:256].any()
    later = [gradients_of(replica, 2) for replica in range(2)]
    mean = (later[0][3] + later[1][3]) / 2
    np.testing.assert_allclose(replicas.average(later)[0][3].numpy(), mean, atol=0.2)


def test_residuals_follow_the_loss_scale() -> None:
    """Gradients that are multiplied by a loss scale, which halves and doubles, average to the
    multiples of the same numbers. Catches a residual that stays in the units of an earlier step."""
    plain, scaled = Replicas(INT8, 2), Replicas(INT8, 2)
    for step, scale in enumerate((1024.0, 512.0, 512.0, 2048.0)):
        given = [gradients_of(replica, step) for replica in range(2)]
        scaled.scale = torch.tensor([scale])
        times = scaled.average([[each * F32(scale) for each in mine] for mine in given])
        for ours, theirs in zip(times[0], plain.average(given)[0], strict=True):
            assert torch.equal(ours, theirs * scale)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", CODED)
def test_half_precision_gradients_are_summed_in_fp32(dtype: str, half: torch.dtype) -> None:
    """The encoded sum of fp32 copies is rounded once. Catches gradients that are not written back,
    and a codec that reads 16-bit numbers as 32-bit ones."""
    replicas = Replicas(dtype, 2)
    given = [[torch.from_numpy(each).to(half) for each in gradients_of(r, 0)] for r in range(2)]
    halves = [[(each * 0.5).float().numpy() for each in mine] for mine in given]
    expected = [AllReduce(list(pair)).sum(dtype, None) for pair in zip(*halves, strict=True)]
    for mine in replicas.average(given):
        for ours, theirs in zip(mine, expected, strict=True):
            assert torch.equal(ours, torch.from_numpy(theirs).to(half))


@pytest.mark.parametrize("scale", [None, 4.0])
def test_restored_residuals_continue(scale: float | None) -> None:
    """Also if the loss scale has changed after the last step. Catches a residual that is not
    saved, or is saved in units of the earlier scale."""
    whole, resumed = Replicas(INT8, 2), Replicas(INT8, 2)
    steps = [[gradients_of(replica, step) for replica in range(2)] for step in range(3)]
    whole.scale = None if scale is None else torch.tensor([scale])
    for given in steps[:2]:
        whole.average(given)
    whole.scale = resumed.scale = None if scale is None else torch.tensor([scale / 2])
    resumed.shards[:] = [[each.clone() for each in mine] for mine in whole.shards]
    for to, origin in zip(resumed.averagers, whole.averagers, strict=True):
        to.load_state_dict([_copy(residual) for residual in origin.state_dict()])
    for ours, theirs in zip(resumed.average(steps[2]), whole.average(steps[2]), strict=True):
        assert all(map(torch.equal, ours, theirs))


def _copy(residual: Any) -> Any:
    return type(residual)(residual.sent.clone(), residual.summed.clone())


def test_residuals_begin_at_zero_after_they_are_freed() -> None:
    """Catches the residuals of a warm-up in the final phase."""
    used, new = Replicas(INT8, 2), Replicas(INT8, 2)
    used.average([gradients_of(replica, 0) for replica in range(2)])
    for averager in used.averagers:
        averager.free()
    given = [gradients_of(replica, 1) for replica in range(2)]
    for ours, theirs in zip(used.average(given), new.average(given), strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_other_types_have_no_residuals(dtype: str) -> None:
    """Catches memory that is allocated and saved for nothing."""
    replicas = Replicas(dtype, 1)
    replicas.average([gradients_of(0, 0)])
    assert not replicas.averagers[0].state_dict()
    replicas.averagers[0].load_state_dict(())
