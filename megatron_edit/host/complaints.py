"""What Megatron refuses on a command line, as one line with the flags that it is about.

Megatron answers an unknown flag with pages of usage and a bad combination with a traceback, often
of an assertion without a text. The launch and `megatron-edit check` both pass through here, so they
say the same.
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

# What Megatron raises over arguments: it has no class of its own for that.
RAISED = (AssertionError, ArithmeticError, LookupError, OSError, RuntimeError, TypeError,
          ValueError)  # fmt: skip
# Of these, faults of a machine or of the network, which may pass: the same command may start later.
_MAY_PASS: tuple[type[Exception], ...] = (
    dist.DistError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", dist.DistError),
)  # fmt: skip
_WRONG_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError,
               PermissionError)  # fmt: skip
# As PyTorch's plain RuntimeErrors begin.
_OF_A_DEVICE = (
    "CUDA error",
    "CUDA driver",
    "HIP error",
    "NCCL",
    "No CUDA GPUs",
    "Unexpected error from cuda",
)
_MEETING = ("init_process_group", "_initialize_distributed")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_ATTRIBUTE = re.compile(r"\b(?:args|self|config)\.([a-z]\w*)")
_MOST_FLAGS = 6
_MOST_CHARACTERS = 200
_UNKNOWN = "unrecognized arguments: "


class CommandLine:
    """Megatron's parser with our flags; remembers what it did not know.

    Attributes:
        unknown: words that are no flags of Megatron's, ours or the script's own.
    """

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self._flags: dict[str, list[str]] = {}  # by attribute
        self._switching_off: set[str] = set()  # attributes whose flag makes them False

    def attach(self, patcher: Patcher) -> None:
        """Add our flags to the parser that Megatron makes, and let it complain in one line.

        Args:
            patcher: for Megatron's function, and for the parser that it returns.
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
            for action in parser._actions:  # with those that the script has added by now
                self._flags.setdefault(action.dest, []).extend(action.option_strings)
                if action.const is False:  # as in --disable-bias-linear
                    self._switching_off.add(action.dest)
            found, self.unknown = parse(args, namespace)
            return found, self.unknown

        patcher.add(parser, "parse_known_args", parse_known_args)
        patcher.add(parser, "error", self._refuse)

    def _refuse(self, message: str) -> NoReturn:
        """argparse's `error`."""
        if message.startswith(_UNKNOWN):
            raise self._unknown_flag(message.removeprefix(_UNKNOWN).split())
        # argparse says "argument --num-layers: invalid int value: 'many'"
        subject, colon, rule = message.removeprefix("argument ").partition(": ")
        subject, rule = (subject, rule) if colon else ("the command line", message)
        raise UsageError(subject, _shortened(rule), "see Megatron's own help for this flag")

    def _unknown_flag(self, words: list[str]) -> UsageError:
        value = words[:1]
        for word in words[1:]:
            if word.startswith("--"):
                break
            value.append(word)
        close = difflib.get_close_matches(_dashed(words[0]), self._names(), n=1, cutoff=0.7)
        return UsageError(
            _shortened(" ".join(value)),
            "no such flag of Megatron's or of this script's",
            f"did you mean {close[0]}?" if close else "drop it, or correct it",
        )

    def questions(self) -> list[str]:
        """Of unknown words that the script takes, those that are almost a flag of Megatron's."""
        asked = []
        for word in self.unknown:
            name = _dashed(word)
            near = difflib.get_close_matches(name, self._names(), n=3, cutoff=0.7)
            near = [flag for flag in near if is_one_letter_off(name, flag)]
            if word.startswith("--") and near:
                asked.append(f"{word.partition('=')[0]}: did you mean {near[0]}?")
        return asked

    def _names(self) -> list[str]:
        return [flag for flags in self._flags.values() for flag in flags]

    def shown(self, args: Namespace, source: str) -> str:
        """The flags in a line of Megatron's source, with their values, as in ``--lr 0.1``."""
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
    def refusals(self, args: Namespace) -> Iterator[None]:
        """Turn what Megatron's validation raises into a refusal of one line.

        Args:
            args: Megatron's; their values are shown.

        Raises:
            UsageError: Megatron refuses them. What may pass, and a bug of ours, stays as it is.
        """
        try:
            yield
        except RAISED as error:
            if _may_pass(error) or _raised_in(error) == "megatron_edit":
                raise
            raise self.usage_error(error, args, "Megatron's validation") from error

    def usage_error(self, error: Exception, args: Namespace, who: str) -> UsageError:
        """The refusal that an error comes to: its text or its source line, and the flags there.

        Args:
            error: that was raised.
            args: Megatron's.
            who: failed, in words.
        """
        frame = traceback.extract_tb(error.__traceback__)[-1]
        source = _source_of(frame)
        lines = str(error).strip().splitlines()
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        what = f"{kind}{_shortened(lines[0])}" if lines else f"{kind}`{_shortened(source)}`"
        flags = self.shown(args, source)
        return UsageError(
            flags or "the command line",
            f"{who} fails: {what} ({Path(frame.filename).name}, line {frame.lineno})",
            "change one of these flags" if flags else "correct what it names",
        )


def comes_from_megatron(error: BaseException) -> bool:
    """Whether Megatron's own code refused what it was given, itself or through a library.

    False where our code or the script failed, also below a call of Megatron's; and for faults that
    may pass (network, device, disk), after which the same command may start.
    """
    is_refusal = isinstance(error, RAISED) and not _may_pass(error)
    return is_refusal and _raised_in(error) == "megatron"


def _may_pass(error: BaseException) -> bool:
    """Whether a fault is of a machine or of the network, or was met while the ranks meet."""
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code.co_name in _MEETING for frame, _ in frames):
        return True
    if isinstance(error, _MAY_PASS):
        return True
    if isinstance(error, OSError) and not isinstance(error, _WRONG_PATH):
        # Libraries raise a bare OSError over a path, too: "Not found: tokenizer.model".
        if type(error) is not OSError or error.errno is not None:
            return True
    elif type(error) is RuntimeError and str(error).startswith(_OF_A_DEVICE):
        return True
    return error.__cause__ is not None and _may_pass(error.__cause__)


def _raised_in(error: BaseException) -> str:
    """The package of the innermost frame that is no library's; empty where there is none."""
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


def is_one_letter_off(word: str, name: str) -> bool:
    """Whether one letter that is missing, added or another makes one word of the other."""
    changes = difflib.SequenceMatcher(None, word, name, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in changes if kind != "equal") <= 1


def _dashed(word: str) -> str:
    """A flag as Megatron writes it: without its value, and with dashes."""
    return word.partition("=")[0].replace("_", "-")


def _source_of(frame: traceback.FrameSummary) -> str:
    """The source of the expression that failed, without line breaks."""
    first = frame.lineno or 1
    last = frame.end_lineno or first
    lines = [linecache.getline(frame.filename, number) for number in range(first, last + 1)]
    return " ".join(" ".join(lines).split())


def _shortened(text: str) -> str:
    return textwrap.shorten(text, _MOST_CHARACTERS, placeholder=" ...") or text[:_MOST_CHARACTERS]
