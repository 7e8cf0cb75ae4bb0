"""Begin of the final synchronous phase: what local training has left different becomes equal.

The parameters are equal already: the last sync of the rounds has landed. Inner moments, step
counters, loss scales and positions of the learning-rate schedule are this replica's own.
"""

from __future__ import annotations

import torch

from megatron_edit.engine.host import EngineGroups, Host, Reporter
from megatron_edit.engine.rounds.synchronous import check_identical


def begin_final_phase(host: Host, groups: EngineGroups, reporter: Reporter) -> None:
    """Make equal on all replicas what is not, and check that the parameters are.

    Collective: all ranks of all replicas. Mutates: inner moments, counters and the schedule.

    Raises:
        DriftError: the parameters differ; the message names a unit.
    """
    check_identical(host, groups, "at the begin of the final synchronous phase")
    if groups.sync.size == 1:
        return
    if _hold_same_moments(host, groups):
        equalize_moments(host, groups)
    else:
        # An inner optimizer has no moments before its first applied step.
        host.reset_moments()
        reporter.on_message("not all replicas have made an optimizer step: inner moments are reset")
    equalize_counters(host, groups)
    equalize_schedule(host, groups)


def equalize_moments(host: Host, groups: EngineGroups) -> None:
    """Replace each inner moment by its mean over the replicas, in fp32. Elements that are not
    finite count as zero.

    Collective: the sync group. Mutates: the host's inner moments.
    """
    sync = groups.sync
    for shard in host.plan.shards:
        for moment in host.inner_moments(shard):
            value = moment.read()
            value = torch.where(value.isfinite(), value, torch.zeros_like(value)).to(sync.device)
            sync.all_reduce(value)
            moment.write(value.div_(sync.size))


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
    moments = [moment.numel for s in host.plan.shards for moment in host.inner_moments(s)]
    sizes = torch.tensor([len(moments), sum(moments), len(host.inner_counters())])
    table = groups.meeting.all_gather(sizes)
    return bool((table == table[0]).all())
