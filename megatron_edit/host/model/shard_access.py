"""Main shards that an optimizer keeps in its own state, read and written through its accessors.

With ``--use-precision-aware-optimizer`` Megatron has no fp32 copy of its own: Transformer Engine's
Adam keeps it, as fp32 or as what bf16 parameters lack of it. With ``--optimizer-cpu-offload`` it is
a tensor of Megatron's hybrid optimizer, which may lie in host memory. Both are made anew by a load,
so they are looked up at each use.
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

    Before the first step there is no state, and theta is what the model holds: Adam will begin
    from that.

    Attributes:
        optimizer: that keeps it.
        model: bf16 or fp16 [n], a view of what the model reads; the optimizer's key of the state.
    """

    optimizer: FusedAdam
    model: Tensor

    def numel(self) -> int:
        """Elements of the shard."""
        return int(self.model.numel())

    def read(self) -> Tensor:
        """theta, fp32 [n]: Adam's master copy, joined where it is a remainder; the model's values
        before the first step."""
        if MASTER not in self.optimizer.state.get(self.model, {}):
            return self.model.detach().float()
        main = self.optimizer.get_unscaled_state(self.model, MASTER)
        return join_remainder(self.model.detach(), main) if main.dtype == torch.int16 else main

    def write(self, values: Tensor) -> None:
        """Make theta `values`, fp32 [n]. The model's part is rounded as Adam's kernels round it."""
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

    Where it is in host memory, the host waits for each copy: its own optimizer steps there.

    Attributes:
        optimizer: that keeps it.
        model: [n], a view of what the model reads; the optimizer's name of the shard.
    """

    optimizer: HybridOptimizer
    model: Tensor

    def numel(self) -> int:
        """Elements of the shard."""
        return int(self.model.numel())

    def read(self) -> Tensor:
        """theta, fp32 [n], on the device of the parameter: a copy, where it lives elsewhere."""
        return self._main.to(device=self.model.device, dtype=torch.float32)

    def write(self, values: Tensor) -> None:
        """Make theta `values`, fp32 [n], in the optimizer's copy and in what the model reads."""
        self._main.copy_(values)
        self.model.detach().copy_(values)

    @property
    def _main(self) -> Tensor:
        return self.optimizer.param_to_inner_param[self.model].detach()


def split_fp32(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as the nearest bf16 and an int16 remainder, bit for bit as Adam's kernels store it.

    Args:
        values: fp32 [n].
    """
    bits = values.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)  # the low half, as a signed number
    high = (bits >> 16) + (remainder < 0)  # rounded up where the low half is a half or more
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join_remainder(rounded: Tensor, remainder: Tensor) -> Tensor:
    """fp32 [n] from what `split_fp32` made of it, exactly.

    Args:
        rounded: bf16 [n].
        remainder: int16 [n].
    """
    high = rounded.contiguous().view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & _LOW)).view(torch.float32)
