"""Settings of the plugin: their rules and their flags; `refusals` has the rules between them.

`EditConfig` is the resolved configuration. From the metadata of its fields (`method.settings`)
`add_arguments` builds the `--edit-*` flags for this package's own parser (`command_line`) and for
Megatron's.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from megatron_edit.constants import (
    ADAM,
    AUTO,
    AUTO_STRATEGIES,
    AUTO_WARMUP_STEPS,
    FIXED,
    INT8,
    LONGEST_WARMUP_SHARE,
    NONE,
    OPTIMIZERS_WITH_MOMENTS,
    REPLICA_NAME,
    REPLICA_NAME_RULE,
    WARMUP_SHARE,
)
from megatron_edit.errors import UsageError
from megatron_edit.flags import UNSET, default_text, flag, format_value, parse_endpoint, preset_of
from megatron_edit.method.auto import AUTO_SETTINGS, auto_settings, chosen_of
from megatron_edit.method.schedule import last_local as last_local_of
from megatron_edit.method.settings import GROUPS, Settings, in_words, is_within
from megatron_edit.method.strategy import (
    STRATEGIES,
    USUAL_LR,
    USUAL_MOMENTUM,
    outer_preset,
)
from megatron_edit.refusals import SETTINGS_ROWS, Values, refuse

# Settings of the deployment, without effect on the numbers of a training.
DEPLOYMENT = frozenset(
    ("use_edit", "num_replicas", "placement", "replica_id", "rendezvous", "log_dir", "device",
     "inner_state", "log_units_to_tensorboard", "digest_interval", "timeout_seconds", "sync_mode",
     "sync_backend", "sync_net", "prefetch_units", "offload", "check_commits", "hub",
     "replica_name", "nominal_replicas", "min_replicas", "hub_token_file", "telemetry",
     "metrics_port", "mlflow_experiment", "preset", "settings")
)  # fmt: skip
OUTER_SETTINGS = ("outer_lr", "outer_momentum")
# Each of these flags leaves all of them as they are: nothing is chosen without --edit-auto.
_FIXING = (*(name for name in AUTO_SETTINGS if name != "final_sync_fraction"), "scale_beta2")
# `--edit-preset paper`, beside the usual defaults.
_PAPER = {"warmup_steps": 1000, "outer_lr": USUAL_LR, "outer_momentum": USUAL_MOMENTUM,
          "weight_temperature": 1.0}  # fmt: skip
# A training in whose warm-up nothing can be measured.
_SHORT_INTERVAL = 8


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
            self._open(inner_optimizer)
        elif self.preset != NONE:
            for name, value in _PAPER.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)
        if self.warmup_steps is None:
            object.__setattr__(self, "has_open_warmup", True)
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
        check_ranges(self)
        check_names(self)
        refuse(SETTINGS_ROWS, Values.of(self, optimizer=inner_optimizer))
        check_not_empty(self)

    @classmethod
    def of_flags(
        cls,
        values: Mapping[str, Any],
        inner_optimizer: str = ADAM,
        given: Container[str] = (),
    ) -> EditConfig:
        """The settings of a run, from those that are given: where none is given of those that
        `--edit-auto` chooses, it chooses all.

        Args:
            values: None, False or the default where not given.
            inner_optimizer: see the class.
            given: names of settings that are given, also with their defaults; those with other
                values need not be named.

        Raises:
            UsageError: see the class.
        """
        if values["settings"] is not None:
            recorded = recorded_settings(Path(values["settings"]))
            if values["hub"] is not None:  # which has no gradients to average
                del recorded["warmup_dtype"]
            unset = {spec.name for spec in dataclasses.fields(cls)
                     if values[spec.name] == spec.default and spec.name not in given}  # fmt: skip
            values = {**values, **{name: recorded[name] for name in unset & recorded.keys()}}
        warmup = values["warmup_steps"]
        chooses = (
            values["use_edit"]
            and values["strategy"] in AUTO_STRATEGIES
            and (values["interval"], values["preset"], values["settings"]) == (FIXED, NONE, None)
            and all(values[name] is None or values[name] is False for name in _FIXING)
            and (warmup is None or warmup >= AUTO_WARMUP_STEPS)
        )
        return cls(**{**values, "auto": values["auto"] or chooses}, inner_optimizer=inner_optimizer)

    def for_training(self, num_iterations: int) -> tuple[EditConfig, str | None]:
        """The settings of a training of this length, and a line for the user or None.

        A warm-up that is not given becomes a share of the training. Where it has too few steps to
        measure in, nothing is chosen.

        Args:
            num_iterations: of the complete training; 0 where that is not known.

        Raises:
            UsageError: there is no step after the warm-up.
        """
        if self.warmup_steps is not None:
            return self, None
        if STRATEGIES[self.strategy].endless_warmup:
            return dataclasses.replace(self, warmup_steps=0), None
        if num_iterations == 1:
            raise UsageError(
                f"{num_iterations} iteration (--train-iters, --train-samples)",
                "must be at least 2: a step of warm-up, and one of a round",
                f"train longer, or give {flag('warmup_steps')} 0",
            )
        steps = max(WARMUP_SHARE * num_iterations, AUTO_WARMUP_STEPS if self.auto else 1)
        is_short = 0 < LONGEST_WARMUP_SHARE * num_iterations < steps
        warmup = max(1, round(WARMUP_SHARE * num_iterations if is_short else steps))
        if not (self.auto and is_short):
            return self.with_warmup(warmup), None
        least = max(self.delay_steps + 1, self.fragments, _SHORT_INTERVAL)
        given = {"sync_interval": min(least, num_iterations - warmup), "sync_dtype": INT8}
        fixed: dict[str, Any] = {n: given.get(n, getattr(self, n)) for n in self.open_settings}
        fixed |= dict.fromkeys({*OUTER_SETTINGS} & fixed.keys())  # follow from the others
        fixed |= {"auto": False, "auto_share": Settings.auto_share}
        found = dataclasses.replace(self, warmup_steps=warmup, **fixed)
        is_timed = STRATEGIES[self.strategy].is_timed
        length = f"tau_time {found.sync_seconds:g} s" if is_timed else f"tau {found.sync_interval}"
        return found, (
            f"{num_iterations} iterations are too few to measure links and steps in a warm-up of "
            f"{AUTO_WARMUP_STEPS} steps: fixed settings, W {warmup}, {length}, {found.sync_dtype}"
        )

    def with_warmup(self, steps: int) -> EditConfig:
        """The settings with a warm-up of so many steps; what is open stays open, other than with
        `replace`."""
        found = copy.copy(self)
        object.__setattr__(found, "warmup_steps", steps)
        return found

    def _open(self, inner_optimizer: str) -> None:
        """Find what is chosen, and set what always comes with it."""
        names = auto_settings(self.strategy, has_hub=self.hub is not None)
        # Muon's presets stay: outer settings by interval were measured with Adam.
        fixed = set(STRATEGIES[self.strategy].optimizer_presets.get(inner_optimizer, {}))
        if inner_optimizer in OPTIMIZERS_WITH_MOMENTS:
            object.__setattr__(self, "scale_beta2", True)
        else:
            fixed |= {"average_moments", "average_moments_every"}
        unset = [n for n in names if getattr(self, n) is None and n not in fixed]
        object.__setattr__(self, "open_settings", tuple(unset))
        if self.warmup_dtype is None and self.hub is None:
            object.__setattr__(self, "warmup_dtype", INT8)

    def _adapt_outer(self, names: Sequence[str], inner_optimizer: str) -> None:
        """Fill in outer settings that follow interval and wire type: those without a preset of the
        strategy or of the inner optimizer."""
        strategy = STRATEGIES[self.strategy]
        interval = None if strategy.is_timed else self.sync_interval
        usual = outer_preset(interval, self.sync_dtype)
        for name in set(names) - strategy.presets_with(inner_optimizer).keys():
            object.__setattr__(self, name, usual[name])


def recorded_settings(path: Path) -> dict[str, Any]:
    """The settings of an earlier run, without those of its deployment.

    Args:
        path: its `run.json`.

    Returns:
        By name; what the run chose is as it was chosen last.

    Raises:
        UsageError: it is no such file.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found = dict(record["config"])
        if choices := record.get("choices"):
            found |= chosen_of(found["strategy"], choices[-1]["settings"])
            found["warmup_steps"] = min(found["warmup_steps"], choices[0]["since"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{flag('settings')} {path}",
            f"must be the run.json of an earlier run ({type(error).__name__}: {error})",
            f"give DIR/run.json, where DIR was the {flag('log_dir')} of that run",
        ) from error
    names = {spec.name for spec in dataclasses.fields(Settings)} - DEPLOYMENT - {"auto_share"}
    return {n: value for n, value in found.items() if n in names} | {"auto": False}


def add_arguments(
    parser: argparse.ArgumentParser, *, shows_all: bool = False
) -> argparse.ArgumentParser:
    """Add the `--use-edit` and `--edit-*` flags to a parser, in groups, and return it.

    Args:
        shows_all: whether the parser's help lists all flags, or the common ones.
    """
    groups = {name: parser.add_argument_group(f"EDiT: {GROUPS[name]}") for name in GROUPS}
    for spec in dataclasses.fields(EditConfig):
        is_shown = shows_all or spec.metadata["is_common"]
        doc = _help_on(spec).replace("%", "%%") if is_shown else argparse.SUPPRESS
        group, kind = groups[spec.metadata["group"]], spec.metadata["kind"]
        if kind is None:
            group.add_argument(flag(spec.name), action="store_true", help=doc)
        else:
            group.add_argument(
                flag(spec.name), type=kind, default=spec.default, metavar="VALUE", help=doc
            )
    if not shows_all:
        parser.add_argument_group("EDiT: other flags", "megatron-edit flags lists all")
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


# ---- rules for single settings


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
    if is_meant:
        return None
    local_steps = last_local - config.warmup_steps
    if local_steps > 0:
        is_late = config.sync_interval > local_steps
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
    if only is not None and value not in only:
        raise UsageError(
            f"{flag(spec.name)} {format_value(value)}",
            f"this version supports only: {', '.join(map(format_value, only))}",
            f"use one of these, or leave {flag(spec.name)} out",
        )


def check_ranges(config: EditConfig) -> None:
    """Check the range of each setting."""
    for spec in dataclasses.fields(config):
        within, value = spec.metadata["within"], getattr(config, spec.name)
        if within is not None and value is not None and not is_within(value, within):
            number = "" if isinstance(value, int) else "a finite number "
            usual = default_text(spec)
            remedy = "give another value" if usual == UNSET else f"the default is {usual}"
            raise UsageError(
                f"{flag(spec.name)} {value}", f"must be {number}{in_words(within)}", remedy
            )


def check_not_empty(config: EditConfig) -> None:
    """Refuse empty names and paths."""
    for spec in dataclasses.fields(config):
        if getattr(config, spec.name) == "":
            raise UsageError(f"{flag(spec.name)} (empty)", "must not be empty", "drop the flag")


def check_names(config: EditConfig) -> None:
    """Check addresses, the name of a replica, and the name of NCCL's network."""
    for name in ("rendezvous", "hub"):
        if (endpoint := getattr(config, name)) is not None:
            parse_endpoint(endpoint, flag(name))
    replica_name = config.replica_name
    if replica_name is not None and not re.fullmatch(REPLICA_NAME, replica_name):
        raise UsageError(
            f"{flag('replica_name')} {replica_name}",
            f"must be {REPLICA_NAME_RULE}",
            "give another name",
        )
    if re.search(r"\.\d+$", replica_name or ""):
        raise UsageError(
            f"{flag('replica_name')} {replica_name}",
            "must not end in a dot and digits, as event files of earlier runs do",
            "give another name",
        )
    if not re.fullmatch(r"[\w.-]*", config.sync_net):
        raise UsageError(
            f"{flag('sync_net')} {config.sync_net}",
            "must be the name of a network of NCCL",
            f"use {AUTO}, Socket, IB or the name of a plugin",
        )
