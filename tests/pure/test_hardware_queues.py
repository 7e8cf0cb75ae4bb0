"""Syncs that overlap with compute on few hardware queues: no deadlock, and no lost overlap.

A simulation (`tests/harness/hardware_queues.py`), not a measurement. `-s` prints the rows of the
table in docs/hardware-queues.md.
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
SHORT, LONG = 0.8, 4.0  # seconds per exchange of a unit; the forward pass of a layer takes 1 s
CASES: dict[str, tuple[Layout, dict[str, Any], float]] = {
    "plain": (Layout(), SOON, SHORT),
    "TP 2": (Layout(within_layer="tp"), SOON, SHORT),
    "PP 2, tied embeddings": (Layout(stages=2, is_tied=True), SOON, SHORT),
    "PP 2, 2 chunks a stage, tied": (
        Layout(stages=2, chunks=2, is_tied=True, layers=2),
        SOON,
        SHORT,
    ),
    "EP 2": (Layout(within_layer="ep"), SOON, SHORT),
    "delayed": (Layout(), LATE, LONG),
    "delayed, PP 2, tied": (Layout(stages=2, is_tied=True), LATE, LONG),
    "int8": (Layout(), {"sync_dtype": "int8", **SOON}, SHORT),
    "int8, delayed": (Layout(), {"sync_dtype": "int8", **LATE}, LONG),
}


def row(name: str) -> str:
    """Return a row of the table: shares of the ideal time by number of queues."""
    layout, settings, seconds = CASES[name]
    commands = recorded(layout, settings, seconds)
    shares = [share_of_ideal(layout, commands, queues) for queues in QUEUES]
    cells = ("deadlock" if share is None else f"{share:.2f}" for share in shares)
    return f"| {name} | " + " | ".join(cells) + " |"


@pytest.mark.parametrize("name", CASES)
def test_share_of_ideal_by_queues_matches_docs(name: str) -> None:
    """Would catch two consecutive messages on the communicator of the tied embedding (a deadlock),
    and exchanges launched one behind another, which block later compute."""
    found = row(name)
    print(found)
    page = (ROOT / "docs" / "hardware-queues.md").read_text()
    table = page.partition("<!-- simulated -->")[2].partition("<!-- end -->")[0]
    assert found in table.splitlines()
