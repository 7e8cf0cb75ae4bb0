"""Remedies for what is found in a run: only settings that a launch with its strategy accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_edit.config import ONLY_COUNTED, EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.tools.monitor.facts import Facts

A_EDIT = "a-edit"


def accepts(facts: Facts, **changes: Any) -> bool:
    """Whether a launch with the settings of a run, some of them changed, would be accepted.

    Args:
        facts: of the run.
        changes: new values, by the names of the settings.
    """
    known = {spec.name for spec in dataclasses.fields(EditConfig)} & facts.config.keys()
    try:
        EditConfig(**{name: facts.config[name] for name in known} | changes)
    except (UsageError, TypeError, ValueError):
        return False
    return True


def either(remedies: Sequence[str]) -> str:
    """One sentence of all that are not empty."""
    return ", or ".join(remedy for remedy in remedies if remedy)


def a_edit(facts: Facts) -> str:
    """For replicas of unequal speed; empty where it cannot be had."""
    fields = EditConfig.__dataclass_fields__
    usual = {name: fields[name].default for name in ONLY_COUNTED}
    if facts.strategy.is_timed or not accepts(facts, strategy=A_EDIT, **usual):
        return ""
    return f"replicas of unequal speed do better with --edit-strategy {A_EDIT}"


def even_weights(facts: Facts) -> str:
    """For weights near one-hot; empty where their temperature cannot be raised."""
    value = facts.config.get("weight_temperature")  # None is auto
    if not isinstance(value, int | float) or not accepts(facts, weight_temperature=2 * value):
        return ""
    return "give a higher --edit-weight-temperature, or auto"


def higher_clip(facts: Facts) -> str:
    """For a clip that always binds; empty where there is no clip to raise."""
    value = facts.config.get("clip")
    if not isinstance(value, int | float) or not accepts(facts, clip=2 * value):
        return ""
    return "raise --edit-clip"


def to_hide(facts: Facts) -> list[str]:
    """For syncs that take much of the time."""
    remedies = []
    if facts.strategy.is_timed:
        remedies.append("raise --edit-sync-seconds")
    elif accepts(facts, sync_interval=2 * facts.sync_interval):
        remedies.append("raise --edit-sync-interval")
    hiding = []
    if not facts.delay_steps and accepts(facts, delay_steps=1):
        hiding.append("--edit-delay-steps")
    if "--overlap-param-gather" not in facts.argv:
        hiding.append("--overlap-param-gather")
    if hiding:
        remedies.append(f"hide the exchange ({', '.join(hiding)})")
    return remedies
