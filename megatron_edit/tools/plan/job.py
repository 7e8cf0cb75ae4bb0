"""A training as the planner models it: model, shards by rank, batch and EDiT's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_edit.command_line import OPTIMIZER, config_from_argv
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.flags import FLAG_PREFIXES, flag
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.entries import STOCK
from megatron_edit.tools.compare.flags import groups, without
from megatron_edit.tools.compare.instances import SHARDED_FLAG
from megatron_edit.tools.plan.model import (
    Architecture,
    Parameter,
    Storage,
    bucket_size,
    shard_numels,
)
from megatron_edit.tools.plan.values import (
    LEAST,
    MOST,
    MOST_COUNTED,
    TrainingFlags,
    check_ranks,
    shortened,
)

PUBLISHED_DILOCO = "published-diloco"
NAMES = (*STRATEGIES, STOCK, PUBLISHED_DILOCO)  # strategies that can be planned
DEFAULT_NAMES = ("edit", PUBLISHED_DILOCO, "ddp", STOCK)
# Settings that the planner replaces by the number of replicas.
_PLACEMENT = (
    "num_replicas", "hub", "hub_token_file", "replica_name", "nominal_replicas", "min_replicas",
)  # fmt: skip
MOST_SHARDS = 5_000_000  # of all units on all ranks of a replica; each is a number in memory


@dataclass(frozen=True)
class Mesh:
    """The layout of the ranks.

    Attributes:
        num_replicas: N.
        ranks_per_replica: K.
        tensor, pipeline, context: sizes of the model parallel groups inside a replica.
        ranks_per_host: ranks of one replica that share a host's link.
        num_instances: of the distributed optimizer inside a replica, each with all shards.
    """

    num_replicas: int
    ranks_per_replica: int
    tensor: int
    pipeline: int
    context: int
    ranks_per_host: int
    num_instances: int = 1

    @property
    def num_shards(self) -> int:
        """Ranks of a replica that hold the same part of the model, in all optimizer instances."""
        return self.ranks_per_replica // (self.tensor * self.pipeline)

    @property
    def ranks_per_instance(self) -> int:
        """M: ranks among which an instance of the distributed optimizer shards its state."""
        return self.num_shards // self.num_instances

    @property
    def num_data_parallel(self) -> int:
        """D: data-parallel ranks of a replica."""
        return self.num_shards // self.context

    @property
    def host_share(self) -> float:
        """Share of a replica's ranks that are on one host."""
        return self.ranks_per_host / self.ranks_per_replica

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.num_replicas * self.ranks_per_replica


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        unit_names: in forward order.
        rank_numels: elements of each unit in the shard of each rank of a replica, [K][units].
        on_rank: parameters of the model on the rank that has most, before sharding by ZeRO.
        fp8_on_rank: of these, kept in fp8.
        storage: bytes of parameters, gradients and optimizer state.
        is_sharded: whether Megatron's distributed optimizer shards the optimizer state.
        num_micro_batches: of a step, on one rank.
        num_iterations: steps of the complete training; None where they are not given.
        tokens_per_step: of all replicas.
        overlaps_gather: --overlap-param-gather: units can land in the forward pass.
        recomputes: whether the backward pass recomputes the forward pass.
        edit_flags: EDiT's flags, and Megatron's `--optimizer`.
    """

    architecture: Architecture
    mesh: Mesh
    unit_names: tuple[str, ...]
    rank_numels: tuple[tuple[int, ...], ...]
    on_rank: int
    fp8_on_rank: int
    storage: Storage
    is_sharded: bool
    num_micro_batches: int
    num_iterations: int | None
    tokens_per_step: int
    overlaps_gather: bool
    overlaps_reduce: bool
    recomputes: bool
    timeout_minutes: int
    edit_flags: tuple[str, ...]

    @property
    def largest_shard(self) -> int:
        """Elements of the largest shard of a rank."""
        return max(map(sum, self.rank_numels))

    @property
    def matrices_on_rank(self) -> int:
        """Elements that Muon updates, on the rank that has most parameters."""
        split, stages = self.mesh.tensor, self.mesh.pipeline
        parts = [self.architecture.parameters(stage, stages) for stage in range(stages)]
        busiest = max(parts, key=lambda part: sum(p.on_rank(split) for _, p in part))
        return sum(p.on_rank(split) for _, p in busiest if p.is_matrix)

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a parameter when Megatron gathers it, mean over the model."""
        parameters = self.architecture.parameters()
        fp8 = sum(p.numel for unit, p in parameters if self.is_fp8(unit, p))
        wide = self.storage.parameter_bytes
        return wide - (wide - 1) * fp8 / self.architecture.numel

    def is_fp8(self, unit: str, parameter: Parameter) -> bool:
        """Return whether a parameter of a unit is kept and gathered in fp8."""
        return _is_fp8(self.storage, self.architecture, unit, parameter)

    @property
    def flops_per_step(self) -> float:
        """FLOPs of a step of all replicas."""
        each = self.architecture.flops_per_token() * (4 / 3 if self.recomputes else 1)
        return each * self.tokens_per_step

    def config(self, strategy: str) -> EditConfig:
        """Return the settings of a strategy: its presets, and the given flags that apply to it.

        Raises:
            UsageError: a setting is invalid, or incompatible with the model.
        """
        given = config_from_argv(self.edit_flags)
        words = without(self.edit_flags, {flag("strategy"), *map(flag, _PLACEMENT)})
        if given.hub is not None:  # a result is applied after the commit, as with this flag
            words = [*without(words, {flag("check_commits")}), flag("check_commits")]
        words += [flag("strategy"), strategy, flag("num_replicas"), str(self.mesh.num_replicas)]
        if flag("use_edit") not in words:
            words.append(flag("use_edit"))
        if strategy != given.strategy:  # flags given for another strategy may not apply
            words = _compatible_flags(words, strategy)
        config = config_from_argv(words)
        _check_rounds(config, len(self.unit_names))
        return config


def _check_rounds(config: EditConfig, num_units: int) -> None:
    """Check that the length of rounds is in range, and that every fragment has a unit.

    Raises:
        UsageError: a value is out of range.
    """
    if config.fragments > num_units:
        raise UsageError(
            f"{flag('fragments')} {shortened(str(config.fragments))}",
            f"the model has {num_units} units, and every fragment needs one",
            "give a smaller value",
        )
    for name in ("sync_interval", "delay_steps"):
        value = getattr(config, name)
        if value > MOST_COUNTED:
            raise UsageError(
                f"{flag(name)} {shortened(str(value))}",
                f"must be at most {MOST_COUNTED}",
                "give a smaller value",
            )
    if not LEAST <= config.sync_seconds <= MOST:
        raise UsageError(
            f"{flag('sync_seconds')} {config.sync_seconds:g}",
            f"must be from {LEAST:g} to {MOST:g}",
            "give another value",
        )


def read_job(
    argv: Sequence[str],
    *,
    num_replicas: int | None,
    world_size: int | None,
    ranks_per_host: int | None,
) -> Job:
    """Read a training's flags.

    Args:
        argv: Megatron's and EDiT's flags.
        num_replicas: N; None takes it from the flags.
        world_size: ranks of all replicas; None for eight per replica.
        ranks_per_host: None for at most eight.

    Raises:
        UsageError: the planner does not support this training.
    """
    words = TrainingFlags(argv)
    edit_flags = tuple(_edit_flags(argv))
    config = config_from_argv(edit_flags)
    num_replicas = num_replicas if num_replicas is not None else config.num_replicas
    if num_replicas is None:
        raise UsageError("--replicas (not given)", "must be given", "add --replicas N")
    check_ranks("--replicas", num_replicas)
    mesh = _mesh(words, num_replicas, world_size, ranks_per_host)
    architecture = Architecture.from_flags(argv)
    num_units = len(architecture.unit_names)
    if mesh.ranks_per_replica * num_units > MOST_SHARDS:
        raise UsageError(
            f"--world-size {mesh.world_size}",
            f"gives a replica {mesh.ranks_per_replica} ranks with {num_units} units each, "
            f"and the product must be at most {MOST_SHARDS}",
            "give fewer ranks or layers",
        )
    storage = Storage.from_flags(words)
    shards = _shards(words, architecture, mesh, storage)
    batch = words.count("--micro-batch-size") * mesh.num_data_parallel * num_replicas
    total = words.count("--global-batch-size", batch)
    if total % batch:
        raise UsageError(
            f"--global-batch-size {total}",
            f"must be a multiple of {batch} (micro-batch x data-parallel ranks of all replicas)",
            "change it, --micro-batch-size, or --world-size",
        )
    return Job(
        architecture=architecture,
        mesh=mesh,
        unit_names=architecture.unit_names,
        rank_numels=shards.by_rank,
        on_rank=shards.on_rank,
        fp8_on_rank=shards.fp8_on_rank,
        storage=storage,
        is_sharded=words.has(SHARDED_FLAG),
        num_micro_batches=total // batch,
        num_iterations=_num_iterations(words, total),
        tokens_per_step=total * architecture.seq_length,
        overlaps_gather=words.has("--overlap-param-gather"),
        overlaps_reduce=words.has("--overlap-grad-reduce"),
        recomputes=words.text("--recompute-granularity", "none") == "full",
        timeout_minutes=words.count("--distributed-timeout-minutes", 10),
        edit_flags=edit_flags,
    )


def _num_iterations(words: TrainingFlags, batch: int) -> int | None:
    """Return the steps of the complete training; None where they are not given."""
    if words.has("--train-iters"):
        return words.count("--train-iters")
    if words.has("--train-samples"):
        return words.count("--train-samples") // batch
    return None


def _is_fp8(storage: Storage, architecture: Architecture, unit: str, parameter: Parameter) -> bool:
    """Return whether a parameter is kept in fp8: matrices of layers, by Transformer Engine.

    Embeddings and head are Megatron's own modules, without fp8 parameters.
    """
    if not (parameter.is_split and parameter.is_matrix):
        return False
    _, _, number = unit.partition("layer.")
    return bool(number) and storage.is_fp8_layer(int(number), architecture.num_layers)


def _num_instances(words: TrainingFlags, num_shards: int) -> int:
    """Return Megatron's `--num-distributed-optimizer-instances`.

    Raises:
        UsageError: the ranks cannot be divided among them.
    """
    name = "--num-distributed-optimizer-instances"
    instances = words.count(name, 1)
    if instances > 1 and not words.has(SHARDED_FLAG):
        raise UsageError(
            f"{name} {instances}", f"belongs to {SHARDED_FLAG}", "add it, or drop the flag"
        )
    if num_shards % instances:
        rule = f"must divide the {num_shards} data-parallel ranks of a replica"
        raise UsageError(f"{name} {instances}", rule, "correct it")
    return instances


def _mesh(
    words: TrainingFlags, num_replicas: int, world_size: int | None, ranks_per_host: int | None
) -> Mesh:
    tensor = words.count("--tensor-model-parallel-size", 1)
    pipeline = words.count("--pipeline-model-parallel-size", 1)
    context = words.count("--context-parallel-size", 1)
    world = 8 * num_replicas if world_size is None else world_size
    check_ranks("--world-size", world)
    if world % num_replicas:
        raise UsageError(
            f"--world-size {world}", f"must be a multiple of {num_replicas} replicas", "correct one"
        )
    ranks, model = world // num_replicas, tensor * pipeline * context
    if ranks % model:
        raise UsageError(
            f"--world-size {world}",
            f"gives a replica {ranks} ranks, which must be a multiple of {model} (TP x PP x CP)",
            "change the world or the parallel sizes",
        )
    per_host = min(ranks, 8) if ranks_per_host is None else ranks_per_host
    if ranks % per_host:
        raise UsageError(
            f"--ranks-per-host {per_host}",
            f"must divide the {ranks} ranks of a replica",
            "correct it",
        )
    instances = _num_instances(words, ranks // (tensor * pipeline))
    return Mesh(num_replicas, ranks, tensor, pipeline, context, per_host, instances)


@dataclass(frozen=True)
class _Shards:
    """The parameters as the ranks of a replica hold them.

    Attributes:
        by_rank: elements of each unit in the shard of each rank, [K][units].
        on_rank: parameters of the rank that has most.
        fp8_on_rank: of these, in fp8.
    """

    by_rank: tuple[tuple[int, ...], ...]
    on_rank: int
    fp8_on_rank: int


def _shards(
    words: TrainingFlags, architecture: Architecture, mesh: Mesh, storage: Storage
) -> _Shards:
    """Return the shards of all ranks. Parameters in fp8 have buffers of their own."""
    if architecture.num_layers % mesh.pipeline:
        raise UsageError(
            f"--pipeline-model-parallel-size {mesh.pipeline}",
            f"must divide the {architecture.num_layers} layers",
            "the planner supports equal stages only",
        )
    num_shards = mesh.ranks_per_instance if words.has(SHARDED_FLAG) else 1
    rows: list[tuple[int, ...]] = []
    most = most_fp8 = 0
    for stage in range(mesh.pipeline):
        parameters = architecture.parameters(stage, mesh.pipeline)
        fp8 = [_is_fp8(storage, architecture, *each) for each in parameters]
        numels = [parameter.on_rank(mesh.tensor) for _, parameter in parameters]
        if (numel := sum(numels)) > most:
            most = numel
            most_fp8 = sum(n for n, is_fp8 in zip(numels, fp8, strict=True) if is_fp8)
        buffers = [
            [each for each, is_fp8 in zip(parameters, fp8, strict=True) if is_fp8 == which]
            for which in sorted(set(fp8))
        ]
        size = bucket_size(words, numel=numel, num_shards=mesh.num_shards)
        tables = [
            shard_numels(
                buffer,
                architecture.unit_names,
                tensor_parallel=mesh.tensor,
                size=size if stage == 0 else None,  # Megatron overlaps only the first stage
                num_shards=num_shards,
                is_tied_over_stages=mesh.pipeline > 1 and not architecture.is_untied,
            )
            for buffer in buffers
        ]
        shards = [tuple(map(sum, zip(*each, strict=True))) for each in zip(*tables, strict=True)]
        rows += shards * (mesh.tensor * (mesh.num_shards // num_shards))
    return _Shards(tuple(rows), most, most_fp8)


def _edit_flags(argv: Sequence[str]) -> list[str]:
    return [
        word
        for name, values in groups(argv)
        if name.startswith(FLAG_PREFIXES) or name == OPTIMIZER  # some presets depend on it
        for word in (name, *values)
    ]


def _compatible_flags(words: Sequence[str], strategy: str) -> list[str]:
    """Drop the flags that a strategy does not use or refuses."""
    kept = [flag("use_edit"), flag("strategy"), strategy]
    waiting = [each for each in groups(words) if each[0] not in kept]
    for _ in range(2):  # a flag may depend on another one after it
        dropped = []
        for name, values in waiting:
            try:
                config_from_argv([*kept, name, *values])
                kept += [name, *values]
            except UsageError:
                dropped.append((name, values))
        waiting = dropped
    return kept
