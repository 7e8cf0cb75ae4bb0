"""`megatron-edit compare` with three tiny real trainings, then a second call without any.

Would catch: a command line that a launch refuses after the check, event files and logs in the wrong
place, numbers that differ from those of the training, and repeated runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import tiny_gpt
from tests.harness.launch import REPOSITORY

SCRIPT = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
MAIN = "import sys; from megatron_edit.tools.cli import main; sys.exit(main())"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


def compare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    tiny = tiny_gpt(train_iters=10, global_batch_size=4, eval_interval=5, eval_iters=1)
    edit = ["--edit-num-replicas", "2", "--edit-warmup-steps", "4", "--edit-sync-interval", "3"]
    own = ["--strategies", "ddp,edit:outer-lr=0.7", "--with-ideal", "--nproc-per-node", "2"]
    argv = [sys.executable, "-c", MAIN, "compare", SCRIPT, *tiny, *edit, *own, *words]
    return subprocess.run(
        argv, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=360, check=False
    )


@pytest.mark.timeout(400)
def test_compare_runs_and_reports_three_trainings(tmp_path: Path) -> None:
    """Bytes and losses are those of the event files; a second call starts no run."""
    done = compare(tmp_path, "--seeds", "3")
    assert done.returncode == 0, done.stderr[-4000:]
    out = tmp_path / "compare_out"
    folders = {path.name.partition("-seed3-")[0]: path for path in (out / "runs").iterdir()}
    assert set(folders) == {"ideal", "ddp", "edit_outer-lr=0.7"}

    rows = {row["label"]: row for row in json.loads((out / "compare.json").read_text())["rows"]}
    assert list(rows) == ["ideal", "ddp", "edit outer-lr=0.7"]
    edit, ddp = rows["edit outer-lr=0.7"], rows["ddp"]
    events = folders["edit_outer-lr=0.7"] / "events"
    syncs = [json.loads(line) for line in (events / "sync.jsonl").read_text().splitlines()]
    assert [sync["iteration"] for sync in syncs] == [7, 10]
    sent = sum(sync["wire_bytes"] for sync in syncs)
    assert edit["step_bytes"]["mean"] == pytest.approx(sent / 6)
    # An exchange of a sync is as large as that of a step, apart from the control records.
    assert ddp["step_bytes"]["mean"] == pytest.approx(syncs[0]["wire_bytes"], rel=0.01)
    assert rows["ideal"]["step_bytes"]["mean"] == 0 and rows["ideal"]["share"]["mean"] == 1
    assert rows["ideal"]["loss"] is None
    assert 3 < edit["loss"]["mean"] < 6 and edit["difference"]["mean"] != 0
    assert edit["share"]["mean"] > 0 and ddp["speed"]["mean"] > 0 and edit["peak"]["mean"] > 0
    for name in ("compare.md", "compare.html", "compare-tokens.png", "compare-bytes.png"):
        assert (out / name).stat().st_size > 500
    assert "| edit outer-lr=0.7 |" in done.stdout

    made = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")}
    again = compare(tmp_path, "--seeds", "3")
    assert again.returncode == 0 and again.stderr.count("finished before") == 3
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")} == made
    assert again.stdout == done.stdout


def test_flags_refused_by_megatron_start_no_run(tmp_path: Path) -> None:
    """The error of Megatron's own validation is printed in one line."""
    done = compare(tmp_path, "--global-batch-size", "7")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "megatron-edit compare: " in done.stderr
    assert not (tmp_path / "compare_out").exists()
