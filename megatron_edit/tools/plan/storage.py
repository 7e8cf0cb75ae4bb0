"""How Megatron keeps a training: types of parameters and gradients, and the optimizer's vectors."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.constants import ADAM, MUON, SUPPORTED_OPTIMIZERS
from megatron_edit.errors import UsageError
from megatron_edit.tools.compare.traffic import gradient_bytes
from megatron_edit.tools.plan.words import Words

# Buffers or states of a type, or in a place, that is not in here.
REFUSED = (
    "--use-megatron-fsdp", "--use-torch-fsdp2", "--use-precision-aware-optimizer",
    "--optimizer-cpu-offload", "--fp8-param-gather", "--fp4-param-gather",
)  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """Of one element of the model.

    Attributes:
        parameter_bytes: of a parameter in the model: 2 or 4.
        gradient_bytes: of a gradient: 4, or 2.
        num_vectors: fp32 numbers that the optimizer keeps: main parameters where the model's are
            halved, and its own state.
        num_matrix_vectors: the same of the matrices that Muon would step.
    """

    parameter_bytes: int
    gradient_bytes: int
    num_vectors: int
    num_matrix_vectors: int

    @classmethod
    def from_words(cls, words: Words) -> Storage:
        """Read Megatron's flags, with Megatron's defaults.

        Raises:
            UsageError: they keep something in a way that is not known here.
        """
        for name in REFUSED:
            if words.has(name):
                rule = "the planner counts Megatron's own buffers and optimizer state in fp32 only"
                raise UsageError(name, rule, "drop the flag")
        is_bf16, is_fp16 = words.has("--bf16"), words.has("--fp16")
        if is_bf16 and is_fp16:
            raise UsageError("--bf16 --fp16", "must be one of them", "drop one")
        is_half = is_bf16 or is_fp16
        vectors = int(is_half) + _num_moments(words)
        is_muon = words.text("--optimizer", ADAM) == MUON  # a momentum of the matrices
        matrix_vectors = int(is_half) + 1 if is_muon else vectors
        return cls(2 if is_half else 4, gradient_bytes(words.has), vectors, matrix_vectors)


def _num_moments(words: Words) -> int:
    """Vectors of the optimizer's own state."""
    optimizer = words.text("--optimizer", ADAM)
    if optimizer not in SUPPORTED_OPTIMIZERS:
        raise UsageError(
            f"--optimizer {optimizer}",
            f"the planner knows the state of {', '.join(SUPPORTED_OPTIMIZERS)} only",
            "use one of these",
        )
    if optimizer == ADAM:
        return 2
    if optimizer == MUON and words.has("--use-distributed-optimizer"):
        raise UsageError(
            f"--optimizer {optimizer} --use-distributed-optimizer",
            "the planner does not know how Megatron shares whole matrices out among ranks",
            "drop --use-distributed-optimizer for the plan",
        )
    if optimizer == MUON:
        return 2  # of Adam, which steps what is no matrix
    if words.has("--use-distributed-optimizer"):
        raise UsageError(
            f"--optimizer {optimizer}",
            "Megatron's distributed optimizer takes Adam alone",
            "drop --use-distributed-optimizer and --overlap-param-gather, or use adam",
        )
    text = words.text("--sgd-momentum", "0.9")
    try:
        has_momentum = float(text) != 0
    except ValueError:
        raise UsageError(f"--sgd-momentum {text}", "must be a number", "correct it") from None
    # The fused SGD of GPUs keeps the vector of a momentum of 0, too; torch's does not.
    return int(has_momentum or words.text("--edit-device", "auto") != "cpu")
