"""Syncs beside compute on devices with few hardware queues: no deadlock, and no overlap lost.

A model (`tests/harness/hardware_queues.py`), not a measurement. `-s` prints the rows of the table
in docs/hardware-queues.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.framework_script import Layout, recorded, share_of_ideal

ROOT = Path(__file__).resolve().parents[2]
QUEUES = (1, 8, 32)
SOON: dict[str, Any] = {"sync_interval": 2}
LATE: dict[str, Any] = {"sync_interval": 4, "delay_steps": 3}
SHORT, LONG = 0.8, 4.0  # seconds of a unit's exchange; a layer's forward takes one
CASES: dict[str, tuple[Layout, dict[str, Any], float]] = {
    "plain": (Layout(), SOON, SHORT),
    "TP 2": (Layout(beside="tp"), SOON, SHORT),
    "PP 2, tied embeddings": (Layout(stages=2, is_tied=True), SOON, SHORT),
    "PP 2, 2 chunks a stage, tied": (
        Layout(stages=2, chunks=2, is_tied=True, layers=2),
        SOON,
        SHORT,
    ),
    "EP 2": (Layout(beside="ep"), SOON, SHORT),
    "delayed": (Layout(), LATE, LONG),
    "delayed, PP 2, tied": (Layout(stages=2, is_tied=True), LATE, LONG),
    "int8": (Layout(), {"sync_dtype": "int8", **SOON}, SHORT),
    "int8, delayed": (Layout(), {"sync_dtype": "int8", **LATE}, LONG),
}


def row(name: str) -> str:
    """Of the table: shares of the ideal by number of queues."""
    layout, settings, seconds = CASES[name]
    commands = recorded(layout, settings, seconds)
    shares = [share_of_ideal(layout, commands, queues) for queues in QUEUES]
    cells = ("deadlock" if share is None else f"{share:.2f}" for share in shares)
    return f"| {name} | " + " | ".join(cells) + " |"


@pytest.mark.parametrize("name", CASES)
def test_queues(name: str) -> None:
    """As the page has it. Would catch two messages in a row on the communicator of the tied
    embedding (a deadlock), and exchanges launched behind each other, which block later compute."""
    found = row(name)
    print(found)
    page = (ROOT / "docs" / "hardware-queues.md").read_text()
    table = page.partition("<!-- simulated -->")[2].partition("<!-- end -->")[0]
    assert found in table.splitlines()
