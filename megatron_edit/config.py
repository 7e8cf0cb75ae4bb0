"""Settings of the plugin: names, defaults, ranges, flags and the rules between them.

`EditConfig` is the resolved configuration. From the metadata of its fields `add_arguments` builds
the `--edit-*` flags for this package's own parser (`command_line`) and for Megatron's.
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
    MIN_TIMEOUT_SECONDS,
    NONE,
    OPTIMIZERS_WITH_MOMENTS,
    OVERLAP,
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
    format_value,
    parse_endpoint,
    preset_of,
)
from megatron_edit.method.schedule import last_local as last_local_of
from megatron_edit.method.strategy import STRATEGIES

# Share of the training time that syncs should not exceed; the target of all advice on settings.
TARGET_SYNC_SHARE = 0.02
_WITHOUT_DEFAULT = ("num_replicas", "replica_id")
# Settings without effect: with timed strategies, with an endless warm-up, without a penalty.
STEP_COUNT_SETTINGS = ("sync_interval", "interval", "qsr_a", "stl_stages", "final_sync_fraction")
SYNC_SETTINGS = (
    "fragments", "delay_steps", "mix", "average_moments", "average_moments_every", "scale_beta2",
    "final_sync_fraction",
)  # fmt: skip
_PENALTY_SETTINGS = (
    "anomaly_threshold", "anomaly_alpha", "anomaly_warmup_syncs", "anomaly_patience",
    "loss_threshold", "clip", "weight_temperature",
)  # fmt: skip


# argparse shows the names of these functions: "invalid number_or_auto value: 'x'".
def number_or_auto(text: str) -> float | None:
    """Parse a number or `auto` (None)."""
    return None if text == AUTO else float(text)


def number_or_none(text: str) -> float | None:
    """Parse a number or `none` (None)."""
    return None if text == NONE else float(text)


def _setting(default: Any, doc: str, *, kind: Any = None, only: Iterable[Any] | None = None) -> Any:
    """Return a dataclass field with the metadata of its flag.

    Args:
        default: value if the flag is not given.
        doc: help text, with unit and range.
        kind: converter of the flag's text; None for a switch.
        only: supported values, if there are few; any other is refused.
    """
    metadata = {"doc": doc, "kind": kind, "only": None if only is None else tuple(only)}
    if kind is number_or_none:
        metadata["none"] = NONE
    return field(default=default, metadata=metadata)


def _preset(usual: Any, doc: str, *, kind: Any) -> Any:
    """Return a field that strategies may preset: its default None is replaced by the preset.

    Args:
        usual: value for strategies without a preset.
        doc: see `_setting`.
        kind: see `_setting`.
    """
    return field(default=None, metadata={"doc": doc, "kind": kind, "only": None, "usual": usual})


@dataclass(frozen=True)
class EditConfig:
    """Settings of EDiT. The constructor fills in the strategy's presets and checks all values.

    Args:
        inner_optimizer: Megatron's `--optimizer`, on which some presets depend; not stored.

    Raises:
        UsageError: a value is out of range, not supported by this version, or contradicts another.
    """

    use_edit: bool = _setting(False, "train with EDiT replicas")
    num_replicas: int | None = _setting(
        None,
        "N, number of replicas; if not set: nodes of the launch, if more than 1",
        kind=int,
    )
    replica_id: int | None = _setting(
        None, "index of this launch's replica, 0..N-1 (one launch per replica)", kind=int
    )
    rendezvous: str | None = _setting(
        None,
        "HOST:PORT at which replica 0 listens for the others (one launch per replica)",
        kind=str,
    )
    strategy: str = _setting("edit", "how replicas are synchronised", kind=str, only=STRATEGIES)
    warmup_steps: int = _preset(
        1000, "W, synchronous steps before the first local step; >= 0", kind=int
    )
    sync_interval: int = _setting(128, "tau, inner steps between two syncs; >= 1", kind=int)
    final_sync_fraction: float = _setting(
        0.0,
        "X, last fraction of training (of iterations, or of samples with --train-samples) in which "
        "gradients are averaged at every step, as in the warm-up; in [0, 1]",
        kind=float,
    )
    sync_seconds: float = _setting(
        600.0, "a-edit: tau_time, seconds between two syncs; > 0", kind=float
    )
    min_round_steps: int = _setting(
        100, "a-edit: minimum steps of a round, of all replicas together; >= 0", kind=int
    )
    step_weight: float = _setting(
        0.0, "a-edit: rho, influence of step counts on the weights; in [0, 1]", kind=float
    )
    outer_lr: float = _preset(0.8, "nu, outer learning rate (slowmo, co2: alpha); > 0", kind=float)
    outer_momentum: float = _preset(
        0.85, "mu_o, outer Nesterov momentum (slowmo, co2: beta); in [0, 1)", kind=float
    )
    anomaly_threshold: float = _setting(
        3.0, "delta, standard deviations above the mean norm that are allowed; > 0", kind=float
    )
    anomaly_alpha: float = _setting(
        0.02, "alpha, weight of the newest norm in the statistics; in (0, 1]", kind=float
    )
    anomaly_warmup_syncs: int = _setting(
        20, "accepted syncs before a detector is armed; >= 0", kind=int
    )
    anomaly_patience: int = _setting(
        3, "consecutive rejections before a norm or a loss is accepted again; >= 0", kind=int
    )
    loss_threshold: float = _setting(
        6.0,
        "standard deviations by which a replica's loss of a round, relative to the other replicas, "
        "may exceed its history; > 0",
        kind=float,
    )
    clip: float = _setting(10.0, "phi, largest norm of a unit's averaged update; > 0", kind=float)
    weight_temperature: float | None = _setting(
        None, "T of the weights softmax(-norm / T); > 0, or auto", kind=number_or_auto
    )
    no_anomaly: bool = _setting(
        False,
        "disable anomaly elimination, including the loss check (non-finite norms are still "
        "rejected)",
    )
    no_loss_check: bool = _setting(False, "do not reject replicas because of their loss")
    no_weighting: bool = _setting(False, "give all accepted replicas equal weights")
    no_clip: bool = _setting(False, "disable the clip")
    sync_mode: str = _setting(
        AUTO,
        "when updates are exchanged; blocking: right after the step, overlap: in the forward pass",
        kind=str,
        only=(AUTO, *SYNC_MODES),
    )
    prefetch_units: int = _setting(
        2, "units whose exchange is prepared ahead (gloo sends one at a time)", kind=int
    )
    fragments: int = _preset(1, "F, groups of units synced at staggered steps; >= 1", kind=int)
    delay_steps: int = _preset(
        0,
        "d, steps between the start of a sync and its landing; >= 0, < tau (a-edit: it lands at "
        "the next meeting at the latest)",
        kind=int,
    )
    mix: float = _preset(
        0.0, "weight of the local parameters when a sync lands; in [0, 1]", kind=float
    )
    offload: bool = _setting(False, "keep anchor and outer momentum in (pinned) host memory")
    sync_dtype: str = _setting(
        FP32, "data type in which updates are exchanged", kind=str, only=SYNC_DTYPES
    )
    sync_backend: str = _setting(
        AUTO,
        "backend for updates between replicas; auto uses nccl if every rank has its own GPU, else "
        "gloo",
        kind=str,
        only=(AUTO, *SYNC_BACKENDS),
    )
    digest_interval: int = _setting(10, "syncs of a unit between two drift checks; >= 1", kind=int)
    check_commits: bool = _setting(
        False,
        "compare the replicas' results of a sync before any replica applies it, so that a "
        "difference ends the run with the state before the round; implies --edit-sync-mode "
        "blocking, and needs memory for one more fp32 copy of the shards (and of averaged moments) "
        "during a sync",
    )
    log_dir: str | None = _setting(None, "folder for the event files", kind=str)
    log_units_to_tensorboard: bool = _setting(
        False,
        f"also write scalars of each unit, and of each replica if more than {FEW_REPLICAS}",
    )
    inner_state: str = _setting(
        ALL,
        "whose inner optimizer state is saved; all: that of every replica (exact resume), leader: "
        "that of replica 0 (saves wait for a sync), reset: like leader, moments restart at zero",
        kind=str,
        only=INNER_STATES,
    )
    timeout_seconds: float | None = _setting(
        None,
        "seconds without progress after which a replica counts as lost; > 0, or auto = "
        f"max({MIN_TIMEOUT_SECONDS:g}, {TIMEOUT_ROUNDS} x the last round)",
        kind=number_or_auto,
    )
    interval: str = _setting(
        FIXED,
        "schedule of the sync interval; qsr = max(tau, (a / lr)^2), stl: tau doubles in each of "
        "the equal stages of local training, adacomm = ceil(tau sqrt(loss / first loss)). In "
        "measurements with a fixed outer momentum, growing and shrinking intervals gave a worse "
        "loss than a fixed one at equal traffic (docs/strategies.md)",
        kind=str,
        only=INTERVALS,
    )
    qsr_a: float | None = _setting(
        None, "a of the qsr schedule, in units of the learning rate; > 0", kind=number_or_none
    )
    stl_stages: int = _setting(
        3, "stl: number of equal stages of local training, tau doubles in each; >= 1", kind=int
    )
    average_moments: str = _setting(
        NONE,
        "moments of Adam that a sync averages over the replicas, in one byte per element",
        kind=str,
        only=AVERAGED_MOMENTS,
    )
    average_moments_every: int = _setting(
        1, "K, syncs between two averages of moments; >= 1", kind=int
    )
    scale_beta2: bool = _setting(False, "use beta2^(1/N) as Adam's beta2 during local training")
    co2_gap: float = _setting(1.0, "co2: Lambda, divisor of the average; > 0", kind=float)
    co2_clip: float | None = _setting(
        None, "co2: phi_m, largest element of the momentum; > 0", kind=number_or_none
    )
    device: str = _setting(
        AUTO,
        "device; auto uses CUDA, and the CPU only if the machine has no GPU",
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
    """Return the help text of a setting, with its values and default."""
    doc = str(spec.metadata["doc"])
    if spec.metadata["kind"] is None:
        return f"{doc} (default: off)"
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
    check_interval(config)
    check_launch(config)


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
    """Refuse settings that have no effect with the strategy."""
    strategy = STRATEGIES[config.strategy]
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
            "drop the flag; Megatron's --grad-reduce-in-bf16 is about gradients",
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
