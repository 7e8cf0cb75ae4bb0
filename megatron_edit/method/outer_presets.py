"""Outer learning rate and momentum by sync interval, with Adam (docs/strategies.md)."""

from __future__ import annotations

# The largest interval of each row, nu, mu_o. Measured with averaged moments, two and four replicas.
_BY_INTERVAL = ((8, 0.8, 0.8), (256, 0.8, 0.85))


def outer_preset(interval: int) -> tuple[float, float]:
    """nu and mu_o at a sync interval tau; those of the longest measured one beyond it."""
    for longest, lr, momentum in _BY_INTERVAL:
        if interval <= longest:
            return lr, momentum
    return _BY_INTERVAL[-1][1:]
