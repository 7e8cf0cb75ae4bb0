"""The distribution: sdist and wheel build, and an installed wheel trains without this repository.

Would catch: a data file, package or module that the wheel lacks, a file of an earlier build that
gets into it, a command that is not installed, and a command of `megatron-edit init` that does not
work.
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
FILES = (".gitignore", "MANIFEST.in", "constraints.txt", "pyproject.toml", "setup.py", *ROOT_FILES)
# What a build, or an import, may have left in a checkout.
JUNK = ("build/lib/megatron_edit/old.py", "megatron_edit/gone/__pycache__/old.cpython-312.pyc")
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
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy this repository, without what git ignores; add what an earlier build may have left."""
    folder = tmp_path_factory.mktemp("package") / "source"
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, run(git, REPOSITORY).stdout.split("\0")):
        if (REPOSITORY / name).is_file():  # not just deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    for name in JUNK:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    (folder / "megatron_edit.egg-info").mkdir()
    old_files = "tests/conftest.py\nmegatron_edit/README.txt\n"
    (folder / "megatron_edit.egg-info" / "SOURCES.txt").write_text(old_files)
    return folder


@pytest.fixture(scope="module")
def distributions(source: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it."""
    done = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", "../dist"], source)
    assert done.returncode == 0, done.stderr[-4000:]
    folder = source.parent / "dist"
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_sdist_and_wheel_have_all_files(source: Path, distributions: tuple[Path, Path]) -> None:
    """Both have every file of the package; the wheel also those of `init`, the sdist the rest."""
    sdist, wheel = distributions
    files = _files_of(source)
    package = {name for name in files if name.startswith("megatron_edit/")}
    copied = set(template_files()) & files
    folders = ("configs/", "recipes/", "scripts/slurm/")
    assert {name for name in files if name.startswith(folders)} < copied
    assert {"scripts/pretrain_gpt.py", "scripts/prepare_corpus.py"} < copied
    assert _wheel_files(wheel) == package | {f"megatron_edit/templates/{name}" for name in copied}
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive if member.isfile()}
    of_folders = {name for name in files if name.partition("/")[0] in SOURCES}
    assert members == {*of_folders, *FILES, "PKG-INFO", "setup.cfg"}


def test_checkout_installs_without_isolation(
    source: Path, distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """`pip install .` has the files of the wheel, an editable install those of the checkout."""
    files = _files_of(source)
    python = _environment(tmp_path / "clean")
    _borrow_packages(python)
    program = "from megatron_edit.tools import templates as t; print(*t.template_files().values())"
    for words, root in (
        ((), Path(_site(python)) / "megatron_edit" / "templates"),
        (("--editable",), source),
    ):
        _install(python, source, "--no-build-isolation", "--no-deps", *words)
        done = run([str(python), "-c", program], tmp_path)
        assert done.stdout.split() == [str(root / name) for name in sorted(template_files())], done
    assert _files_of(source) == files
    done = run([sys.executable, "-m", "build", "--no-isolation", "-w", "-o", "../again"], source)
    assert done.returncode == 0, done.stderr[-4000:]
    (wheel,) = (source.parent / "again").glob("*.whl")
    assert _wheel_files(wheel) == _wheel_files(distributions[1])


def _files_of(source: Path) -> set[str]:
    """Return the files of a checkout, without bytecode and what an earlier build has left."""
    files = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    left = ("__pycache__", "build", "megatron_edit.egg-info")
    return {path.as_posix() for path in files if not set(left) & set(path.parts)}


def _wheel_files(wheel: Path) -> set[str]:
    """Return the files of a wheel, without those of its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return {name for name in names if not name.startswith(f"megatron_edit-{__version__}.dist-info")}


def test_metadata_leaves_megatron_to_an_extra(distributions: tuple[Path, Path]) -> None:
    """Would catch a second Megatron beside a clone, a pinned torch, and an old version number."""
    with zipfile.ZipFile(distributions[1]) as archive:
        text = archive.read(f"megatron_edit-{__version__}.dist-info/METADATA").decode()
    metadata = email.message_from_string(text)
    required = metadata.get_all("Requires-Dist", [])
    always = {re.split(r"[<>=;]", name)[0]: name for name in required if "extra ==" not in name}
    assert set(always) == {
        "torch", "numpy", "cryptography", "einops", "msgspec", "psutil", "pybind11",
    }  # fmt: skip
    for path in ("recipes/install.sh", "docs/quickstart.md"):  # where dependencies are left out
        text = (REPOSITORY / path).read_text()
        assert all(name in text for name in set(always) - {"numpy"}), path
    assert "==" not in always["torch"] and {"<", ">"} <= set(always["torch"])
    assert any(name.startswith("megatron-core<") and '"megatron"' in name for name in required)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation


@pytest.mark.timeout(600)
def test_wheel_trains_without_repository(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment with its requirements, the wheel needs no file of this repository."""
    python = _environment(tmp_path / "clean")
    _borrow_packages(python)
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


def _borrow_packages(python: Path) -> None:
    """Add those of the tests' environment, without .pth files, which lead to this repository."""
    packages = [path for path in sys.path if path.endswith("-packages")]
    (Path(_site(python)) / "base.pth").write_text("\n".join(packages))


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
