"""Settings of which several runs have different values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from megatron_edit.flags import FLAG_PREFIXES, flag, format_value
from megatron_edit.tools.compare.flags import canonical
from megatron_edit.tools.monitor.facts import Facts
from megatron_edit.tools.monitor.summary import describe_layout

UNSET, GIVEN = "unset", "on"
LEFT_OUT = ("log_dir",)  # differs in any case


class DifferingSetting(NamedTuple):
    """A setting that is not equal in all runs.

    Attributes:
        name: a flag, or a fact about machine or versions.
        values: of each run.
    """

    name: str
    values: tuple[str, ...]


def differing_settings(runs: Sequence[Facts]) -> list[DifferingSetting]:
    """Return what differs: layout, EDiT's settings as used, Megatron's flags as given, versions."""
    tables = [_settings(facts) for facts in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    found = (
        DifferingSetting(name, tuple(table.get(name, UNSET) for table in tables)) for name in names
    )
    return [each for each in found if len(set(each.values)) > 1]


def _settings(facts: Facts) -> dict[str, str]:
    given = canonical(facts.argv)
    script = given.pop("", [])
    return {
        "layout": describe_layout(facts),
        "script": PurePath(script[0]).name if script else UNSET,
        **{flag(name): format_value(value, none=UNSET)
           for name, value in facts.config.items() if name not in LEFT_OUT},
        **_host_flags(given),
        **{f"version of {name}": version for name, version in facts.versions.items()},
        "host": facts.host,
    }  # fmt: skip


def _host_flags(given: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return Megatron's flags; EDiT's are compared as used, not as given."""
    return {
        name: " ".join(values) or GIVEN
        for name, values in given.items()
        if not name.startswith(FLAG_PREFIXES)
    }
