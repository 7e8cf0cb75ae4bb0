"""Flags and values as people write them on the command line."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_edit.constants import ADAM
from megatron_edit.errors import UsageError
from megatron_edit.method.strategy import STRATEGIES

AUTO = "auto"
USE_EDIT, PREFIX = "--use-edit", "--edit-"
BEGINNINGS = (USE_EDIT, PREFIX)  # of our flags
# With those of a flag that is written with underscores, which there is not.
BEGINNINGS_TO_REFUSE = (*BEGINNINGS, *("--" + b[2:].replace("-", "_") for b in BEGINNINGS))


def flag(name: str) -> str:
    """The command-line flag of a field of `EditConfig`."""
    return USE_EDIT if name == "use_edit" else PREFIX + name.replace("_", "-")


def attribute(name: str) -> str:
    """The attribute that argparse gives a field of `EditConfig`."""
    return flag(name)[2:].replace("-", "_")


def shown(value: Any, none: str = AUTO) -> str:
    """A value as people write it on the command line."""
    return none if value is None else str(value)


def preset_of(spec: dataclasses.Field[Any], strategy: str, inner_optimizer: str) -> Any:
    """What a setting is where the command line is silent.

    Args:
        spec: the field of `EditConfig`.
        strategy: whose presets count.
        inner_optimizer: of Megatron's, `--optimizer`: some have presets of their own.
    """
    if "usual" not in spec.metadata:
        return spec.default
    return STRATEGIES[strategy].presets_with(inner_optimizer).get(spec.name, spec.metadata["usual"])


def default_text(spec: dataclasses.Field[Any]) -> str:
    """The default of a setting; with the strategies and inner optimizers that have another."""
    if "usual" not in spec.metadata:
        unset = AUTO if AUTO in spec.metadata["doc"] else "not set"
        return shown(spec.default, none=spec.metadata.get("none", unset))
    usual = preset_of(spec, "edit", ADAM)
    others = [
        f"{strategy.name} {strategy.presets[spec.name]}"
        for strategy in STRATEGIES.values()
        if strategy.presets.get(spec.name, usual) != usual
    ]
    by_optimizer: dict[str, list[str]] = {}
    for strategy in STRATEGIES.values():
        for optimizer, presets in strategy.optimizer_presets.items():
            if spec.name in presets:
                text = f"with --optimizer {optimizer} {presets[spec.name]}"
                by_optimizer.setdefault(text, []).append(strategy.name)
    others += [f"{' and '.join(names)} {text}" for text, names in by_optimizer.items()]
    return "; ".join([str(usual), *others])


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``.

    Raises:
        UsageError: it is not of that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{flag('rendezvous')} {text}", "must be HOST:PORT", "give e.g. node0:29400"
        )
    return host, int(port)
