"""The launcher: its help, subcommands and exit codes."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.__main__ import main
from megatron_edit.command_line import has_help_flag
from megatron_edit.config import EditConfig
from megatron_edit.constants import WIRE_TYPES
from megatron_edit.errors import (
    DriftError,
    EditError,
    HostVersionError,
    ReplicaLostError,
    SyncProtocolError,
    UsageError,
)
from megatron_edit.flags import flag
from megatron_edit.method.settings import GROUPS
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.cli import SUBCOMMANDS
from tests.harness.launch import REPOSITORY

SCRIPT = str(REPOSITORY / "scripts" / "pretrain_gpt.py")


@pytest.fixture(autouse=True)
def _without_rank_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")  # argparse breaks lines at hyphens, too


@pytest.mark.parametrize(
    "words", [["-h"], ["--help"], [SCRIPT, "--help"], [SCRIPT, "--use-edit", "-h", "--lr", "1"]]
)
def test_help_prints_flags_and_choices(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch the help of Megatron's parser, which fails; flags without choices."""
    assert main(words) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith("usage: torchrun [...] -m megatron_edit SCRIPT")
    assert "python SCRIPT --help" in output and "--edit-sync-interval" in output
    assert f"one of {', '.join(STRATEGIES)} (default: edit)" in output
    assert f"one of {', '.join(WIRE_TYPES)} (default: fp32; sparse-loco top64)" in output


@pytest.mark.parametrize("word", ["--help", "flags"])
def test_flags_are_listed_with_one_default(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help lists the common flags, `flags` all. Would catch two different defaults of one."""
    specs = [
        spec
        for spec in dataclasses.fields(EditConfig)
        if word == "flags" or spec.metadata["is_common"]
    ]
    assert main([word]) == 0
    output = capsys.readouterr().out
    listed = re.findall(r"^  (--[\w-]+)", output, re.MULTILINE)
    assert sorted(listed) == sorted(flag(spec.name) for spec in specs)
    assert output.count("(default:") == len(specs)
    for name in {spec.metadata["group"] for spec in specs}:
        assert f"\nEDiT: {GROUPS[name]}:\n" in output


def test_help_is_short_and_names_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    output = capsys.readouterr().out
    assert output.endswith("  megatron-edit flags lists all\n")
    assert output.count("\n  --") <= 18


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_only_rank_0_prints_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch the same page from every rank."""
    monkeypatch.setenv(name, "1")
    assert main([SCRIPT, "--help"]) == 0
    assert capsys.readouterr().out == ""


def test_words_after_double_dash_are_ignored() -> None:
    assert has_help_flag(["a.py", "-h", "--"]) and has_help_flag(["--help"])
    assert not has_help_flag(["a.py", "--", "--help"]) and not has_help_flag([])


@pytest.mark.parametrize("words", [["a.py", "-h"], ["flags"]])
def test_help_imports_neither_torch_nor_megatron(words: list[str]) -> None:
    """Would catch seconds of delay, or an import error, before the help."""
    code = (
        f"import sys; from megatron_edit.__main__ import main; code = main({words});"
        "sys.exit(code or not {'torch', 'megatron'}.isdisjoint(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_subcommands_print_help(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch "no such training script"; a folder of that name is no script, either."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: megatron-edit {name}" in capsys.readouterr().out


def test_script_takes_precedence_over_subcommand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a training script that cannot be launched because of its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "check").write_text("")
    assert main(["check", "--help"]) == 0
    assert "usage: torchrun" in capsys.readouterr().out


def test_exit_codes_are_frozen() -> None:
    """Batch scripts restart by exit code. Catches drift or a lost replica reported like a bug."""
    codes: dict[type[EditError], int] = {
        EditError: 1, UsageError: 2, HostVersionError: 2, DriftError: 3, ReplicaLostError: 4,
        SyncProtocolError: 1,
    }  # fmt: skip
    assert {kind: kind.exit_code for kind in codes} == codes


class FakeAttachment:
    """A stand-in for `Attachment`, which patches Megatron."""

    placement = None

    def __init__(self, *_: Any) -> None:
        self.is_checked = False
        self.placement = None

    def __enter__(self) -> FakeAttachment:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.is_checked == (FakeAttachment.ends == "return")

    def check_model_was_built(self) -> None:
        """Record the check after a script that returned."""
        self.is_checked = True

    ends = "return"


@pytest.mark.parametrize(
    ("ends", "code"),
    [("return", 0), ("sys.exit(0)", 0), ("sys.exit()", 0), ("sys.exit(7)", 7), ("drift", 3)],
)
def test_exit_code_follows_script_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, code: int
) -> None:
    """Catches a failed training that exits with 0, and an EDiT error that ends in a traceback."""
    import megatron_edit.host.attach as attach
    import megatron_edit.host.devices as devices

    monkeypatch.setattr(attach, "Attachment", FakeAttachment)
    monkeypatch.setattr(devices, "choose_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(FakeAttachment, "ends", ends)
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


def test_refusal_is_one_line_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a launcher that prints the error and then exits with 0."""
    assert main(["no_such_script.py"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
