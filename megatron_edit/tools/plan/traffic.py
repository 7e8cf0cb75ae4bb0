"""Bytes that leave a replica, by the closed forms that the engine counts with."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.comm.collectives import all_reduce_payload
from megatron_edit.comm.control import record_bytes
from megatron_edit.comm.wire import Wire, moment_bytes
from megatron_edit.config import EditConfig
from megatron_edit.host.settings import landing_of, moments_of
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.plan.job import Job


@dataclass(frozen=True)
class Traffic:
    """Payload between replicas.

    Attributes:
        per_replica: bytes that a replica sends in one exchange: of all units once, or in a step.
            Of moments that are averaged at every K-th sync alone, 1/K.
        per_rank: of these, the rank that sends most.
        per_host: a host.
        per_step: a replica, mean over the steps of a round.
    """

    per_replica: float
    per_rank: float
    per_host: float
    per_step: float


def unit_bytes(job: Job, config: EditConfig) -> tuple[int, ...]:
    """Payload that a replica sends of each unit, mean over the syncs."""
    return tuple(
        sum(_shard_bytes(job, config, row[unit]) for row in job.held)
        for unit in range(len(job.unit_names))
    )


def _shard_bytes(job: Job, config: EditConfig, numel: int) -> int:
    """Payload of a shard of a unit: its parameters, and moments at every K-th sync."""
    size, moments = job.mesh.num_replicas, moments_of(config)
    extra = round(moment_bytes(moments.rule, numel, size) / moments.interval)
    return Wire.of(config.sync_dtype).payload_bytes(numel, size) + extra


def control_bytes(job: Job, config: EditConfig) -> int:
    """Control records that a replica sends at one meeting."""
    strategy, size = STRATEGIES[config.strategy], job.mesh.num_replicas
    capacity = config.sync_interval if not strategy.is_timed else 0
    units = -(-len(job.unit_names) // config.fragments)
    each = record_bytes(capacity, units, 0, has_digests=not landing_of(config).is_immediate)
    return (size - 1) * each * job.mesh.ranks_per_replica


def sync_traffic(job: Job, config: EditConfig, round_steps: float) -> Traffic:
    """Of a round: every unit once."""
    control = control_bytes(job, config) * config.fragments
    total = sum(unit_bytes(job, config)) + control
    rank = max(sum(_shard_bytes(job, config, n) for n in row) for row in job.held)
    return Traffic(total, rank, total * job.mesh.host_share, total / round_steps)


def gradient_traffic(job: Job) -> Traffic:
    """Of a synchronous step with replicas: the warm-up, and `ddp`."""
    size = job.mesh.num_replicas
    each = [all_reduce_payload(job.storage.gradient_bytes * sum(row), size) for row in job.held]
    total = float(sum(each))
    return Traffic(total, max(each), total * job.mesh.host_share, total)


def stock_traffic(job: Job, *, reduces_by_all_reduce: bool) -> tuple[Traffic, float]:
    """Of a step of stock Megatron over all ranks, ordered by host, and the part of the gradients.

    A ring over R ranks has one link out of each host; in a reduce-scatter or an all-gather of n
    bytes it carries (R - 1) / R x n. Tensor and pipeline parallel ranks have rings of their own.

    Returns:
        The traffic, and how much of `per_host` are gradients.
    """
    mesh, numel = job.mesh, job.architecture.numel
    ring = mesh.num_shards * mesh.num_replicas
    share = (ring - 1) / ring if mesh.num_replicas > 1 else 0.0
    inside = mesh.tensor * mesh.pipeline  # ranks that hold the model together
    on_host = numel * min(1.0, mesh.ranks_per_host / inside) * share
    factor = 2 if reduces_by_all_reduce or not job.is_sharded else 1
    gradients = on_host * job.storage.gradient_bytes * factor
    parameters = on_host * job.storage.parameter_bytes if job.is_sharded else 0.0
    total = gradients + parameters
    replica = numel * share * (total / on_host if on_host else 0.0)
    return Traffic(replica, total / mesh.ranks_per_host, total, replica), gradients
