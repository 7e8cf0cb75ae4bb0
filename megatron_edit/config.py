"""Settings of the plugin: their rules and their flags; `refusals` has the rules between them.

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
    ADAM,
    AUTO,
    REPLICA_NAME,
    REPLICA_NAME_RULE,
)
from megatron_edit.errors import UsageError
from megatron_edit.flags import UNSET, default_text, flag, format_value, parse_endpoint, preset_of
from megatron_edit.method.auto import auto_settings
from megatron_edit.method.schedule import last_local as last_local_of
from megatron_edit.method.settings import GROUPS, Settings, in_words, is_within
from megatron_edit.method.strategy import STRATEGIES, outer_preset
from megatron_edit.refusals import SETTINGS_ROWS, Values, refuse

OUTER_SETTINGS = ("outer_lr", "outer_momentum")


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
            names = auto_settings(self.strategy)
            unset = [n for n in names if getattr(self, n) is None and n not in fixed]
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
        check_ranges(self)
        check_names(self)
        refuse(SETTINGS_ROWS, Values.of(self, optimizer=inner_optimizer))
        check_not_empty(self)

    def _adapt_outer(self, names: Sequence[str], inner_optimizer: str) -> None:
        """Fill in outer settings that follow interval and wire type: those without a preset of the
        strategy or of the inner optimizer."""
        strategy = STRATEGIES[self.strategy]
        interval = None if strategy.is_timed else self.sync_interval
        usual = outer_preset(interval, self.sync_dtype)
        for name in set(names) - strategy.presets_with(inner_optimizer).keys():
            object.__setattr__(self, name, usual[name])


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
