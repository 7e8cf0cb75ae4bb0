"""The strategies of `--edit-strategy` and their settings of the engine (method section 6).

No other module depends on the name of a strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_edit.constants import INT2, MUON, SIGN, TERNARY, TOP64

NESTEROV, SLOW_MOMENTUM, STALE_MOMENTUM = "nesterov", "slow-momentum", "stale-momentum"


@dataclass(frozen=True)
class Strategy:
    """A synchronisation strategy.

    Attributes:
        name: the value of `--edit-strategy`.
        presets: defaults of settings that are not on the command line; only those that differ from
            the general defaults in `EditConfig`.
        optimizer_presets: presets by Megatron's `--optimizer`, which replace those above where the
            replicas train with that inner optimizer.
        endless_warmup: gradients are averaged at every step; there is never an outer step.
        is_timed: replicas meet by the clock, after as many steps as each has made by then.
        is_elastic: a hub may decide which replicas take part.
        has_penalty: whether replicas are weighted, anomalous ones rejected, and averages clipped.
        outer: the rule of the outer step (`outer_rule`).
        keeps_progress: whether a delayed landing keeps the change of the parameters since the
            snapshot.
        lands_at_next_meeting: the result of a round lands at the end of the next.
        own_settings: settings that apply to this strategy alone, or to a few.
        fixed_settings: settings that always have the strategy's preset, or their default.
    """

    name: str
    presets: Mapping[str, float | str] = field(default_factory=dict)
    optimizer_presets: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    endless_warmup: bool = False
    is_timed: bool = False
    is_elastic: bool = False
    has_penalty: bool = False
    outer: str = NESTEROV
    keeps_progress: bool = True
    lands_at_next_meeting: bool = False
    own_settings: tuple[str, ...] = ()
    fixed_settings: tuple[str, ...] = ()

    def presets_with(self, inner_optimizer: str) -> Mapping[str, float | str]:
        """The presets with one of Megatron's inner optimizers.

        Args:
            inner_optimizer: the value of `--optimizer`.
        """
        return {**self.presets, **self.optimizer_presets.get(inner_optimizer, {})}


_AVERAGING = {"outer_lr": 1.0, "outer_momentum": 0.0}
_DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9}
# Muon's updates all have the same size: their averages are not too small, as Adam's are, and need
# less outer momentum (2505.23725; docs/strategies.md has our own numbers).
_WITH_MUON = {MUON: {"outer_lr": 0.9, "outer_momentum": 0.6}}
MOMENT_SETTINGS = ("average_moments", "average_moments_every")
TIMED_SETTINGS = ("sync_seconds", "min_round_steps", "step_weight")

STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("edit", optimizer_presets=_WITH_MUON, is_elastic=True, has_penalty=True),
        Strategy(
            "a-edit",
            optimizer_presets=_WITH_MUON,
            is_timed=True,
            is_elastic=True,
            has_penalty=True,
            own_settings=TIMED_SETTINGS,
        ),
        Strategy("ddp", endless_warmup=True, has_penalty=True),
        Strategy("local-sgd", {**_AVERAGING, "warmup_steps": 0}),
        Strategy("post-local-sgd", _AVERAGING),
        Strategy("slowmo", {"outer_lr": 1.0, "outer_momentum": 0.7}, outer=SLOW_MOMENTUM),
        Strategy("diloco", _DILOCO),
        Strategy(
            "co2",
            {"outer_lr": 1.0, "outer_momentum": 0.5},
            outer=STALE_MOMENTUM,
            keeps_progress=False,
            lands_at_next_meeting=True,
            own_settings=("co2_gap", "co2_clip"),
        ),
        Strategy(
            "streaming-diloco",
            {**_DILOCO, "fragments": 4, "delay_steps": 8, "mix": 0.5},
            keeps_progress=False,
        ),
        Strategy(
            "sparse-loco",
            {**_AVERAGING, "sync_dtype": TOP64},
            # With a mix a replica would keep, in its parameters, updates that are also in its
            # residual. Moments would take many times the bytes of the updates.
            fixed_settings=("sync_dtype", "outer_momentum", "mix", *MOMENT_SETTINGS),
        ),
    )
}


# ---- Outer learning rate and momentum by sync interval and wire type, with Adam
# (docs/strategies.md)
#
# Short rounds overshoot with a large momentum. Error feedback of a coarse wire type delays parts
# of an update by several rounds, as momentum does: both together overshoot, too.


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
    """
    if wire in _BY_WIRE:
        return _BY_WIRE[wire]
    return _SHORT if interval is not None and interval < LEAST_USUAL_INTERVAL else _USUAL
