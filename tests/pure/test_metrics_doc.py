"""The table of scalars in docs/monitoring.md is that of the code."""

from __future__ import annotations

from pathlib import Path

from megatron_edit.observe.metrics import TAGS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"


def test_the_table_of_scalars_is_current() -> None:
    """Would catch: a scalar that nobody can look up, and one that is there no more."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = [f"| `{tag.name}` | {tag.unit} | {tag.meaning} |".replace("|  |", "| |") for tag in TAGS]
    found = [line for line in text.splitlines() if line.startswith("| `edit/")]
    assert found == rows, "\n".join(rows)
