"""Payload bytes that cross the border between replicas, where nothing counts them.

EDiT counts the bytes of its syncs itself (`wire_bytes` of sync.jsonl). Those of synchronous steps
are computed here.

Notation: N replicas of K ranks, R = N * K ranks in all, P parameters.

The baseline has no replicas. Its R ranks are counted as if N machines held K each: then its
collectives cross the same borders. All figures are payload, without protocol overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ElementBytes:
    """What crosses in a synchronous step, of each parameter of the model.

    Attributes:
        gradient: of its gradient, 4 or 2.
        rest: beside the gradient's reduce-scatter: of the parameter, where the distributed
            optimizer gathers it; else of the gradient again, which is all-reduced.
    """

    gradient: int = 4
    rest: int = 2

    @classmethod
    def of_flags(cls, has: Callable[[str], bool]) -> ElementBytes:
        """By Megatron's flags.

        Args:
            has: whether a flag is given, such as `--bf16`.
        """
        gradient = gradient_bytes(has)
        if not has("--use-distributed-optimizer"):
            return cls(gradient, gradient)
        return cls(gradient, 2 if has("--bf16") or has("--fp16") else 4)


def gradient_bytes(has: Callable[[str], bool]) -> int:
    """Of a gradient as Megatron reduces it: only with bf16 does it turn fp32 on by itself.

    Args:
        has: whether a flag is given.
    """
    if has("--bf16"):
        return 2 if has("--grad-reduce-in-bf16") else 4
    return 2 if has("--fp16") and not has("--accumulate-allreduce-grads-in-fp32") else 4


BF16 = ElementBytes()  # with the distributed optimizer and Megatron's defaults


@dataclass(frozen=True)
class Layout:
    """Who trains what.

    Attributes:
        num_replicas: N.
        ranks_per_replica: K.
        num_parameters: P, of the whole model.
    """

    num_replicas: int
    ranks_per_replica: int
    num_parameters: int


def baseline_bytes(layout: Layout, *, num_steps: int, element: ElementBytes = BF16) -> float:
    """Bytes over the border in `num_steps` steps of the distributed optimizer on R ranks.

    A ring over R ranks that are ordered by machine has N links between machines. In a
    reduce-scatter or an all-gather of n bytes every link carries (R - 1) / R * n. Each step
    reduce-scatters the gradients and all-gathers the parameters. (An all-reduce, which plain data
    parallelism makes of the gradients, is both for them.)

    Args:
        layout: of the ranks.
        num_steps: how many.
        element: of one parameter.
    """
    if layout.num_replicas == 1:
        return 0.0
    num_ranks = layout.num_replicas * layout.ranks_per_replica
    payload = layout.num_parameters * (element.gradient + element.rest)
    return num_steps * layout.num_replicas * (num_ranks - 1) / num_ranks * payload


def warmup_bytes(layout: Layout, *, num_steps: int, element: ElementBytes = BF16) -> float:
    """Bytes over the border in `num_steps` warm-up steps of EDiT.

    Each of the R ranks all-reduces its shard of the gradients (P / K of them) with its N - 1
    counterparts, and sends 2 (N - 1) / N of it.
    """
    shard_bytes = layout.num_parameters / layout.ranks_per_replica * element.gradient
    num_ranks = layout.num_replicas * layout.ranks_per_replica
    sent_per_rank = 2 * (layout.num_replicas - 1) / layout.num_replicas * shard_bytes
    return num_steps * num_ranks * sent_per_rank


def sync_bytes(layout: Layout, records: Sequence[Mapping[str, Any]]) -> float:
    """Bytes over the border in the syncs of EDiT, as its sync.jsonl counted them.

    `wire_bytes` is what the ranks of replica 0 sent; all replicas send as much.
    """
    return float(layout.num_replicas * sum(record["wire_bytes"] for record in records))
