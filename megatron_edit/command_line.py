"""Parses the `--edit-*` flags of a command line that also has Megatron's, and prints their help."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from megatron_edit.config import EditConfig, add_arguments
from megatron_edit.constants import ADAM
from megatron_edit.errors import UsageError
from megatron_edit.flags import RESERVED_PREFIXES, attribute, flag, format_value, preset_of

_UNSET = object()  # of a flag that is not given
OPTIMIZER = "--optimizer"  # a flag of Megatron
USAGE = "torchrun [...] -m megatron_edit SCRIPT [Megatron's arguments] --use-edit [--edit-...]"
_ABOUT = (
    "Train with EDiT replicas: Megatron's training script under the plugin. Megatron's own flags: "
    "python SCRIPT --help, without the plugin (where that fails, as with megatron-core 0.19.2: "
    "megatron/training/arguments.py)."
)


class _OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        # argparse's message: "argument --edit-clip: invalid float value: 'abc'"
        subject, _, rule = message.removeprefix("argument ").partition(": ")
        raise UsageError(subject, rule or message, "see megatron-edit flags")


def has_help_flag(argv: Sequence[str]) -> bool:
    """Whether `-h` or `--help` is among the arguments before a bare `--`, if there is one."""
    return not {"-h", "--help"}.isdisjoint(takewhile("--".__ne__, argv))


def help_text(*, shows_all: bool = False) -> str:
    """Return the help text: how to launch, and the common flags of this package, or all.

    Megatron's flags are left out: building its parser takes torch, and that of megatron-core 0.19.2
    fails to print its help because of an unescaped percent sign.
    """
    parser = argparse.ArgumentParser(
        usage=USAGE, description=_ABOUT, add_help=False, allow_abbrev=False
    )
    return add_arguments(parser, shows_all=shows_all).format_help()


def config_from_argv(argv: Sequence[str]) -> EditConfig:
    """Parse the flags of this package from a command line that also has Megatron's.

    Args:
        argv: arguments, without the name of the program.

    Raises:
        UsageError: a value is invalid, an `--edit-*` flag is unknown, or `--edit-*` flags are given
            without `--use-edit` (they would be silently ignored).
    """
    parser = add_arguments(_OneLineParser(add_help=False, allow_abbrev=False))
    fields = dataclasses.fields(EditConfig)
    unset = argparse.Namespace(**{attribute(spec.name): _UNSET for spec in fields})
    known, rest = parser.parse_known_args(list(argv), unset)
    for word in rest:
        _refuse_unknown(word.partition("=")[0])
    found = {spec.name: getattr(known, attribute(spec.name)) for spec in fields}
    given = {name for name, value in found.items() if value is not _UNSET}
    values = {s.name: found[s.name] if s.name in given else s.default for s in fields}
    inner_optimizer = inner_optimizer_of(rest)
    config = EditConfig.of_flags(values, inner_optimizer, given)
    if not config.use_edit:
        _refuse_unused(config, inner_optimizer)
    return config


def inner_optimizer_of(words: Sequence[str]) -> str:
    """Return the value of Megatron's `--optimizer` (default: Adam), on which some presets depend.

    Args:
        words: arguments. If the flag is repeated, the last one counts, as in argparse.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(OPTIMIZER, nargs="?", default=ADAM, const=ADAM)
    return str(parser.parse_known_args(list(words))[0].optimizer)


def training_script(name: str) -> Path:
    """Return the path of the training script.

    Args:
        name: path, as given on the command line.

    Raises:
        UsageError: it is no readable file.
    """
    path, rule = Path(name), "no such training script"
    try:
        if path.is_file():
            path.open("rb").close()
            return path
    except OSError as error:
        rule = f"is not a script that can be read ({error.strerror})"
    raise UsageError(name, rule, "give the path of pretrain_gpt.py")


def _refuse_unknown(word: str) -> None:
    if not word.startswith(RESERVED_PREFIXES):
        return
    names = [flag(spec.name) for spec in dataclasses.fields(EditConfig)]
    close = difflib.get_close_matches(word, names, n=1)
    remedy = f"did you mean {close[0]}?" if close else "see megatron-edit flags"
    raise UsageError(word, "no such flag", remedy)


def _refuse_unused(config: EditConfig, inner_optimizer: str) -> None:
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if spec.name != "device" and value != preset_of(spec, config.strategy, inner_optimizer):
            raise UsageError(
                flag(spec.name) if value is True else f"{flag(spec.name)} {format_value(value)}",
                "has no effect without --use-edit",
                "add --use-edit, or drop the flag",
            )
