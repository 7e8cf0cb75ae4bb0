"""Accessors for main shards that are stored in the state of an optimizer.

With ``--use-precision-aware-optimizer`` Megatron has no fp32 copy: Transformer Engine's Adam has
it, as fp32 or as the remainder of bf16 parameters. With ``--optimizer-cpu-offload`` it is a tensor
of Megatron's hybrid optimizer, which may be in host memory. Loading a checkpoint replaces both, so
that they are looked up at each use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.host.seams.megatron import FusedAdam, HybridOptimizer

MASTER = "master_param"
_LOW = 0xFFFF


@dataclass(frozen=True)
class AdamShard:
    """A main shard in the state of Transformer Engine's Adam.

    Before the first step there is no state, and theta is the model's shard, from which Adam will
    begin.

    Attributes:
        optimizer: optimizer with the state.
        model: bf16 or fp16 [n], a view of the model's parameter; the optimizer's key of the state.
    """

    optimizer: FusedAdam
    model: Tensor

    def numel(self) -> int:
        """Elements of the shard."""
        return int(self.model.numel())

    def read(self) -> Tensor:
        """Return theta, fp32 [n]: Adam's main copy, or the model's values before the first step.

        A main copy that is stored as a remainder is joined with the model's values."""
        if MASTER not in self.optimizer.state.get(self.model, {}):
            return self.model.detach().float()
        main = self.optimizer.get_unscaled_state(self.model, MASTER)
        return join_remainder(self.model.detach(), main) if main.dtype == torch.int16 else main

    def write(self, values: Tensor) -> None:
        """Set theta to `values`, fp32 [n]; the model's shard is rounded as by Adam's kernels."""
        state, model = self.optimizer.state.get(self.model, {}), self.model.detach()
        if MASTER in state and state[MASTER].dtype == torch.int16:
            rounded, remainder = split_fp32(values)
            model.copy_(rounded)
            self.optimizer.set_scaled_state(self.model, MASTER, remainder)
            return
        model.copy_(values)
        if MASTER in state:
            self.optimizer.set_scaled_state(self.model, MASTER, values)


@dataclass(frozen=True)
class HybridShard:
    """A main shard of Megatron's hybrid optimizer, on the device or in host memory.

    In host memory, the host blocks for each copy, because the CPU optimizer uses the shard.

    Attributes:
        optimizer: optimizer with the shard.
        model: [n], a view of the model's parameter; the optimizer's key of the shard.
    """

    optimizer: HybridOptimizer
    model: Tensor

    def numel(self) -> int:
        """Elements of the shard."""
        return int(self.model.numel())

    def read(self) -> Tensor:
        """Return theta, fp32 [n], on the parameter's device: a copy if it is stored elsewhere."""
        return self._main.to(device=self.model.device, dtype=torch.float32)

    def write(self, values: Tensor) -> None:
        """Set theta to `values`, fp32 [n], in the optimizer's copy and in the model's parameter."""
        self._main.copy_(values)
        self.model.detach().copy_(values)

    @property
    def _main(self) -> Tensor:
        return self.optimizer.param_to_inner_param[self.model].detach()


def split_fp32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into the nearest bf16 and an int16 remainder, bit for bit as Adam's kernels do.

    Args:
        values: fp32 [n].
    """
    bits = values.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)  # the low half, as a signed number
    high = (bits >> 16) + (remainder < 0)  # rounded up if the low half is at least a half
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join_remainder(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return the exact fp32 [n] from the results of `split_fp32`.

    Args:
        rounded: bf16 [n].
        remainder: int16 [n].
    """
    high = rounded.contiguous().view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & _LOW)).view(torch.float32)
