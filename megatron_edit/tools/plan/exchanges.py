"""Traffic of exchanges, and the time that they cost a training.

Bytes use the closed forms of the engine. Seconds come from the simulation in `method/cost.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_edit.comm.collectives import all_reduce_payload
from megatron_edit.comm.compressed_all_reduce import Chunks
from megatron_edit.comm.control import record_bytes
from megatron_edit.comm.wire import Wire, moment_bytes
from megatron_edit.config import EditConfig
from megatron_edit.constants import BLOCKING, FP32, FP32_BYTES
from megatron_edit.host.settings import landing_of, moments_of
from megatron_edit.method.cost import Cost, UnitExchange, gaps_of_round, round_cost
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.traffic import ElementBytes, Layout, baseline_bytes
from megatron_edit.tools.plan.job import Job
from megatron_edit.tools.plan.machine import Link, Machine


@dataclass(frozen=True)
class Traffic:
    """Payload between replicas.

    Attributes:
        per_replica: bytes that a replica sends in one exchange: all units once, or one step.
            Moments that are averaged at every K-th sync only count 1/K.
        per_rank: of these, by the rank that sends most.
        per_host: of these, by a host.
        per_step: by a replica, mean over the steps of a round.
    """

    per_replica: float
    per_rank: float
    per_host: float
    per_step: float


def unit_bytes(job: Job, config: EditConfig) -> tuple[int, ...]:
    """Return the payload that a replica sends of each unit, mean over the syncs."""
    return tuple(
        sum(shard_bytes(job, config, config.sync_dtype, row[unit]) for row in job.rank_numels)
        for unit in range(len(job.unit_names))
    )


def shard_bytes(job: Job, config: EditConfig, wire: str, numel: int) -> int:
    """Return the payload of a shard of a unit: parameters, and moments at every K-th sync.

    Args:
        config: its settings, of which `sync_dtype` is not used.
        numel: elements of the shard.
    """
    size, moments = job.mesh.num_replicas, moments_of(config)
    extra = round(moment_bytes(moments.rule, numel, size) / moments.interval)
    return Wire.of(wire).payload_bytes(numel, size) + extra


def cut_lines(job: Job, config: EditConfig, of: Sequence[int]) -> Iterator[str]:
    """Yield what a sync sends out of a site, or of hosts that replicas share.

    Args:
        of: place of each replica (`hosts.places_of`); empty yields nothing.
    """
    if of:
        wires = dict.fromkeys((config.sync_dtype, FP32))
        sent = (
            f"{sum(cut_bytes(Wire.of(wire), n, of) for row in job.rank_numels for n in row):,} "
            f"bytes in {wire}"
            for wire in wires
        )
        places = ", ".join(f"{replica} at {place}" for replica, place in enumerate(of))
        yield f"replica {places}: a sync of all units sends out of a place {', '.join(sent)}"


def cut_bytes(wire: Wire, numel: int, of: Sequence[int]) -> int:
    """Return the payload of a sum that leaves a place, the largest of all places.

    Encoded sums are formed in a place first; a ring of fp32 follows the order of the ranks.

    Args:
        numel: elements of the addends.
        of: place of each rank.
    """
    size, num_places = len(of), len(set(of))

    def leaving(place: int) -> int:
        mine = [rank for rank, each in enumerate(of) if each == place]
        num_others = size - len(mine)
        if wire.codec is None:
            num_edges = sum(of[(rank + 1) % size] != place for rank in mine)
            return num_edges * all_reduce_payload(FP32_BYTES * numel, size)
        if not wire.codec.encodes_sums:
            return len(mine) * num_others * wire.codec.encoded_bytes(numel)
        width = wire.codec.encoded_bytes(Chunks.split(numel, size, wire.codec).numel)
        return width * (num_others + len(mine) * (num_places - 1))

    return max(leaving(place) for place in set(of))


def control_bytes(job: Job, config: EditConfig) -> int:
    """Return the bytes of control records that a replica sends at one meeting."""
    strategy, size = STRATEGIES[config.strategy], job.mesh.num_replicas
    capacity = config.sync_interval if not strategy.is_timed else 0
    units = -(-len(job.unit_names) // config.fragments)
    each = record_bytes(capacity, units, 0, has_digests=not landing_of(config).is_immediate)
    return (size - 1) * each * job.mesh.ranks_per_replica


def sync_traffic(job: Job, config: EditConfig, round_steps: float) -> Traffic:
    """Return the traffic of a round: every unit once."""
    control = control_bytes(job, config) * config.fragments
    total = sum(unit_bytes(job, config)) + control
    rank = max(
        sum(shard_bytes(job, config, config.sync_dtype, numel) for numel in row)
        for row in job.rank_numels
    )
    return Traffic(total, rank, total * job.mesh.host_share, total / round_steps)


def gradient_traffic(job: Job, config: EditConfig) -> Traffic:
    """Return the traffic of a synchronous step with replicas: the warm-up, and `ddp`."""
    size, wire = job.mesh.num_replicas, Wire.of(config.warmup_dtype)
    numels = [sum(row) for row in job.rank_numels]
    if wire.codec is None:
        nbytes = job.storage.gradient_bytes
        each = [all_reduce_payload(nbytes * numel, size) for numel in numels]
    else:
        each = [wire.payload_bytes(numel, size) for numel in numels]
    total = float(sum(each))
    return Traffic(total, max(each), total * job.mesh.host_share, total)


def stock_traffic(job: Job, *, reduces_by_all_reduce: bool) -> tuple[Traffic, float]:
    """Return the traffic of a step of stock Megatron, and the gradients' part of it.

    Its ranks are all ranks, ordered by host.

    A ring over R ranks has one link out of each host; in a reduce-scatter or an all-gather of n
    bytes it carries (R - 1) / R x n. Tensor and pipeline parallel ranks have rings of their own.
    Several optimizer instances have smaller rings: `compare/traffic.py`.

    Returns:
        The traffic, and the bytes of gradients in `per_host`.
    """
    mesh, numel = job.mesh, job.architecture.numel
    if mesh.num_instances > 1:
        return _instance_traffic(job, reduces_by_all_reduce=reduces_by_all_reduce)
    ring = mesh.num_shards * mesh.num_replicas
    share = (ring - 1) / ring if mesh.num_replicas > 1 else 0.0
    inside = mesh.tensor * mesh.pipeline  # ranks that hold the model together
    on_host = numel * min(1.0, mesh.ranks_per_host / inside) * share
    factor = 2 if reduces_by_all_reduce or not job.is_sharded else 1
    gradients = on_host * job.storage.gradient_bytes * factor
    parameters = on_host * job.gathered_bytes if job.is_sharded else 0.0
    total = gradients + parameters
    replica = numel * share * (total / on_host if on_host else 0.0)
    return Traffic(replica, total / mesh.ranks_per_host, total, replica), gradients


def _instance_traffic(job: Job, *, reduces_by_all_reduce: bool) -> tuple[Traffic, float]:
    """Return the same for several optimizer instances over all ranks.

    The launch without replicas has as many instances as a replica.
    """
    mesh, storage = job.mesh, job.storage
    again = storage.gradient_bytes if reduces_by_all_reduce else 0

    def sent(ranks: int, element: ElementBytes) -> float:
        """Return the bytes that `ranks` consecutive ranks send to others in a step."""
        machines = mesh.world_size // ranks
        layout = Layout(machines, ranks, job.architecture.numel, mesh.tensor * mesh.pipeline,
                        mesh.num_instances)  # fmt: skip
        return baseline_bytes(layout, num_steps=1, element=element) / machines

    gradients = sent(mesh.ranks_per_host, ElementBytes(storage.gradient_bytes, again))
    parameters = ElementBytes(0, job.gathered_bytes)
    total = gradients + sent(mesh.ranks_per_host, parameters)
    replica = sent(mesh.ranks_per_replica, ElementBytes(storage.gradient_bytes, again))
    replica += sent(mesh.ranks_per_replica, parameters)
    return Traffic(replica, total / mesh.ranks_per_host, total, replica), gradients


@dataclass(frozen=True)
class TimingSetting:
    """The setting that times are computed for.

    Attributes:
        link: between hosts.
        machine: of a rank.
        step: seconds of a step without any exchange between replicas.
        forward_share: share of the forward pass in a step's compute.
    """

    link: Link
    machine: Machine
    step: float
    forward_share: float


def sync_cost(
    job: Job, config: EditConfig, setting: TimingSetting, *, blocks: bool = False
) -> Cost:
    """Return the cost of a round of a strategy with outer steps.

    Args:
        setting: link, machine and step.
        blocks: whether syncs are blocking, whatever the settings say.
    """
    landing = landing_of(config)
    overlaps = lands_in_forward(job, config) and not blocks
    round_seconds = round_of(config, setting.step)
    head_start = min(config.delay_steps * setting.step, round_seconds)
    if landing.at_next_meeting:
        head_start = round_seconds
    steps = 0 if STRATEGIES[config.strategy].is_timed else config.sync_interval
    return round_cost(
        _exchanges(job, config, setting, hides=overlaps),
        gaps=gaps_of_round(round_seconds, config.fragments, steps),
        depth=config.prefetch_units if overlaps else 1,
        head_start=0.0 if blocks else head_start,
        latency=setting.link.latency,
        burst=setting.link.burst_seconds,
    )


def lands_in_forward(job: Job, config: EditConfig) -> bool:
    """Return whether syncs land unit by unit in the forward pass."""
    return job.overlaps_gather and config.sync_mode != BLOCKING and not config.check_commits


def round_of(config: EditConfig, step: float) -> float:
    """Return the seconds of training between two syncs of a unit."""
    is_timed = STRATEGIES[config.strategy].is_timed
    return config.sync_seconds if is_timed else config.sync_interval * step


def synchronous_cost(job: Job, config: EditConfig, setting: TimingSetting) -> Cost:
    """Return the cost of a step of `ddp` or of the warm-up: gradients are averaged after it."""
    traffic = gradient_traffic(job, config)
    is_coded = Wire.of(config.warmup_dtype).codec is not None  # then all are one exchange
    num_exchanges = 1 if is_coded else len(job.unit_names)
    steps = _ring_steps(job, config.warmup_dtype) * num_exchanges
    slowest = setting.machine.per_wire_byte * traffic.per_rank
    wire = max(setting.link.seconds(traffic.per_host), slowest) + steps * setting.link.latency
    return Cost(wire, 0.0, wire, setting.step, wire)


def stock_cost(job: Job, setting: TimingSetting) -> Cost:
    """Return the cost of a step of stock Megatron over all ranks, with ideal overlap.

    Gradients overlap with the backward pass of the last micro-batch, parameters with the forward
    pass of the first.
    """
    machine, link = setting.machine, setting.link
    traffic, gradients = stock_traffic(job, reduces_by_all_reduce=machine.reduces_by_all_reduce)
    forward = forward_seconds(job, setting)
    backward = setting.step / job.num_micro_batches - forward
    reduce = link.seconds(gradients)
    gather = link.seconds(traffic.per_host - gradients) * machine.gather_factor
    work = machine.per_wire_byte * traffic.per_rank
    exposed = max(0.0, reduce - backward * job.overlaps_reduce)
    exposed += max(0.0, gather - forward * job.overlaps_gather)
    # The rank's local work for the exchange cannot overlap with its compute.
    longest = max(reduce, gather)
    return Cost(reduce + gather, work, max(exposed, work), setting.step, longest)


def forward_seconds(job: Job, setting: TimingSetting) -> float:
    """Return the seconds of the forward pass that a sync overlaps: of the first micro-batch."""
    return setting.step / job.num_micro_batches * setting.forward_share


def _exchanges(
    job: Job, config: EditConfig, setting: TimingSetting, *, hides: bool
) -> list[UnitExchange]:
    machine, link, size = setting.machine, setting.link, job.mesh.num_replicas
    numels = job.architecture.unit_numels()
    forward = forward_seconds(job, setting) if hides else 0.0
    total = sum(numels[unit] for unit in job.unit_names[1:])
    ring_steps = _ring_steps(job, config.sync_dtype)
    exchanges = []
    shards = zip(unit_bytes(job, config), largest_shards(job), strict=True)
    for number, (nbytes, largest) in enumerate(shards):
        slowest = machine.per_wire_byte * nbytes / job.mesh.ranks_per_replica
        wire = max(link.seconds(nbytes * job.mesh.host_share), slowest) + ring_steps * link.latency
        work = local_work(config, machine, largest, size)
        if config.offload:  # anchor and momentum, in both directions, during the exchange
            wire = max(wire, 16 * largest / machine.copy_bandwidth)
        share = numels[job.unit_names[number]] / total if number else 0.0  # a look-up takes no time
        exchanges.append(UnitExchange(wire, work, forward * share))
    return exchanges


def largest_shards(job: Job) -> tuple[int, ...]:
    """Return the elements of each unit on the rank that has most of it."""
    return tuple(map(max, zip(*job.rank_numels, strict=True)))


def largest_rank(job: Job) -> tuple[int, ...]:
    """Return the elements of each unit on the rank that has most of all."""
    return tuple(max(job.rank_numels, key=sum))


def local_work(config: EditConfig, machine: Machine, numel: int, size: int) -> float:
    """Return the seconds of a rank's local work in the sync of a shard of a unit.

    Args:
        numel: elements of the shard.
        size: N, replicas.
    """
    work = machine.per_element * numel
    work += machine.per_sent_byte * all_reduce_payload(4 * numel, size)
    work += machine.per_ring_step * 2 * (size - 1)
    return work + (4 * numel / machine.copy_bandwidth if config.offload else 0.0)


def _ring_steps(job: Job, wire: str) -> int:
    """Return the number of messages that a unit's exchange waits for, one after another."""
    if job.mesh.num_replicas == 1:
        return 0
    return Wire.of(wire).num_phases or 2 * (job.mesh.num_replicas - 1)
