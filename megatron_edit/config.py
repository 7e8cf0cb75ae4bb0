"""Every setting of the plugin: name, default, range and flag, each written once; and their rules.

`EditConfig` is the resolved configuration. Its fields carry the text of their flags, from which
`add_arguments` builds the `--edit-*` group, for our own parser (`command_line`) and Megatron's.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any

from megatron_edit.constants import (
    ADACOMM,
    ADAM,
    ALL,
    AVERAGED_MOMENTS,
    DEVICES,
    FEW_REPLICAS,
    FIXED,
    FP32,
    INNER_STATES,
    INTERVALS,
    LEAST_TIMEOUT_SECONDS,
    NONE,
    OPTIMIZERS_WITH_MOMENTS,
    QSR,
    STL,
    SYNC_BACKENDS,
    SYNC_DTYPES,
    SYNC_MODES,
    TIMEOUT_ROUNDS,
)
from megatron_edit.errors import UsageError
from megatron_edit.flags import (
    AUTO,
    default_text,
    flag,
    parse_endpoint,
    preset_of,
    shown,
)
from megatron_edit.method.schedule import last_local as last_local_of
from megatron_edit.method.strategy import STRATEGIES

# The largest share of the time that syncs should take: what all advice about settings aims at.
GOAL_SHARE = 0.02
_WITHOUT_DEFAULT = ("num_replicas", "replica_id")
# Settings that strategies with the clock do not look at, those of syncs, and of the penalty.
ONLY_COUNTED = ("sync_interval", "interval", "qsr_a", "stl_stages", "final_sync_fraction")
ONLY_SYNCED = (
    "fragments", "delay_steps", "mix", "average_moments", "average_moments_every", "scale_beta2",
    "final_sync_fraction",
)  # fmt: skip
_ONLY_PENALTY = (
    "anomaly_threshold", "anomaly_alpha", "anomaly_warmup_syncs", "anomaly_patience",
    "loss_threshold", "clip", "weight_temperature",
)  # fmt: skip


# argparse shows the names of these two: "invalid number_or_auto value: 'x'".
def number_or_auto(text: str) -> float | None:
    """A flag's value; None is `auto`."""
    return None if text == AUTO else float(text)


def number_or_none(text: str) -> float | None:
    """A flag's value; None is `none`."""
    return None if text == NONE else float(text)


def _setting(default: Any, doc: str, *, kind: Any = None, only: Iterable[Any] | None = None) -> Any:
    """A field with its flag.

    Args:
        default: the value when the flag is not given.
        doc: help text, with unit and range.
        kind: converter of the flag's text; None for a switch.
        only: the values that this version supports; any other is refused, never ignored.
    """
    metadata = {"doc": doc, "kind": kind, "only": None if only is None else tuple(only)}
    if kind is number_or_none:
        metadata["none"] = NONE
    return field(default=default, metadata=metadata)


def _preset(usual: Any, doc: str, *, kind: Any) -> Any:
    """A field that strategies preset: its default is None, which becomes the strategy's value.

    Args:
        usual: for strategies that say nothing.
        doc: see `_setting`.
        kind: see `_setting`.
    """
    return field(default=None, metadata={"doc": doc, "kind": kind, "only": None, "usual": usual})


@dataclass(frozen=True)
class EditConfig:
    """Settings of EDiT. Construction fills in the strategy's presets, and checks everything.

    Args:
        inner_optimizer: Megatron's `--optimizer`, which some presets depend on; not kept.

    Raises:
        UsageError: a value is out of range, not supported by this version, or contradicts another.
    """

    use_edit: bool = _setting(False, "train with EDiT replicas")
    num_replicas: int | None = _setting(
        None,
        "N, replicas of the model; where not set: nodes of the launch, if more than 1",
        kind=int,
    )
    replica_id: int | None = _setting(
        None, "which replica this launch is, 0..N-1 (one launch per replica)", kind=int
    )
    rendezvous: str | None = _setting(
        None, "HOST:PORT where replica 0 listens for the others (one launch per replica)", kind=str
    )
    strategy: str = _setting("edit", "how replicas are synchronised", kind=str, only=STRATEGIES)
    warmup_steps: int = _preset(
        1000, "W, synchronous steps before the first local step; >= 0", kind=int
    )
    sync_interval: int = _setting(128, "tau, inner steps between two syncs; >= 1", kind=int)
    final_sync_fraction: float = _setting(
        0.0,
        "X, share at the end of training (iterations, or samples with --train-samples) in which "
        "gradients are averaged at every step, as in the warm-up; in [0, 1]",
        kind=float,
    )
    sync_seconds: float = _setting(
        600.0, "a-edit: tau_time, seconds between two syncs; > 0", kind=float
    )
    min_round_steps: int = _setting(
        100, "a-edit: steps of all replicas below which a round is extended; >= 0", kind=int
    )
    step_weight: float = _setting(
        0.0, "a-edit: rho, share of the step counts in the weights; in [0, 1]", kind=float
    )
    outer_lr: float = _preset(0.8, "nu, outer learning rate (slowmo, co2: alpha); > 0", kind=float)
    outer_momentum: float = _preset(
        0.85, "mu_o, outer Nesterov momentum (slowmo, co2: beta); in [0, 1)", kind=float
    )
    anomaly_threshold: float = _setting(
        3.0, "delta, standard deviations above the mean norm; > 0", kind=float
    )
    anomaly_alpha: float = _setting(
        0.02, "weight of the newest norm in the statistics; in (0, 1]", kind=float
    )
    anomaly_warmup_syncs: int = _setting(
        20, "accepted syncs before a detector is armed; >= 0", kind=int
    )
    anomaly_patience: int = _setting(
        3, "rejections in a row before a norm or a loss is accepted again; >= 0", kind=int
    )
    loss_threshold: float = _setting(
        6.0,
        "standard deviations by which the loss of a replica's round may exceed its history, "
        "relative to the other replicas; > 0",
        kind=float,
    )
    clip: float = _setting(10.0, "phi, largest norm of a unit's averaged update; > 0", kind=float)
    weight_temperature: float | None = _setting(
        None, "T of the weights softmax(-norm / T); > 0, or auto", kind=number_or_auto
    )
    no_anomaly: bool = _setting(
        False,
        "switch anomaly elimination off, the loss check too (norms that are not finite are still "
        "left out)",
    )
    no_loss_check: bool = _setting(False, "leave no replica out because of its loss")
    no_weighting: bool = _setting(False, "weigh all accepted replicas alike")
    no_clip: bool = _setting(False, "switch the clip off")
    sync_mode: str = _setting(
        AUTO,
        "where the exchange happens; overlap: in the forward pass",
        kind=str,
        only=(AUTO, *SYNC_MODES),
    )
    prefetch_units: int = _setting(2, "units staged ahead (gloo sends one at a time)", kind=int)
    fragments: int = _preset(1, "F, groups of units synced at staggered steps; >= 1", kind=int)
    delay_steps: int = _preset(
        0,
        "d, steps between the start of a sync and its landing; >= 0, < tau (a-edit: the next "
        "meeting ends it)",
        kind=int,
    )
    mix: float = _preset(
        0.0, "share of the local parameters kept when a sync lands; in [0, 1]", kind=float
    )
    offload: bool = _setting(False, "keep anchor and momentum in (pinned) host memory")
    sync_dtype: str = _setting(
        FP32, "type of the exchanged updates on the wire", kind=str, only=SYNC_DTYPES
    )
    sync_backend: str = _setting(
        AUTO,
        "what carries updates between replicas; auto takes nccl where every rank has a GPU of its "
        "own, else gloo",
        kind=str,
        only=(AUTO, *SYNC_BACKENDS),
    )
    digest_interval: int = _setting(10, "syncs of a unit between two drift checks; >= 1", kind=int)
    log_dir: str | None = _setting(None, "folder of the event files", kind=str)
    log_units_to_tensorboard: bool = _setting(
        False,
        f"also scalars of each unit, and of each replica where there are more than {FEW_REPLICAS}",
    )
    inner_state: str = _setting(
        ALL,
        "whose inner optimizer state a checkpoint holds; all: every replica's (resume is exact), "
        "leader: replica 0's (saves wait for a sync), reset: like leader (moments start anew)",
        kind=str,
        only=INNER_STATES,
    )
    timeout_seconds: float | None = _setting(
        None,
        "longest wait for a replica without progress, seconds; > 0, or auto = "
        f"max({LEAST_TIMEOUT_SECONDS:g}, {TIMEOUT_ROUNDS} x the last round)",
        kind=number_or_auto,
    )
    interval: str = _setting(
        FIXED,
        "schedule of the sync interval; qsr = max(tau, (a / lr)^2), stl: tau doubles in each of "
        "the equal stages of local training, adacomm = ceil(tau sqrt(loss / first loss)). In "
        "measurements intervals that change while the outer momentum stays fixed lost loss in both "
        "directions at equal bytes (docs/strategies.md)",
        kind=str,
        only=INTERVALS,
    )
    qsr_a: float | None = _setting(
        None, "a of the qsr schedule, in units of the learning rate; > 0", kind=number_or_none
    )
    stl_stages: int = _setting(
        3, "stl: equal stages of the local training, tau doubles in each; >= 1", kind=int
    )
    average_moments: str = _setting(
        NONE,
        "Adam's moments that a sync averages over the replicas, in codes of one byte",
        kind=str,
        only=AVERAGED_MOMENTS,
    )
    average_moments_every: int = _setting(
        1, "K, syncs between two averages of moments; >= 1", kind=int
    )
    scale_beta2: bool = _setting(
        False, "Adam's beta2 becomes beta2^(1/N) while replicas train by themselves"
    )
    co2_gap: float = _setting(1.0, "co2: Lambda, divisor of the average; > 0", kind=float)
    co2_clip: float | None = _setting(
        None, "co2: phi_m, largest element of the momentum; > 0", kind=number_or_none
    )
    device: str = _setting(
        AUTO,
        "where to train; auto takes CUDA, and the CPU only where the machine has no GPU",
        kind=str,
        only=(AUTO, *DEVICES),
    )
    inner_optimizer: InitVar[str] = ADAM

    def __post_init__(self, inner_optimizer: str) -> None:
        for spec in dataclasses.fields(self):
            check_supported(spec, getattr(self, spec.name))
            if "usual" in spec.metadata and getattr(self, spec.name) is None:
                object.__setattr__(self, spec.name, preset_of(spec, self.strategy, inner_optimizer))
        if not STRATEGIES[self.strategy].has_penalty:
            for name in ("no_anomaly", "no_weighting", "no_clip"):
                object.__setattr__(self, name, True)
        if self.no_anomaly:
            object.__setattr__(self, "no_loss_check", True)
        check_all(self)
        check_inner_optimizer(self, inner_optimizer)


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
    """The text of `--help` on a setting."""
    doc = str(spec.metadata["doc"])
    if spec.metadata["kind"] is None:
        return f"{doc} (default: off)"
    if spec.metadata["only"] is not None:
        doc += f"; one of {', '.join(shown(value) for value in spec.metadata['only'])}"
    return f"{doc} (default: {default_text(spec)})"


# ---- what settings must be, each alone and together


def check_all(config: EditConfig) -> None:
    """Check a configuration whose presets are filled in.

    Raises:
        UsageError: a value is out of range, or contradicts another.
    """
    check_ranges(config)
    check_strategy(config)
    check_landing(config)
    check_moments(config)
    check_interval(config)
    check_launch(config)


def warning_of_phases(
    config: EditConfig, num_iterations: int, last_local: int | None = None
) -> str | None:
    """What to say of a training without a local step, or without the final phase that was asked
    for; None where nothing is to be said.

    Args:
        config: settings.
        num_iterations: of the whole training.
        last_local: the last iteration before the final synchronous phase; None where it is not
            known: the share of the iterations decides.
    """
    if last_local is None:
        last_local = last_local_of(num_iterations, config.final_sync_fraction)
    is_meant = STRATEGIES[config.strategy].endless_warmup or config.final_sync_fraction == 1
    if config.final_sync_fraction and last_local == num_iterations:
        return (
            f"WARNING: {flag('final_sync_fraction')} {config.final_sync_fraction:g} of "
            f"{num_iterations} iterations is less than one: there is no final synchronous phase"
        )
    if is_meant or last_local > config.warmup_steps:
        return None
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
    _at_least(config, "average_moments_every", 1)
    _at_least(config, "delay_steps", 0)
    _at_least(config, "stl_stages", 1)
    for name in ("sync_seconds", "outer_lr", "anomaly_threshold", "loss_threshold", "clip",
                 "qsr_a", "weight_temperature", "timeout_seconds", "co2_gap",
                 "co2_clip"):  # fmt: skip
        _within(config, name, "above 0", lambda x: x > 0)
    for name in ("step_weight", "mix", "final_sync_fraction"):
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
        for name in ONLY_COUNTED:
            _refuse_unless_default(config, name, "edit")
    if not strategy.has_penalty:
        for name in _ONLY_PENALTY:
            _refuse_unless_default(config, name, "edit")
    if strategy.endless_warmup:
        for name in ONLY_SYNCED:
            _refuse_unless_default(config, name, "edit")


def _refuse_unless_default(config: EditConfig, name: str, fitting: str) -> None:
    value = getattr(config, name)
    # No setting that is refused here has a preset of an inner optimizer (a test says so).
    if value != preset_of(_spec(config, name), config.strategy, ADAM):
        shown_value = "" if value is True else f" {shown(value)}"
        raise UsageError(
            f"{flag(name)}{shown_value}",
            f"has no effect with {flag('strategy')} {config.strategy}",
            f"use {flag('strategy')} {fitting}, or drop the flag",
        )


def check_inner_optimizer(config: EditConfig, inner_optimizer: str) -> None:
    """Refuse settings of Adam's moments with an optimizer that has none."""
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
    if config.inner_state != ALL and not is_whole:
        raise UsageError(
            f"{flag('inner_state')} {config.inner_state}",
            "with fragments, a delay or a mix there is no step at which replicas are equal",
            f"use {flag('inner_state')} {ALL}",
        )
    if strategy.endless_warmup and config.sync_dtype != FP32:
        raise UsageError(
            f"{flag('sync_dtype')} {config.sync_dtype}",
            f"has no effect with {flag('strategy')} {config.strategy}: gradients cross, no syncs",
            "drop the flag; Megatron's --grad-reduce-in-bf16 is about gradients",
        )


def check_moments(config: EditConfig) -> None:
    """The interval of averages of moments is of something."""
    if config.average_moments_every > 1 and config.average_moments == NONE:
        raise UsageError(
            f"{flag('average_moments_every')} {config.average_moments_every}",
            "no moments are averaged",
            f"add {flag('average_moments')} both (or second), or drop the flag",
        )


def check_interval(config: EditConfig) -> None:
    """The schedule of the interval has what it needs."""
    if (config.interval == QSR) != (config.qsr_a is not None):
        raise UsageError(
            f"{flag('interval')} {config.interval}, {flag('qsr_a')} {config.qsr_a}",
            "the qsr schedule needs its a, and no other schedule has one",
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
            f"{flag(name)} {shown(value)}",
            f"has no effect without {needed}",
            f"add {needed}, or drop the flag",
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
