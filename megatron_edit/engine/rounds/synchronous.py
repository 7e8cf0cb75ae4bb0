"""What replicas do in step: an equal start, the warm-up, an equal switch (method section 2), and
the final synchronous phase.

In the warm-up and in the final phase gradients are averaged over the replicas at every step. What
local training has left different becomes equal at the begin of the final phase: the last sync of
the rounds has landed, so that the parameters are equal already; inner moments, step counters, loss
scales and positions of the learning-rate schedule are each replica's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group, Work
from megatron_edit.engine.host import EngineGroups, Host, Reporter
from megatron_edit.engine.sync import drift
from megatron_edit.engine.sync.averages import tie_copies
from megatron_edit.method.moments import ALL_MOMENTS


def broadcast_first_replica(host: Host, groups: EngineGroups) -> float:
    """Give every replica the main shards of replica 0, and the rest of the model with them.

    Inner moments are not touched: they belong to each replica's own training.

    Collective: all ranks of all replicas.
    Mutates: main shards and model parameters.

    Returns:
        The largest difference that there was, on any rank of any replica.
    """
    for tensor in host.replicated_tensors():
        groups.sync.broadcast(tensor)
    device = groups.sync.device
    largest = torch.zeros((), device=device)
    for shard in host.plan.shards:
        mine = shard.gather(torch.empty(shard.numel, dtype=torch.float32, device=device))
        agreed = mine.clone()
        groups.sync.broadcast(agreed)
        if agreed.numel():
            largest = torch.maximum(largest, (agreed - mine).abs().max())
        shard.scatter(agreed)
        shard.publish()
    host.gather_parameters()
    everywhere = groups.meeting.all_gather(groups.replica.all_gather(largest).max())
    return float(everywhere.max())


def check_identical(host: Host, groups: EngineGroups, when: str) -> None:
    """Compare the parameters of all replicas.

    Collective: all ranks of all replicas.

    Args:
        host: has the parameters.
        groups: who communicates.
        when: this is, for the error.

    Raises:
        DriftError: they differ; the message names a unit.
    """
    drift.check(host.plan, groups, drift.plan_digests(host.plan), when)


def broadcast_if_different(host: Host, groups: EngineGroups, reporter: Reporter) -> None:
    """After warm-up: where the replicas differ after all, give them the parameters of replica 0.

    Collective: all ranks of all replicas.
    """
    if drift.differing_units(host.plan, groups, drift.plan_digests(host.plan))[0]:
        largest = broadcast_first_replica(host, groups)
        reporter.on_message(
            f"the replicas had rounded differently in warm-up (by up to {largest:.3e}); "
            "all now hold the parameters of replica 0"
        )


def average_gradients(host: Host, groups: EngineGroups, num_tokens: Tensor | None) -> None:
    """Average the gradient shards over the replicas.

    Collective: the sync group, and ties where copies could be averaged to different bits.
    Mutates: the host's gradients.

    Args:
        host: gives the gradients.
        groups: who communicates.
        num_tokens: tokens that this replica's gradients were divided by, where the loss is per
            token: the average is then over the tokens of all replicas.
    """
    sync = groups.sync
    share: Tensor | float = 1.0 / sync.size
    if num_tokens is not None:
        total = num_tokens.detach().clone().double()
        sync.all_reduce(total)
        share = (num_tokens.double() / total.clamp(min=1)).float()
    for gradients in host.gradient_shards():
        gradients.mul_(share)
        sync.all_reduce(gradients)
    # Copies of a parameter are summed by several sync groups. Two addends have one sum; that of
    # more depends on the order of adding, which depends on where they lie in a group's buffers.
    if sync.size > 2:
        for tie, gradient in host.tied_gradients():
            if tie in groups.ties:
                groups.ties[tie].broadcast(gradient)


def sum_counts(host: Host, groups: EngineGroups) -> None:
    """Before buffers that no optimizer owns move: let every replica see what all have counted.

    Collective: the sync group. Mutates: the host's counts.
    """
    _all_reduce_together(host.shared_counts(), groups, divisor=1)


def average_linear_buffers(host: Host, groups: EngineGroups) -> None:
    """After these buffers moved: mean of those that are linear in what was seen.

    Collective: the sync group. Mutates: the host's buffers.
    """
    _all_reduce_together(host.linear_buffers(), groups, divisor=groups.sync.size)


def _all_reduce_together(tensors: Sequence[Tensor], groups: EngineGroups, *, divisor: int) -> None:
    if not tensors or groups.sync.size == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    groups.sync.all_reduce(flat)
    flat /= divisor
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def begin_final_phase(
    host: Host, groups: EngineGroups, reporter: Reporter, accepted: Tensor
) -> None:
    """Make equal on all replicas what is not, and check that the parameters are.

    Collective: all ranks of all replicas. Mutates: inner moments, counters and the schedule.

    Args:
        host: trains.
        groups: who communicates.
        reporter: learns of moments that are reset.
        accepted: bool [N, U], which replicas the last sync accepted in which unit.

    Raises:
        DriftError: the parameters differ; the message names a unit.
    """
    check_identical(host, groups, "at the begin of the final synchronous phase")
    if groups.sync.size == 1:
        return
    if _hold_same_moments(host, groups):
        equalize_moments(host, groups, accepted)
    else:
        # An inner optimizer has no moments before its first applied step.
        host.reset_moments()
        reporter.on_message("not all replicas have made an optimizer step: inner moments are reset")
    equalize_counters(host, groups)
    equalize_schedule(host, groups)


def equalize_moments(host: Host, groups: EngineGroups, accepted: Tensor) -> None:
    """Replace each inner moment by its mean over the accepted replicas, in fp32; over all, where a
    unit accepts none. Elements that are not finite count as zero.

    Collective: the sync group, and those that hold copies. Mutates: the host's inner moments.

    Args:
        host: trains.
        groups: who communicates.
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
    """Take over replica 0's step counters and loss scales.

    Collective: the sync group. Mutates: the host's inner optimizers.
    """
    host.set_inner_counters(groups.meeting.all_gather(host.inner_counters())[0])


def equalize_schedule(host: Host, groups: EngineGroups) -> None:
    """Advance the learning-rate schedule to the furthest position of all replicas: one that has
    skipped a step since the last sync is behind.

    Collective: the sync group. Mutates: the host's schedule.
    """
    progress = host.progress()
    position = progress.schedule_position + progress.pending_schedule
    positions = groups.meeting.all_gather(torch.tensor([position], dtype=torch.int64))
    if behind := int(positions.max()) - position:
        host.advance_schedule(behind)


def _hold_same_moments(host: Host, groups: EngineGroups) -> bool:
    """Whether the inner optimizers of all replicas hold the same number of moments and counters."""
    sizes = torch.tensor([host.num_moment_elements(), len(host.inner_counters())])
    table = groups.meeting.all_gather(sizes)
    return bool((table == table[0]).all())


@dataclass
class CommonStop:
    """A stop in warm-up: all replicas make the same steps, so all must end after the same one.

    Attributes:
        group: the sync group.
    """

    group: Group
    _asked: tuple[Work, Tensor] | None = None

    def after_step(self, is_wanted: bool) -> bool:
        """After a step of the warm-up: whether all replicas stop now.

        What is wanted now is known to all after the next step, so that nobody waits for it.

        Collective: the sync group.
        """
        is_agreed = self.drain()
        wish = torch.tensor([float(is_wanted)], device=self.group.device)
        self._asked = (self.group.start_all_reduce(wish), wish)
        return is_agreed

    def drain(self) -> bool:
        """What the last step's question brought; nothing is under way afterwards."""
        if self._asked is None:
            return False
        (work, total), self._asked = self._asked, None
        work.wait()
        return float(total) > 0
