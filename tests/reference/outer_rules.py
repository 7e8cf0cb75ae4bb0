"""Differences between strategies: presets, outer step and landing of one unit.

Functions of arrays and numbers, written from the publications: local SGD (arXiv 1805.09767),
post-local SGD (1808.07217), SlowMo (1910.00643), DiLoCo (2311.08105), CO2 (2401.16265), Streaming
DiLoCo (2501.18512), SparseLoCo (2508.15706).
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.reference.oracle import Array, OracleSettings, nesterov

NO_PENALTY = OracleSettings(anomaly_elimination=False, weighting=False, max_norm=None)
PENALIZED = ("edit", "a-edit")
AVERAGING = ("local-sgd", "post-local-sgd")
SPARSE = "sparse-loco"
NESTEROV = ("diloco", "streaming-diloco", SPARSE, *PENALIZED)


@dataclass(frozen=True)
class StrategySettings:
    """Settings of one strategy; `settings_for` applies the presets.

    Attributes:
        strategy: a name of method section 6.
        tau: steps of a round.
        warmup_steps: W.
        fragments: F, the number of groups.
        delay: d, in steps.
        mix: weight of the replica's own parameters at a landing.
        outer_lr: nu of Nesterov, alpha of SlowMo and CO2.
        outer_momentum: mu_o of Nesterov, beta of SlowMo and CO2.
        penalty: detectors, weights and clip.
        co2_gap: Lambda, a constant.
        co2_clip: phi_m, the bound of every element of CO2's momentum; None is off.
        rho: weight of the step counts in the weights of `a-edit`.
        ranks: of a replica, each of which encodes a shard of every unit; SparseLoCo only.
        dtype: float64, or float32 to include the rounding of the engine's state.
    """

    strategy: str
    tau: int
    warmup_steps: int = 0
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    penalty: OracleSettings = field(default_factory=lambda: NO_PENALTY)
    co2_gap: float = 1.0
    co2_clip: float | None = None
    rho: float = 0.0
    ranks: int = 1
    dtype: type[np.floating[Any]] = np.float64

    def __post_init__(self) -> None:
        """Refuse unknown strategies and combinations."""
        known = {*AVERAGING, *NESTEROV, "slowmo", "co2"}
        if self.strategy not in known:
            raise ValueError(f"strategy {self.strategy!r} is not one of {sorted(known)}")
        if self.strategy == "co2" and (self.delay or self.mix):
            raise ValueError("co2 is delayed by one round itself: it has no delay and no mix")
        if self.strategy == SPARSE and (self.mix or self.outer_momentum):
            raise ValueError("sparse-loco has no mix and no outer momentum")


PRESETS: dict[str, dict[str, Any]] = {
    "local-sgd": {},
    "post-local-sgd": {},
    "slowmo": {"outer_lr": 1.0, "outer_momentum": 0.7},
    "diloco": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "co2": {"outer_lr": 1.0, "outer_momentum": 0.5},
    "streaming-diloco": {
        "outer_lr": 0.7, "outer_momentum": 0.9, "fragments": 4, "delay": 8, "mix": 0.5,
    },
    SPARSE: {"outer_lr": 1.0, "outer_momentum": 0.0},
    "edit": {"outer_lr": 0.8, "outer_momentum": 0.85, "penalty": OracleSettings()},
    "a-edit": {"outer_lr": 0.8, "outer_momentum": 0.85, "penalty": OracleSettings()},
}  # fmt: skip


def settings_for(strategy: str, *, tau: int, **changes: Any) -> StrategySettings:
    """Return the preset of `strategy`, overridden by `changes`."""
    return replace(StrategySettings(strategy, tau, **PRESETS[strategy]), **changes)


def outer_step(
    settings: StrategySettings, anchor: Array, momentum: Array, average: Array, *, lr: float
) -> tuple[Array, Array]:
    """Return the new anchor and momentum of one unit.

    Args:
        settings: the strategy.
        anchor: A, before.
        momentum: b of Nesterov, u of SlowMo, m of CO2; stays zero for averaging strategies.
        average: the average of A - theta over the accepted replicas; with CO2 that of the previous
            round, computed with the previous A.
        lr: learning rate of the inner optimizer at the sync, used by SlowMo only.
    """
    rate, beta = settings.outer_lr, settings.outer_momentum
    if settings.strategy in AVERAGING or (settings.strategy == "slowmo" and lr == 0.0):
        return anchor - average, momentum
    if settings.strategy == "slowmo":
        momentum = beta * momentum + average / lr
        return anchor - rate * lr * momentum, momentum
    if settings.strategy == "co2":
        momentum = beta * momentum + average / settings.co2_gap
        if settings.co2_clip is not None:
            momentum = np.clip(momentum, -settings.co2_clip, settings.co2_clip)
        return anchor - rate * momentum, momentum
    return nesterov(anchor, momentum, average, lr=rate, momentum_coefficient=beta)


def landed(
    settings: StrategySettings, theta: Array, snapshot: Array, anchor: Array, *, mix: float
) -> Array:
    """Return the parameters of an accepted replica after the new `anchor` has landed.

    CO2 restarts from the anchor, and Streaming DiLoCo mixes it with the current parameters, as
    published. All others keep the progress since the snapshot, which is zero without delay.
    """
    if settings.strategy == "co2":
        return anchor.copy()
    if settings.strategy == "streaming-diloco":
        return mix * theta + (1.0 - mix) * anchor
    return mix * theta + (1.0 - mix) * (anchor + (theta - snapshot))
