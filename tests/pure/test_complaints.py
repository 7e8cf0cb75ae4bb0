"""Megatron's complaints about a command line as one line: flags, source, what is almost a flag."""

from __future__ import annotations

import argparse
import runpy
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest

from megatron_edit.errors import UsageError
from megatron_edit.host.complaints import CommandLine, comes_from_megatron, is_one_letter_off
from megatron_edit.host.seams.patching import Patcher


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    """A parser like Megatron's, with a few flags."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("--num-layers", type=int)
    made.add_argument("--lr", type=float)
    made.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    return made


def watched(parser: argparse.ArgumentParser) -> CommandLine:
    """A command line that watches it."""
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
def test_an_unknown_flag_is_one_line(
    parser: argparse.ArgumentParser, words: str, value: str, remedy: str
) -> None:
    """Would catch: pages of usage, the values of another flag, and advice that is far off."""
    watched(parser)
    with pytest.raises(UsageError) as caught:
        parser.parse_args(words.split())
    assert caught.value.value == value and remedy in caught.value.remedy


def test_a_script_keeps_its_own_flags(parser: argparse.ArgumentParser) -> None:
    """Would catch: a question about each of them, or none about one letter off a flag."""
    line = watched(parser)
    parser.parse_known_args(["--num-layer", "3", "--of-mine", "1", "--lrs", "2"])
    assert line.unknown == ["--num-layer", "3", "--of-mine", "1", "--lrs", "2"]
    assert line.questions() == [
        "--num-layer: did you mean --num-layers?", "--lrs: did you mean --lr?"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "name", "is_near"),
    [
        ("--num-layer", "--num-layers", True),
        ("--num-layerz", "--num-layers", True),
        ("--lr", "--lr", True),
        ("--num-heads", "--num-layers", False),
        ("--lr-decay", "--lr", False),
    ],
)
def test_one_letter_off(word: str, name: str, is_near: bool) -> None:
    """One that is missing, added or another."""
    assert is_one_letter_off(word, name) == is_near


def test_a_bare_assertion_shows_its_source(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    """Would catch: `AssertionError` without a word, and flags in their attributes' names."""
    line, module = watched(parser), tmp_path / "validation.py"
    source = "assert args.num_layers % 2 == 0 or args.add_bias_linear or args.lr"
    module.write_text(f"def validate(args):\n    {source}\n")  # pytest rewrites its own files
    args = parser.parse_args(["--num-layers", "3", "--disable-bias-linear"])
    validate = runpy.run_path(str(module))["validate"]
    with pytest.raises(UsageError) as caught, line.refusals(args):
        validate(args)
    said = str(caught.value)
    assert said.startswith("--num-layers 3, --disable-bias-linear, --lr (not given): "), said
    assert f"`{source}` (validation.py, line 2)" in said


def test_an_error_with_a_text_keeps_it(parser: argparse.ArgumentParser) -> None:
    """Its first line, with its kind where it is no assertion."""
    line = watched(parser)
    with (
        pytest.raises(UsageError, match="fails: ValueError: too many layers"),
        line.refusals(Namespace()),
    ):
        raise ValueError("too many layers\nsecond line")


def test_only_what_megatron_raises_is_a_refusal() -> None:
    """Would catch: a bug of the script's whose traceback is hidden."""
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


def _fail(error: Exception) -> None:
    raise error
