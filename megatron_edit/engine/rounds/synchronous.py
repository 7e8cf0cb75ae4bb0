"""Synchronous training: identical start, warm-up, switch (method section 2), and final phase.

In the warm-up and in the final phase gradients are averaged over the replicas at every step
(below). When the final phase begins, the last sync of the rounds has landed, so that the
parameters are already identical; inner moments, step counters, loss scales and positions of the
learning-rate schedule still differ between the replicas and are equalized here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group, Work
from megatron_edit.comm.compressed_all_reduce import Addend, Residual
from megatron_edit.comm.wire import Wire, start_exchange
from megatron_edit.engine.host import EngineGroups, Host, Reporter
from megatron_edit.engine.sync import checks
from megatron_edit.engine.sync.averages import tie_copies
from megatron_edit.engine.units import UnitShard
from megatron_edit.errors import DriftError
from megatron_edit.method.digest import rounding_bound
from megatron_edit.method.moments import ALL_MOMENTS


def broadcast_first_replica(host: Host, groups: EngineGroups) -> None:
    """Broadcast the main shards of replica 0 and its tensors that no optimizer owns.

    Inner moments are not touched: each replica keeps its own.

    Collective: all ranks of all replicas.
    Mutates: main shards and model parameters.
    """
    for tensor in host.replicated_tensors():
        groups.sync.broadcast(tensor)
    for shard in host.plan.shards:
        shard.scatter(_of_first_replica(shard, groups.sync))
        shard.publish()
    host.gather_parameters()


def _of_first_replica(shard: UnitShard, sync: Group) -> Tensor:
    values = shard.gather(torch.empty(shard.numel, dtype=torch.float32, device=sync.device))
    sync.broadcast(values)
    return values


def check_identical(host: Host, groups: EngineGroups, when: str) -> None:
    """Check that the parameters of all replicas are identical.

    Collective: all ranks of all replicas.

    Args:
        when: time of the check, for the error message.

    Raises:
        DriftError: they differ; the message names a unit.
    """
    checks.check(host.plan, groups, checks.plan_digests(host.plan), when)


def broadcast_if_different(
    host: Host, groups: EngineGroups, reporter: Reporter, steps: int
) -> None:
    """After warm-up: if the replicas differ by rounding, broadcast the parameters of replica 0.

    Collective: all ranks of all replicas.

    Args:
        reporter: receives a message with the largest difference.

    Raises:
        DriftError: rounding does not explain the difference; the message names a unit.
    """
    if not checks.differing_units(host.plan, groups, checks.plan_digests(host.plan))[0]:
        return
    excess, difference, bound, unit = _worst_difference(host, groups, steps)
    if excess > 1:
        raise DriftError(
            f"the replicas differ after the warm-up in unit {host.plan.names[int(unit)]} by "
            f"{difference:.1e}, and rounding explains at most {bound:.1e}: gradients were not "
            "averaged in every step"
        )
    broadcast_first_replica(host, groups)
    reporter.on_message(
        f"the replicas had rounded differently in warm-up (by {difference:.3e}); "
        "all now hold the parameters of replica 0"
    )


def _worst_difference(host: Host, groups: EngineGroups, steps: int) -> list[float]:
    """The difference from replica 0 that is largest relative to what rounding explains.

    Collective: all ranks of all replicas; all get the same.

    Returns:
        The difference divided by its bound, the difference, the bound, and the unit's position.
    """
    sync = groups.sync
    rows = [torch.zeros(4, device=sync.device)]
    for shard in host.plan.shards:
        first = _of_first_replica(shard, sync)
        mine = shard.gather(torch.empty_like(first))
        if not shard.numel:
            continue
        is_equal = (mine == first) | (mine.isnan() & first.isnan())
        difference = (mine - first).abs().masked_fill(is_equal, 0.0).nan_to_num(nan=math.inf)
        bound = rounding_bound(first, steps, host.update_error)
        excess = (difference / bound).nan_to_num(nan=math.inf).masked_fill(is_equal, 0.0)
        worst = excess.argmax()
        index = torch.tensor(float(shard.index), device=sync.device)
        rows.append(torch.stack([excess[worst], difference[worst], bound[worst], index]))
    of_replica = groups.replica.all_gather(_first_largest(torch.stack(rows)))
    of_all = groups.meeting.all_gather(_first_largest(of_replica))
    return [float(value) for value in _first_largest(of_all)]


def _first_largest(rows: Tensor) -> Tensor:
    """The row whose first element is the largest."""
    return rows[rows[:, 0].argmax()]


def sum_counts(host: Host, groups: EngineGroups) -> None:
    """Sum the host's counts over the replicas, before it updates buffers from them.

    Collective: the sync group. Mutates: the host's counts.
    """
    _all_reduce_together(host.shared_counts(), groups, divisor=1)


def average_linear_buffers(host: Host, groups: EngineGroups) -> None:
    """Average the buffers that are linear in the data, after the host has updated them.

    Collective: the sync group. Mutates: the host's buffers.
    """
    _all_reduce_together(host.linear_buffers(), groups, divisor=groups.sync.size)


def _all_reduce_together(tensors: Sequence[Tensor], groups: EngineGroups, *, divisor: int) -> None:
    if not tensors or groups.sync.size == 1:
        return
    # Their types differ between Megatron's versions; integers are exact in fp64.
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
    groups.sync.all_reduce(flat)
    flat /= divisor
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def begin_final_phase(
    host: Host, groups: EngineGroups, reporter: Reporter, accepted: Tensor
) -> None:
    """Equalize inner moments, counters and schedules, and check that the parameters are identical.

    Collective: all ranks of all replicas. Mutates: inner moments, counters and the schedule.

    Args:
        host: has the inner optimizers and the schedule.
        reporter: receives a message if moments are reset.
        accepted: bool [N, U], which replicas the last sync accepted in which unit.

    Raises:
        DriftError: the parameters differ; the message names a unit.
    """
    check_identical(host, groups, "at the start of the final synchronous phase")
    if groups.sync.size == 1:
        return
    if _have_same_moments(host, groups):
        equalize_moments(host, groups, accepted)
    else:
        # An inner optimizer has no moments before its first applied step.
        host.reset_moments()
        reporter.on_message("not all replicas have made an optimizer step: inner moments are reset")
    equalize_counters(host, groups)
    equalize_schedule(host, groups)


def equalize_moments(host: Host, groups: EngineGroups, accepted: Tensor) -> None:
    """Replace each inner moment by its mean over the accepted replicas, in fp32; over all replicas
    where a unit accepts none. Elements that are not finite count as zero.

    Collective: the sync group, and the groups of copies. Mutates: the host's inner moments.

    Args:
        accepted: see `begin_final_phase`.
    """
    sync = groups.sync
    for shard in host.plan.shards:
        chosen = accepted[:, shard.index]
        chosen = chosen if bool(chosen.any()) else ~chosen
        means = {}
        for kind in ALL_MOMENTS.kinds:
            mean = torch.zeros(shard.numel, dtype=torch.float32, device=sync.device)
            if bool(chosen[sync.rank]):
                host.read_moments(shard, kind, mean)
                mean.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            sync.all_reduce(mean)
            means[kind] = mean.div_(int(chosen.sum()))
        for tie, group in groups.ties.items():
            tie_copies(shard, tuple(means.values()), tie, group)
        for kind, mean in means.items():
            host.write_moments(shard, kind, mean)


def equalize_counters(host: Host, groups: EngineGroups) -> None:
    """Set step counters and loss scales to those of replica 0.

    Collective: the sync group. Mutates: the host's inner optimizers.
    """
    host.set_inner_counters(groups.meeting.all_gather_json(host.inner_counters())[0])


def equalize_schedule(host: Host, groups: EngineGroups) -> None:
    """Advance the learning-rate schedule to the furthest position of all replicas; a replica that
    has skipped a step since the last sync is behind.

    Collective: the sync group. Mutates: the host's schedule.
    """
    progress = host.progress()
    position = progress.schedule_position + progress.pending_schedule
    positions = groups.meeting.all_gather(torch.tensor([position], dtype=torch.int64))
    if behind := int(positions.max()) - position:
        host.advance_schedule(behind)


def _have_same_moments(host: Host, groups: EngineGroups) -> bool:
    """Whether the inner optimizers of all replicas have the same number of moments."""
    table = groups.meeting.all_gather(torch.tensor([host.num_moment_elements()]))
    return bool((table == table[0]).all())


@dataclass
class CommonStop:
    """Agreement of all replicas to stop after the same step of the warm-up."""

    group: Group
    _pending: tuple[Work, Tensor] | None = None

    def after_step(self, is_requested: bool) -> bool:
        """Whether all replicas stop after this step of the warm-up.

        A request made now takes effect after the next step, so that no rank waits for it.

        Collective: the sync group.
        """
        is_agreed = self.drain()
        request = torch.tensor([float(is_requested)], device=self.group.device)
        self._pending = (self.group.start_all_reduce(request), request)
        return is_agreed

    def drain(self) -> bool:
        """Finish the pending all-reduce; return whether a replica requested to stop."""
        if self._pending is None:
            return False
        (work, total), self._pending = self._pending, None
        work.wait()
        return float(total) > 0


# ---- Gradients averaged over the replicas, at every step of the warm-up and of the final phase
#
# In fp32 each gradient shard is all-reduced as it is. An encoded type sums all shards in one
# exchange (`comm/wire.py`): all replicas decode the same bytes, and so get the same bits. With
# int8 what a step has lost is added to the next one, at the sender and at the rank that sums
# (error feedback).


class GradientAverager:
    """Averages the gradient shards over the replicas.

    Residuals take 4 (1 + 1 / N) bytes for each element of this rank's gradient shards, from the
    first use until `free`.
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
