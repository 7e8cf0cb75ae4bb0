"""The settings of `EditConfig` as fields of another configuration. Imports no Megatron."""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, get_args, get_type_hints

from megatron_edit.config import EditConfig
from megatron_edit.errors import EditError, UsageError
from megatron_edit.flags import attribute
from megatron_edit.launcher import refuse

SETTINGS = tuple(spec for spec in dataclasses.fields(EditConfig) if spec.name != "use_edit")
NAMES = tuple(spec.name for spec in SETTINGS)
_TYPES = get_type_hints(EditConfig)
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")


def class_with_settings(name: str, base: type, module: str) -> type:
    """Return a dataclass with the fields of `base` and those of `EditConfig`, with their defaults.

    Args:
        base: dataclass whose fields have defaults.
        module: in which the class is found by its name.
    """
    fields = [(spec.name, spec.type, dataclasses.field(default=spec.default)) for spec in SETTINGS]
    return dataclasses.make_dataclass(name, fields, bases=(base,), module=module)


def check_names(given: Mapping[str, object]) -> None:
    """Check that all names are settings.

    Raises:
        UsageError: one is not.
    """
    for name, value in given.items():
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            remedy = f"use {close[0]}" if close else "see the fields of EditOptimizerConfig"
            raise UsageError(f"{name}={value!r}", "is not a setting of EDiT", remedy)


def edit_config_of(settings: Any, inner_optimizer: str) -> EditConfig:
    """Return the checked configuration, with the strategy's presets.

    Args:
        settings: object with the fields of `EditConfig`.
        inner_optimizer: Megatron's name of the optimizer.

    Raises:
        UsageError: a value is refused.
    """
    values = {name: getattr(settings, name) for name in NAMES}
    for spec in SETTINGS:
        value, hint = values[spec.name], _TYPES[spec.name]
        if not (_has_type(value, hint) or (value is None and spec.default is None)):
            rule = f"must be of type {getattr(hint, '__name__', hint)}"
            raise UsageError(f"optimizer.{spec.name}={value!r}", rule, "correct it")
    try:
        return EditConfig.of_flags({**values, "use_edit": True}, inner_optimizer)
    except UsageError as error:
        raise in_fields(error, {}) from None


def _has_type(value: object, hint: Any) -> bool:
    types = get_args(hint) or (hint,)
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, (*types, int) if float in types else types)


def in_fields(error: UsageError, paths: Mapping[str, str]) -> UsageError:
    """Return an error with fields of Megatron-Bridge's configuration instead of flags.

    Args:
        error: whose texts name flags.
        paths: field by the name of Megatron's argument; those of EDiT are known.
    """
    known = {attribute(name): f"optimizer.{name}" for name in NAMES} | dict(paths)

    def field_of(flag: re.Match[str]) -> str:
        return known.get(flag[1].replace("-", "_"), flag[0])

    value, rule, remedy = (
        _FLAG.sub(field_of, text).replace("drop the flag", "drop the setting")
        for text in (error.value, error.rule, error.remedy)
    )
    return UsageError(value, rule, remedy, is_local=error.is_local)


def exit_with(error: EditError, *, is_first: bool) -> NoReturn:
    """Print an error in one line, as the launcher does, and exit with its code.

    Args:
        error: that ends the process.
        is_first: whether this is the first rank of the launch.

    Raises:
        SystemExit: always.
    """
    sys.exit(refuse(error, is_first=is_first))
