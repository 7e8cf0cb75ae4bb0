"""Replicas on two sites in real runs: encoded sums are formed on each site first."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

from megatron_edit.comm.wire import placed_bytes
from megatron_edit.method.codec import INT8
from tests.host.runs import EditRun, run_edit

SITES = (0, 0, 1, 1)
FLAGS: dict[str, Any] = {
    "global_batch_size": 8, "train_iters": 11, "edit_sync_dtype": "int8",
    "edit_warmup_dtype": "int8", "overlap_param_gather": True, "overlap_grad_reduce": True,
    "ddp_bucket_size": 10_000,
}  # fmt: skip


def train(folder: Path, **flags: Any) -> EditRun:
    """Train four replicas of one rank, two of them on each site, all on this host."""
    folder.mkdir()
    placement = folder / "placement"
    host = socket.gethostname()
    placement.write_text(f"[paris]\n{host}\n{host}\n[lyon]\n{host}\n{host}\n")
    return run_edit(folder, 4, 4, edit_placement=placement, **{**FLAGS, **flags})


def losses(run: EditRun) -> list[float]:
    """Return the losses of the steps."""
    return [line["loss"] for line in run.lines("loss.jsonl")]


def test_replicas_of_two_sites_stay_equal_in_every_mode(tmp_path: Path) -> None:
    """Overlapping, blocking and resumed, with error feedback, and in the warm-up. Catches replicas
    that decode different bytes (drift ends the run), and residuals that a checkpoint loses."""
    overlap = train(tmp_path / "overlap", edit_sync_mode="overlap")
    assert (
        "encoded sums are formed in each place first (replica 0 at 0, 1 at 0, 2 at 1, 3 at 1)"
        in (overlap.result.ranks[0].stdout)
    )
    saves = tmp_path / "saves"
    blocking = train(tmp_path / "blocking", edit_sync_mode="blocking", save=saves, save_interval=7)
    assert losses(overlap) == losses(blocking) and len(losses(blocking)) == 11
    assert overlap.digests(0) == blocking.digests(0) == blocking.digests(3)
    assert None not in blocking.digests(0) and len(blocking.digests(0)) == 3
    sent = [[line["wire_bytes"] for line in run.syncs] for run in (overlap, blocking)]
    assert sent[0] == sent[1]
    resumed = train(tmp_path / "resumed", edit_sync_mode="blocking", load=saves, ckpt_step=7)
    assert losses(resumed) == losses(blocking)[-len(losses(resumed)) :]
    assert resumed.digests(2) == blocking.digests(2)[-len(resumed.digests(2)) :]


def test_reported_bytes_are_those_of_places(tmp_path: Path) -> None:
    """Catches a report that counts a flat exchange."""
    run = train(tmp_path / "run", edit_sync_mode="blocking")
    flat = tmp_path / "flat"
    without = run_edit(flat, 4, 4, **FLAGS)
    line, usual = run.syncs[-1], without.syncs[-1]
    assert line["wire_bytes"] != usual["wire_bytes"]
    # Replica 0 sends its place's sum for two of four chunks, the sum of its own chunk, and shares.
    width = INT8.encoded_bytes(250)
    sent = partial(placed_bytes, INT8, 1000, SITES)
    assert [sent(rank) for rank in range(4)] == [4000 + 4 * width] * 4
