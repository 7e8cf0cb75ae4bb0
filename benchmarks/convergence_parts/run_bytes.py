"""Bytes that a replica sends in a whole run, estimated from its flags alone."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_edit.comm.wire import Wire
from megatron_edit.constants import FP32
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.flags import canonical

from .cases import Case

NUMEL = 1 << 20  # of a unit, large enough for the padding of codes not to count
MOMENTS = {"none": 0, "second": 1, "both": 2}
MOMENT_WIRE = "int8"  # moments travel in 8-bit codes with a scale for each block, as int8 does


def bytes_per_parameter(case: Case) -> float:
    """Of one replica in the whole run, its warm-up and its final synchronous phase included.

    Payload, without control records. Gradients of synchronous steps are fp32.

    Args:
        case: with one number of replicas throughout, and rounds that are counted in steps.
    """
    (stage,) = case.stages
    size = stage.num_replicas

    def sent(wire: str) -> float:
        return Wire.of(wire).payload_bytes(NUMEL, size) / NUMEL

    if STRATEGIES[case.strategy].endless_warmup:
        return stage.until * sent(FP32)
    values = {name: words[0] for name, words in canonical(case.words).items() if words}
    final = round(float(values.get("--edit-final-sync-fraction", "0")) * stage.until)
    final = min(final, stage.until - case.warmup_steps)
    num_syncs = math.ceil((stage.until - case.warmup_steps - final) / case.tau)
    num_moments = MOMENTS[values.get("--edit-average-moments", "none")]
    num_moment_syncs = num_syncs // int(values.get("--edit-average-moments-every", "1"))
    return (
        (case.warmup_steps + final) * sent(FP32)
        + num_syncs * sent(values.get("--edit-sync-dtype", FP32))
        + num_moment_syncs * num_moments * sent(MOMENT_WIRE)
    )


def relative_to_plain(case: Case) -> float:
    """Bytes of a run over those of plain EDiT with the same warm-up, interval and N."""
    plain = replace(case, strategy="edit", flags=())
    return bytes_per_parameter(case) / bytes_per_parameter(plain)
