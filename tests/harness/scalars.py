"""The scalars of syncs that docs/monitoring.md describes."""

from __future__ import annotations

import re

from tests.harness.launch import REPOSITORY

_ROW = re.compile(r"\| `(edit/[^`]+)` \| [^|]*\| [^|]+ \|")


def documented_scalars() -> list[str]:
    """Return their names; `<r>` stands for a replica, `<unit>` for the name of a unit."""
    text = (REPOSITORY / "docs" / "monitoring.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| `edit/")]
    rows = [_ROW.fullmatch(line) for line in lines]
    return [row[1] for row in rows if row is not None]
