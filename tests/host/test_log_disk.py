"""Training whose logs cannot be written: event files, output of the other replicas, TensorBoard.

Would catch a disk error that ends a rank or changes the training: losses and digests must be those
of the undisturbed run, bit for bit.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Flags
from tests.host.runs import EditRun, cached_run, run_edit

FLAGS: Flags = {"train_iters": 11}


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read the lines of an event file, without measured times."""
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "time")}
        for line in lines
    ]


def undisturbed() -> EditRun:
    """Return the same training without disk errors."""
    return cached_run(run_edit, 2, 2, **FLAGS)


def losses_of(run: EditRun) -> dict[int, float]:
    """Return the losses that replica 0 printed."""
    assert run.result.losses
    return run.result.losses


@pytest.mark.parametrize("hook", ["fill_temporarily", "fill_permanently"])
def test_full_log_disk_does_not_stop_training(small_disk: Path, tmp_path: Path, hook: str) -> None:
    """With space again, the event files are complete in the end; without, losses are reported."""
    pytest.importorskip("tensorboard")
    log = small_disk / "log"
    run = run_edit(
        log, 2, 2, before=f"tests.host.spy_log_disk:{hook}", env={"SPY_DISK": str(small_disk)},
        tensorboard_dir=small_disk / "board", tensorboard_queue_size=1, **FLAGS,
    )  # fmt: skip
    same = undisturbed()
    assert losses_of(run) == losses_of(same)
    errors = run.result.ranks[0].stderr
    assert errors.count(f"event files in {log} cannot be written (No space left on device)") == 1
    if hook == "fill_temporarily":
        assert "lines of event files" not in errors
        for name in ("sync.jsonl", "loss.jsonl", "replica-0.jsonl", "replica-1.jsonl"):
            assert lines_of(log, name) == lines_of(same.folder, name)
    else:
        (lost,) = re.findall(rf"(\d+) lines of event files in {log} were lost", errors)
        for name in ("loss.jsonl", "replica-0.jsonl", "replica-1.jsonl"):
            seen = lines_of(log, name)
            if (
                seen and "end" in seen[-1]
            ):  # the end record still fitted into the last page of its file
                end = seen.pop()
                assert end["lines_lost"] == int(lost) or name != "replica-0.jsonl"
            assert seen == lines_of(same.folder, name)[: len(seen)]


def test_failing_metric_writers_do_not_stop_training(tmp_path: Path) -> None:
    """Also when Megatron itself calls them: in its log, at evaluations and at the end. There is one
    warning for each writer, and a count of the lost values."""
    pytest.importorskip("tensorboard")
    run = run_edit(
        tmp_path, 2, 2, before="tests.host.spy_log_disk:break_writers",
        env={"SPY_WANDB": str(tmp_path)}, tensorboard_dir=tmp_path / "board", wandb_project="p",
        wandb_exp_name="e", wandb_save_dir=tmp_path / "wandb", **FLAGS,
    )  # fmt: skip
    assert losses_of(run) == losses_of(undisturbed())
    errors = run.result.ranks[0].stderr
    for name in ("TensorBoard", "W&B"):
        assert errors.count(f"{name} cannot be written (ConnectionError: nobody listens)") == 1
        assert errors.count(f"[edit] {name}: ") == 1
    assert run.digests(0) == undisturbed().digests(0)
