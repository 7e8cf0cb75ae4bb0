"""`megatron-edit init` from a source checkout; from a wheel: tests/system/test_package.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_edit.tools.cli import main
from megatron_edit.tools.templates import template_files
from tests.harness.launch import REPOSITORY


def test_checkout_has_the_files_of_a_wheel() -> None:
    """Would catch a list of files that bytecode, tests or the package itself get into."""
    files = template_files()
    assert {"configs/tiny_cpu.args", "scripts/slurm/settings.env", "scripts/pretrain_gpt.py"} <= {
        *files
    }
    assert {name.partition("/")[0] for name in files} <= {"configs", "recipes", "scripts"}
    assert "scripts/test.sh" not in files
    assert [name for name in files if "__pycache__" in name] == []
    assert all(path == REPOSITORY / name for name, path in files.items())


def test_init_writes_all_files_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a missing file or folder, and a second run that complains of equal files."""
    folder, files = tmp_path / "new" / "run", template_files()
    assert main(["init", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[: len(files)] == sorted(files)
    assert lines[len(files)] == f"{len(files)} of {len(files)} files written to {folder}"
    assert f"cd {folder}" in lines
    for name, source in files.items():
        assert (folder / name).read_bytes() == source.read_bytes()
    assert main(["init", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"0 of {len(files)} files written")


def test_init_replaces_changed_files_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch lost changes of a user, also in part, and files of the user that are deleted."""
    changed, own = tmp_path / "configs" / "tiny_cpu.args", tmp_path / "configs" / "mine.args"
    changed.parent.mkdir()
    changed.write_text("mine")
    own.write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"megatron-edit init: {changed}: exists with other content; give another folder, or "
        "--force to replace it\n"
    )
    assert sorted(tmp_path.rglob("*")) == [changed.parent, own, changed]
    assert main(["init", str(tmp_path), "--force"]) == 0
    assert changed.read_bytes() == (REPOSITORY / "configs" / "tiny_cpu.args").read_bytes()
    assert own.read_text() == "mine"
