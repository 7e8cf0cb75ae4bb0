"""scripts/setup.sh: which build of torch it takes, and what it says of disk space.

It makes environments for a tiny project from package indexes on this machine.
"""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.launch import REPOSITORY

VERSION = "2.14.1"
ENVIRONMENT = {
    name: value for name, value in os.environ.items()
    if not name.startswith(("PIP_", "MEGATRON_EDIT_")) and name != "PYTHONPATH"
} | {"PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}  # fmt: skip
# The project's build backend: an editable install of nothing.
BACKEND = """\
import zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name, info = "tiny-1-py3-none-any.whl", "tiny-1.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve two package indexes: `cpu` has a CPU build of torch, `plain` one without a suffix."""
    folder = tmp_path_factory.mktemp("indexes")
    for index, version in (("cpu", f"{VERSION}+cpu"), ("plain", VERSION)):
        project = folder / index / "torch"
        project.mkdir(parents=True)
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(project / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def project(tmp_path: Path, indexes: str) -> Path:
    """A project with setup.sh, whose index of CPU builds is the one served here."""
    (tmp_path / "scripts").mkdir()
    script = (REPOSITORY / "scripts" / "setup.sh").read_text(encoding="utf-8")
    official = "cpu_index=https://download.pytorch.org/whl/cpu\n"
    assert official in script
    (tmp_path / "scripts" / "setup.sh").write_text(
        script.replace(official, f"cpu_index={indexes}/cpu\n")
    )
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "constraints.txt").write_text(f"# pinned\ntorch=={VERSION}\n")
    return tmp_path


def setup(project: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run setup.sh with more variables of the environment."""
    return subprocess.run(
        ["bash", "scripts/setup.sh"], cwd=project, env=ENVIRONMENT | env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200, check=False,
    )  # fmt: skip


def torch_of(project: Path) -> str:
    """Return the version of torch in the project's environment."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    python = str(project / ".venv" / "bin" / "python")
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


@pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists() or sys.platform != "linux",
    reason="CPU builds are for Linux without an NVIDIA driver",
)
def test_machine_without_nvidia_gets_cpu_build(project: Path) -> None:
    """Would catch 6 GB where 2.4 GB are enough, and a later update that replaces the build."""
    made = setup(project)
    assert made.returncode == 0, made.stdout
    assert f"CPU build of torch {VERSION}: needs 2.4 GB in " in made.stdout
    assert torch_of(project) == f"{VERSION}+cpu"
    (project / "pyproject.toml").write_text(PROJECT + "\n[tool.other]\n")
    updated = setup(project)
    assert updated.returncode == 0 and "needs" not in updated.stdout, updated.stdout
    assert torch_of(project) == f"{VERSION}+cpu"


def test_configured_index_is_respected(project: Path, indexes: str) -> None:
    """Would catch a foreign index where pip is configured with a mirror."""
    made = setup(project, PIP_INDEX_URL=f"{indexes}/plain")
    assert made.returncode == 0, made.stdout
    assert f"torch {VERSION} with CUDA: needs 6.3 GB in " in made.stdout
    assert torch_of(project) == VERSION


def test_variable_names_another_index(project: Path, indexes: str) -> None:
    """Would catch an ignored MEGATRON_EDIT_TORCH_INDEX, and one that cannot be used."""
    mirror = f"{indexes}/plain"
    wrong = setup(project, PIP_INDEX_URL=mirror, MEGATRON_EDIT_TORCH_INDEX=f"{indexes}/none")
    assert wrong.returncode == 1 and "pip failed" in wrong.stdout, wrong.stdout
    made = setup(project, PIP_INDEX_URL=mirror, MEGATRON_EDIT_TORCH_INDEX=f"{indexes}/cpu")
    assert made.returncode == 0, made.stdout
    assert torch_of(project) == f"{VERSION}+cpu"


def test_full_disk_is_refused_before_installing(project: Path, indexes: str) -> None:
    """Would catch an installation that fills the disk."""
    script = project / "scripts" / "setup.sh"
    text = script.read_text()
    assert "cuda_mb=(6300 " in text
    script.write_text(text.replace("cuda_mb=(6300 ", "cuda_mb=(999999999 "))
    made = setup(project, PIP_INDEX_URL=f"{indexes}/plain")
    assert made.returncode == 2, made.stdout
    last = made.stdout.splitlines()[-1]
    assert "has less than 1000" in last and "MEGATRON_EDIT_VENV" in last
    with pytest.raises(subprocess.CalledProcessError):
        torch_of(project)


HELPFUL = [
    *sorted((REPOSITORY / "scripts").glob("*.sh")),
    REPOSITORY / "scripts" / "slurm" / "submit.sh",
    REPOSITORY / "recipes" / "install.sh",
]


@pytest.mark.parametrize("script", HELPFUL, ids=lambda path: path.name)
def test_help_shows_usage_and_does_nothing(script: Path, tmp_path: Path) -> None:
    """Would catch a script that takes `--help` as an argument, or installs something first."""
    folders = {"MEGATRON_EDIT_VENV": str(tmp_path / "venv"),
               "MEGATRON_LM_DIR": str(tmp_path / "clone")}  # fmt: skip
    nowhere = folders | {"PYTHON": "/nowhere", "MEGATRON_LM_URL": "/nowhere"}
    done = subprocess.run(["bash", str(script), "--help"], env=ENVIRONMENT | nowhere,
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0 and done.stderr == "" and list(tmp_path.iterdir()) == [], done
    usage = f"  {script.relative_to(REPOSITORY)}"
    assert any(line.startswith(usage) for line in done.stdout.splitlines()), done.stdout
