"""The words that `plan`, `check`, `doctor` and `compare` share."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_edit.command_line import config_from_argv
from megatron_edit.errors import UsageError
from megatron_edit.tools.cli import SUBCOMMANDS, check, main
from megatron_edit.tools.cli.words import FLAGS, SCRIPT, SHARED, SharedValues, TrainingCommand

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODEL, EDIT = str(CONFIGS / "llama_350m.args"), str(CONFIGS / "edit_8x8.args")
PLANNED = ("plan", "check", "doctor")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.args").write_text("# a comment\n--lr 1e-3\n--bf16\n")
    (tmp_path / "b.args").write_text("--lr 2e-3\n")
    (tmp_path / "flags.txt").write_text("--seed 3\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


A = ("--lr", "1e-3", "--bf16")
B = ("--lr", "2e-3")


@pytest.mark.parametrize(
    ("words", "others", "script", "argv"),
    [
        ("", None, None, ()),
        ("train.py a.args b.args --seed 1", None, "train.py", (*A, *B, "--seed", "1")),
        ("b.args train.py a.args", None, "train.py", (*B, *A)),
        ("a.args", FLAGS, None, A),
        ("--lr 1 b.args", None, None, ("--lr", "1", "b.args")),  # a value of --lr
        ("train one.txt --lr 1", SCRIPT, "train", ("one.txt", "--lr", "1")),
        ("train.py other.py --lr 1", SCRIPT, "train.py", ("other.py", "--lr", "1")),
        ("flags.txt b.args --lr 1", FLAGS, None, ("--seed", "3", *B, "--lr", "1")),
        ("train.py flags.txt", FLAGS, "train.py", ("--seed", "3")),
    ],
)
def test_training_is_read_from_script_files_and_flags(
    files: Path, words: str, others: str | None, script: str | None, argv: tuple[str, ...]
) -> None:
    """In the given order, as Megatron takes the last of repeated flags."""
    assert TrainingCommand.of(words.split(), others) == TrainingCommand(script, argv)


@pytest.mark.parametrize("words", ["missing.args", "extra", "extra train.py", "b.args extra"])
def test_words_that_are_neither_script_nor_file_are_refused(files: Path, words: str) -> None:
    with pytest.raises(UsageError):
        TrainingCommand.of(words.split())


def test_replicas_are_those_of_the_flag(files: Path) -> None:
    """`--replicas` adds the flag; would catch two numbers of which one is ignored."""
    given = TrainingCommand.of(["--use-edit"])
    for command in (given.with_replicas(4), given.with_replicas(4).with_replicas(4)):
        assert config_from_argv(command.argv).num_replicas == 4
    assert given.with_replicas(None) is given
    for flags in (["--edit-num-replicas", "2"], ["--edit-num-replicas=2"]):
        with pytest.raises(UsageError, match="--edit-num-replicas 2: must be the same number"):
            TrainingCommand.of(flags).with_replicas(4)
    overridden = TrainingCommand.of([*flags, "--edit-num-replicas", "4"])
    assert overridden.with_replicas(4) is overridden


@pytest.mark.parametrize("name", PLANNED)
def test_commands_have_the_same_options(name: str) -> None:
    """Would catch an option that only one of them has, or an abbreviation that takes a flag."""
    parser = argparse.ArgumentParser()
    SUBCOMMANDS[name].configure(parser)
    assert {"--replicas", *SHARED} <= set(parser._option_string_actions)
    words = ["--link", "10Gbit", "--host", "a", "--replica", "b", "--lat", "c"]
    known, rest = parser.parse_known_args(words)
    assert (known.hosts, known.replicas, known.latency) == (None, None, None)
    assert rest == words[2:]


def test_compare_has_replicas() -> None:
    parser = argparse.ArgumentParser()
    SUBCOMMANDS["compare"].configure(parser)
    assert "--replicas" in parser._option_string_actions


BAD_VALUES = {
    "--link 10": "--link 10: must be a rate",
    "--latency soon": "--latency soon: must be a duration",
    "--step-time 0": "--step-time 0: must be a duration",
    "--device-memory 80": "--device-memory 80: must be a size",
    "--gpu-tflops 0": "--gpu-tflops 0: must be from",
    "--replicas 0": "--replicas 0: must be at least 1",
    "--world-size 0": "--world-size 0: must be at least 1",
    "--replicas 2": "must be the same number",
    "extra": "extra: ",
}


@pytest.mark.parametrize("words", BAD_VALUES)
@pytest.mark.parametrize("name", PLANNED)
def test_bad_values_are_refused_alike(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the command has no use for the value."""
    usual = ["--link", "10Gbit", "--step-time", "2"] if name == "plan" else []
    line = [name, MODEL, EDIT, *usual, *words.split()]
    if words == "extra":
        line = [name, words, *usual]
    assert main(line) == 2
    error = capsys.readouterr().err
    assert BAD_VALUES[words] in error and error.count("\n") == 1, error


def test_plan_takes_the_command_line_of_check(capsys: pytest.CaptureFixture[str]) -> None:
    """The script need not exist, and the ranks may be given by hosts."""
    link = ["--link", "10Gbit", "--step-time", "2"]
    lines = [
        ["train.py", MODEL, EDIT, "--world-size", "64", *link],
        [MODEL, EDIT, "--hosts", "n1,n2,n3,n4", "--world-size", "64", *link],
        [MODEL, EDIT, "--replicas", "8", "--hosts", "n1:32,n2:32", *link],
        [MODEL, EDIT, "--replicas", "8", *link],
    ]
    printed = []
    for line in lines:
        assert main(["plan", *line]) == 0, capsys.readouterr().err
        printed.append(capsys.readouterr().out.splitlines())
    assert printed[1][:8] == [f"replica {r} is on n{r // 2 + 1} (8 ranks)" for r in range(8)]
    assert printed[1][8].startswith("replica 0 at 0, 1 at 0, 2 at 1, 3 at 1, 4 at 2, ")
    plans = {"\n".join(each[9:] if "--hosts" in line else each) for line, each in
             zip(lines, printed, strict=True)}  # fmt: skip
    assert len(plans) == 1 and "8 replicas x 8 ranks" in plans.pop()


@pytest.mark.parametrize(
    "own",
    [
        "--edit-replica-id 1 --edit-rendezvous node0:29400 --edit-num-replicas 8",
        "--edit-hub 127.0.0.1:29600 --edit-replica-name a --edit-nominal-replicas 8",
    ],
)
def test_ranks_are_those_of_the_launch(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With one launch per replica these are the ranks of a replica, as for `check`."""
    line = [MODEL, "--use-edit", *own.split(), "--world-size", "16", "--link", "10Gbit"]
    assert main(["plan", *line, "--step-time", "2"]) == 0
    assert "8 replicas x 16 ranks" in capsys.readouterr().out


def test_values_are_parsed_once() -> None:
    parser = argparse.ArgumentParser()
    check.configure(parser)
    words = (
        "--link 100Mbit --latency 20ms --step-time 2.5 --device-memory 80GB --gpu-tflops 3 "
        "--hosts a:1,b:2"
    )
    found = SharedValues.of(parser.parse_args(words.split()))
    assert found == SharedValues(1e8, 0.02, 2.5, 3.0, 80e9, ["a", "b", "b"])
    assert SharedValues.of(parser.parse_args([])) == SharedValues(None, 0.0, None, None, None, None)


@pytest.mark.parametrize(
    "words", [["--help"], ["plan", MODEL, "--replicas", "8", "--link", "1Gbit", "--step-time", "2"]]
)
def test_closed_pipe_ends_command_quietly(words: list[str]) -> None:
    """As in `megatron-edit plan ... | head -0`; would catch a traceback and Python's own report."""
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    program = "import sys; from megatron_edit.tools.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, *words], stdout=writer, timeout=100,
                          env=buffered, stderr=subprocess.PIPE, text=True, check=False)  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
