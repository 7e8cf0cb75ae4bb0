"""A training as the planner models it, computed from its flags alone.

No model is built and Megatron is not imported, so that the planner runs without Megatron and
Transformer Engine. `tests/host/test_configs.py` compares the counts of parameters with the models
that Megatron builds, `tests/host/test_plan_memory.py` the shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from megatron_edit.command_line import OPTIMIZER, config_from_argv
from megatron_edit.config import EditConfig
from megatron_edit.constants import BF16, BLOCKING, EMBEDDING, FINAL, FP32
from megatron_edit.errors import UsageError
from megatron_edit.flags import FLAG_PREFIXES, flag
from megatron_edit.method.auto import SyncSettings
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.entries import STOCK
from megatron_edit.tools.compare.flags import INSTANCES_FLAG, SHARDED_FLAG, groups, without
from megatron_edit.tools.compare.traffic import gradient_bytes
from megatron_edit.tools.plan.values import TrainingFlags, check_ranks

MOST_LAYERS = 10_000
MOST_SHARDS = 5_000_000  # of all units on all ranks of a replica; each is a number in memory
# Of Megatron's buffer of gradients, in elements.
PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
USUAL_BUCKET, USUAL_BUCKET_PER_RANK = 40_000_000, 1_000_000
# Flags that change parameters or buffers in ways that are not implemented here.
REFUSED = (
    "--num-experts", "--mtp-num-layers", "--multi-latent-attention", "--spec", "--yaml-cfg",
    "--heterogeneous-layers-config-path", "--hybrid-override-pattern", "--hybrid-layer-pattern",
    "--experimental-attention-variant", "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--attention-output-gate", "--use-megatron-fsdp", "--use-torch-fsdp2", "--fp4-param-gather",
    "--optimizer-offload-fraction",
)  # fmt: skip
NAMES = (*STRATEGIES, STOCK)  # strategies that can be planned
# Settings that the planner replaces by the number of replicas.
_PLACEMENT = (
    "num_replicas", "hub", "hub_token_file", "replica_name", "nominal_replicas", "min_replicas",
)  # fmt: skip


# ---- Parameters


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    Attributes:
        numel: elements of the full parameter.
        is_split: whether tensor parallelism splits it; otherwise each of its ranks has a copy.
        is_matrix: whether Muon updates it: any matrix except the word embeddings and the head.
    """

    numel: int
    is_split: bool = False
    is_matrix: bool = False

    def on_rank(self, tensor_parallel: int) -> int:
        """Return the number of elements on one tensor-parallel rank."""
        return self.numel // tensor_parallel if self.is_split else self.numel


@dataclass(frozen=True)
class Architecture:
    """A dense GPT model of Megatron.

    Attributes:
        attention_width: elements per token of all heads together.
        embedding, layer, final: parameters of these units, in the order in which Megatron
            registers them; all layers are equal.
    """

    num_layers: int
    seq_length: int
    attention_width: int
    is_untied: bool
    embedding: tuple[Parameter, ...]
    layer: tuple[Parameter, ...]
    final: tuple[Parameter, ...]

    @classmethod
    def from_flags(cls, words: TrainingFlags) -> Architecture:
        """Read Megatron's flags, with Megatron's defaults.

        Raises:
            UsageError: a flag is missing, or the model is not supported.
        """
        for name in REFUSED:
            if words.has(name):
                raise UsageError(
                    name,
                    "the planner counts dense GPTs only, in Megatron's usual buffers",
                    "drop it",
                )
        hidden, heads = words.count("--hidden-size"), words.count("--num-attention-heads")
        channels = words.count("--kv-channels", max(1, hidden // heads))
        has_norm_bias = words.text("--normalization", "LayerNorm") == "LayerNorm"  # not RMSNorm
        norm = (Parameter(hidden),) * (2 if has_norm_bias else 1)
        word = Parameter(_vocabulary(words) * hidden, is_split=True)
        embedding = [word]
        positions = words.text("--position-embedding-type", "learned_absolute")
        # The old name takes precedence.
        if positions == "learned_absolute" and not words.has("--use-rotary-position-embeddings"):
            numel = words.count("--max-position-embeddings") * hidden
            embedding.append(Parameter(numel, is_matrix=True))
        is_untied = words.has("--untie-embeddings-and-output-weights")
        return cls(
            num_layers=words.count("--num-layers", most=MOST_LAYERS),
            seq_length=words.count("--seq-length"),
            attention_width=heads * channels,
            is_untied=is_untied,
            embedding=tuple(embedding),
            layer=_layer(words, norm, heads, channels),
            final=(*norm, word) if is_untied else norm,
        )

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Names of the units, in forward order."""
        layers = (f"layer.{number}" for number in range(1, self.num_layers + 1))
        return (EMBEDDING, *layers, FINAL)

    def unit_numels(self) -> dict[str, int]:
        """Return the number of parameters of each unit of the model."""
        numels = dict.fromkeys(self.unit_names, 0)
        for unit, parameter in self.parameters():
            numels[unit] += parameter.numel
        return numels

    @property
    def numel(self) -> int:
        """Number of parameters of the model."""
        return sum(self.unit_numels().values())

    def parameters(self, stage: int = 0, num_stages: int = 1) -> list[tuple[str, Parameter]]:
        """Return (unit, parameter) pairs of a pipeline stage, in the order of registration."""
        each, is_last = self.num_layers // num_stages, stage == num_stages - 1
        found = [(EMBEDDING, parameter) for parameter in self.embedding if stage == 0]
        for number in range(stage * each + 1, (stage + 1) * each + 1):
            found += [(f"layer.{number}", parameter) for parameter in self.layer]
        found += [(FINAL, parameter) for parameter in self.final if is_last]
        if is_last and stage > 0 and not self.is_untied:
            found.append((EMBEDDING, self.embedding[0]))  # the tied copy
        return found

    def flops_per_token(self) -> float:
        """Return FLOPs of forward and backward without recomputation, for causal attention."""
        matrices = sum(parameter.numel for _, parameter in self.parameters() if parameter.is_split)
        matrices -= self.embedding[0].numel if self.is_untied else 0  # a look-up
        attention = self.num_layers * self.attention_width * self.seq_length
        return 6.0 * matrices + 6.0 * attention


def _layer(
    words: TrainingFlags, norm: tuple[Parameter, ...], heads: int, channels: int
) -> tuple[Parameter, ...]:
    """Return the parameters of a layer, in the order of their registration.

    Args:
        norm: one norm of the hidden size.
        heads: number of query heads.
        channels: of a head.
    """
    hidden, is_swiglu = norm[0].numel, words.has("--swiglu")
    ffn = (8 * hidden // 3) // 64 * 64 if is_swiglu else 4 * hidden
    ffn = words.count("--ffn-hidden-size", ffn)
    grouped = words.has("--group-query-attention")
    groups = words.count("--num-query-groups", 1) if grouped else heads
    fan_out = (heads + 2 * groups) * channels
    fc1 = ffn * (2 if is_swiglu or words.has("--quick-geglu") else 1)
    has_bias = not words.has("--disable-bias-linear")

    def linear(width: int, *bias: Parameter, biased: bool = has_bias) -> tuple[Parameter, ...]:
        matrix = Parameter(width * hidden, is_split=True, is_matrix=True)
        return (matrix, *bias) if biased else (matrix,)

    proj = linear(heads * channels, Parameter(hidden))
    bias = Parameter(fan_out, is_split=True)
    qkv = linear(fan_out, bias, biased=has_bias or words.has("--add-qkv-bias"))
    mlp = (linear(fc1, Parameter(fc1, is_split=True)), linear(ffn, Parameter(hidden)))
    if words.has("--qk-layernorm"):
        qkv += (Parameter(channels),) * (2 * len(norm))
    has_transformer_engine = (
        words.text("--transformer-impl", "transformer_engine") == "transformer_engine"
        and words.text("--edit-device", "auto") != "cpu"
    )
    if has_transformer_engine:  # it fuses norms with the matrices behind them
        return (*proj, *norm, *qkv, *norm, *mlp[0], *mlp[1])
    return (*norm, *proj, *qkv, *norm, *mlp[0], *mlp[1])


def _vocabulary(words: TrainingFlags) -> int:
    """Return the vocabulary size with Megatron's padding. The planner reads no tokenizer."""
    if words.has("--padded-vocab-size"):
        return words.count("--padded-vocab-size")
    multiple = words.count("--make-vocab-size-divisible-by", 128)
    multiple *= words.count("--tensor-model-parallel-size", 1)
    return -(-words.count("--vocab-size") // multiple) * multiple


# ---- Shards


def shard_numels(
    parameters: Sequence[tuple[str, Parameter]],
    units: Sequence[str],
    *,
    tensor_parallel: int,
    size: int | None,
    num_shards: int,
    is_tied_over_stages: bool = False,
) -> tuple[tuple[int, ...], ...]:
    """Return the elements of each unit on each rank of the shard group, [num_shards][units].

    Args:
        parameters: of a pipeline stage, in the order of their registration.
        tensor_parallel: ranks that share the split parameters.
        size: elements at which a bucket is closed; None for a single bucket.
        num_shards: ranks among which every bucket is split into equal parts.
        is_tied_over_stages: whether the embedding is tied to that of another stage.
    """
    index = {unit: place for place, unit in enumerate(units)}
    table = [[0] * len(units) for _ in range(num_shards)]
    sizes = [(unit, p.on_rank(tensor_parallel)) for unit, p in parameters]
    # The word embedding comes first, or last as the tied copy of the last stage.
    alone = [p.is_split and unit == EMBEDDING and is_tied_over_stages for unit, p in parameters]
    for bucket in _buckets(sizes, alone, size):
        part = _aligned(bucket[-1][2], math.lcm(num_shards, BUCKET_ALIGNMENT)) // num_shards
        for unit, start, stop in bucket:
            for rank in range(start // part, (stop - 1) // part + 1):
                overlap = min(stop, (rank + 1) * part) - max(start, rank * part)
                table[rank][index[unit]] += overlap
    return tuple(map(tuple, table))


def _buckets(
    sizes: Sequence[tuple[str, int]], alone: Sequence[bool], limit: int | None
) -> Iterator[list[tuple[str, int, int]]]:
    """Yield for each bucket (unit, start, stop) of its parameters, counted from its start.

    Megatron lays out parameters in reverse order, and closes a bucket with the parameter that
    reaches the bucket's size.

    Args:
        sizes: unit and elements of each parameter.
        alone: whether each parameter has a bucket of its own.
        limit: see `size` of `shard_numels`.
    """
    bucket: list[tuple[str, int, int]] = []
    for (unit, numel), is_alone in zip(reversed(sizes), reversed(alone), strict=True):
        if is_alone and bucket:
            yield bucket
            bucket = []
        start = _aligned(bucket[-1][2], PARAMETER_ALIGNMENT) if bucket else 0
        bucket.append((unit, start, start + numel))
        if is_alone or (limit is not None and start + numel >= limit):
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _aligned(place: int, divisor: int) -> int:
    return -(-place // divisor) * divisor


def _bucket_size(words: TrainingFlags, numel: int, num_shards: int) -> int | None:
    """Return the number of elements at which a bucket is closed; None for a single bucket."""
    if not words.has("--overlap-grad-reduce"):
        return None
    if words.has("--ddp-num-buckets"):
        return numel // words.count("--ddp-num-buckets")
    return words.count("--ddp-bucket-size", max(USUAL_BUCKET, USUAL_BUCKET_PER_RANK * num_shards))


# ---- The training


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
    num_instances: int

    @property
    def num_shards(self) -> int:
        """Ranks of a replica that hold the same part of the model, in all optimizer instances."""
        return self.ranks_per_replica // (self.tensor * self.pipeline)

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
        words: its flags.
        rank_numels: elements of each unit in the shard of each rank of a replica, [K][units].
        on_rank: parameters of the model on the rank that has most, before sharding by ZeRO.
        matrices_on_rank: of these, updated by Muon.
        batch: samples of a step of all replicas.
        edit_flags: EDiT's flags, and Megatron's `--optimizer`.
    """

    words: TrainingFlags
    architecture: Architecture
    mesh: Mesh
    rank_numels: tuple[tuple[int, ...], ...]
    on_rank: int
    matrices_on_rank: int
    batch: int
    num_micro_batches: int
    edit_flags: tuple[str, ...]

    @property
    def largest_shard(self) -> int:
        """Elements of the largest shard of a rank."""
        return max(map(sum, self.rank_numels))

    @property
    def is_sharded(self) -> bool:
        """Whether Megatron's distributed optimizer shards the optimizer state."""
        return self.words.has(SHARDED_FLAG)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a parameter of the model: 2 or 4."""
        return 2 if self.words.has("--bf16") or self.words.has("--fp16") else 4

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient: 4, or 2."""
        if self.words.text("--main-grads-dtype", FP32) == BF16:
            return 2
        return gradient_bytes(self.words.has)

    @property
    def overlaps_gather(self) -> bool:
        """Whether units can land in the forward pass."""
        return self.words.has("--overlap-param-gather")

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes the forward pass."""
        return self.words.text("--recompute-granularity", "none") == "full"

    @property
    def num_iterations(self) -> int | None:
        """Steps of the complete training; None where they are not given."""
        if self.words.has("--train-samples"):
            return self.words.count("--train-samples") // self.batch
        return self.words.count("--train-iters") if self.words.has("--train-iters") else None

    @property
    def flops_per_step(self) -> float:
        """FLOPs of a step of all replicas."""
        each = self.architecture.flops_per_token() * (4 / 3 if self.recomputes else 1)
        return each * self.batch * self.architecture.seq_length

    @property
    def is_elastic(self) -> bool:
        """Whether a hub commits each round."""
        return config_from_argv(self.edit_flags).hub is not None

    def config(self, strategy: str, *, chooses: bool = False) -> EditConfig:
        """Return the settings of a strategy: its presets, and the given flags that apply to it.

        Args:
            chooses: whether with `--edit-auto`, and without the settings that it chooses.

        Raises:
            UsageError: a setting is invalid, or incompatible with the model.
        """
        given = config_from_argv(self.edit_flags)
        words = without(self.edit_flags, {flag("strategy"), *map(flag, _PLACEMENT)})
        if self.is_elastic:
            words = [*without(words, {flag("sync_mode")}), flag("sync_mode"), BLOCKING]
        words += [flag("strategy"), strategy, flag("num_replicas"), str(self.mesh.num_replicas)]
        if flag("use_edit") not in words:
            words.append(flag("use_edit"))
        if chooses:
            chosen = {flag(each.name) for each in fields(SyncSettings)}
            words = [*without(words, {flag("auto"), flag("preset"), *chosen}), flag("auto")]
        if strategy != given.strategy:  # flags given for another strategy may not apply
            words = _compatible_flags(words, strategy)
        config, _ = config_from_argv(words).for_training(self.num_iterations or 0)
        num_units = len(self.architecture.unit_names)
        if config.fragments > num_units:
            rule = f"the model has {num_units} units, and every fragment needs one"
            raise UsageError(
                f"{flag('fragments')} {config.fragments}", rule, "give a smaller value"
            )
        return config


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
    edit_flags = tuple(
        word
        for name, values in groups(argv)
        if name.startswith(FLAG_PREFIXES) or name == OPTIMIZER  # some presets depend on it
        for word in (name, *values)
    )
    config = config_from_argv(edit_flags)
    num_replicas = num_replicas if num_replicas is not None else config.num_replicas
    if num_replicas is None:
        raise UsageError("--replicas (not given)", "must be given", "add --replicas N")
    check_ranks("--replicas", num_replicas)
    mesh = _mesh(words, num_replicas, world_size, ranks_per_host)
    architecture = Architecture.from_flags(words)
    num_units = len(architecture.unit_names)
    if mesh.ranks_per_replica * num_units > MOST_SHARDS:
        raise UsageError(
            f"--world-size {mesh.world_size}",
            f"gives a replica {mesh.ranks_per_replica} ranks with {num_units} units each, "
            f"and the product must be at most {MOST_SHARDS}",
            "give fewer ranks or layers",
        )
    _check_divides(
        "--pipeline-model-parallel-size", mesh.pipeline, architecture.num_layers, "layers"
    )
    stages = [architecture.parameters(s, mesh.pipeline) for s in range(mesh.pipeline)]
    held = [[(p, p.on_rank(mesh.tensor)) for _, p in stage] for stage in stages]
    most = max(held, key=lambda stage: sum(n for _, n in stage))
    batch = words.count("--micro-batch-size") * mesh.num_shards // mesh.context * num_replicas
    total = words.count("--global-batch-size", batch)
    if total % batch:
        raise UsageError(
            f"--global-batch-size {total}",
            f"must be a multiple of {batch} (micro-batch x data-parallel ranks of all replicas)",
            "change it, --micro-batch-size, or --world-size",
        )
    return Job(
        words=words,
        architecture=architecture,
        mesh=mesh,
        rank_numels=_rank_numels(words, architecture, mesh, stages),
        on_rank=sum(n for _, n in most),
        matrices_on_rank=sum(n for p, n in most if p.is_matrix),
        batch=total,
        num_micro_batches=total // batch,
        edit_flags=edit_flags,
    )


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
    check_ranks("--ranks-per-host", per_host)
    _check_divides("--ranks-per-host", per_host, ranks, "ranks of a replica")
    instances, num_shards = words.count(INSTANCES_FLAG, 1), ranks // (tensor * pipeline)
    _check_divides(INSTANCES_FLAG, instances, num_shards, "data-parallel ranks of a replica")
    return Mesh(num_replicas, ranks, tensor, pipeline, context, per_host, instances)


def _check_divides(name: str, value: int, total: int, what: str) -> None:
    if total % value:
        raise UsageError(f"{name} {value}", f"must divide the {total} {what}", "correct it")


def _rank_numels(
    words: TrainingFlags,
    architecture: Architecture,
    mesh: Mesh,
    stages: Sequence[list[tuple[str, Parameter]]],
) -> tuple[tuple[int, ...], ...]:
    """Return the shards of all ranks of a replica, [K][units]."""
    num_shards = mesh.num_shards // mesh.num_instances if words.has(SHARDED_FLAG) else 1
    rows: list[tuple[int, ...]] = []
    for number, stage in enumerate(stages):
        numel = sum(parameter.on_rank(mesh.tensor) for _, parameter in stage)
        size = _bucket_size(words, numel, mesh.num_shards)
        shards = shard_numels(
            stage,
            architecture.unit_names,
            tensor_parallel=mesh.tensor,
            size=size if number == 0 else None,  # Megatron overlaps only the first stage
            num_shards=num_shards,
            is_tied_over_stages=mesh.pipeline > 1 and not architecture.is_untied,
        )
        rows += shards * (mesh.tensor * (mesh.num_shards // num_shards))
    return tuple(rows)
