"""What settings must be, each alone and together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_edit.errors import UsageError
from megatron_edit.flags import default_text, flag, parse_endpoint, preset_of, shown
from megatron_edit.method.strategy import STRATEGIES

if TYPE_CHECKING:
    from megatron_edit.config import EditConfig

_WITHOUT_DEFAULT = ("num_replicas", "replica_id")
# Settings that strategies with the clock do not look at, those of syncs, and of the penalty.
_ONLY_COUNTED = ("sync_interval", "interval", "qsr_a")
_ONLY_LANDING = ("fragments", "delay_steps", "mix")
_ONLY_PENALTY = (
    "anomaly_threshold", "anomaly_alpha", "anomaly_warmup_syncs", "anomaly_patience", "clip",
    "weight_temperature",
)  # fmt: skip


def check_all(config: EditConfig) -> None:
    """Check a configuration whose presets are filled in.

    Raises:
        UsageError: a value is out of range, or contradicts another.
    """
    check_ranges(config)
    check_strategy(config)
    check_landing(config)
    check_interval(config)
    check_launch(config)


def warning_of_endless_warmup(config: EditConfig, num_iterations: int) -> str | None:
    """What to say of a training that ends before its replicas part; None where they do part.

    Args:
        config: settings.
        num_iterations: of the whole training.
    """
    is_meant = STRATEGIES[config.strategy].endless_warmup
    if is_meant or num_iterations > config.warmup_steps:
        return None
    return (
        f"WARNING: {num_iterations} iterations (--train-iters, --train-samples) <= "
        f"{flag('warmup_steps')} {config.warmup_steps}: training ends before the replicas part, "
        "EDiT never starts"
    )


def check_supported(spec: dataclasses.Field[Any], value: Any) -> None:
    """A setting has one of the values that are supported, where these are few."""
    only = spec.metadata["only"]
    if only is None or value in only:
        return
    allowed = ", ".join(shown(v) for v in only)
    raise UsageError(
        f"{flag(spec.name)} {shown(value)}",
        f"this version supports only: {allowed}",
        f"use one of these, or leave {flag(spec.name)} out",
    )


def check_ranges(config: EditConfig) -> None:
    """Each setting is in its range."""
    _at_least(config, "num_replicas", 1)
    _at_least(config, "replica_id", 0)
    _at_least(config, "warmup_steps", 0)
    _at_least(config, "sync_interval", 1)
    _at_least(config, "min_round_steps", 0)
    _at_least(config, "digest_interval", 1)
    _at_least(config, "prefetch_units", 1)
    _at_least(config, "anomaly_warmup_syncs", 0)
    _at_least(config, "anomaly_patience", 0)
    _at_least(config, "fragments", 1)
    _at_least(config, "delay_steps", 0)
    for name in ("sync_seconds", "outer_lr", "anomaly_threshold", "clip", "qsr_a",
                 "weight_temperature", "timeout_seconds", "co2_gap", "co2_clip"):  # fmt: skip
        _within(config, name, "above 0", lambda x: x > 0)
    for name in ("step_weight", "mix"):
        _within(config, name, "in [0, 1]", lambda x: 0 <= x <= 1)
    _within(config, "outer_momentum", "in [0, 1)", lambda x: 0 <= x < 1)
    _within(config, "anomaly_alpha", "in (0, 1]", lambda x: 0 < x <= 1)


def check_strategy(config: EditConfig) -> None:
    """No setting is given that the strategy does not look at."""
    strategy = STRATEGIES[config.strategy]
    for other in STRATEGIES.values():
        for name in other.own_settings:
            if name not in strategy.own_settings:
                _refuse_unless_default(config, name, other.name)
    if strategy.is_timed:
        for name in _ONLY_COUNTED:
            _refuse_unless_default(config, name, "edit")
    if not strategy.has_penalty:
        for name in _ONLY_PENALTY:
            _refuse_unless_default(config, name, "edit")
    if strategy.endless_warmup:
        for name in _ONLY_LANDING:
            _refuse_unless_default(config, name, "edit")


def _refuse_unless_default(config: EditConfig, name: str, fitting: str) -> None:
    value = getattr(config, name)
    if value != preset_of(_spec(config, name), config.strategy):
        shown_value = "" if value is True else f" {shown(value)}"
        raise UsageError(
            f"{flag(name)}{shown_value}",
            f"has no effect with {flag('strategy')} {config.strategy}",
            f"use {flag('strategy')} {fitting}, or drop the flag",
        )


def check_landing(config: EditConfig) -> None:
    """Fragments, delay and mix go with the rest."""
    strategy = STRATEGIES[config.strategy]
    if not strategy.is_timed:
        _below_interval(config, "delay_steps", config.delay_steps, "d < tau")
        _below_interval(config, "fragments", config.fragments - 1, "F <= tau")
    if strategy.lands_at_next_meeting:
        for name in ("delay_steps", "mix"):
            if getattr(config, name):
                raise UsageError(
                    f"{flag(name)} {getattr(config, name)}",
                    f"{config.strategy} has a delay of its own: one round, nothing kept",
                    "drop the flag, or use another strategy",
                )
    is_whole = config.fragments == 1 and config.delay_steps == 0 and config.mix == 0.0
    is_whole = is_whole and not strategy.lands_at_next_meeting
    if config.inner_state != "all" and not is_whole:
        raise UsageError(
            f"{flag('inner_state')} {config.inner_state}",
            "with fragments, a delay or a mix there is no step at which replicas are equal",
            f"use {flag('inner_state')} all",
        )
    if strategy.endless_warmup and config.sync_dtype != "fp32":
        raise UsageError(
            f"{flag('sync_dtype')} {config.sync_dtype}",
            f"has no effect with {flag('strategy')} {config.strategy}: gradients cross, no syncs",
            "drop the flag; Megatron's --grad-reduce-in-bf16 is about gradients",
        )


def check_interval(config: EditConfig) -> None:
    """The schedule of the interval has what it needs."""
    if (config.interval == "qsr") != (config.qsr_a is not None):
        raise UsageError(
            f"{flag('interval')} {config.interval}, {flag('qsr_a')} {config.qsr_a}",
            "the qsr schedule needs its a, and no other schedule has one",
            f"give both {flag('interval')} qsr and {flag('qsr_a')}, or none of them",
        )
    if config.interval == "qsr" and config.fragments > 1:
        raise UsageError(
            f"{flag('fragments')} {config.fragments}",
            f"{flag('interval')} qsr has rounds of changing length, and no places between",
            f"use {flag('fragments')} 1, or {flag('interval')} fixed",
        )


def check_launch(config: EditConfig) -> None:
    """A launch per replica says which replica it is."""
    if (config.replica_id is None) != (config.rendezvous is None):
        given, missing = ("replica_id", "rendezvous")
        if config.replica_id is None:
            given, missing = missing, given
        raise UsageError(
            f"{flag(given)} {getattr(config, given)}",
            f"one launch per replica also needs {flag(missing)}",
            f"add {flag(missing)}, or drop {flag(given)} for a single launch of all replicas",
        )
    if config.replica_id is not None and config.num_replicas is None:
        raise UsageError(
            f"{flag('replica_id')} {config.replica_id}",
            f"one launch per replica also needs {flag('num_replicas')}",
            f"add {flag('num_replicas')} N",
        )
    if config.replica_id is not None and config.replica_id >= (config.num_replicas or 0):
        raise UsageError(
            f"{flag('replica_id')} {config.replica_id}",
            f"must be below {flag('num_replicas')} {config.num_replicas}",
            "number the launches from 0",
        )
    if config.rendezvous is not None:
        parse_endpoint(config.rendezvous)


def _at_least(config: EditConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if value is not None and value < least:
        remedy = "give a larger value" if name in _WITHOUT_DEFAULT else _default_of(config, name)
        raise UsageError(f"{flag(name)} {value}", f"must be at least {least}", remedy)


def _within(config: EditConfig, name: str, rule: str, holds: Callable[[float], bool]) -> None:
    value = getattr(config, name)
    if value is not None and not (math.isfinite(value) and holds(value)):
        raise UsageError(
            f"{flag(name)} {value}", f"must be a finite number {rule}", _default_of(config, name)
        )


def _below_interval(config: EditConfig, name: str, value: int, rule: str) -> None:
    if value >= config.sync_interval:
        raise UsageError(
            f"{flag(name)} {getattr(config, name)}, {flag('sync_interval')} {config.sync_interval}",
            f"must be {rule}",
            f"give a smaller value, or a longer {flag('sync_interval')}",
        )


def _default_of(config: EditConfig, name: str) -> str:
    return f"the default is {default_text(_spec(config, name))}"


def _spec(config: EditConfig, name: str) -> dataclasses.Field[Any]:
    return config.__dataclass_fields__[name]
