"""Versions of torch that are accepted, and the version of Megatron that is shown."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_edit.errors import HostVersionError
from megatron_edit.host.seams.probes import megatron_version
from megatron_edit.versions import OLDEST_TORCH, check_torch
from tests.harness.launch import REPOSITORY


@pytest.mark.parametrize(
    "version", ["2.8.0", "2.8.0a0+5228986c39.nv25.5", "2.13.0+cpu", "2.13.0a0+x.nv26.9", "3.0"]
)
def test_supported_torch_versions_are_accepted(version: str) -> None:
    """Catches a refused NVIDIA container, whose torch is a pre-release by PEP 440."""
    check_torch(version)


@pytest.mark.parametrize("version", ["2.7.1", "1.13.0", "2.7.0a0+x.nv25.3", "nightly"])
def test_unsupported_torch_versions_are_refused(version: str) -> None:
    with pytest.raises(HostVersionError, match=f"torch {re.escape(version)}: "):
        check_torch(version)


def test_oldest_torch_is_the_same_everywhere() -> None:
    """Package, requirements, and the environment of our tests must agree."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (required,) = [x for x in project["dependencies"] if x.startswith("torch")]
    assert required == f"torch>={oldest},<3"
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = [line for line in lines if line.startswith("torch")]
    check_torch(pin.removeprefix("torch=="))


def test_missing_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback beside neither a clone nor megatron-core, which is an extra."""
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", None)  # cannot be imported
    with pytest.raises(HostVersionError, match=r"^Megatron \(not found\): .*\[megatron\]'$"):
        megatron_version()


@pytest.mark.parametrize("place", ["env/lib/site-packages", "."])
def test_version_shows_no_commit_of_another_repository(place: str, tmp_path: Path) -> None:
    """In an environment inside another repository, megatron-core adds that repository's commit.

    Catches a shown version with that commit; and a clone of Megatron-LM without its own commit.
    """
    core = tmp_path / place / "megatron" / "core"
    core.mkdir(parents=True)
    found = importlib.util.find_spec("megatron.core")
    assert found is not None and found.origin is not None
    shutil.copy(Path(found.origin).with_name("package_info.py"), core)
    (core / "__init__.py").touch()
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True, timeout=30)
    script = (
        "from megatron.core.package_info import __version__\n"
        "from megatron_edit.host.seams.probes import megatron_version\n"
        "print(__version__, megatron_version())"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path / place}:{REPOSITORY}"}
    env.pop("NO_VCS_VERSION", None)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    theirs, ours = done.stdout.split()
    assert "+" in theirs
    assert ours == (theirs if place == "." else theirs.partition("+")[0])
