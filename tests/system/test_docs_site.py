"""The site of docs/ builds without a warning; skipped without the extra `docs`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launch import REPOSITORY

pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers.python")


def test_site_builds_strictly(tmp_path: Path) -> None:
    """Would catch a broken link or anchor, a page without a place, and a renamed public object."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    reference = (tmp_path / "dev" / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("activation.activate", "engine.engine.EditEngine.after_step", "method.outer"):
        assert f'id="megatron_edit.{name}"' in reference
