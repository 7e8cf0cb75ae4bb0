"""The table of scalars in docs/monitoring.md matches the code."""

from __future__ import annotations

from pathlib import Path

from megatron_edit.observe.metrics import TAGS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"


def test_documented_scalars_match_code() -> None:
    """Would catch a scalar without documentation, and a documented one that was removed."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = [f"| `{tag.name}` | {tag.unit} | {tag.meaning} |".replace("|  |", "| |") for tag in TAGS]
    found = [line for line in text.splitlines() if line.startswith("| `edit/")]
    assert found == rows, "\n".join(rows)
