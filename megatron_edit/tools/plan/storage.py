"""Bytes of Megatron's parameters, gradients and optimizer state, by its flags.

Formulas are from Megatron-LM core_v0.19.0: buffers from distributed/param_and_grad_buffer.py,
states from optimizer/distrib_optimizer.py, optimizer/__init__.py, optimizer/optimizer_config.py and
optimizer/cpu_offloading/hybrid_optimizer.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_edit.constants import (
    ADAM,
    BF16,
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

# Flags that change buffers or optimizer states in ways that are not implemented here.
REFUSED = ("--use-megatron-fsdp", "--use-torch-fsdp2", "--fp4-param-gather")
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
        for name in REFUSED:
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
            num_layers: of the model.
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
