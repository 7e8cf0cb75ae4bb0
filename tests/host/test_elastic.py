"""Resuming with another number of replicas: no sample is repeated or lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Flags
from tests.host.runs import EditRun, cached_run, run_edit
from tests.host.test_aedit import AEDIT
from tests.host.test_metrics import scalars_of

HOOK = "tests.host.spy_state:record_all"
pytestmark = pytest.mark.timeout(300)
BATCH = 12
FLAGS: Flags = {"global_batch_size": BATCH, "micro_batch_size": 2, "lr_decay_style": "cosine",
                "lr_warmup_iters": 4, "exit_signal_handler": True}  # fmt: skip


def consumed(folder: Path) -> list[int]:
    """Return the samples that the ranks of a run consumed."""
    return [
        index
        for file in sorted(folder.glob("fetched-*.json"))
        for batch in json.loads(file.read_text())
        for index in batch
    ]


def stage(folder: Path, saves: Path, replicas: int, env: dict[str, str], **flags: Any) -> EditRun:
    """Run one stage of a training: load the newest checkpoint, train, save."""
    hooks = ",".join(env.pop("HOOKS", "").split())
    return run_edit(
        folder, replicas * flags.pop("ranks", 1), replicas, before=HOOK,
        env={"SPY_HOOKS": hooks, **env}, save=saves, load=saves, save_interval=100,
        **{**FLAGS, **flags},
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)], ids=["d1", "tp2"])
def test_resume_with_two_three_one_two_replicas(tmp_path: Path, ranks: int) -> None:
    """Stops within a round, at a sync, within a round: samples, schedule and loss continue."""
    layout: Flags = {"ranks": ranks, "tensor_model_parallel_size": ranks, "train_iters": 20}
    plan = [(2, 7), (3, 11), (1, 15), (2, 20)]  # syncs after 5, 8, 11, 14, 17 and 20
    lines: list[dict[str, Any]] = []
    losses: dict[int, float] = {}
    samples: list[int] = []
    for replicas, last in plan:
        folder = tmp_path / f"until-{last}"
        run = stage(folder, tmp_path / "saves", replicas, {}, exit_interval=last, **layout)
        lines += [line for line in run.lines("replica-0.jsonl") if "loss" in line]
        losses |= {line["iteration"]: line["loss"] for line in run.lines("loss.jsonl")}
        samples += consumed(folder)
    assert [line["iteration"] for line in lines] == list(range(1, 21))
    assert sorted(samples) == list(range(20 * BATCH))
    whole = run_edit(
        tmp_path / "whole", 2 * ranks, 2, **FLAGS,
        **{k: v for k, v in layout.items() if k != "ranks"},
    )  # fmt: skip
    expected = [line for line in whole.lines("replica-0.jsonl") if "loss" in line]
    assert [line["lr"] for line in lines] == [line["lr"] for line in expected]
    uninterrupted = {line["iteration"]: line["loss"] for line in whole.lines("loss.jsonl")}
    noise = max(abs(uninterrupted[i + 1] - uninterrupted[i]) for i in range(2, 20))
    for step in range(2, 20):
        assert abs(losses[step + 1] - losses[step]) < 2 * noise


@pytest.mark.system
def test_unequal_stops_lose_no_sample(tmp_path: Path) -> None:
    """A signal stops two replicas at different steps of a round; then three resume, then one."""
    saves, flags = tmp_path / "saves", {"train_iters": 40, "edit_sync_interval": 100}
    env = {"HOOKS": "slow signal_replica_1", "SPY_SLEEP": "[0.02, 0.1]", "SPY_STEP": "5"}
    first = stage(tmp_path / "a", saves, 2, env, **flags)
    steps = [len([x for x in first.lines(f"replica-{r}.jsonl") if "loss" in x]) for r in (0, 1)]
    assert steps[0] != steps[1]
    stage(tmp_path / "b", saves, 3, {}, exit_interval=30, **flags)
    stage(tmp_path / "c", saves, 1, {}, **flags)
    samples = [x for name in ("a", "b", "c") for x in consumed(tmp_path / name)]
    assert len(samples) == len(set(samples))
    left = set(range(40 * BATCH)) - set(samples)
    assert len(left) < BATCH and min(left, default=40 * BATCH) >= 39 * BATCH


@pytest.mark.system
@pytest.mark.parametrize("stop", ["sync", "mid-round"])
def test_aedit_resumes_with_other_replica_counts(tmp_path: Path, stop: str) -> None:
    """A-EDiT with two replicas, then three, then two: the ledger continues."""
    saves, flags = tmp_path / "saves", {**AEDIT, "train_iters": 30, "edit_sync_seconds": 6}
    env = {"HOOKS": "script_clock", "SPY_FACTORS": "[1, 3, 2]"}
    if stop == "sync":
        ends: list[dict[str, Any]] = [{"exit_interval": 8}, {"exit_interval": 18}, {}]
    else:
        ends = [{}, {}, {}]
    for number, (replicas, end) in enumerate(zip((2, 3, 2), ends, strict=True)):
        extra = dict(env)
        if stop == "mid-round" and number < 2:
            extra["HOOKS"] += " slow signal_replica_1"
            extra |= {"SPY_SLEEP": "[0.05, 0.05, 0.05]", "SPY_STEP": str(4 + 9 * number)}
        stage(tmp_path / str(number), saves, replicas, extra, **flags, **end)
    samples = [x for number in range(3) for x in consumed(tmp_path / str(number))]
    assert len(samples) == len(set(samples))
    left = set(range(30 * BATCH)) - set(samples)
    assert len(left) < BATCH and min(left, default=30 * BATCH) >= 29 * BATCH


@pytest.mark.system
def test_skipped_iterations_consume_their_samples(tmp_path: Path) -> None:
    """EDiT skips an iteration, and A-EDiT resumes after it. Would catch samples that repeat, and
    scalars that are not at Megatron's iterations."""
    pytest.importorskip("tensorboard")
    saves = tmp_path / "saves"
    boards = [tmp_path / f"board-{number}" for number in range(2)]
    first = stage(
        tmp_path / "0", saves, 2, {}, train_iters=14, exit_interval=8, iterations_to_skip=[5],
        tensorboard_dir=boards[0],
    )  # fmt: skip
    clock = {"HOOKS": "script_clock", "SPY_FACTORS": "[1, 2]"}
    flags: Flags = {**AEDIT, "train_iters": 14, "edit_sync_seconds": 6}
    second = stage(tmp_path / "1", saves, 2, clock, tensorboard_dir=boards[1], **flags)
    assert sorted(consumed(tmp_path / "0") + consumed(tmp_path / "1")) == list(range(14 * BATCH))
    assert [sync["iteration"] for sync in first.syncs] == [5]
    written = scalars_of(boards[0])
    assert list(written["edit/round"]) == [6]
    assert list(written["edit/lm-loss"]) == [1, 2, 3, 4, 6, 7, 8]
    found = scalars_of(boards[1])
    assert len(found["edit/round"]) == len(second.syncs)
    assert max(found["edit/round"]) == max(found["lm loss"])


LATE: dict[str, dict[str, Any]] = {
    "delay": {"edit_delay_steps": 2},
    "all": {"edit_fragments": 2, "edit_delay_steps": 2, "edit_mix": 0.25},
    "streaming": {
        "edit_strategy": "streaming-diloco", "edit_fragments": 2, "edit_delay_steps": 1,
    },
    "moments": {
        "edit_delay_steps": 2, "edit_average_moments": "both", "edit_scale_beta2": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "all" else [pytest.mark.full]) for n in LATE]
)
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.system), 3])
def test_pending_syncs_land_before_replica_count_changes(
    tmp_path: Path, name: str, replicas: int
) -> None:
    """Saved while syncs are pending. Another number of replicas starts from the state with which
    the same replicas would have ended training there: all syncs land, and the round is synced."""
    step = 6
    flags: Flags = {**FLAGS, "edit_sync_interval": 3, **LATE[name], "train_iters": 9}
    saved = cached_run(run_edit, 2, 2, before=HOOK, save_interval=step, **flags)
    over = {**flags, "train_iters": step, "lr_decay_iters": 9}
    ended = cached_run(run_edit, 2, 2, before=HOOK, **over)
    run_edit(
        tmp_path / "b", replicas, replicas, before=HOOK, load=saved.folder / "saves",
        ckpt_step=step, **{**over, "override_opt_param_scheduler": True},
    )  # fmt: skip
    expected, found = (
        json.loads((folder / "outer-0.json").read_text())
        for folder in (ended.folder, tmp_path / "b")
    )
    anchors = [key for key in expected if key.startswith(("anchor", "momentum"))]
    assert len(anchors) == 8
    assert {key: found[key] for key in anchors} == {key: expected[key] for key in anchors}
