"""Megatron's errors about the command line in one line, with flags and source."""

from __future__ import annotations

import argparse
import errno
import json
import runpy
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.errors import UsageError
from megatron_edit.host.argument_errors import CommandLine, comes_from_megatron
from megatron_edit.host.seams.patching import Patcher


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """Return a parser like Megatron's, with a few flags."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("--num-layers", type=int)
    made.add_argument("--lr", type=float)
    made.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    return made


def watched(parser: argparse.ArgumentParser) -> CommandLine:
    """Return a `CommandLine` that watches a parser."""
    found = CommandLine()
    found._watch(parser, Patcher("a test"))
    return found


@pytest.mark.parametrize(
    ("words", "value", "remedy"),
    [
        ("--num-layer 3", "--num-layer 3", "did you mean --num-layers?"),
        ("--num_layers=3 --of-mine", "--num_layers=3", "did you mean --num-layers?"),
        ("--of-mine 1 2 --lr 1", "--of-mine 1 2", "drop it"),
        ("word", "word", "drop it"),
    ],
)
def test_unknown_flag_is_refused_in_one_line(
    parser: argparse.ArgumentParser, words: str, value: str, remedy: str
) -> None:
    """Would catch: a usage page, the values of another flag, and an unrelated suggestion."""
    watched(parser)
    with pytest.raises(UsageError) as caught:
        parser.parse_args(words.split())
    assert caught.value.value == value and remedy in caught.value.remedy


def test_script_keeps_its_own_flags(parser: argparse.ArgumentParser) -> None:
    line = watched(parser)
    parser.parse_known_args(["--num-layer", "3", "--of-mine", "1"])
    assert line.unknown == ["--num-layer", "3", "--of-mine", "1"]


def test_bare_assertion_is_shown_with_its_source(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    """Would catch a bare `AssertionError`, and attribute names in place of flags."""
    line, module = watched(parser), tmp_path / "validation.py"
    source = "assert args.num_layers % 2 == 0 or args.add_bias_linear or args.lr"
    module.write_text(f"def validate(args):\n    {source}\n")  # pytest rewrites its own files
    args = parser.parse_args(["--num-layers", "3", "--disable-bias-linear"])
    validate = runpy.run_path(str(module))["validate"]
    with pytest.raises(UsageError) as caught, line.as_usage_errors(args):
        validate(args)
    message = str(caught.value)
    assert message.startswith("--num-layers 3, --disable-bias-linear, --lr (not given): "), message
    assert f"`{source}` (validation.py, line 2)" in message


def test_error_message_is_kept(parser: argparse.ArgumentParser) -> None:
    """The first line is kept, with the exception type unless it is an assertion."""
    line = watched(parser)
    with (
        pytest.raises(UsageError, match="fails: ValueError: too many layers"),
        line.as_usage_errors(Namespace()),
    ):
        raise ValueError("too many layers\nsecond line")


def test_only_errors_raised_by_megatron_are_refusals() -> None:
    """Would catch a bug in the training script whose traceback is hidden."""
    namespace: dict[str, object] = {"__name__": "megatron.training.arguments"}
    exec("def fail(error): raise error", namespace)
    for error, fail, is_megatrons in (
        (ValueError("x"), namespace["fail"], True),
        (ImportError("x"), namespace["fail"], False),
        (ValueError("x"), partial(_fail), False),
    ):
        assert callable(fail)
        with pytest.raises(type(error)) as caught:
            fail(error)
        assert comes_from_megatron(caught.value) == is_megatrons


def in_module(name: str, source: Any, **names: object) -> Any:
    """Return the function `f` of a made-up module."""
    namespace: dict[str, Any] = {"__name__": name} | names
    exec(source, namespace)
    return namespace["f"]


@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [
        (FileNotFoundError(errno.ENOENT, "no tokenizer"), True),
        (OSError("Not found: tokenizer.model"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False),
        (dist.DistNetworkError("the store is gone"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), False),
        (RuntimeError("CUDA_DEVICE_MAX_CONNECTIONS must be 1"), True),
    ],
    ids=repr,
)
def test_transient_errors_are_not_refusals(error: Exception, is_refusal: bool) -> None:
    """Catches exit code 2, after which batch scripts do not restart, for a transient error."""
    fail = in_module("megatron.training.initialize", "def f(error): raise error")
    with pytest.raises(type(error)) as caught:
        fail(error)
    assert comes_from_megatron(caught.value) == is_refusal
    with (
        pytest.raises(UsageError if is_refusal else type(error)),
        CommandLine().as_usage_errors(Namespace()),
    ):
        fail(error)


def test_error_with_transient_cause_is_not_a_refusal() -> None:
    """As in a library that reports "cannot load the tokenizer" after a network failure."""
    source = (
        "def f():\n try: raise ConnectionError()\n except OSError as e: raise OSError('x') from e"
    )
    with pytest.raises(OSError) as caught:
        in_module("megatron.training.initialize", source)()
    assert not comes_from_megatron(caught.value)


def test_errors_while_ranks_connect_are_not_refusals() -> None:
    """Catches a refusal if the ranks only connected too late."""
    source = (
        "def _initialize_distributed(): raise ValueError('x')\ndef f(): _initialize_distributed()"
    )
    with pytest.raises(ValueError) as caught:
        in_module("megatron.training.initialize", source)()
    assert not comes_from_megatron(caught.value)


def test_own_bug_called_by_megatron_keeps_its_traceback() -> None:
    """Errors in other libraries that Megatron calls count as errors of Megatron."""
    ours = in_module("megatron_edit.host.data", "def f(): raise ValueError('x')")
    library = in_module("json", compile("def f(): raise ValueError('x')", json.__file__, "exec"))
    for called, is_refusal in ((ours, False), (library, True)):
        call = in_module("megatron.training.arguments", "def f(): called()", called=called)
        with pytest.raises(ValueError) as caught:
            call()
        assert comes_from_megatron(caught.value) == is_refusal
        with (
            pytest.raises(UsageError if is_refusal else ValueError) as raised,
            CommandLine().as_usage_errors(Namespace()),
        ):
            call()
        assert isinstance(raised.value, UsageError) == is_refusal


def _fail(error: Exception) -> None:
    raise error
