"""The distribution: sdist and wheel build, and an installed wheel works without this repository.

Would catch: a data file, package or module that the wheel lacks, and a command that is not
installed.
"""

from __future__ import annotations

import ast
import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.harness import tiny_gpt
from tests.harness.launch import REPOSITORY

SOURCES = ("megatron_edit", "configs", "docs", "patches", "scripts")
ROOT_FILES = ("README.md", "LICENSE", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "constraints.txt", *ROOT_FILES)
# Without variables of the tests' environment, in which this repository is installed.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(argv: list[str], cwd: Path, seconds: float = 100) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its output."""
    return subprocess.run(
        argv, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist and the wheel from it, in a copy, as a build leaves files."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    junk = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        shutil.copytree(REPOSITORY / name, source / name, ignore=junk)
    for name in FILES:
        shutil.copy(REPOSITORY / name, source / name)
    done = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", "../dist"], source)
    assert done.returncode == 0, done.stderr[-4000:]
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def test_sdist_and_wheel_have_all_files(distributions: tuple[Path, Path]) -> None:
    """Both have every file of the package; the sdist also has scripts and configurations."""
    sdist, wheel = distributions
    package = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "megatron_edit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert package - names == set()
    assert {name.split("/")[0] for name in names} <= {"megatron_edit", *_info(names)}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert package - members == set()
    assert {"scripts/pretrain_gpt.py", "configs/tiny_cpu.args", "docs/flags.md"} <= members
    assert "constraints.txt" in members  # for scripts/setup.sh
    assert set(ROOT_FILES) <= members


def _info(names: set[str]) -> set[str]:
    return {name.split("/")[0] for name in names if ".dist-info/" in name}


def test_wheel_works_without_repository(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment with its requirements, the wheel needs no file of this repository."""
    python = _environment(tmp_path / "clean")
    # Packages of the tests' environment without its .pth files, which lead to this repository.
    (Path(_site(python)) / "base.pth").write_text("\n".join(site.getsitepackages()))
    _install(python, distributions[1], "--no-deps")
    _assert_works(python, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_wheel_installs_its_requirements(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """In a new environment, `pip install` of the wheel gets all requirements from the index."""
    python = _environment(tmp_path / "clean")
    _install(python, distributions[1], "-c", str(REPOSITORY / "constraints.txt"))
    _assert_works(python, tmp_path)


def _environment(folder: Path) -> Path:
    done = run([sys.executable, "-m", "venv", str(folder)], folder.parent)
    assert done.returncode == 0, done.stderr
    return folder / "bin" / "python"


def _site(python: Path) -> str:
    return run([str(python), "-c", "import site; print(site.getsitepackages()[0])"],
               python.parent).stdout.strip()  # fmt: skip


def _install(python: Path, wheel: Path, *words: str) -> None:
    done = run([str(python), "-m", "pip", "install", "-q", *words, str(wheel)], python.parent, 1000)
    assert done.returncode == 0, done.stderr[-4000:]


def _assert_works(python: Path, folder: Path) -> None:
    command = str(python.with_name("megatron-edit"))
    where = run([str(python), "-c", "import megatron_edit as m; print(m.__file__)"], folder)
    assert where.stdout.startswith(str(python.parent.parent)), where
    version = run([command, "--version"], folder)
    assert version.stdout == f"megatron_edit {_version()}\n", version
    script = str(shutil.copy(REPOSITORY / "scripts" / "pretrain_gpt.py", folder))
    tiny = tiny_gpt(global_batch_size=4)
    edit = ["--use-edit", "--edit-num-replicas", "2", "--world-size", "2"]
    checked = run([command, "check", script, *tiny, *edit], folder)
    assert checked.returncode == 0 and checked.stdout.startswith("ok: 2 replicas"), checked
    wrong = run([command, "check", script, *tiny, *edit, "--edit-sync-interval", "0"], folder)
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1, wrong
    assert "Traceback" not in wrong.stderr


def _version() -> str:
    tree = ast.parse((REPOSITORY / "setup.py").read_text(encoding="utf-8"))
    call = next(n for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_setup(n))
    return str(next(ast.literal_eval(k.value) for k in call.keywords if k.arg == "version"))


def _is_setup(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "setup"
