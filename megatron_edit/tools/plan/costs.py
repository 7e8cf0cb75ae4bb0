"""Bytes, seconds and memory of a training's exchanges.

Bytes use the closed forms of the engine. Seconds come from the simulation in `method/cost.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_edit.comm.collectives import all_reduce_payload
from megatron_edit.comm.compressed_all_reduce import Chunks
from megatron_edit.comm.control import record_bytes
from megatron_edit.comm.wire import Wire, moment_bytes
from megatron_edit.config import EditConfig
from megatron_edit.constants import (
    ADAM,
    BF16,
    BLOCKING,
    FP32,
    FP32_BYTES,
    MUON,
    SGD,
    SUPPORTED_OPTIMIZERS,
)
from megatron_edit.errors import UsageError
from megatron_edit.method.cost import Cost, UnitExchange, gaps_of_round, round_cost
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.moments import MomentSchedule
from megatron_edit.method.settings import Settings
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.flags import SHARDED_FLAG
from megatron_edit.tools.compare.traffic import ElementBytes, Layout, baseline_bytes
from megatron_edit.tools.plan.job import Job
from megatron_edit.tools.plan.values import TrainingFlags

DEVICE, HOST = "device", "host"  # places of memory
_BYTES = {FP32: FP32_BYTES, "fp16": 2, BF16: 2, "fp8": 1}
SYNCING, SYNCHRONOUS = "during a sync", "in synchronous steps"  # when it is allocated


# ---- What the exchanges run on


@dataclass(frozen=True)
class Link:
    """The link between two hosts.

    Attributes:
        bandwidth: bits per second of a host in each direction.
        latency: seconds until a message has arrived.
        burst_seconds: length of the burst, in seconds at `bandwidth`, that a shaped link (a token
            bucket) sends at once after it was idle; 0 for a link without shaping.
    """

    bandwidth: float
    latency: float = 0.0
    burst_seconds: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds to transfer some bytes, without the latency."""
        return 8 * nbytes / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """Costs of a rank's local work, and properties of its communication library.

    Attributes:
        per_element: seconds for every element of a rank's shard: norm, addend, outer step, copies.
        per_sent_byte: seconds for every byte that a ring of fp32 would send.
        per_ring_step: seconds for every step of the ring of every unit.
        copy_bandwidth: bytes per second between host memory and device, for offload.
        reduces_by_all_reduce: whether a reduce-scatter sends what an all-reduce does (gloo).
        per_wire_byte: least seconds of a rank to send a byte, on any link.
        gather_factor: seconds of a gather over those that its bytes need.
    """

    name: str
    per_element: float
    per_sent_byte: float
    per_ring_step: float
    copy_bandwidth: float
    reduces_by_all_reduce: bool
    per_wire_byte: float = 0.0
    gather_factor: float = 1.0


# Fitted to runs on two cores without a GPU. Costs of a sync to benchmarks/results/
# growth_2cpu_202611.md, over a link without a limit, least of 32: 2.92 ns for every byte that a
# ring sends, and 1.25 ms a unit at N = 2, where a ring has two steps. Of the 2.92 ns, 1.2 are
# attributed to gloo: the cost per byte of stock Megatron's step over a link without a limit
# (overlap_2cpu_202611.md). That its gathers take 1.6 times as long as their bytes is from the run
# at 20 Mbit/s. All other runs are predictions (docs/plan.md).
CPU = Machine("cpu", 0.0, 1.72e-9, 0.625e-3, 5e9, True, 1.2e-9, 1.6)
# Not measured: about 20 passes over 4 bytes an element at 1.5 TB/s, and a dozen kernel launches a
# unit.
GPU = Machine("gpu", 80 / 1.5e12, 0.0, 20e-6, 20e9, False)


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

    def forward_seconds(self, job: Job) -> float:
        """Return the seconds of the forward pass that a sync overlaps: of the first micro-batch."""
        return self.step / job.num_micro_batches * self.forward_share


# ---- Bytes


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


def shard_bytes(job: Job, config: EditConfig, wire: str, numel: int) -> int:
    """Return the payload of a shard of a unit: parameters, and moments at every K-th sync.

    Args:
        config: its settings, of which `sync_dtype` is not used.
        numel: elements of the shard.
    """
    size, moments = job.mesh.num_replicas, MomentSchedule.of(config)
    extra = round(moment_bytes(moments.rule, numel, size) / moments.interval)
    return Wire.of(wire).payload_bytes(numel, size) + extra


def sync_traffic(job: Job, config: EditConfig, round_steps: float) -> Traffic:
    """Return the traffic of a round: every unit once, and the control records of its meetings."""
    strategy, size = STRATEGIES[config.strategy], job.mesh.num_replicas
    units = -(-len(job.rank_numels[0]) // config.fragments)
    capacity = 0 if strategy.is_timed else config.sync_interval
    record = record_bytes(capacity, units, 0, has_digests=not LandingRule.of(config).is_immediate)
    control = (size - 1) * record * job.mesh.ranks_per_replica * config.fragments
    send = partial(shard_bytes, job, config, config.sync_dtype)
    by_rank = [sum(map(send, row)) for row in job.rank_numels]
    total = sum(by_rank) + control
    return Traffic(total, max(by_rank), total * job.mesh.host_share, total / round_steps)


def gradient_traffic(job: Job, config: EditConfig) -> Traffic:
    """Return the traffic of a synchronous step with replicas: the warm-up, and `ddp`. With a hub it
    is a round of one step."""
    if (rounds := _settings_of_one_step(job, config)) is not None:
        return sync_traffic(job, rounds, 1)
    size, wire = job.mesh.num_replicas, Wire.of(config.warmup_dtype)
    numels = [sum(row) for row in job.rank_numels]
    if wire.codec is None:
        each = [all_reduce_payload(job.gradient_bytes * numel, size) for numel in numels]
    else:
        each = [wire.payload_bytes(numel, size) for numel in numels]
    total = float(sum(each))
    return Traffic(total, max(each), total * job.mesh.host_share, total)


def stock_traffic(job: Job, *, reduces_by_all_reduce: bool) -> tuple[Traffic, float]:
    """Return the traffic of a step of stock Megatron, whose ranks are ordered by host.

    The launch without replicas has as many optimizer instances as a replica.

    Returns:
        The traffic, and the bytes of gradients in `per_host`.
    """
    mesh, width = job.mesh, job.gradient_bytes
    if mesh.num_replicas == 1:
        return Traffic(0.0, 0.0, 0.0, 0.0), 0.0
    all_reduces = reduces_by_all_reduce or not job.is_sharded
    gradient = ElementBytes(width, width if all_reduces else 0)
    parameter = ElementBytes(0, job.parameter_bytes if job.is_sharded else 0)

    def sent(ranks: int, element: ElementBytes) -> float:
        """Return the bytes that `ranks` consecutive ranks send to others in a step."""
        machines = mesh.world_size // ranks
        layout = Layout(machines, ranks, job.architecture.numel, mesh.tensor * mesh.pipeline,
                        mesh.num_instances)  # fmt: skip
        return baseline_bytes(layout, num_steps=1, element=element) / machines

    gradients = sent(mesh.ranks_per_host, gradient)
    total = gradients + sent(mesh.ranks_per_host, parameter)
    replica = sent(mesh.ranks_per_replica, gradient) + sent(mesh.ranks_per_replica, parameter)
    return Traffic(replica, total / mesh.ranks_per_host, total, replica), gradients


def cut_lines(job: Job, config: EditConfig, of: Sequence[int]) -> Iterator[str]:
    """Yield what a sync sends out of a site, or of hosts that replicas share.

    Args:
        of: place of each replica (`hosts.places_of`); empty yields nothing.
    """
    if of:
        sent = (
            f"{sum(cut_bytes(Wire.of(wire), n, of) for row in job.rank_numels for n in row):,} "
            f"bytes in {wire}"
            for wire in dict.fromkeys((config.sync_dtype, FP32))
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


# ---- Seconds


def sync_cost(job: Job, config: EditConfig, setting: TimingSetting) -> Cost:
    """Return the cost of a round of a strategy with outer steps."""
    is_timed = STRATEGIES[config.strategy].is_timed
    overlaps = lands_in_forward(job, config)
    length = config.sync_seconds if is_timed else config.sync_interval * setting.step
    delay = length if LandingRule.of(config).at_next_meeting else config.delay_steps * setting.step
    return round_cost(
        _exchanges(job, config, setting, hides=overlaps),
        gaps=gaps_of_round(length, config.fragments, 0 if is_timed else config.sync_interval),
        depth=config.prefetch_units if overlaps else 1,
        head_start=min(delay, length),
        latency=setting.link.latency,
        burst=setting.link.burst_seconds,
    )


def lands_in_forward(job: Job, config: EditConfig) -> bool:
    """Return whether syncs land unit by unit in the forward pass."""
    return job.overlaps_gather and config.sync_mode != BLOCKING and not config.check_commits


def synchronous_cost(job: Job, config: EditConfig, setting: TimingSetting) -> Cost:
    """Return the cost of a step of `ddp` or of the warm-up: gradients are averaged after it. With a
    hub parameters are, in a sync that training waits for."""
    if (rounds := _settings_of_one_step(job, config)) is not None:
        link, exchanges = setting.link, _exchanges(job, rounds, setting, hides=False)
        return round_cost(
            exchanges, gaps=[setting.step], depth=1, head_start=0.0, latency=link.latency,
            burst=link.burst_seconds,
        )  # fmt: skip
    traffic = gradient_traffic(job, config)
    is_coded = Wire.of(config.warmup_dtype).codec is not None  # then all are one exchange
    num_exchanges = 1 if is_coded else len(job.rank_numels[0])
    steps = _ring_steps(job, config.warmup_dtype) * num_exchanges
    slowest = setting.machine.per_wire_byte * traffic.per_rank
    wire = max(setting.link.seconds(traffic.per_host), slowest) + steps * setting.link.latency
    return Cost(wire, 0.0, wire, setting.step, wire)


def _settings_of_one_step(job: Job, config: EditConfig) -> EditConfig | None:
    """Return the settings of the rounds of one step that warm-up and final phase have with a hub:
    all units are exchanged at once, without moments. None where gradients are averaged: without a
    hub, and with `ddp`, which a plan compares others with."""
    if not job.is_elastic or STRATEGIES[config.strategy].endless_warmup:
        return None
    return replace(
        config, auto=False, auto_share=Settings.auto_share, fragments=1, delay_steps=0, mix=0.0,
        average_moments="none", average_moments_every=1,
    )  # fmt: skip


def stock_cost(job: Job, setting: TimingSetting) -> Cost:
    """Return the cost of a step of stock Megatron over all ranks, with ideal overlap.

    Gradients overlap with the backward pass of the last micro-batch, parameters with the forward
    pass of the first.
    """
    machine, link = setting.machine, setting.link
    traffic, gradients = stock_traffic(job, reduces_by_all_reduce=machine.reduces_by_all_reduce)
    forward = setting.forward_seconds(job)
    backward = setting.step / job.num_micro_batches - forward
    reduce = link.seconds(gradients)
    gather = link.seconds(traffic.per_host - gradients) * machine.gather_factor
    work = machine.per_wire_byte * traffic.per_rank
    exposed = (
        max(0.0, reduce - backward * job.words.has("--overlap-grad-reduce"))
        + max(0.0, gather - forward * job.overlaps_gather)
    )  # fmt: skip
    # The rank's local work for the exchange cannot overlap with its compute.
    return Cost(reduce + gather, work, max(exposed, work), setting.step, max(reduce, gather))


def _exchanges(
    job: Job, config: EditConfig, setting: TimingSetting, *, hides: bool
) -> list[UnitExchange]:
    machine, link, mesh = setting.machine, setting.link, job.mesh
    numels = list(job.architecture.unit_numels().values())
    numels[0] = 0  # a look-up takes no time
    forward = setting.forward_seconds(job) if hides else 0.0
    latency = _ring_steps(job, config.sync_dtype) * link.latency
    exchanges = []
    for numel, shards in zip(numels, zip(*job.rank_numels, strict=True), strict=True):
        nbytes = sum(shard_bytes(job, config, config.sync_dtype, shard) for shard in shards)
        slowest = machine.per_wire_byte * nbytes / mesh.ranks_per_replica
        wire = max(link.seconds(nbytes * mesh.host_share), slowest) + latency
        if config.offload:  # anchor and momentum, in both directions, during the exchange
            wire = max(wire, 16 * max(shards) / machine.copy_bandwidth)
        work = local_work(config, machine, max(shards), mesh.num_replicas)
        exchanges.append(UnitExchange(wire, work, forward * numel / sum(numels)))
    return exchanges


def local_work(config: EditConfig, machine: Machine, numel: int, size: int) -> float:
    """Return the seconds of a rank's local work in the sync of a shard of a unit.

    Args:
        numel: elements of the shard.
        size: N, replicas.
    """
    return (
        machine.per_element * numel
        + machine.per_sent_byte * all_reduce_payload(FP32_BYTES * numel, size)
        + machine.per_ring_step * 2 * (size - 1)
        + (FP32_BYTES * numel / machine.copy_bandwidth if config.offload else 0.0)
    )


def _ring_steps(job: Job, wire: str) -> int:
    """Return the number of messages that a unit's exchange waits for, one after another."""
    if job.mesh.num_replicas == 1:
        return 0
    return Wire.of(wire).num_phases or 2 * (job.mesh.num_replicas - 1)


# ---- Memory of the rank that needs most


@dataclass(frozen=True)
class MemoryItem:
    """One item of a rank's memory.

    Attributes:
        place: `DEVICE` or `HOST`.
        when: `SYNCING` or `SYNCHRONOUS`; empty if it is allocated all the time.
    """

    name: str
    place: str
    nbytes: int
    when: str = ""


def added_bytes(parts: Sequence[MemoryItem], place: str) -> int:
    """Return the most bytes of a strategy's parts at one time."""

    def needed(when: str) -> int:
        return sum(part.nbytes for part in parts if (part.place, part.when) == (place, when))

    return needed("") + max(needed(SYNCHRONOUS), needed(SYNCING))


def stock_parts(job: Job) -> tuple[MemoryItem, ...]:
    """Return the memory of stock Megatron. Activations are not counted.

    Formulas are from Megatron-LM core_v0.19.0: distributed/param_and_grad_buffer.py, and in
    optimizer/ distrib_optimizer.py, optimizer_config.py and cpu_offloading/hybrid_optimizer.py.
    Parameters in fp8 count as in bf16: with a second, transposed copy, as on Hopper, they need as
    much.

    Raises:
        UsageError: the planner does not support the optimizer.
    """
    words = job.words
    optimizer = words.text("--optimizer", ADAM, SUPPORTED_OPTIMIZERS)
    if optimizer != ADAM and job.is_sharded:
        rule = f"{SHARDED_FLAG} is planned with Adam only"
        raise UsageError(f"--optimizer {optimizer}", rule, f"drop {SHARDED_FLAG} for the plan")
    elements = job.largest_shard if job.is_sharded else job.on_rank
    main = 0 if job.parameter_bytes == FP32_BYTES else FP32_BYTES
    moments, host = FP32_BYTES * (1 if optimizer == SGD else 2), 0
    is_aware = words.has("--use-precision-aware-optimizer")
    if words.has("--optimizer-cpu-offload"):
        # The CPU has an fp32 copy, a gradient and the moments. Without the precision-aware
        # optimizer the device keeps main parameters as well.
        main, moments, host = 0 if is_aware else main, 0, 2 * FP32_BYTES + moments
    elif is_aware:
        main = 2 if _keeps_remainders(words) else FP32_BYTES
        names = ("--exp-avg-dtype", "--exp-avg-sq-dtype")
        moments = sum(_BYTES[words.text(name, FP32, tuple(_BYTES))] for name in names)
    state = elements * (main + moments)
    if optimizer == MUON:  # one momentum of its matrices, beside Adam's moments of the others
        state -= FP32_BYTES * job.matrices_on_rank
    parts = [
        MemoryItem("parameters", DEVICE, job.on_rank * job.parameter_bytes),
        MemoryItem("gradients", DEVICE, job.on_rank * job.gradient_bytes),
        MemoryItem("optimizer state", DEVICE, state),
    ]
    if host:
        parts.append(MemoryItem("offloaded optimizer state", HOST, elements * host))
    return tuple(parts)


def _keeps_remainders(words: TrainingFlags) -> bool:
    """Return whether only the low 16 bits of main parameters are kept, beside the bf16 model's.

    Megatron keeps all of them with fp8 that is not scaled with a delay
    (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`).
    """
    is_delayed = words.text("--fp8-recipe", "delayed") == "delayed"
    return words.has("--bf16") and (is_delayed or not words.has("--fp8-format"))


def edit_parts(job: Job, config: EditConfig, *, overlaps: bool) -> tuple[MemoryItem, ...]:
    """Return the memory that a strategy adds."""
    parts = list(_gradient_parts(job, config))
    if not STRATEGIES[config.strategy].endless_warmup:
        parts += _round_parts(job, config, overlaps=overlaps)
    return tuple(part for part in parts if part.nbytes)


def _gradient_parts(job: Job, config: EditConfig) -> list[MemoryItem]:
    """Return the memory of averaged gradients. fp32 needs none: they are averaged in place."""
    wire, size, numel = Wire.of(config.warmup_dtype), job.mesh.num_replicas, job.largest_shard
    if wire.codec is None:
        return []
    owned = wire.owner_numel(numel, size)
    residuals = FP32_BYTES * (numel + owned) if wire.has_residual else 0
    coded = 2 * size * wire.codec.encoded_bytes(owned) + FP32_BYTES * owned
    if job.gradient_bytes < FP32_BYTES:
        coded += FP32_BYTES * numel  # an fp32 copy
    return [
        MemoryItem(f"gradient residuals of {wire.name}", DEVICE, residuals, SYNCHRONOUS),
        MemoryItem("encoded gradients", DEVICE, coded, SYNCHRONOUS),
    ]


def _round_parts(job: Job, config: EditConfig, *, overlaps: bool) -> list[MemoryItem]:
    """Return the memory of rounds with an outer step; an item without bytes is not needed."""
    elements, largest = job.largest_shard, max(map(max, job.rank_numels))
    landing, wire, size = LandingRule.of(config), Wire.of(config.sync_dtype), job.mesh.num_replicas
    moments, group = MomentSchedule.of(config).rule, -(-elements // config.fragments)
    depth = config.prefetch_units if overlaps and landing.is_immediate else 1
    place, in_flight = HOST if config.offload else DEVICE, partial(_vectors, when=SYNCING)
    checks = config.check_commits or job.is_elastic  # `CheckedSync`
    has_snapshot = landing.needs_snapshot or job.is_elastic
    late = 0 if landing.is_immediate else group * (2 if has_snapshot else 1)
    fullest = max(job.rank_numels, key=sum)
    owned = sum(wire.owner_numel(numel, size) for numel in fullest) if wire.has_residual else 0
    residuals = elements + owned if wire.has_residual else 0
    staged, moment_numel = (
        max(_staged(row, depth, is_offloaded=each) for row in job.rank_numels)
        for each in (config.offload, False)
    )
    if checks or late:
        moment_numel = group
    coded = 0
    if wire.codec is not None or moments.kinds:
        sent = moment_bytes(moments, largest, size)
        sent += 0 if wire.codec is None else wire.payload_bytes(largest, size)
        coded = 2 * sent + FP32_BYTES * -(-largest // size)
    what = "average and snapshot" if has_snapshot else "average"
    return [
        _vectors("anchor", elements, place=place),
        _vectors("outer momentum", elements, place=place),
        _vectors(f"residuals of {wire.name}", residuals),
        in_flight("residuals before the commit", residuals // config.fragments if checks else 0),
        in_flight(f"{what} in flight", late),
        in_flight("staging", staged),
        in_flight("averages before the commit", group if checks and not late else 0),
        in_flight("scratch of the comparison", 3 * largest if checks else 0),
        in_flight("moments in flight", len(moments.kinds) * moment_numel),
        MemoryItem("encoded units", DEVICE, coded * depth, SYNCING),
    ]


def _vectors(name: str, numel: int, *, place: str = DEVICE, when: str = "") -> MemoryItem:
    """Return an item of `numel` elements in fp32."""
    return MemoryItem(name, place, FP32_BYTES * numel, when)


def _staged(row: Sequence[int], depth: int, *, is_offloaded: bool) -> int:
    """Return the most elements on the device for units that are exchanged, `depth` at a time.

    One addend for each; with offload also anchor and momentum of these units and of the next one,
    and the anchor of a unit that lands: its outer step may have been done much earlier.
    """
    numels = [numel for numel in row if numel]  # this rank exchanges no empty shards
    found = [0]
    for i in range(len(numels)):
        addends = sum(numels[i : i + depth])
        next_one = sum(numels[i + depth : i + depth + 1])
        landing = max(numels[:i], default=0)
        found.append(3 * addends + 2 * next_one + landing if is_offloaded else addends)
    return max(found)
