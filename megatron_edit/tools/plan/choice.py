"""What `--edit-auto` would choose, predicted from the planner's link, machine and step."""

from __future__ import annotations

from functools import partial

from megatron_edit.config import EditConfig
from megatron_edit.host.settings import given_settings
from megatron_edit.method.auto import (
    INTERVALS,
    LEAST_ROUNDS,
    AutoChoice,
    AutoSetting,
    Measurement,
    choose,
)
from megatron_edit.method.expected_loss import WIRE_LOSS
from megatron_edit.method.schedule import last_local
from megatron_edit.tools.plan.exchanges import (
    TimingSetting,
    forward_seconds,
    lands_in_forward,
    largest_rank,
    local_work,
    shard_bytes,
)
from megatron_edit.tools.plan.job import Job


def predicted_choice(job: Job, config: EditConfig, setting: TimingSetting) -> AutoChoice:
    """Return the choice of a run whose measurements agree with the planner's setting.

    A training of unknown length is long enough for every interval.

    Args:
        job: the training.
        config: its settings, with `--edit-auto`.
        setting: link, machine and step.
    """
    rules = AutoSetting(
        given=given_settings(config),
        open=config.open_settings,
        target=config.auto_share,
        unit_numels=largest_rank(job),
        payload=lambda numel, wire: shard_bytes(job, config, wire, numel),
        depth=config.prefetch_units if lands_in_forward(job, config) else 1,
    )
    local_steps = LEAST_ROUNDS * INTERVALS[-1]
    if job.num_iterations is not None:
        last = last_local(job.num_iterations, config.final_sync_fraction)
        local_steps = last - config.warmup_steps
    return choose(rules, _measurement(job, config, setting), config.warmup_steps, local_steps)


def _measurement(job: Job, config: EditConfig, setting: TimingSetting) -> Measurement:
    """Return what a run would measure. All ranks of a host share its link; the machine's local work
    does not depend on the wire type."""
    machine, link, numels = setting.machine, setting.link, largest_rank(job)
    work_of = partial(local_work, config, machine, size=job.mesh.num_replicas)
    seconds_per_byte = max(link.seconds(job.mesh.ranks_per_host), machine.per_wire_byte)
    work = sum(map(work_of, numels)) / sum(numels)
    return Measurement(
        step=setting.step,
        forward=forward_seconds(job, setting),
        rate=1 / seconds_per_byte,
        latency=link.latency,
        work=dict.fromkeys(WIRE_LOSS, work),
    )
