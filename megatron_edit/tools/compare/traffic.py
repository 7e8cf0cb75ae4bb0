"""Payload bytes between replicas in synchronous steps, computed from the layout.

EDiT counts the bytes of its syncs itself (`wire_bytes` of sync.jsonl).

Notation: N replicas of K ranks, R = N * K ranks in all, P parameters.

The baseline has no replicas. Its traffic is that between N machines of K ranks each, so that the
same links are compared. All figures are payload, without protocol overhead, and those of an
all-reduce, reduce-scatter or all-gather in a ring, as NCCL uses it for large tensors. Gloo sends
more for one of them: its reduce-scatter all-reduces the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_edit.constants import FP32

_LARGE = 1 << 20  # elements, so that the padding of codes is negligible


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of a parameter that a synchronous step exchanges."""

    gradient: int = 4  # in the reduce-scatter of its gradient, 4 or 2
    # In the all-gather: of the parameter with the distributed optimizer, else of the gradient
    # again, which is all-reduced.
    rest: float = 2

    @classmethod
    def of_flags(cls, has: Callable[[str], bool]) -> ElementBytes:
        """Return the bytes for Megatron's flags.

        Args:
            has: whether a flag is given, such as `--bf16`.
        """
        gradient = gradient_bytes(has)
        if not has("--use-distributed-optimizer"):
            return cls(gradient, gradient)
        return cls(gradient, 2 if has("--bf16") or has("--fp16") else 4)


def gradient_bytes(has: Callable[[str], bool]) -> int:
    """Return the bytes of a gradient that Megatron reduces; by default fp32 only with bf16.

    Args:
        has: whether a flag is given.
    """
    if has("--bf16"):
        return 2 if has("--grad-reduce-in-bf16") else 4
    return 2 if has("--fp16") and not has("--accumulate-allreduce-grads-in-fp32") else 4


BF16 = ElementBytes()  # with the distributed optimizer and Megatron's defaults


@dataclass(frozen=True)
class Layout:
    """The layout of a training."""

    num_replicas: int
    ranks_per_replica: int
    num_parameters: int  # P, of the model
    model_parallel_ranks: int = 1  # ranks that hold the model together
    # Of the distributed optimizer: of the baseline over all ranks, of EDiT in each replica.
    num_instances: int = 1


def baseline_bytes(layout: Layout, *, num_steps: int, element: ElementBytes = BF16) -> float:
    """Return the bytes between machines in `num_steps` steps of the baseline on R ranks.

    A ring over D ranks that are ordered by machine has N links between machines; in a
    reduce-scatter or an all-gather of n bytes every link carries (D - 1) / D * n. Each step
    reduce-scatters the gradients and all-gathers the parameters, in a ring of its own for each part
    of the model. (The all-reduce of gradients in plain data parallelism counts as both.)

    Several optimizer instances do this inside an instance, in a ring of D / I ranks, and all-reduce
    every shard of the gradients in a ring of I ranks: 2 (I - 1) / I of it per link. With an
    instance on each machine (I = N) a machine sends 2 (N - 1) / N of all gradients.

    Args:
        layout: of the ranks.
        num_steps: number of steps.
        element: bytes of a parameter.
    """
    num_ranks = layout.num_replicas * layout.ranks_per_replica
    ring = max(1, num_ranks // layout.model_parallel_ranks)
    machines = [rank * layout.num_replicas // ring for rank in range(ring)]
    instances = layout.num_instances
    size = ring // instances
    inside = sum(_links(machines[i * size : (i + 1) * size]) for i in range(instances))
    between = sum(_links(machines[shard::size]) for shard in range(size))
    per_parameter = (
        inside * (size - 1) / size * (element.gradient + element.rest)
        + between * 2 * (instances - 1) / instances * element.gradient / size
    )
    return num_steps * layout.num_parameters * per_parameter


def _links(machines: Sequence[int]) -> int:
    """Return the links between machines in a ring of ranks, from the machine of each."""
    return sum(machines[i - 1] != machine for i, machine in enumerate(machines))


def warmup_bytes(
    layout: Layout, *, num_steps: int, element: ElementBytes = BF16, dtype: str = FP32
) -> float:
    """Return the bytes between replicas in `num_steps` warm-up steps of EDiT.

    Each of the R ranks all-reduces its shard of the gradients with its N - 1 counterparts, and
    sends 2 (N - 1) / N of it. The shard has P / K of them, or P I / K if a replica has I optimizer
    instances, as each of them exchanges all gradients. Encoded, a gradient has as many bytes as its
    code and its share of a scale.

    Args:
        layout: of the ranks.
        num_steps: number of steps.
        element: bytes of a parameter.
        dtype: `--edit-warmup-dtype`.
    """
    from megatron_edit.comm.wire import Wire  # imports torch, which other commands do not need

    codec = Wire.of(dtype).codec
    gradient = element.gradient if codec is None else codec.encoded_bytes(_LARGE) / _LARGE
    shard = layout.num_parameters * layout.num_instances / layout.ranks_per_replica
    num_ranks = layout.num_replicas * layout.ranks_per_replica
    sent_per_rank = 2 * (layout.num_replicas - 1) / layout.num_replicas * (shard * gradient)
    return num_steps * num_ranks * sent_per_rank
