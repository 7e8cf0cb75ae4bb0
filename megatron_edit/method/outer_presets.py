"""Outer learning rate and momentum by sync interval and wire type, with Adam (docs/strategies.md).

Short rounds overshoot with a large momentum. Error feedback of a coarse wire type delays parts of
an update by several rounds, as momentum does: both together overshoot, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_edit.constants import INT2, SIGN, TERNARY

LEAST_USUAL_INTERVAL = 12  # between the measured 8 and 16
USUAL_LR, USUAL_MOMENTUM = 0.8, 0.85
_USUAL = {"outer_lr": USUAL_LR, "outer_momentum": USUAL_MOMENTUM}
_SHORT = {"outer_lr": 0.9, "outer_momentum": 0.6}
_BY_WIRE = {
    INT2: _SHORT,
    TERNARY: {"outer_lr": 1.0, "outer_momentum": 0.5},
    SIGN: {"outer_lr": 1.0, "outer_momentum": 0.5},
}


def outer_preset(interval: int | None, wire: str) -> Mapping[str, float]:
    """nu and mu_o, by the names of the settings.

    Args:
        interval: tau; None where rounds end by the clock.
        wire: type on the wire.
    """
    if wire in _BY_WIRE:
        return _BY_WIRE[wire]
    return _SHORT if interval is not None and interval < LEAST_USUAL_INTERVAL else _USUAL
