"""Turns Megatron's errors about its arguments into one-line errors that name the flags.

Megatron answers an unknown flag with pages of usage and a bad combination with a traceback, often
of an assertion without a text. The launch and `megatron-edit check` both use this module, so that
their messages are the same.
"""

from __future__ import annotations

import difflib
import linecache
import re
import sysconfig
import textwrap
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_edit.config import add_arguments
from megatron_edit.errors import UsageError
from megatron_edit.host.seams.patching import Patcher

# Exceptions that Megatron raises for bad arguments; it has no class of its own for them.
ARGUMENT_ERRORS = (AssertionError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError,
          ValueError)  # fmt: skip
# Of these, faults of the machine or the network: the same command may succeed later.
_TRANSIENT_ERRORS: tuple[type[Exception], ...] = (
    dist.DistError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", dist.DistError),
)  # fmt: skip
_PATH_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError,
               PermissionError)  # fmt: skip
# Beginnings of PyTorch's plain RuntimeErrors about devices.
_DEVICE_ERROR_PREFIXES = (
    "CUDA error",
    "CUDA driver",
    "HIP error",
    "NCCL",
    "No CUDA GPUs",
    "Unexpected error from cuda",
)
_DISTRIBUTED_INIT = ("init_process_group", "_initialize_distributed")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_ATTRIBUTE = re.compile(r"\b(?:args|self|config)\.([a-z]\w*)")
_MOST_FLAGS = 6
_MOST_CHARACTERS = 200
_UNKNOWN = "unrecognized arguments: "


class CommandLine:
    """Adds the `--edit-*` flags to Megatron's parser and records unknown arguments.

    Attributes:
        unknown: arguments that are no flags of Megatron, this package or the script.
    """

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self._flags: dict[str, list[str]] = {}  # flags by attribute
        self._switching_off: set[str] = set()  # attributes with a flag that sets them to False

    def attach(self, patcher: Patcher) -> None:
        """Add the `--edit-*` flags to Megatron's parser, and make it report errors in one line.

        Args:
            patcher: patches Megatron's function and the parser that it returns.
        """
        import megatron.training.arguments as arguments

        def around(
            add: Callable[[ArgumentParser], ArgumentParser],
        ) -> Callable[[ArgumentParser], ArgumentParser]:
            @wraps(add)
            def added(parser: ArgumentParser) -> ArgumentParser:
                parser = add_arguments(add(parser))
                self._watch(parser, patcher)
                return parser

            return added

        patcher.wrap(arguments, "add_megatron_arguments", around)

    def _watch(self, parser: ArgumentParser, patcher: Patcher) -> None:
        parse = parser.parse_known_args

        @wraps(parse)
        def parse_known_args(
            args: Sequence[str] | None = None, namespace: Namespace | None = None
        ) -> tuple[Namespace, list[str]]:
            for action in parser._actions:  # including those that the script has added
                self._flags.setdefault(action.dest, []).extend(action.option_strings)
                if action.const is False:  # as in --disable-bias-linear
                    self._switching_off.add(action.dest)
            found, self.unknown = parse(args, namespace)
            return found, self.unknown

        patcher.add(parser, "parse_known_args", parse_known_args)
        patcher.add(parser, "error", self._refuse)

    def _refuse(self, message: str) -> NoReturn:
        """Replace argparse's `error`: raise a `UsageError`."""
        if message.startswith(_UNKNOWN):
            raise self._unknown_flag(message.removeprefix(_UNKNOWN).split())
        # argparse's message: "argument --num-layers: invalid int value: 'many'"
        subject, colon, rule = message.removeprefix("argument ").partition(": ")
        subject, rule = (subject, rule) if colon else ("the command line", message)
        raise UsageError(subject, _shortened(rule), "see Megatron's own help for this flag")

    def _unknown_flag(self, words: list[str]) -> UsageError:
        value = words[:1]
        for word in words[1:]:
            if word.startswith("--"):
                break
            value.append(word)
        name = words[0].partition("=")[0].replace("_", "-")
        names = [flag for flags in self._flags.values() for flag in flags]
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        return UsageError(
            _shortened(" ".join(value)),
            "no such flag of Megatron's or of this script's",
            f"did you mean {close[0]}?" if close else "drop it, or correct it",
        )

    def flags_in(self, args: Namespace, source: str) -> str:
        """Return the flags used in a line of source with their values, as in ``--lr 0.1``."""
        found = []
        for name in dict.fromkeys(_ATTRIBUTE.findall(source)):
            if flags := self._flags.get(name):
                value = getattr(args, name, None)
                if name in self._switching_off:
                    value = value is False
                is_given = value is not None and value is not False and value not in ([], "")
                words = "" if value is True else f"{value}" if is_given else "(not given)"
                found.append(f"{flags[0]} {_shortened(words)}".strip())
        return ", ".join(found[:_MOST_FLAGS])

    @contextmanager
    def as_usage_errors(self, args: Namespace) -> Iterator[None]:
        """Turn errors of Megatron's validation into a `UsageError` of one line.

        Transient faults, and errors raised in this package, are not changed.

        Args:
            args: Megatron's arguments, whose values are shown.

        Raises:
            UsageError: Megatron refuses the arguments.
        """
        try:
            yield
        except ARGUMENT_ERRORS as error:
            if _is_transient(error) or _raising_package(error) == "megatron_edit":
                raise
            raise self.usage_error(error, args, "Megatron's validation") from error

    def usage_error(self, error: Exception, args: Namespace, part: str) -> UsageError:
        """Make a `UsageError` of an error's text or source line, and the flags used in that line.

        Args:
            args: Megatron's arguments.
            part: name of the part that failed.
        """
        frame = traceback.extract_tb(error.__traceback__)[-1]
        source = _source_of(frame)
        lines = str(error).strip().splitlines()
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        what = f"{kind}{_shortened(lines[0])}" if lines else f"{kind}`{_shortened(source)}`"
        flags = self.flags_in(args, source)
        return UsageError(
            flags or "the command line",
            f"{part} fails: {what} ({Path(frame.filename).name}, line {frame.lineno})",
            "change one of these flags" if flags else "correct what it names",
        )


def comes_from_megatron(error: BaseException) -> bool:
    """Whether the error was raised by Megatron's code, or by a library that it called.

    False for errors in this package or in the script, also in functions that Megatron called, and
    for transient faults (network, device, disk), after which the same command may succeed.
    """
    is_refusal = isinstance(error, ARGUMENT_ERRORS) and not _is_transient(error)
    return is_refusal and _raising_package(error) == "megatron"


def _is_transient(error: BaseException) -> bool:
    """Whether an error is a fault of the machine or network, or of forming process groups."""
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code.co_name in _DISTRIBUTED_INIT for frame, _ in frames):
        return True
    if isinstance(error, _TRANSIENT_ERRORS):
        return True
    if isinstance(error, OSError) and not isinstance(error, _PATH_ERRORS):
        # Libraries also raise a plain OSError for a bad path: "Not found: tokenizer.model".
        if type(error) is not OSError or error.errno is not None:
            return True
    elif type(error) is RuntimeError and str(error).startswith(_DEVICE_ERROR_PREFIXES):
        return True
    return error.__cause__ is not None and _is_transient(error.__cause__)


def _raising_package(error: BaseException) -> str:
    """Return the package of the innermost frame outside of libraries; empty if there is none."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in ("megatron", "megatron_edit") or not _is_library(frame.f_code.co_filename):
            return package
    return ""


def _is_library(file: str) -> bool:
    return file.startswith(("<frozen", _STANDARD_LIBRARY)) or not {
        "site-packages",
        "dist-packages",
    }.isdisjoint(Path(file).parts)


def _source_of(frame: traceback.FrameSummary) -> str:
    """Return the source of the failed expression on one line."""
    first = frame.lineno or 1
    last = frame.end_lineno or first
    lines = [linecache.getline(frame.filename, number) for number in range(first, last + 1)]
    return " ".join(" ".join(lines).split())


def _shortened(text: str) -> str:
    return textwrap.shorten(text, _MOST_CHARACTERS, placeholder=" ...") or text[:_MOST_CHARACTERS]
