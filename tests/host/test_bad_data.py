"""A replica that trains on random tokens is rejected because of its loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Flags
from tests.host.layouts import GATHER, LAYOUTS
from tests.host.runs import EditRun, cached_run, run_edit

HOOK = "tests.host.spy_faults:feed_random_tokens"
# Two steps of warm-up, a sync every three: after steps 5, 8, ..., 29 there are nine values.
BURST = (33, 36)
STEPS, REPLICAS = 44, 3
SETTINGS: Flags = {
    "train_iters": STEPS, "lr": 0.01, "min_lr": 0.01, "lr_decay_style": "constant",
    "edit_anomaly_warmup_syncs": 1000, "global_batch_size": 12,
    "edit_outer_lr": 0.8, "edit_outer_momentum": 0.85,
}  # fmt: skip


def bursts(folder: Path, **flags: Any) -> EditRun:
    """Train three replicas of one rank each; replica 1 gets the burst of random tokens."""
    env = {"SPY_BURST": json.dumps(BURST)}
    return run_edit(folder, REPLICAS, REPLICAS, before=HOOK, env=env, **{**SETTINGS, **flags})


def rejected(run: EditRun) -> list[tuple[int, int]]:
    """Return iteration and replica of each rejection; checks that it concerns all units."""
    found = []
    for line in run.syncs:
        for replica, reasons in enumerate(zip(*line["why"], strict=True)):
            if any(reasons):
                assert set(reasons) == {"loss"} and not any(w[replica] for w in line["weights"])
                found.append((line["iteration"], replica))
    return found


def test_bad_data_burst_is_rejected_within_a_round() -> None:
    """Would catch bad data that reach the anchor, and clean replicas that are rejected."""
    run = cached_run(bursts, save_interval=34)
    # The first bad loss, of step 33, is reported at the sync after step 35, that of step 36 at 38.
    assert rejected(run) == [(35, 1), (38, 1)]
    line = next(line for line in run.syncs if line["iteration"] == 35)
    assert line["loss_z"][1] > 6 and line["round_loss"][1] > max(line["round_loss"][::2]) + 0.1
    text = run.result.ranks[0].stdout
    assert "replica 1 is left out because of its loss" in text
    assert run.digests(0) == run.digests(1) == run.digests(2)


def test_resume_within_burst_repeats_decisions(tmp_path: Path) -> None:
    """Resuming within the first bad round gives the same loss history, scores and decisions."""
    whole = cached_run(bursts, save_interval=34)
    resumed = run_edit(
        tmp_path, REPLICAS, REPLICAS, before=HOOK, load=whole.folder / "saves", ckpt_step=34,
        env={"SPY_BURST": json.dumps(BURST), "SPY_FIRST_STEP": "35"}, **SETTINGS,
    )  # fmt: skip
    assert rejected(resumed) == rejected(whole)
    before = {line["round"]: line for line in whole.syncs}
    for line in resumed.syncs:
        for name in ("why", "round_loss", "loss_z", "norms", "weights"):
            assert line[name] == before[line["round"]][name], name
    assert resumed.digests(0) == whole.digests(0)[-len(resumed.syncs) :]


@pytest.mark.system
def test_pipeline_stages_reject_same_replica(tmp_path: Path) -> None:
    """Only the last stage has losses. Would catch a rejection by some of the stages only."""
    ranks, flags = LAYOUTS["pp2"]
    run = run_edit(
        tmp_path, 2 * ranks, 2, before=HOOK, env={"SPY_BURST": json.dumps(BURST)},
        **{**SETTINGS, **GATHER, **flags, "global_batch_size": 8},
    )  # fmt: skip
    assert rejected(run) == [(35, 1), (38, 1)]
    assert run.digests(0) == run.digests(1)
