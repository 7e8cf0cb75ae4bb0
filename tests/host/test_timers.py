"""EDiT's timers in Megatron's log: per iteration, for log intervals below and above a round."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.host.runs import EditRun, run_edit
from tests.host.test_aedit import HOOKS

LONG = (
    "megatron.training.training.build_train_valid_test_datasets",
    "megatron.training.training.evaluate",
    "megatron_edit.engine.rounds.meeting:Meetings.exchange_records",
)
SYNC_TIMERS = {"wait": "sync-wait", "exchange": "sync-exchange", "outer": "outer-step"}


def logged(run: EditRun, timer: str) -> list[float]:
    """Return the milliseconds in each line of the log of a replica with one rank."""
    text = run.result.ranks[0].stdout
    pairs = re.findall(rf"{timer} \.+: \(([\d.]+), ([\d.]+)\)", text)
    assert all(low == high for low, high in pairs)
    return [float(low) for low, _ in pairs]


@pytest.mark.parametrize("interval", [1, 4])
def test_timer_line_covers_all_its_steps(tmp_path: Path, interval: int) -> None:
    """Steps of 1 s, a sync every three, all other calls 100 s. Would catch a line right after a
    sync that shows no time, or only steps of the last round, or time outside training."""
    run = run_edit(
        tmp_path, 2, 2, before=HOOKS, train_iters=12, log_interval=interval, timing_log_level=1,
        eval_interval=5, eval_iters=1, global_batch_size=4,
        env={"SPY_HOOKS": "script_clock,slow,linger", "SPY_FACTORS": "[1, 1]",
             "SPY_SLEEP": "[0, 0.03]",
             "SPY_LINGER": ",".join(LONG)},
    )  # fmt: skip
    # Megatron also logs after the first step, and does not reset its timers there.
    lines = {1: [1000.0, 2000.0, *[1000.0] * 10], 4: [250.0, *[1000.0] * 3]}
    assert logged(run, "edit-inner-phase") == lines[interval]
    for key, timer in SYNC_TIMERS.items():
        shown = sum(logged(run, f"edit-{timer}")) * interval
        spent = sum(sync["seconds"][key] for sync in run.syncs)
        assert shown == pytest.approx(1000 * spent, abs=0.01 * 12) and spent > 0
