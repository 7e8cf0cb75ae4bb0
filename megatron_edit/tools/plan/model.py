"""The parameters of a GPT and their shards on each rank, computed from Megatron's flags alone.

No model is built and Megatron is not imported, so that the planner runs without Megatron and
Transformer Engine. `tests/host/test_configs.py` compares the counts with the models that Megatron
builds, `tests/host/test_plan_memory.py` the shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from megatron_edit.constants import (
    ADAM,
    BF16,
    EMBEDDING,
    FINAL,
    FP8_GATHER_RECIPES,
    FP32,
    FP32_BYTES,
    MUON,
    SUPPORTED_OPTIMIZERS,
)
from megatron_edit.errors import UsageError
from megatron_edit.tools.compare.instances import SHARDED_FLAG
from megatron_edit.tools.compare.traffic import gradient_bytes
from megatron_edit.tools.plan.values import TrainingFlags

MOST_LAYERS = 10_000
# Of Megatron's buffer of gradients, in elements.
PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
USUAL_BUCKET, USUAL_BUCKET_PER_RANK = 40_000_000, 1_000_000

# Flags that change the count in ways that are not implemented here.
REFUSED = (
    "--num-experts", "--mtp-num-layers", "--multi-latent-attention", "--spec", "--yaml-cfg",
    "--heterogeneous-layers-config-path", "--hybrid-override-pattern", "--hybrid-layer-pattern",
    "--experimental-attention-variant", "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--attention-output-gate",
)  # fmt: skip


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
    hidden_size: int
    seq_length: int
    attention_width: int
    is_untied: bool
    embedding: tuple[Parameter, ...]
    layer: tuple[Parameter, ...]
    final: tuple[Parameter, ...]

    @classmethod
    def from_flags(cls, argv: Sequence[str]) -> Architecture:
        """Read Megatron's flags, with Megatron's defaults.

        Raises:
            UsageError: a flag is missing, or the model is not supported.
        """
        words = TrainingFlags(argv)
        for name in REFUSED:
            if words.has(name):
                raise UsageError(name, "the planner counts dense GPTs only", "drop the flag")
        hidden, heads = words.count("--hidden-size"), words.count("--num-attention-heads")
        ffn = (8 * hidden // 3) // 64 * 64 if words.has("--swiglu") else 4 * hidden
        positions = words.text("--position-embedding-type", "learned_absolute")
        is_rope = words.has("--use-rotary-position-embeddings")  # old name, takes precedence
        num_layers = words.count("--num-layers", most=MOST_LAYERS)
        ffn = words.count("--ffn-hidden-size", ffn)
        grouped = words.has("--group-query-attention")
        groups = words.count("--num-query-groups", 1) if grouped else heads
        channels = words.count("--kv-channels", max(1, hidden // heads))
        seq_length = words.count("--seq-length")
        word = Parameter(_vocabulary(words) * hidden, is_split=True)
        has_norm_bias = words.text("--normalization", "LayerNorm") == "LayerNorm"  # not RMSNorm
        norm = [Parameter(hidden)] * (2 if has_norm_bias else 1)
        embedding, final = [word], norm
        if positions == "learned_absolute" and not is_rope:
            numel = words.count("--max-position-embeddings") * hidden
            embedding.append(Parameter(numel, is_matrix=True))
        if is_untied := words.has("--untie-embeddings-and-output-weights"):
            final = [*norm, word]
        layer = _layer(words, norm, heads=heads, groups=groups, channels=channels, ffn=ffn)
        return cls(
            num_layers=num_layers,
            hidden_size=hidden,
            seq_length=seq_length,
            attention_width=heads * channels,
            is_untied=is_untied,
            embedding=tuple(embedding),
            layer=tuple(layer),
            final=tuple(final),
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
    words: TrainingFlags,
    norm: Sequence[Parameter],
    *,
    heads: int,
    groups: int,
    channels: int,
    ffn: int,
) -> list[Parameter]:
    """Return the parameters of a layer, in the order of their registration.

    Args:
        words: Megatron's flags.
        norm: one norm of the hidden size.
        heads, groups: numbers of query heads, and of key-value heads.
        channels: of a head.
    """
    hidden, query, fan_out = norm[0].numel, heads * channels, (heads + 2 * groups) * channels
    fc1 = ffn * (2 if words.has("--swiglu") or words.has("--quick-geglu") else 1)
    has_bias = not words.has("--disable-bias-linear")
    proj, qkv, up, down = (
        [Parameter(width * hidden, is_split=True, is_matrix=True)]
        for width in (query, fan_out, fc1, ffn)
    )
    if has_bias or words.has("--add-qkv-bias"):
        qkv.append(Parameter(fan_out, is_split=True))
    if has_bias:
        proj.append(Parameter(hidden))
        up.append(Parameter(fc1, is_split=True))
        down.append(Parameter(hidden))
    if words.has("--qk-layernorm"):
        qkv += [Parameter(channels)] * (2 * len(norm))
    has_transformer_engine = (
        words.text("--transformer-impl", "transformer_engine") == "transformer_engine"
        and words.text("--edit-device", "auto") != "cpu"
    )
    if has_transformer_engine:  # it fuses norms with the matrices behind them
        return [*proj, *norm, *qkv, *norm, *up, *down]
    return [*norm, *proj, *qkv, *norm, *up, *down]


def _vocabulary(words: TrainingFlags) -> int:
    """Return the vocabulary size with Megatron's padding."""
    if words.has("--padded-vocab-size"):
        return words.count("--padded-vocab-size")
    if not words.has("--vocab-size"):
        raise UsageError(
            "--vocab-size (not given)",
            "the planner reads no tokenizer, and needs its size",
            "add --vocab-size",
        )
    multiple = words.count("--make-vocab-size-divisible-by", 128)
    multiple *= words.count("--tensor-model-parallel-size", 1)
    return -(-words.count("--vocab-size") // multiple) * multiple


def bucket_size(words: TrainingFlags, *, numel: int, num_shards: int) -> int | None:
    """Return the number of elements at which a bucket is closed; None for a single bucket.

    Args:
        words: Megatron's flags.
    """
    num_buckets = words.count("--ddp-num-buckets", 1)
    size = words.count("--ddp-bucket-size", max(USUAL_BUCKET, USUAL_BUCKET_PER_RANK * num_shards))
    if not words.has("--overlap-grad-reduce"):
        return None
    return numel // num_buckets if words.has("--ddp-num-buckets") else size


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
        part = _aligned(bucket[-1][2], lcm(num_shards, BUCKET_ALIGNMENT)) // num_shards
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


# ---- Bytes of Megatron's parameters, gradients and optimizer state, by its flags
#
# Formulas are from Megatron-LM core_v0.19.0: buffers from distributed/param_and_grad_buffer.py,
# states from optimizer/distrib_optimizer.py, optimizer/__init__.py, optimizer/optimizer_config.py
# and optimizer/cpu_offloading/hybrid_optimizer.py.


# Flags that change buffers or optimizer states in ways that are not implemented here.
REFUSED_BUFFERS = ("--use-megatron-fsdp", "--use-torch-fsdp2", "--fp4-param-gather")
PRECISION_AWARE = "--use-precision-aware-optimizer"
OFFLOADED, FP8_GATHER = "--optimizer-cpu-offload", "--fp8-param-gather"
_BYTES = {FP32: FP32_BYTES, "fp16": 2, BF16: 2, "fp8": 1}
_BF16 = (FP32, BF16)


@dataclass(frozen=True)
class Storage:
    """Memory of one element of the model.

    Attributes:
        parameter_bytes: of a parameter in the model: 2 or 4.
        gradient_bytes: of a gradient: 4, or 2.
        state_bytes: of the optimizer on the device: the main parameter where the model's is in half
            precision, and the optimizer's state.
        matrix_state_bytes: the same for matrices that Muon updates.
        host_state_bytes: of the optimizer in host memory, with `--optimizer-cpu-offload`.
        has_fp8_parameters: whether matrices of layers are kept and gathered in fp8.
        num_bf16_layers: layers at the start and at the end whose matrices are not.
    """

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: float
    matrix_state_bytes: float
    host_state_bytes: float = 0.0
    has_fp8_parameters: bool = False
    num_bf16_layers: tuple[int, int] = (0, 0)

    @classmethod
    def from_flags(cls, words: TrainingFlags) -> Storage:
        """Read Megatron's flags, with Megatron's defaults.

        Raises:
            UsageError: the planner does not support a flag.
        """
        for name in REFUSED_BUFFERS:
            if words.has(name):
                rule = "the planner does not count these buffers"
                raise UsageError(name, rule, "drop the flag")
        is_bf16, is_fp16 = words.has("--bf16"), words.has("--fp16")
        if is_bf16 and is_fp16:
            raise UsageError("--bf16 --fp16", "must be one of them", "drop one")
        is_half = is_bf16 or is_fp16
        moments = _num_moments(words)
        main = FP32_BYTES * int(is_half)
        state: float = main + FP32_BYTES * moments
        is_muon = words.text("--optimizer", ADAM) == MUON
        matrix: float = main + FP32_BYTES * (
            1 if is_muon else moments
        )  # one momentum for the matrices
        gradient = gradient_bytes(words.has)
        has_fp8 = _has_fp8_parameters(words, is_half=is_half)
        if words.has(PRECISION_AWARE):
            _check_precision_aware(words, is_half=is_half)
            if _dtype(words, "--main-grads-dtype", _BF16) == BF16:
                gradient = 2
            state = matrix = _precision_aware_bytes(words, is_bf16=is_bf16)
        host = 0.0
        if words.has(OFFLOADED):
            state, host = _offloaded_bytes(words, is_half=is_half)
            matrix = state
        bf16_layers = _num_bf16_layers(words) if has_fp8 else (0, 0)
        return cls(2 if is_half else 4, gradient, state, matrix, host, has_fp8, bf16_layers)

    def is_fp8_layer(self, number: int, num_layers: int) -> bool:
        """Return whether the matrices of a layer are kept in fp8.

        Args:
            number: of the layer, from 1.
        """
        first, last = self.num_bf16_layers
        return self.has_fp8_parameters and first < number <= num_layers - last


def _has_fp8_parameters(words: TrainingFlags, *, is_half: bool) -> bool:
    if not words.has(FP8_GATHER):
        return False
    if not words.has("--fp8-format") or not is_half:
        remedy = "add --bf16 --fp8-format hybrid, or drop the flag"
        raise UsageError(FP8_GATHER, "belongs to fp8 training in half precision", remedy)
    _dtype(words, "--fp8-recipe", FP8_GATHER_RECIPES)
    return True


def _num_bf16_layers(words: TrainingFlags) -> tuple[int, int]:
    """Return the layers at both ends in bf16 (`is_first_last_bf16_layer` in fp8_utils.py)."""
    if not words.has("--first-last-layers-bf16"):
        return 0, 0
    names = ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")
    first, last = (0 if words.text(name, "1") == "0" else words.count(name, 1) for name in names)
    return first, last


def _dtype(words: TrainingFlags, name: str, known: tuple[str, ...]) -> str:
    """Return the value of a flag; the first one of `known` is the default.

    Raises:
        UsageError: it is none of `known`.
    """
    text = words.text(name, known[0])
    if text not in known:
        raise UsageError(f"{name} {text}", f"must be of {', '.join(known)}", "correct it")
    return text


def _check_precision_aware(words: TrainingFlags, *, is_half: bool) -> None:
    """Refuse what Megatron refuses, and models in fp32, whose states are in its kernels' hands."""
    if words.text("--optimizer", ADAM) != ADAM or not words.has(SHARDED_FLAG):
        raise UsageError(PRECISION_AWARE, f"needs {SHARDED_FLAG} and Adam", "drop it, or add these")
    if not is_half:
        raise UsageError(
            PRECISION_AWARE, "is planned for models in half precision only", "add --bf16"
        )
    _dtype(words, "--main-params-dtype", ("fp32",))  # `check` refuses the other one


def _precision_aware_bytes(words: TrainingFlags, *, is_bf16: bool) -> float:
    """Return main parameter and moments.

    The kernel keeps only the low 16 bits of a main parameter whose high bits are the bf16 model's
    (`store_param_remainders`), except with fp8 parameters that are not scaled with a delay: then
    Megatron keeps all of it (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`).
    """
    has_scaling_now = (
        words.has("--fp8-format") and words.text("--fp8-recipe", "delayed") != "delayed"
    )
    main = 2 if is_bf16 and not has_scaling_now else FP32_BYTES
    names = ("--exp-avg-dtype", "--exp-avg-sq-dtype")
    return main + sum(_BYTES[_dtype(words, name, tuple(_BYTES))] for name in names)


def _offloaded_bytes(words: TrainingFlags, *, is_half: bool) -> tuple[float, float]:
    """Return the bytes on the device and in host memory.

    `HybridDeviceOptimizer` updates a share of the parameters on the CPU: there they have an fp32
    copy, the moments and a pinned gradient, all in fp32. The others have theirs on the device. It
    gets the parameters in half precision from the precision-aware optimizer, otherwise the main
    parameters, which then stay on the device.
    """
    text = words.text("--optimizer-offload-fraction", "1.0")
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        rule, remedy = "must be from 0 to 1", "correct it"
        raise UsageError(f"--optimizer-offload-fraction {text}", rule, remedy)
    if words.text("--optimizer", ADAM) == MUON:
        raise UsageError(f"{OFFLOADED} --optimizer {MUON}", "is not planned", "use Adam")
    vectors = _num_moments(words)
    copied = 1 if is_half and words.has(PRECISION_AWARE) else 0
    kept = int(is_half) - copied
    device = FP32_BYTES * (kept + (1 - share) * (copied + vectors))
    return device, FP32_BYTES * share * (2 + vectors)


def _num_moments(words: TrainingFlags) -> int:
    """Return the number of vectors in the optimizer's state."""
    optimizer = words.text("--optimizer", ADAM)
    if optimizer not in SUPPORTED_OPTIMIZERS:
        raise UsageError(
            f"--optimizer {optimizer}",
            f"the planner supports {', '.join(SUPPORTED_OPTIMIZERS)} only",
            "use one of these",
        )
    if optimizer == ADAM:
        return 2
    if optimizer == MUON and words.has(SHARDED_FLAG):
        raise UsageError(
            f"--optimizer {optimizer} {SHARDED_FLAG}",
            "the planner does not model how Megatron distributes matrices among ranks",
            f"drop {SHARDED_FLAG} for the plan",
        )
    if optimizer == MUON:
        return 2  # of Adam, which updates all other parameters
    if words.has(SHARDED_FLAG):
        raise UsageError(
            f"--optimizer {optimizer}",
            "Megatron's distributed optimizer supports Adam only",
            f"drop {SHARDED_FLAG} and --overlap-param-gather, or use adam",
        )
    text = words.text("--sgd-momentum", "0.9")
    try:
        has_momentum = float(text) != 0
    except ValueError:
        raise UsageError(f"--sgd-momentum {text}", "must be a number", "correct it") from None
    # The fused SGD of GPUs allocates a momentum of 0, too; torch's does not.
    return int(has_momentum or words.text("--edit-device", "auto") != "cpu")
