"""Loss that a setting is expected to cost: measured tables of small models (docs/results.md).

All numbers are relative increases of the final validation loss, of a GPT of 1.1 million parameters
after 960 steps. For other models and batches they have other sizes (less loss with more samples per
replica and step); `--edit-auto` only needs their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_edit.constants import BF16, FP32, INT2, INT4, INT8, SIGN, TERNARY

# By interval, over stock DDP, with averaged moments and the best outer settings of the interval.
INTERVAL_LOSS = ((8, 0.014), (16, 0.015), (32, 0.033), (64, 0.057), (128, 0.085), (256, 0.12))
# By wire type, each with the outer settings that are preset for it, over fp32 with the usual ones.
WIRE_LOSS = {
    FP32: 0.0,
    BF16: 0.0001,
    INT8: 0.0001,
    INT4: 0.0002,
    TERNARY: 0.0104,
    INT2: 0.001,
    SIGN: 0.031,
}
# By share of the interval that a sync is delayed, with an outer momentum of `DELAYED_MOMENTUM`.
DELAY_LOSS = 0.030
DELAYED_MOMENTUM = 0.7


def interval_loss(interval: int) -> float:
    """Increase at a sync interval: linear in log(tau) between the measured ones and beyond them."""
    return _interpolate(INTERVAL_LOSS, interval)


def expected_loss(interval: int, wire: str, delay: int) -> float:
    """Increase of the final loss over that of stock DDP; the parts are added.

    Args:
        interval: tau.
        wire: type on the wire.
        delay: d, steps.
    """
    return interval_loss(interval) + WIRE_LOSS[wire] + DELAY_LOSS * delay / interval


def _interpolate(points: Sequence[tuple[int, float]], at: int) -> float:
    place = next((i for i, (x, _) in enumerate(points) if x >= at), len(points) - 1)
    place = max(place, 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * math.log(at / x0) / math.log(x1 / x0)
