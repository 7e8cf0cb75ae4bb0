"""The files that `megatron-edit init` copies: configurations, batch scripts, training scripts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def template_files() -> dict[str, Path]:
    """Return the files by their path in a user's folder, ``"configs/tiny_cpu.args"``, in order.

    A wheel has them in the package, a source checkout at its root, under the same paths.
    """
    installed = PACKAGE / "templates"
    root, places = (installed, ["."]) if installed.is_dir() else _in_checkout(PACKAGE.parent)
    files = sorted(file for place in places for file in _files(root / place))
    return {file.relative_to(root).as_posix(): file for file in files}


def _in_checkout(root: Path) -> tuple[Path, list[str]]:
    """Return the root, and the files and folders that setup.py adds to the package in a wheel."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return root, project["tool"]["megatron_edit"]["templates"]


def _files(place: Path) -> Iterator[Path]:
    """Yield a file, or those below a folder, without bytecode; nothing if it does not exist."""
    found = [place] if place.is_file() else place.rglob("*")
    return (path for path in found if path.is_file() and "__pycache__" not in path.parts)
