"""Memory of the rank that needs most, on the device and on the host, item by item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_edit.comm.wire import Wire, moment_bytes
from megatron_edit.config import EditConfig
from megatron_edit.constants import FP32_BYTES
from megatron_edit.host.settings import landing_of, moments_of
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.plan.job import Job

DEVICE, HOST = "device", "host"


@dataclass(frozen=True)
class MemoryItem:
    """One item of a rank's memory.

    Attributes:
        place: "device" or "host".
        is_persistent: whether it is allocated all the time, and not only during an exchange.
        is_synchronous: whether it belongs to the warm-up and the final phase; all others belong to
            the rounds.
    """

    name: str
    place: str
    nbytes: int
    is_persistent: bool = True
    is_synchronous: bool = False

    @property
    def when(self) -> str:
        """The times at which it is allocated, for a table; empty if always in the rounds."""
        if self.is_synchronous:
            return "in synchronous steps"
        return "" if self.is_persistent else "during a sync"


def added_bytes(parts: Sequence[MemoryItem], place: str) -> int:
    """Return the most bytes of a strategy's parts at one time: what the rounds keep is allocated
    from the start on."""
    kept = synchronous = temporary = 0
    for part in parts:
        if part.place == place:
            synchronous += part.nbytes * part.is_synchronous
            kept += part.nbytes * (part.is_persistent and not part.is_synchronous)
            temporary += part.nbytes * (not part.is_persistent and not part.is_synchronous)
    return kept + max(synchronous, temporary)


def stock_parts(job: Job) -> tuple[MemoryItem, ...]:
    """Return the memory of stock Megatron. Activations are not counted.

    For the backward pass Transformer Engine keeps a second, transposed copy of parameters in fp8
    (`keep the columnwise data` in Megatron's fp8_utils.py), on GPUs that need it (Hopper).
    """
    storage, fp8 = job.storage, job.fp8_on_rank
    elements = job.largest_shard if job.is_sharded else job.on_rank
    state = elements * storage.state_bytes
    if storage.matrix_state_bytes != storage.state_bytes:  # never sharded
        state -= job.matrices_on_rank * (storage.state_bytes - storage.matrix_state_bytes)
    parameters = job.on_rank * storage.parameter_bytes - fp8 * (storage.parameter_bytes - 1)
    parts = (
        MemoryItem("parameters", DEVICE, parameters),
        MemoryItem("transposed fp8 parameters", DEVICE, fp8),
        MemoryItem("gradients", DEVICE, job.on_rank * storage.gradient_bytes),
        MemoryItem("optimizer state", DEVICE, round(state)),
        MemoryItem("offloaded optimizer state", HOST, round(elements * storage.host_state_bytes)),
    )
    optional = ("transposed fp8 parameters", "offloaded optimizer state")
    return tuple(part for part in parts if part.nbytes or part.name not in optional)


def edit_parts(job: Job, config: EditConfig, *, overlaps: bool) -> tuple[MemoryItem, ...]:
    """Return the memory that a strategy adds."""
    parts = list(_synchronous_parts(job, config))
    if not STRATEGIES[config.strategy].endless_warmup:
        parts += _parts(job, config, overlaps=overlaps)
    return tuple(part for part in parts if part.nbytes)


def _synchronous_parts(job: Job, config: EditConfig) -> Iterator[MemoryItem]:
    """Yield the memory of averaged gradients. fp32 needs none: they are averaged in place."""
    wire, size, numel = Wire.of(config.warmup_dtype), job.mesh.num_replicas, job.largest_shard
    if wire.codec is None:
        return
    owned = wire.owner_numel(numel, size)
    residuals = FP32_BYTES * (numel + owned) if wire.has_residual else 0
    yield MemoryItem(f"gradient residuals of {wire.name}", DEVICE, residuals, is_synchronous=True)
    coded = 2 * size * wire.codec.encoded_bytes(owned) + FP32_BYTES * owned
    if job.storage.gradient_bytes < FP32_BYTES:
        coded += FP32_BYTES * numel  # an fp32 copy
    yield MemoryItem("encoded gradients", DEVICE, coded, is_persistent=False, is_synchronous=True)


def published_diloco_parts(job: Job) -> tuple[MemoryItem, ...]:
    """Return the memory of DiLoCo as published: anchor and momentum are not sharded."""
    return (
        MemoryItem("anchor, whole", DEVICE, FP32_BYTES * job.on_rank),
        MemoryItem("outer momentum, whole", DEVICE, FP32_BYTES * job.on_rank),
        MemoryItem("average, whole", DEVICE, FP32_BYTES * job.on_rank, is_persistent=False),
    )


def _parts(job: Job, config: EditConfig, *, overlaps: bool) -> Iterator[MemoryItem]:
    elements, largest = job.largest_shard, max(max(row) for row in job.rank_numels)
    place = HOST if config.offload else DEVICE
    landing, wire = landing_of(config), Wire.of(config.sync_dtype)
    size, depth = job.mesh.num_replicas, config.prefetch_units if overlaps else 1
    yield MemoryItem("anchor", place, FP32_BYTES * elements)
    yield MemoryItem("outer momentum", place, FP32_BYTES * elements)
    if wire.has_residual:
        row = max(job.rank_numels, key=sum)
        owned = sum(wire.owner_numel(numel, size) for numel in row)
        yield MemoryItem(f"residuals of {wire.name}", DEVICE, FP32_BYTES * (elements + owned))
    if not landing.is_immediate:
        group = -(-elements // config.fragments)
        vectors = 1 + int(landing.needs_snapshot)
        what = "average and snapshot" if vectors == 2 else "average"
        yield MemoryItem(
            f"{what} in flight", DEVICE, FP32_BYTES * vectors * group, is_persistent=False
        )
    units = depth if landing.is_immediate else 1
    staged = max(_staged(row, units, is_offloaded=config.offload) for row in job.rank_numels)
    yield MemoryItem("staging", DEVICE, FP32_BYTES * staged, is_persistent=False)
    if config.check_commits:  # `CheckedSync`
        yield MemoryItem(
            "averages before the commit", DEVICE, FP32_BYTES * elements, is_persistent=False
        )
        yield MemoryItem(
            "scratch of the comparison", DEVICE, 3 * FP32_BYTES * largest, is_persistent=False
        )
    moments = moments_of(config).rule
    moment_numel = max(_staged(row, units, is_offloaded=False) for row in job.rank_numels)
    if not landing.is_immediate:
        moment_numel = -(-elements // config.fragments)
    yield MemoryItem(
        "moments in flight", DEVICE, FP32_BYTES * len(moments.kinds) * moment_numel,
        is_persistent=False,
    )  # fmt: skip
    if wire.codec is not None or moments.kinds:
        sent = moment_bytes(moments, largest, size)
        sent += 0 if wire.codec is None else wire.payload_bytes(largest, size)
        coded = 2 * sent + FP32_BYTES * -(-largest // size)
        yield MemoryItem("encoded units", DEVICE, coded * units, is_persistent=False)


def _staged(row: Sequence[int], depth: int, *, is_offloaded: bool) -> int:
    """Return the most elements on the device for units that are exchanged, `depth` at a time.

    One addend for each; with offload also anchor and momentum of these units and of the next one,
    and the anchor of a unit that lands: its outer step may have been done much earlier.
    """
    numels = [numel for numel in row if numel]  # this rank exchanges no empty shards
    if not is_offloaded:
        return max((sum(numels[i : i + depth]) for i in range(len(numels))), default=0)
    return max(
        (
            3 * sum(numels[i : i + depth])
            + 2 * sum(numels[i + depth : i + depth + 1])
            + max(numels[:i], default=0)
            for i in range(len(numels))
        ),
        default=0,
    )
