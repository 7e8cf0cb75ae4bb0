"""The line in training scripts that activates the plugin: its place and its removal."""

from __future__ import annotations

import ast
import codecs
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.activation import activate, has_edit_flags
from megatron_edit.errors import UsageError
from megatron_edit.launched import launched
from megatron_edit.tools.cli import main
from megatron_edit.tools.cli.patch import LINE, diff, insert, remove
from tests.harness.command_lines import outcomes_of

ROOT = Path(__file__).resolve().parents[2]
OLD_LINE = (
    b"from megatron_edit.activation import activate; activate(__name__, __file__)"
    b"  # megatron-edit patch"
)
CALL = "if __name__ == '__main__':\n    pretrain(1)"
HEADS = (
    "", "#!/usr/bin/env python\n", "# -*- coding: latin-1 -*-\n# caf\xe9\n", "# (c)\n\n\f\n",
)  # fmt: skip
DOCS = (
    "",
    '"""One line."""\n',
    '"""Many\n\nlines\\\n"""\n',
    "'doc'; import os\n",
    "r'''x'''\n\n",
)
FUTURES = ("", "from __future__ import annotations\n", "from __future__ import (\n  division,\n)\n")
BODIES = (
    "import os\n", "# a comment\nimport os\n", "x = (\n1)\n", "\n\n", "",
)  # fmt: skip

repeatable = settings(deadline=None, derandomize=True, max_examples=150)


@st.composite
def scripts(draw: st.DrawFn) -> bytes:
    """Draw training scripts with anything that may come before the first statement."""
    parts = (HEADS, DOCS, FUTURES, BODIES, BODIES)
    text = "".join(draw(st.sampled_from(part)) for part in parts) + CALL
    source = text.encode("latin-1") + draw(st.sampled_from([b"", b"\n", b"\n\n"]))
    source = source.replace(b"\n", draw(st.sampled_from([b"\n", b"\r\n", b"\r"])))
    # A BOM means UTF-8; before it there is no place for a line.
    can_have_bom = text.startswith("#") and not text.startswith(HEADS[2])
    return codecs.BOM_UTF8 + source if can_have_bom and draw(st.booleans()) else source


@repeatable
@given(scripts())
def test_insert_and_remove_round_trip(source: bytes) -> None:
    """Would catch: a byte that a revert does not restore."""
    patched = insert(source, "x")
    assert remove(source, "x") == remove(patched, "x") == source
    assert len(patched) - len(source) - len(LINE) in (1, 2)


@repeatable
@given(scripts())
def test_line_comes_before_the_first_statement(source: bytes) -> None:
    """Would catch: a line after an import, or one that splits a docstring or a future import."""
    tree = ast.parse(insert(source, "x"))
    assert ast.get_docstring(tree) == ast.get_docstring(ast.parse(source))
    before = []
    for node in tree.body:
        if "'megatron_edit.activation'" in ast.unparse(node):
            break
        before.append(ast.unparse(node))
    if before[-1:] == ["import importlib.util, sys"]:  # the first half of our line
        del before[-1]
    assert [x for x in before if "import os" in x or "x =" in x] in ([], ["import os"])
    # The one import that may come first shares its line with the docstring.
    assert "import os" not in before or b"; import os" in source


def test_diff_can_be_applied_by_git(tmp_path: Path) -> None:
    """Would catch: a wrong line number, a line of the script in the diff."""
    source = b'# (c)\n"""Doc."""\nimport os\npretrain()\n'
    (tmp_path / "pretrain_x.py").write_bytes(source)
    patch = diff(source, "pretrain_x.py")
    assert [x for x in patch.splitlines() if x[0] == " " or x[:2] == "- "] == []
    for options, expected in (([], insert(source, "x")), (["-R"], source)):
        command = ["git", "apply", *options, "--unidiff-zero", "-"]
        subprocess.run(command, cwd=tmp_path, input=patch.encode(), check=True, timeout=30)
        assert (tmp_path / "pretrain_x.py").read_bytes() == expected


@pytest.mark.parametrize(
    "source",
    [
        b"pretrain(", b"'doc'; pretrain()", b"'doc'; pretrain()\nx = 1\n",
        b"'doc' \\\n\npretrain()", b"'doc'; x = \"\"\"\n\"\"\"\npretrain()",
        b"@dec\ndef f():\n  pretrain()\n", codecs.BOM_UTF8 + b"pretrain()\n",
    ],
)  # fmt: skip
def test_script_without_a_place_for_the_line_is_refused(source: bytes) -> None:
    """Not valid Python, or no place for a line: refused, not damaged."""
    with pytest.raises(UsageError):
        insert(source, "x")


@repeatable
@given(scripts())
def test_line_of_version_0_1_is_removed(source: bytes) -> None:
    """Removed like the present line. Catches clones that stay patched."""
    old = insert(source, "x").replace(LINE.encode(), OLD_LINE, 1)
    assert remove(old, "x") == source


def test_edited_line_is_not_removed() -> None:
    """Would catch: a revert that removes what a user has added to the line."""
    with pytest.raises(UsageError, match="was changed"):
        remove(b"import os\n" + LINE.encode() + b"; x()\npretrain()\n", "x")


# ---- the command


def clone(folder: Path, version: str = "0.18.2") -> Path:
    """Write a minimal clone of Megatron-LM; returns its folder."""
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    major, minor, patch = version.split(".")
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = 'rc0'\n")
    (folder / "pretrain_gpt.py").write_text("import os\ntraining.pretrain()\n")
    (folder / "pretrain_mamba.py").write_text("import runpy\n")  # only runs another script
    (folder / "train.py").write_text("pretrain()\n")
    return folder


def test_patch_command_patches_checks_and_reverts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Patches once, checks, reverts; keeps modes and links, and does not touch other scripts."""
    folder = clone(tmp_path / "clone")
    script = folder / "pretrain_gpt.py"
    real = tmp_path / "elsewhere.py"
    script.rename(real)
    script.symlink_to(real)
    real.chmod(0o755)
    before = real.read_bytes()
    assert main(["patch", str(folder), "--check"]) == 1
    assert main(["patch", str(folder)]) == 0
    assert main(["patch", str(folder)]) == 0
    assert main(["patch", str(folder), "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "pretrain_gpt.py: not patched",
        "Megatron-LM 0.18.x (core_v0.18.2)", "pretrain_gpt.py: patched",
        "Megatron-LM 0.18.x (core_v0.18.2)", "pretrain_gpt.py: patched already",
        "pretrain_gpt.py: patched",
    ]  # fmt: skip
    assert script.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o755
    assert main(["patch", str(folder), "--revert"]) == 0
    assert real.read_bytes() == before
    assert sorted(x.name for x in folder.iterdir()) == [
        "megatron", "pretrain_gpt.py", "pretrain_mamba.py", "train.py"
    ]  # fmt: skip


def test_patch_command_patches_all_scripts_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch: a script patched before a later one is found to be invalid."""
    folder = clone(tmp_path / "clone")
    (folder / "pretrain_t5.py").write_text("pretrain(")
    assert main(["patch", str(folder)]) == 2
    assert LINE not in (folder / "pretrain_gpt.py").read_text()
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--check"], ["--diff"]])
@pytest.mark.parametrize("version", ["0.15.3", "0.21.0", "1.19.0"])
def test_patch_command_refuses_unknown_versions(
    version: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = clone(tmp_path / "clone", version)
    assert main(["patch", str(folder), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"megatron-core {version}rc0" in error


def test_patch_command_refuses_other_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["patch", str(tmp_path / "missing")]) == 2
    assert "is no clone of Megatron-LM" in capsys.readouterr().err
    assert main(["patch", str(tmp_path), "--revert"]) == 2
    assert "has no pretrain_*.py" in capsys.readouterr().err


def test_patch_command_reports_unwritable_script_in_one_line(tmp_path: Path) -> None:
    """One line names the script. Catches a traceback about the temporary file next to it."""
    folder = clone(tmp_path / "clone")
    folder.chmod(0o555)
    words = {"patch": ["patch", str(folder)]}
    code, output = outcomes_of(words, tmp_path, file_modes_apply=True)["patch"]
    assert code == 2 and output.count("\n") == 1
    assert "pretrain_gpt.py: cannot be written (Permission denied)" in output


# ---- what the line does


def test_activation_happens_only_with_edit_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: the launcher in a stock run, in an imported script, or a second time."""
    started: list[list[str]] = []

    def main(argv: list[str]) -> int:
        started.append(argv)
        return 7

    monkeypatch.setattr("megatron_edit.launcher.main", main)
    monkeypatch.setattr(sys, "argv", ["-c", "--lr", "1", "--use-edit"])
    activate("pretrain_gpt", "x.py")
    activate("__mp_main__", "x.py")
    with launched():
        activate("__main__", "x.py")
    assert started == []
    with pytest.raises(SystemExit) as stop:
        activate("__main__", "x.py")
    assert stop.value.code == 7 and started == [["x.py", "--lr", "1", "--use-edit"]]
    monkeypatch.setattr(sys, "argv", ["x.py", "--lr", "1", "--user-edit", "use-edit"])
    activate("__main__", "x.py")
    assert len(started) == 1


def test_edit_flags_are_recognised() -> None:
    assert has_edit_flags(["--edit-device=cpu"]) and has_edit_flags(["--use_edit"])
    assert not has_edit_flags(["--editor", "--lr=--use-edit"])


def test_activation_imports_nothing_in_a_stock_run(tmp_path: Path) -> None:
    """Would catch: torch or our launcher imported before Megatron in a run without --edit flags."""
    script = tmp_path / "pretrain_x.py"
    script.write_text(
        f"{LINE}\nimport sys\nassert not {{'torch', 'megatron', 'megatron_edit.config'}} & "
        "set(sys.modules)\nprint(sys.argv[1:], __name__)\n"
    )
    command = [sys.executable, str(script), "--lr", "1"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['--lr', '1'] __main__\n"


@pytest.mark.parametrize(("flags", "code"), [(["--use-edit"], 2), (["--lr", "1"], 0)])
def test_patched_script_without_the_package(flags: list[str], code: int, tmp_path: Path) -> None:
    """With --edit flags one line says what to install; without them the script runs as stock.

    Catches a traceback about a module, and a patched clone that users without the package cannot
    train with.
    """
    script = tmp_path / "pretrain_x.py"
    script.write_text(f"{LINE}\nprint('stock')\n")
    command = [sys.executable, "-I", "-S", str(script), *flags]  # no site-packages, no PYTHONPATH
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "" if code else "stock\n")
    if code:
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("megatron_edit: --use-edit: needs the package megatron_edit")
        assert "pip install" in done.stderr
    else:
        assert done.stderr == ""
