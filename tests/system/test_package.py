"""The distribution: sdist and wheel build, and an installed wheel trains without this repository.

Would catch: a data file, package or module that the wheel lacks, a command that is not installed,
and a command of `megatron-edit init` that does not work.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_edit import __version__
from megatron_edit.tools.templates import template_files
from tests.harness import tiny_gpt
from tests.harness.launch import REPOSITORY

SOURCES = ("megatron_edit", "configs", "docs", "patches", "recipes", "scripts")
ROOT_FILES = ("README.md", "LICENSE", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff")
FILES = ("pyproject.toml", "constraints.txt", *ROOT_FILES)
CLONE = "MEGATRON_LM_DIR"
# Appended to the training that `init` prints.
SHORT = (
    "--train-iters 4 --eval-iters 1 --eval-interval 4 --num-layers 1 --hidden-size 64 "
    "--lr-warmup-iters 0 --edit-warmup-steps 2 --edit-sync-interval 1"
)
# Without variables of the tests' environment, in which this repository is installed.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(
    argv: list[str], cwd: Path, seconds: float = 100, env: Mapping[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its output."""
    return subprocess.run(
        argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds, check=False
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
    """Both have every file of the package; the wheel also those of `init`, the sdist the rest."""
    sdist, wheel = distributions
    package = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "megatron_edit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    copied = set(template_files())
    folders = [REPOSITORY / name for name in ("configs", "recipes", "scripts/slurm")]
    expected = {path.relative_to(REPOSITORY).as_posix() for folder in folders
                for path in folder.rglob("*") if path.is_file()}  # fmt: skip
    assert expected | {"scripts/pretrain_gpt.py", "scripts/prepare_corpus.py"} <= copied
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = {name for name in names if name.startswith(f"megatron_edit-{__version__}.dist-info/")}
    assert names - info == package | {f"megatron_edit/templates/{name}" for name in copied}
    assert any(name.endswith("/licenses/LICENSE") for name in info)
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert (package | copied) - members == set()
    assert {"constraints.txt", "scripts/setup.sh", "docs/flags.md", *ROOT_FILES} <= members


def test_metadata_leaves_megatron_to_an_extra(distributions: tuple[Path, Path]) -> None:
    """Would catch a second Megatron beside a clone, a pinned torch, and an old version number."""
    with zipfile.ZipFile(distributions[1]) as archive:
        text = archive.read(f"megatron_edit-{__version__}.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    required = metadata.get_all("Requires-Dist", [])
    always = {re.split(r"[<>=;]", name)[0]: name for name in required if "extra ==" not in name}
    assert set(always) == {"torch", "numpy", "einops", "psutil", "pybind11"}
    assert "==" not in always["torch"] and {"<", ">"} <= set(always["torch"])
    assert any(name.startswith("megatron-core<") and "'megatron'" in name for name in required)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation


@pytest.mark.timeout(600)
def test_wheel_trains_without_repository(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment with its requirements, the wheel needs no file of this repository."""
    python = _environment(tmp_path / "clean")
    # Packages of the tests' environment without its .pth files, which lead to this repository.
    packages = [path for path in sys.path if path.endswith("-packages")]
    (Path(_site(python)) / "base.pth").write_text("\n".join(packages))
    _install(python, distributions[1], "--no-deps")
    _assert_installed(python, tmp_path)
    other = tmp_path / "other"  # a package that hides Megatron
    other.mkdir()
    (other / "megatron.py").touch()
    _assert_missing_megatron_is_refused(python, tmp_path, str(other))
    _assert_trains(python, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_wheel_installs_its_requirements(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """In a new environment, `pip install` of the wheel gets all requirements from the index."""
    python = _environment(tmp_path / "clean")
    constraints = ("-c", str(REPOSITORY / "constraints.txt"))
    _install(python, distributions[1], *constraints)
    _assert_installed(python, tmp_path)
    _assert_missing_megatron_is_refused(python, tmp_path)
    _install(python, f"{distributions[1]}[report]", *constraints)
    if CLONE in os.environ:
        clone = tmp_path / "clone"  # a copy, as its helper is compiled in it
        shutil.copytree(Path(os.environ[CLONE]) / "megatron", clone / "megatron")
        for script in Path(os.environ[CLONE]).glob("*.py"):
            shutil.copy(script, clone)
        _assert_trains(python, tmp_path, clone)
        shutil.rmtree(tmp_path / "a run")
    _install(python, f"{distributions[1]}[megatron]", *constraints)
    _assert_trains(python, tmp_path)


def _environment(folder: Path) -> Path:
    done = run([sys.executable, "-m", "venv", str(folder)], folder.parent)
    assert done.returncode == 0, done.stderr
    return folder / "bin" / "python"


def _site(python: Path) -> str:
    return run([str(python), "-c", "import site; print(site.getsitepackages()[0])"],
               python.parent).stdout.strip()  # fmt: skip


def _install(python: Path, wheel: Path | str, *words: str) -> None:
    done = run([str(python), "-m", "pip", "install", "-q", *words, str(wheel)], python.parent, 1000)
    assert done.returncode == 0, done.stderr[-4000:]


def _assert_installed(python: Path, folder: Path) -> None:
    where = run([str(python), "-c", "import megatron_edit as m; print(m.__file__)"], folder)
    assert where.stdout.startswith(str(python.parent.parent)), where
    version = run([str(python.with_name("megatron-edit")), "--version"], folder)
    assert version.stdout == f"megatron_edit {__version__}\n", version


def _assert_missing_megatron_is_refused(python: Path, folder: Path, path: str = "") -> None:
    script = folder / "train.py"
    script.write_text("import megatron.training\n")
    edit = ["--use-edit", "--edit-num-replicas", "1"]
    for command in (
        [str(python), "-m", "megatron_edit", str(script), *edit],
        [str(python.with_name("megatron-edit")), "check", str(script), *edit],
    ):
        done = run(command, folder, env=ENVIRONMENT | {"PYTHONPATH": path})
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
        assert "Megatron (not found)" in done.stderr and "megatron_edit[megatron]" in done.stderr


def _assert_trains(python: Path, folder: Path, clone: Path | None = None) -> None:
    """Run `init` and the commands that it prints, for a few steps of two replicas of one rank."""
    env = ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{python.parent}:{env['PATH']}"
    command = str(python.with_name("megatron-edit"))
    made = run([command, "init", "a run"], folder)
    assert made.returncode == 0, made
    _, _, commands = made.stdout.partition("\ncd ")
    assert commands.startswith("'a run'\n"), made.stdout
    torchrun = f"{python} -m torch.distributed.run"  # its script may be in another environment
    commands = commands.replace("\ntorchrun ", f"\n{torchrun} ").replace("-node 4", "-node 2")
    commands = re.sub("(prepare_corpus.*)", r"\1 --max-megabytes 0.4", commands)
    if clone is not None:
        env["PYTHONPATH"] = str(clone)
        commands = commands.replace("scripts/pretrain_gpt.py", f"{clone}/pretrain_gpt.py")
    words = ["bash", "-ec", f"cd {commands.rstrip()} {SHORT}"]
    done = run(words, folder, 250, env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "ok: 2 replicas x 2 ranks" in done.stdout
    assert "sync 2 after iteration 4" in done.stdout
    assert (folder / "a run" / "log" / "sync.jsonl").is_file()
    wrong = run([command, "check", "scripts/pretrain_gpt.py", *tiny_gpt(), "--use-edit",
                 "--edit-sync-interval", "0"], folder / "a run", env=env)  # fmt: skip
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 1, wrong
