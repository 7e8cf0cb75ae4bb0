"""Syncs that overlap with compute on few hardware queues: no deadlock, and no lost overlap.

A simulation (`tests/harness/hardware_queues.py`), not a measurement.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.framework_script import (
    BACKWARD,
    FORWARD,
    Layout,
    recorded,
    recorded_apart,
    share_of_ideal,
)
from tests.harness.hardware_queues import Replay

QUEUES = (1, 8, 32)
SOON: dict[str, Any] = {"sync_interval": 2}
LATE: dict[str, Any] = {"sync_interval": 4, "delay_steps": 3}
SHORT, LONG = 0.8, 4.0  # seconds per exchange of a unit; the forward pass of a layer takes 1 s
# By case: what the ranks run, and the shares of the ideal time with each number of queues.
CASES: dict[str, tuple[Layout, dict[str, Any], float, str]] = {
    "plain": (Layout(), SOON, SHORT, "0.96 0.97 0.97"),
    "TP 2": (Layout(within_layer="tp"), SOON, SHORT, "0.96 0.97 0.97"),
    "PP 2, tied embeddings": (Layout(stages=2, is_tied=True), SOON, SHORT, "0.96 0.98 0.98"),
    "PP 2, 2 chunks a stage, tied": (
        Layout(stages=2, chunks=2, is_tied=True, layers=2), SOON, SHORT, "0.96 0.98 0.98",
    ),
    "EP 2": (Layout(within_layer="ep"), SOON, SHORT, "0.96 0.97 0.97"),
    "delayed": (Layout(), LATE, LONG, "1.00 1.00 1.00"),
    "delayed, PP 2, tied": (Layout(stages=2, is_tied=True), LATE, LONG, "1.00 1.00 1.00"),
    "int8": (Layout(), {"sync_dtype": "int8", **SOON}, SHORT, "0.94 0.97 0.97"),
    "int8, delayed": (Layout(), {"sync_dtype": "int8", **LATE}, LONG, "1.00 1.00 1.00"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_share_of_ideal_by_number_of_queues(name: str) -> None:
    """Would catch two consecutive messages on the communicator of the tied embedding (a deadlock),
    and exchanges launched one behind another, which block later compute."""
    layout, settings, seconds, expected = CASES[name]
    commands = recorded(layout, settings, seconds)
    shares = [share_of_ideal(layout, commands, queues) for queues in QUEUES]
    assert " ".join("deadlock" if x is None else f"{x:.2f}" for x in shares) == expected


@pytest.mark.parametrize("settings", [
    pytest.param({"sync_dtype": "int8", **LATE}, id="delayed"),
    pytest.param({"sync_dtype": "int8", "average_moments": "both", **LATE}, id="moments"),
    pytest.param({"sync_dtype": "int8", **SOON}, id="overlap"),
    pytest.param({"sync_dtype": "int8", "sync_interval": 4, "fragments": 2, "delay_steps": 1},
                 id="fragments"),
])  # fmt: skip
def test_ranks_that_poll_at_different_times_launch_in_the_same_order(
    settings: dict[str, Any],
) -> None:
    """Where a device runs one collective after another, in the order of their launches. Catches a
    second phase that each rank launches when it finds the first one done: before a collective of
    tensor parallelism on one rank, and after it on another one, which is a deadlock."""
    layout = Layout(within_layer="tp")
    step = layout.layers * layout.micro_batches * (FORWARD + BACKWARD)
    early_first = {0: (0.3, 1.3), 1: (1.3, 0.3)}  # of a step, by replica and rank
    lags = {(r, s, w): early_first[r][w] * step for r, s, w in layout.ranks()}
    commands = recorded_apart(layout, settings, SHORT, lags)
    for queues in QUEUES:
        assert Replay(commands, layout.members, queues, is_serial=True).seconds() > 0
    for replica in range(2):
        order = [
            [(c.group, c.number) for c in commands[replica, 0, place] if c.kind == "collective"]
            for place in range(2)
        ]
        assert order[0] == order[1]
