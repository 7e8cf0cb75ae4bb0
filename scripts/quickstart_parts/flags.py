"""Reading the flag files of configs/."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def read_flags(path: Path) -> list[str]:
    """The flags of an .args file, as `$(grep -v '^#' FILE)` would give them to a command."""
    flags: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            flags.extend(shlex.split(line))
    return flags


def int_flag(flags: Sequence[str], name: str) -> int:
    """The value of an integer flag; the last one given counts, as on a command line.

    Raises:
        KeyError: `flags` do not have it.
    """
    for position in range(len(flags) - 2, -1, -1):
        if flags[position] == name:
            return int(flags[position + 1])
    raise KeyError(name)
