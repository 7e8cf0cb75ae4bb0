"""Reading our flags from a command line that also holds Megatron's, and the help on them."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_edit.config import EditConfig, add_arguments
from megatron_edit.constants import ADAM
from megatron_edit.errors import UsageError
from megatron_edit.flags import BEGINNINGS_TO_REFUSE, attribute, flag, preset_of, shown

OPTIMIZER = "--optimizer"  # of Megatron's
_OTHERS = (
    "Megatron's own flags: python SCRIPT --help, without the plugin (where that fails, as with "
    "megatron-core 0.19.2: megatron/training/arguments.py)"
)


class _OneLineParser(argparse.ArgumentParser):
    """argparse that answers bad input with one line instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        # argparse says "argument --edit-clip: invalid float value: 'abc'"
        subject, _, rule = message.removeprefix("argument ").partition(": ")
        raise UsageError(subject, rule or message, "see the table of flags in docs/flags.md")


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether `-h` or `--help` is among the words, before a bare `--` if there is one."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return not {"-h", "--help"}.isdisjoint(words[:end])


def help_text(usage: str) -> str:
    """How to launch, and our own flags.

    Megatron's parser is not asked: it takes torch to build, and that of megatron-core 0.19.2 cannot
    print its help (a text with a lone percent sign).

    Args:
        usage: of the launcher.
    """
    about = "Train with EDiT replicas: Megatron's training script under the plugin."
    parser = argparse.ArgumentParser(
        usage=usage, description=about, epilog=_OTHERS, add_help=False, allow_abbrev=False
    )
    return add_arguments(parser).format_help()


def config_from_argv(argv: Sequence[str]) -> EditConfig:
    """Read our flags from a command line that also holds Megatron's.

    Args:
        argv: words of the command line, without the program's name.

    Raises:
        UsageError: a value that does not parse or is refused, an unknown `--edit-*` flag, or
            `--edit-*` flags without `--use-edit` (they would be ignored, silently).
    """
    parser = add_arguments(_OneLineParser(add_help=False, allow_abbrev=False))
    known, rest = parser.parse_known_args(list(argv))
    for word in rest:
        _refuse_unknown(word.partition("=")[0])
    values = {s.name: getattr(known, attribute(s.name)) for s in dataclasses.fields(EditConfig)}
    inner_optimizer = inner_optimizer_of(rest)
    config = EditConfig(**values, inner_optimizer=inner_optimizer)
    if not config.use_edit:
        _refuse_unused(config, inner_optimizer)
    return config


def inner_optimizer_of(words: Sequence[str]) -> str:
    """Megatron's `--optimizer`, by which some of our presets go; Adam, its default, without.

    Args:
        words: of a command line. As in argparse the last one counts.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(OPTIMIZER, nargs="?", default=ADAM, const=ADAM)
    return str(parser.parse_known_args(list(words))[0].optimizer)


def training_script(name: str) -> Path:
    """The script that a command line names.

    Raises:
        UsageError: there is none that can be read.
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
    if not word.startswith(BEGINNINGS_TO_REFUSE):
        return
    names = [flag(spec.name) for spec in dataclasses.fields(EditConfig)]
    close = difflib.get_close_matches(word, names, n=1)
    remedy = f"did you mean {close[0]}?" if close else "see the table of flags in docs/flags.md"
    raise UsageError(word, "no such flag", remedy)


def _refuse_unused(config: EditConfig, inner_optimizer: str) -> None:
    for spec in dataclasses.fields(config):
        usual = preset_of(spec, config.strategy, inner_optimizer)
        if spec.name != "device" and getattr(config, spec.name) != usual:
            raise UsageError(
                f"{flag(spec.name)} {shown(getattr(config, spec.name))}",
                "has no effect without --use-edit",
                "add --use-edit, or drop the flag",
            )
