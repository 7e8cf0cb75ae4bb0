"""Gradients averaged over the replicas, at every step of the warm-up and of the final phase.

In fp32 each gradient shard is all-reduced as it is. An encoded type sums all shards in one
exchange (`comm/wire.py`): all replicas decode the same bytes, and so get the same bits. With int8
what a step has lost is added to the next one, at the sender and at the rank that sums (error
feedback).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_edit.comm.compressed_all_reduce import Addend, Residual
from megatron_edit.comm.wire import Wire, start_exchange
from megatron_edit.engine.host import EngineGroups, Host
from megatron_edit.engine.rounds.synchronous import average_linear_buffers


class GradientAverager:
    """Averages the gradient shards over the replicas.

    Residuals take 4 (1 + 1 / N) bytes for each element of this rank's gradient shards, from the
    first use until `free`.

    Args:
        wire: type of the sums.
        host: has the gradients.
        groups: the communication groups.
    """

    def __init__(self, wire: Wire, host: Host, groups: EngineGroups) -> None:
        self._wire, self._host, self._groups = wire, host, groups
        self._residuals: list[Residual] = []  # of all gradient shards, in order
        self._loss_scale: Tensor | None = None  # that the residuals are multiplied by

    def average(self, num_tokens: Tensor | None) -> None:
        """Average the gradients over the replicas, and buffers that the host has updated.

        Collective: the sync group, and ties where copies could be averaged to different bits.
        Mutates: the host's gradients and linear buffers.

        Args:
            num_tokens: tokens that this replica's gradients were divided by, where the loss is per
                token: the average is then over the tokens of all replicas.
        """
        average_linear_buffers(self._host, self._groups)
        sync = self._groups.sync
        share: Tensor | float = 1.0 / sync.size
        if num_tokens is not None:
            total = num_tokens.detach().clone().double()
            sync.all_reduce(total)
            share = (num_tokens.double() / total.clamp(min=1)).float()
        shards = list(self._host.gradient_shards())
        for gradients in shards:
            gradients.mul_(share)
            if self._wire.codec is None:
                sync.all_reduce(gradients)
        if self._wire.codec is not None:
            self._sum_encoded(shards)
        # Copies of a parameter are summed by several sync groups. Encoded, they share scales with
        # other neighbours in each. In fp32 the sum of two addends is unique; for more it depends on
        # the order of addition, and so on their place in a group's buffers.
        if self._wire.codec is not None or sync.size > 2:
            self._tie_copies()

    def state_dict(self) -> Sequence[Residual]:
        """The residuals of all gradient shards, in order, for a checkpoint; empty where the wire
        has none. Tensors are not copied."""
        self._prepare_residuals()
        return self._residuals

    def load_state_dict(self, saved: Sequence[Residual]) -> None:
        """Restore what `state_dict` has returned; nothing where `saved` is empty."""
        if not saved:
            return
        self._prepare_residuals()
        for mine, loaded in zip(self._residuals, saved, strict=True):
            mine.sent.copy_(loaded.sent)
            mine.summed.copy_(loaded.summed)

    def free(self) -> None:
        """Drop the residuals: gradients are not averaged for a while. Later they begin at zero."""
        self._residuals, self._loss_scale = [], None

    def _sum_encoded(self, shards: Sequence[Tensor]) -> None:
        """Sum the shards over the replicas. Half-precision gradients are sent from fp32 copies."""
        self._prepare_residuals()
        values = [shard.float() for shard in shards]  # fp32 shards themselves
        residuals: Sequence[Residual | None] = self._residuals or [None] * len(shards)
        addends = [
            Addend(each, residual, False, self._wire.codec)
            for each, residual in zip(values, residuals, strict=True)
        ]
        start_exchange(self._groups.sync, addends).wait()
        for shard, summed in zip(shards, values, strict=True):
            if shard is not summed:
                shard.copy_(summed)
        for residual in self._residuals:
            # A block that is not finite: its errors are lost, and the next step is not affected.
            for errors in (residual.sent, residual.summed):
                errors.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _prepare_residuals(self) -> None:
        """Allocate the residuals if there are none, and rescale them if the loss scale of fp16 has
        changed: they are in units of scaled gradients."""
        if not self._wire.has_residual:
            return
        sync, scale = self._groups.sync, self._host.loss_scale()
        if not self._residuals:
            self._residuals = [
                self._wire.new_residual(shard.numel(), sync.size, sync.device)
                for shard in self._host.gradient_shards()
            ]
        elif scale is not None and self._loss_scale is not None:
            factor = scale / self._loss_scale  # a power of two: exact
            for residual in self._residuals:
                residual.sent.mul_(factor)
                residual.summed.mul_(factor)
        self._loss_scale = None if scale is None else scale.clone()

    def _tie_copies(self) -> None:
        """Broadcast the gradients of the first copy of each parameter to the other copies."""
        copies: dict[str, list[Tensor]] = {}
        for tie, gradient in self._host.tied_gradients(is_encoded=self._wire.codec is not None):
            copies.setdefault(tie, []).append(gradient)
        for tie, group in self._groups.ties.items():
            if tie in copies:
                together = torch.cat(copies[tie])
                group.broadcast(together)
                parts = together.split([copy.numel() for copy in copies[tie]])
                for copy, first in zip(copies[tie], parts, strict=True):
                    copy.copy_(first)
