"""Event files of a run besides its steps, and EDiT's timers in Megatron's log."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.host.runs import EditRun, run_edit
from tests.host.test_aedit import HOOKS

BATCH = 8


def end_of(run: EditRun, replica: int) -> dict[str, Any]:
    """Return the end record of a replica; checks that it is the last line and the only one."""
    *others, last = run.lines(f"replica-{replica}.jsonl")
    assert not any("end" in line for line in others)
    assert abs(time.time() - last.pop("time")) < 120
    return last


def segment_of(folder: Path, name: str = "run.json") -> dict[str, Any]:
    """Read the segment of a run from its folder."""
    segment: dict[str, Any] = json.loads((folder / name).read_text())["segment"]
    return segment


def test_resumed_run_records_resume_point(tmp_path: Path) -> None:
    """Stopped within a round: the losses of the round's first steps, trained before the resume,
    have their samples, too."""
    saves = tmp_path / "saves"
    run = run_edit(tmp_path, 2, 2, train_iters=11, exit_interval=6, save=saves, save_interval=6)
    assert segment_of(tmp_path) == {"number": 1, "resumed_from": None}
    stopped = {"end": "stopped", "reason": "--exit-interval", "exit_code": 0, "iteration": 6}
    assert end_of(run, 1).items() >= stopped.items()
    run = run_edit(tmp_path, 2, 2, train_iters=11, load=saves)
    assert segment_of(tmp_path) == {
        "number": 2,
        "resumed_from": {"iteration": 6, "samples": 6 * BATCH, "replica_steps": [6, 6]},
    }
    assert segment_of(tmp_path, "run.1.json")["number"] == 1
    lines = run.lines("loss.jsonl")
    assert lines[0]["iteration"] <= 6 and lines[-1]["iteration"] == 11
    assert all(line["samples"] == BATCH * line["iteration"] for line in lines)
    assert end_of(run, 0)["samples"] == 11 * BATCH // 2


def test_resume_with_changed_settings_is_logged(tmp_path: Path) -> None:
    """Replica 0 logs one line; Megatron's table of arguments shows the settings in use."""
    saves = tmp_path / "saves"
    first = run_edit(tmp_path, 2, 2, train_iters=8, exit_interval=5, save=saves, save_interval=5)
    table = first.result.ranks[0].stdout
    assert re.search(r"edit_outer_lr \.+ 0\.9$", table, re.MULTILINE)
    assert re.search(r"edit_weight_temperature \.+ auto$", table, re.MULTILINE)
    assert re.search(r"edit_sync_mode \.+ blocking$", table, re.MULTILINE)
    config = json.loads((tmp_path / "run.json").read_text())["config"]
    assert (config["outer_lr"], config["outer_momentum"]) == (0.9, 0.6)  # at tau 3
    second = run_edit(
        tmp_path, 2, 2, train_iters=8, load=saves, edit_strategy="diloco", edit_sync_interval=2,
        edit_sync_dtype="int8",
    )  # fmt: skip
    message = [[line for line in rank.stdout.splitlines() if "settings changed" in line]
            for rank in second.result.ranks]  # fmt: skip
    (line,) = message[0]
    assert line.startswith("[edit] settings changed since the checkpoint: --edit-strategy edit -> ")
    for change in (
        "--edit-strategy edit -> diloco", "--edit-sync-interval 3 -> 2",
        "--edit-sync-dtype fp32 -> int8", "--edit-outer-lr 0.9 -> 0.7",
    ):  # fmt: skip
        assert change in line
    again = run_edit(tmp_path, 2, 2, train_iters=8, load=saves)
    assert "settings changed" not in again.result.ranks[0].stdout


def test_training_error_is_recorded(tmp_path: Path) -> None:
    """The failing replica records it on one line, and the others record that they lost it."""
    run = run_edit(tmp_path, 2, 2, before="tests.host.spy_faults:fail", check=False, grace=30)
    assert [rank.returncode for rank in run.result.ranks] == [4, 1]
    failed = {"end": "failed", "reason": "ValueError: a broken\\nbatch", "exit_code": 1,
              "iteration": 5, "samples": 5 * BATCH // 2}  # fmt: skip
    assert end_of(run, 1).items() >= failed.items()
    other = end_of(run, 0)
    assert (other["end"], other["exit_code"]) == ("failed", 4)
    assert "replica 1" in other["reason"]


# ---- timers


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
