"""Settings of the plugin: the rules for them and between them, and their flags.

`EditConfig` is the resolved configuration. From the metadata of its fields (`method.settings`)
`add_arguments` builds the `--edit-*` flags for this package's own parser (`command_line`) and for
Megatron's.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from megatron_edit.constants import (
    ADACOMM,
    ADAM,
    ALL,
    AUTO,
    BLOCKING,
    DEFAULT_STRATEGY,
    FIXED,
    FP32,
    GLOO,
    NONE,
    OPTIMIZERS_WITH_MOMENTS,
    OVERLAP,
    QSR,
    REPLICA_NAME,
    REPLICA_NAME_RULE,
    STL,
    TOP64,
)
from megatron_edit.errors import UsageError
from megatron_edit.flags import default_text, flag, format_value, parse_endpoint, preset_of
from megatron_edit.method.auto import AUTO_SETTINGS
from megatron_edit.method.schedule import last_local as last_local_of
from megatron_edit.method.settings import Settings, in_words, is_within
from megatron_edit.method.strategy import STRATEGIES, outer_preset

_WITHOUT_DEFAULT = ("num_replicas", "replica_id", "nominal_replicas", "metrics_port")
# Settings without effect: with timed strategies, with an endless warm-up, without a penalty.
STEP_COUNT_SETTINGS = ("sync_interval", "interval", "qsr_a", "stl_stages", "final_sync_fraction")
SYNC_SETTINGS = (
    "fragments", "delay_steps", "mix", "average_moments", "average_moments_every", "scale_beta2",
    "final_sync_fraction",
)  # fmt: skip
AUTO_WARMUP_STEPS = 20  # that `--edit-auto` needs
OUTER_SETTINGS = ("outer_lr", "outer_momentum")
# Values of settings with which a run may have a hub.
_ELASTIC: dict[str, tuple[Any, ...]] = {
    "sync_mode": (AUTO, BLOCKING),
    "sync_backend": (AUTO, GLOO),
    "sync_net": (AUTO,),
    "fragments": (1,),
    "delay_steps": (0,),
    "mix": (0.0,),
    "interval": (FIXED,),
    "final_sync_fraction": (0.0,),
}
_PENALTY_SETTINGS = (
    "anomaly_threshold", "anomaly_alpha", "anomaly_warmup_syncs", "anomaly_patience",
    "loss_threshold", "clip", "weight_temperature",
)  # fmt: skip


@dataclass(frozen=True)
class EditConfig(Settings):
    """Settings of EDiT. The constructor fills in the strategy's presets and checks all values.

    Args:
        inner_optimizer: Megatron's `--optimizer`, on which some presets depend; not stored.

    Raises:
        UsageError: a value is out of range, not supported by this version, or contradicts another.
    """

    inner_optimizer: InitVar[str] = ADAM

    def __post_init__(self, inner_optimizer: str) -> None:
        if self.auto:
            # Muon's presets stay: outer settings by interval were measured with Adam.
            fixed = STRATEGIES[self.strategy].optimizer_presets.get(inner_optimizer, {})
            unset = [n for n in AUTO_SETTINGS if getattr(self, n) is None and n not in fixed]
            object.__setattr__(self, "open_settings", tuple(unset))
        adapted = [name for name in OUTER_SETTINGS if getattr(self, name) is None]
        for spec in dataclasses.fields(self):
            if "usual" in spec.metadata and getattr(self, spec.name) is None:
                object.__setattr__(self, spec.name, preset_of(spec, self.strategy, inner_optimizer))
            check_supported(spec, getattr(self, spec.name))
        self._adapt_outer(adapted, inner_optimizer)
        if not STRATEGIES[self.strategy].has_penalty:
            for name in ("no_anomaly", "no_weighting", "no_clip"):
                object.__setattr__(self, name, True)
        if self.no_anomaly:
            object.__setattr__(self, "no_loss_check", True)
        check_all(self)
        check_inner_optimizer(self, inner_optimizer)

    def _adapt_outer(self, names: Sequence[str], inner_optimizer: str) -> None:
        """Fill in outer settings that follow interval and wire type: those without a preset of the
        strategy or of the inner optimizer."""
        strategy = STRATEGIES[self.strategy]
        interval = None if strategy.is_timed else self.sync_interval
        usual = outer_preset(interval, self.sync_dtype)
        for name in set(names) - strategy.presets_with(inner_optimizer).keys():
            object.__setattr__(self, name, usual[name])


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--use-edit` and `--edit-*` flags to a parser and return it."""
    group = parser.add_argument_group("EDiT (megatron_edit)")
    for spec in dataclasses.fields(EditConfig):
        doc = _help_on(spec).replace("%", "%%")
        if spec.metadata["kind"] is None:
            group.add_argument(flag(spec.name), action="store_true", help=doc)
        else:
            group.add_argument(
                flag(spec.name), type=spec.metadata["kind"], default=spec.default, help=doc
            )
    return parser


def _help_on(spec: dataclasses.Field[Any]) -> str:
    """Return the help text of a setting, with its values and default."""
    doc = str(spec.metadata["doc"])
    if spec.metadata["kind"] is None:
        return f"{doc} (default: off)"
    if spec.metadata["within"] is not None:
        doc += f"; {in_words(spec.metadata['within'])}"
    if spec.metadata["only"] is not None:
        doc += f"; one of {', '.join(format_value(value) for value in spec.metadata['only'])}"
    return f"{doc} (default: {default_text(spec)})"


# ---- rules for single settings and for combinations


def check_all(config: EditConfig) -> None:
    """Check a configuration with its presets filled in.

    Raises:
        UsageError: a value is out of range, or contradicts another.
    """
    check_ranges(config)
    check_strategy(config)
    check_landing(config)
    check_moments(config)
    check_gradients(config)
    check_interval(config)
    check_auto(config)
    check_launch(config)
    check_net(config)
    check_elastic(config)
    check_not_empty(config)


def phase_warning(
    config: EditConfig, num_iterations: int, last_local: int | None = None
) -> str | None:
    """Return a warning if training has no local step, or no final phase although one is set.

    Args:
        config: settings.
        num_iterations: iterations of the whole training.
        last_local: last iteration before the final synchronous phase; None if unknown: it is then
            computed from the fraction of the iterations.
    """
    if last_local is None:
        last_local = last_local_of(num_iterations, config.final_sync_fraction)
    is_meant = STRATEGIES[config.strategy].endless_warmup or config.final_sync_fraction == 1
    if config.final_sync_fraction and last_local == num_iterations:
        return (
            f"WARNING: {flag('final_sync_fraction')} {config.final_sync_fraction:g} of "
            f"{num_iterations} iterations is less than one: there is no final synchronous phase"
        )
    local_steps = last_local - config.warmup_steps
    if is_meant or local_steps > 0:
        is_late = config.sync_interval > local_steps and not is_meant
        if not is_late or STRATEGIES[config.strategy].is_timed or config.auto:
            return None
        return (
            f"WARNING: {flag('sync_interval')} {config.sync_interval} > the {local_steps} local "
            f"steps of {num_iterations} iterations (--train-iters, --train-samples): the replicas "
            "sync only once, at the end"
        )
    if last_local < num_iterations:
        return (
            f"WARNING: the final synchronous phase ({flag('final_sync_fraction')} "
            f"{config.final_sync_fraction:g}) begins after iteration {last_local}, before the end "
            f"of the warm-up ({flag('warmup_steps')} {config.warmup_steps}): there is no local step"
        )
    return (
        f"WARNING: {num_iterations} iterations (--train-iters, --train-samples) <= "
        f"{flag('warmup_steps')} {config.warmup_steps}: training ends before the first local step, "
        "EDiT never starts"
    )


def check_supported(spec: dataclasses.Field[Any], value: Any) -> None:
    """Check that a setting with a list of supported values has one of them."""
    only = spec.metadata["only"]
    if only is None or value in only:
        return
    allowed = ", ".join(format_value(v) for v in only)
    raise UsageError(
        f"{flag(spec.name)} {format_value(value)}",
        f"this version supports only: {allowed}",
        f"use one of these, or leave {flag(spec.name)} out",
    )


def check_ranges(config: EditConfig) -> None:
    """Check the range of each setting."""
    for spec in dataclasses.fields(config):
        within, value = spec.metadata["within"], getattr(config, spec.name)
        if within is not None and value is not None and not is_within(value, within):
            number = "" if isinstance(value, int) else "a finite number "
            remedy = "give another value"
            if spec.name not in _WITHOUT_DEFAULT:
                remedy = f"the default is {default_text(spec)}"
            raise UsageError(
                f"{flag(spec.name)} {value}", f"must be {number}{in_words(within)}", remedy
            )


def check_not_empty(config: EditConfig) -> None:
    """Refuse empty names and paths."""
    for spec in dataclasses.fields(config):
        if getattr(config, spec.name) == "":
            raise UsageError(f"{flag(spec.name)} (empty)", "must not be empty", "drop the flag")


def check_strategy(config: EditConfig) -> None:
    """Refuse settings that have no effect with the strategy, or are part of another one."""
    strategy = STRATEGIES[config.strategy]
    _check_fixed(config)
    for other in STRATEGIES.values():
        for name in other.own_settings:
            if name not in strategy.own_settings:
                _refuse_unless_default(config, name, other.name)
    if strategy.is_timed:
        for name in STEP_COUNT_SETTINGS:
            _refuse_unless_default(config, name, "edit")
    if not strategy.has_penalty:
        for name in _PENALTY_SETTINGS:
            _refuse_unless_default(config, name, "edit")
    if strategy.endless_warmup:
        for name in SYNC_SETTINGS:
            _refuse_unless_default(config, name, "edit")


def _check_fixed(config: EditConfig) -> None:
    """Check settings that are part of a strategy: that it has them, and that no other has them."""
    for name in STRATEGIES[config.strategy].fixed_settings:
        fixed, value = preset_of(_spec(config, name), config.strategy, ADAM), getattr(config, name)
        if value != fixed:
            raise UsageError(
                f"{flag(name)} {value}",
                f"is always {fixed} with {flag('strategy')} {config.strategy}",
                "drop the flag, or use another strategy",
            )
    owners = [s.name for s in STRATEGIES.values() if s.presets.get("sync_dtype") == TOP64]
    if config.sync_dtype == TOP64 and config.strategy not in owners:
        raise UsageError(
            f"{flag('sync_dtype')} {TOP64}",
            f"is part of {flag('strategy')} {' and '.join(owners)}",
            f"use {flag('strategy')} {owners[0]}, or another {flag('sync_dtype')}",
        )


def _refuse_unless_default(config: EditConfig, name: str, suitable: str) -> None:
    value = getattr(config, name)
    # No setting that is refused here has a preset for an inner optimizer (tested).
    if value != preset_of(_spec(config, name), config.strategy, ADAM):
        value_text = "" if value is True else f" {format_value(value)}"
        raise UsageError(
            f"{flag(name)}{value_text}",
            f"has no effect with {flag('strategy')} {config.strategy}",
            f"use {flag('strategy')} {suitable}, or drop the flag",
        )


def check_inner_optimizer(config: EditConfig, inner_optimizer: str) -> None:
    """Refuse settings for moments with an inner optimizer that has none."""
    if inner_optimizer in OPTIMIZERS_WITH_MOMENTS:
        return
    for name, off in (("average_moments", NONE), ("scale_beta2", False)):
        if (value := getattr(config, name)) != off:
            raise UsageError(
                flag(name) if value is True else f"{flag(name)} {value}",
                f"--optimizer {inner_optimizer} has no such moments",
                "use --optimizer adam, or drop the flag",
            )


def check_landing(config: EditConfig) -> None:
    """Check fragments, delay and mix against the other settings."""
    strategy = STRATEGIES[config.strategy]
    if not strategy.is_timed:
        _below_interval(config, "delay_steps", config.delay_steps, "d < tau")
        _below_interval(config, "fragments", config.fragments - 1, "F <= tau")
    if strategy.lands_at_next_meeting:
        for name in ("delay_steps", "mix"):
            if getattr(config, name):
                raise UsageError(
                    f"{flag(name)} {getattr(config, name)}",
                    f"{config.strategy} always lands one round later, without a mix",
                    "drop the flag, or use another strategy",
                )
    is_plain = config.fragments == 1 and config.delay_steps == 0 and config.mix == 0.0
    is_plain = is_plain and not strategy.lands_at_next_meeting
    if config.inner_state != ALL and not is_plain:
        raise UsageError(
            f"{flag('inner_state')} {config.inner_state}",
            "with fragments, a delay or a mix there is no step at which replicas are equal",
            f"use {flag('inner_state')} {ALL}",
        )
    if config.check_commits and (
        config.delay_steps or config.mix or strategy.lands_at_next_meeting
    ):
        raise UsageError(
            flag("check_commits"),
            "results can only be checked before they are applied where a sync lands at once",
            "drop the flag, or the delay, the mix or the strategy that lands later",
        )
    if config.check_commits and config.sync_mode == OVERLAP:
        raise UsageError(
            f"{flag('check_commits')}, {flag('sync_mode')} {OVERLAP}",
            "results can only be checked before they are applied in blocking mode",
            f"drop {flag('sync_mode')}, or {flag('check_commits')}",
        )
    if strategy.endless_warmup and config.sync_dtype != FP32:
        raise UsageError(
            f"{flag('sync_dtype')} {config.sync_dtype}",
            f"has no effect with {flag('strategy')} {config.strategy}: it has no syncs",
            f"drop the flag; {flag('warmup_dtype')} is about gradients",
        )


def check_gradients(config: EditConfig) -> None:
    """Refuse a data type of averaged gradients where no gradients are averaged."""
    is_endless = STRATEGIES[config.strategy].endless_warmup
    if not (is_endless or config.warmup_steps or config.final_sync_fraction):
        _refuse_unless_default_with(
            config, "warmup_dtype", f"{flag('warmup_steps')} or {flag('final_sync_fraction')} > 0"
        )


def check_moments(config: EditConfig) -> None:
    """Refuse an interval for averaging moments if none are averaged."""
    if config.average_moments_every > 1 and config.average_moments == NONE:
        raise UsageError(
            f"{flag('average_moments_every')} {config.average_moments_every}",
            "no moments are averaged",
            f"add {flag('average_moments')} both (or second), or drop the flag",
        )


def check_interval(config: EditConfig) -> None:
    """Check the schedule of the interval against the other settings."""
    if (config.interval == QSR) != (config.qsr_a is not None):
        raise UsageError(
            f"{flag('interval')} {config.interval}, {flag('qsr_a')} {config.qsr_a}",
            "the qsr schedule needs a, and other schedules do not take it",
            f"give both {flag('interval')} qsr and {flag('qsr_a')}, or none of them",
        )
    if config.interval != STL:
        _refuse_unless_default_with(config, "stl_stages", f"{flag('interval')} {STL}")
    if config.interval == ADACOMM and config.delay_steps:
        raise UsageError(
            f"{flag('delay_steps')} {config.delay_steps}",
            f"the rounds of {flag('interval')} {ADACOMM} may become shorter than the delay",
            f"use {flag('delay_steps')} 0, or another {flag('interval')}",
        )
    if config.interval != FIXED and config.fragments > 1:
        raise UsageError(
            f"{flag('fragments')} {config.fragments}",
            f"the rounds of {flag('interval')} {config.interval} change their length",
            f"use {flag('fragments')} 1, or {flag('interval')} fixed",
        )


def _refuse_unless_default_with(config: EditConfig, name: str, needed: str) -> None:
    value = getattr(config, name)
    if value != _spec(config, name).default:
        raise UsageError(
            f"{flag(name)} {format_value(value)}",
            f"has no effect without {needed}",
            f"add {needed}, or drop the flag",
        )


def check_auto(config: EditConfig) -> None:
    """Check the settings that `--edit-auto` depends on."""
    if not config.auto:
        _refuse_unless_default_with(config, "auto_share", flag("auto"))
        return
    needed: dict[str, tuple[Any, str]] = {
        "strategy": (DEFAULT_STRATEGY, "its tables of expected losses are those of EDiT"),
        "hub": (None, "delays and most wire types are not elastic yet"),
        "interval": (FIXED, "it chooses a fixed interval"),
        "inner_state": (ALL, "with a delay there is no step at which replicas are equal"),
        "check_commits": (False, "it may choose a delay"),
    }
    for name, (value, reason) in needed.items():
        if (given := getattr(config, name)) != value:
            raise UsageError(
                f"{flag('auto')}, {flag(name)}{'' if given is True else f' {given}'}",
                f"cannot be used together: {reason}",
                "drop one of the two",
            )
    if config.warmup_steps < AUTO_WARMUP_STEPS:
        raise UsageError(
            f"{flag('auto')}, {flag('warmup_steps')} {config.warmup_steps}",
            f"measures in at least {AUTO_WARMUP_STEPS} steps of the warm-up",
            f"give {flag('warmup_steps')} {AUTO_WARMUP_STEPS} or more, or drop {flag('auto')}",
        )
    if not config.open_settings:
        raise UsageError(
            flag("auto"),
            "everything that it chooses is given",
            f"drop it, or one of {', '.join(map(flag, AUTO_SETTINGS))}",
        )


def check_launch(config: EditConfig) -> None:
    """Check the settings of one launch per replica."""
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
        parse_endpoint(config.rendezvous, flag("rendezvous"))
    has_own_launch = config.replica_id is not None or config.hub is not None
    if has_own_launch and config.placement != _spec(config, "placement").default:
        raise UsageError(
            f"{flag('placement')} {config.placement}",
            "arranges the ranks of a single launch, and here each replica has its own",
            "drop the flag",
        )


def check_net(config: EditConfig) -> None:
    """Refuse a name of NCCL's network that cannot be one, or has no effect."""
    if not re.fullmatch(r"[\w.-]*", config.sync_net):
        raise UsageError(
            f"{flag('sync_net')} {config.sync_net}",
            "must be the name of a network of NCCL",
            f"use {AUTO}, Socket, IB or the name of a plugin",
        )
    if config.sync_backend == GLOO:
        _refuse_unless_default_with(config, "sync_net", f"{flag('sync_backend')} nccl or {AUTO}")


def check_elastic(config: EditConfig) -> None:
    """Check the settings of a run with a hub, and refuse those that are not elastic yet."""
    if config.hub is None:
        for name in ("replica_name", "nominal_replicas", "min_replicas", "hub_token_file"):
            _refuse_unless_default_with(config, name, f"{flag('hub')} HOST:PORT")
        return
    parse_endpoint(config.hub, flag("hub"))
    for name in ("replica_name", "nominal_replicas"):
        if getattr(config, name) is None:
            raise UsageError(
                f"{flag('hub')} {config.hub}", f"also needs {flag(name)}", f"add {flag(name)}"
            )
    if not re.fullmatch(REPLICA_NAME, config.replica_name or ""):
        raise UsageError(
            f"{flag('replica_name')} {config.replica_name}",
            f"must be {REPLICA_NAME_RULE}",
            "give another name",
        )
    if re.search(r"\.\d+$", config.replica_name or ""):
        raise UsageError(
            f"{flag('replica_name')} {config.replica_name}",
            "must not end in a dot and digits, as event files of earlier runs do",
            "give another name",
        )
    for name in ("num_replicas", "replica_id", "rendezvous"):
        if getattr(config, name) is not None:
            raise UsageError(
                f"{flag(name)} {getattr(config, name)}",
                "with a hub each replica has a launch of its own, and the hub numbers them",
                f"start one launch per replica, with {flag('replica_name')}, and drop the flag",
            )
    if config.min_replicas > (config.nominal_replicas or 0):
        raise UsageError(
            f"{flag('min_replicas')} {config.min_replicas}",
            f"must be at most {flag('nominal_replicas')} {config.nominal_replicas}",
            "give a smaller value",
        )
    _refuse_not_elastic(config)


def _refuse_not_elastic(config: EditConfig) -> None:
    if not STRATEGIES[config.strategy].is_elastic:
        able = [name for name, strategy in STRATEGIES.items() if strategy.is_elastic]
        raise UsageError(
            f"{flag('strategy')} {config.strategy}",
            f"is not elastic yet: {flag('hub')} cannot be given with it",
            f"use {' or '.join(able)}, or drop {flag('hub')}",
        )
    for name, elastic in _ELASTIC.items():
        value = getattr(config, name)
        if value not in elastic:
            names = " or ".join(format_value(each) for each in elastic)
            raise UsageError(
                flag(name) if value is True else f"{flag(name)} {format_value(value)}",
                f"is not elastic yet: {flag('hub')} cannot be given with it",
                "drop one of the two" if value is True else f"use {names}, or drop {flag('hub')}",
            )


def _below_interval(config: EditConfig, name: str, value: int, rule: str) -> None:
    if value >= config.sync_interval:
        raise UsageError(
            f"{flag(name)} {getattr(config, name)}, {flag('sync_interval')} {config.sync_interval}",
            f"must be {rule}",
            f"give a smaller value, or a longer {flag('sync_interval')}",
        )


def _spec(config: EditConfig, name: str) -> dataclasses.Field[Any]:
    return config.__dataclass_fields__[name]
