"""The launcher before it launches: its help, and the subcommands under its name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.__main__ import main
from megatron_edit.command_line import asks_for_help
from megatron_edit.config import EditConfig
from megatron_edit.errors import (
    DriftError,
    EditError,
    HostVersionError,
    ReplicaLostError,
    SyncProtocolError,
    UsageError,
)
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.cli import SUBCOMMANDS
from tests.harness.launch import REPOSITORY

SCRIPT = str(REPOSITORY / "scripts" / "pretrain_gpt.py")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")  # argparse breaks lines at hyphens, too


@pytest.mark.parametrize(
    "words", [["-h"], ["--help"], [SCRIPT, "--help"], [SCRIPT, "--use-edit", "-h", "--lr", "1"]]
)
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch: Megatron's parser, whose own help ends in a traceback; a list without values."""
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("usage: torchrun [...] -m megatron_edit SCRIPT")
    assert "python SCRIPT --help" in said and "--edit-sync-interval" in said
    assert f"one of {', '.join(STRATEGIES)} (default: edit)" in said
    assert "one of fp32, bf16, int8, int4 (default: fp32)" in said


def test_every_flag_has_one_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch: two of them, of which a reader must guess."""
    main(["--help"])
    said = capsys.readouterr().out
    assert said.count("(default:") == len(dataclasses.fields(EditConfig))


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_other_ranks_are_quiet(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch: the same page from every rank."""
    monkeypatch.setenv(name, "1")
    assert main([SCRIPT, "--help"]) == 0
    assert capsys.readouterr().out == ""


def test_words_after_two_dashes_are_not_ours() -> None:
    assert asks_for_help(["a.py", "-h", "--"]) and asks_for_help(["--help"])
    assert not asks_for_help(["a.py", "--", "--help"]) and not asks_for_help([])


def test_help_imports_neither_torch_nor_megatron() -> None:
    """Would catch: seconds of waiting, or an error of theirs, before a page of text."""
    code = (
        "import sys; from megatron_edit.__main__ import main; code = main(['a.py', '-h']);"
        "sys.exit(code or not {'torch', 'megatron'}.isdisjoint(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_subcommands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch: "no such training script"; a folder of that name is not one, either."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: megatron-edit {name}" in capsys.readouterr().out


def test_a_script_comes_before_a_subcommand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch: a training script that cannot be launched because of its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "check").write_text("")
    assert main(["check", "--help"]) == 0
    assert "usage: torchrun" in capsys.readouterr().out


def test_exit_codes_are_frozen() -> None:
    """Batch scripts start a job again by them. Catches drift or a lost replica told like a bug."""
    codes: dict[type[EditError], int] = {
        EditError: 1, UsageError: 2, HostVersionError: 2, DriftError: 3, ReplicaLostError: 4,
        SyncProtocolError: 1,
    }  # fmt: skip
    assert {kind: kind.exit_code for kind in codes} == codes


class Attached:
    """In place of everything that is changed in Megatron."""

    placement = None

    def __init__(self, *_: Any) -> None:
        self.is_checked = False
        self.placement = None

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.is_checked == (Attached.ends == "return")

    def check_used(self) -> None:
        """After a script that has come to its end."""
        self.is_checked = True

    ends = "return"


@pytest.mark.parametrize(
    ("ends", "code"),
    [("return", 0), ("sys.exit(0)", 0), ("sys.exit()", 0), ("sys.exit(7)", 7), ("drift", 3)],
)
def test_how_a_script_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, code: int
) -> None:
    """Catches a failed training that ends with 0, and an error of ours that is a traceback."""
    import megatron_edit.host.attach as attach
    import megatron_edit.host.devices as devices

    monkeypatch.setattr(attach, "Attachment", Attached)
    monkeypatch.setattr(devices, "choose_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(Attached, "ends", ends)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    lines = {"return": "pass", "drift": "from megatron_edit.errors import DriftError as E; raise E"}
    script = tmp_path / "train.py"
    script.write_text(f"import sys; {lines.get(ends, ends)}")
    try:
        ended: object = main([str(script), "--edit-device", "cpu"])
    except SystemExit as stop:
        ended = stop.code
    assert ended == code


def test_a_refusal_is_one_line_and_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a launcher that says what is wrong and then reports success."""
    assert main(["no_such_script.py"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
