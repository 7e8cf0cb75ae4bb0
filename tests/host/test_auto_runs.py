"""`--edit-auto`: settings chosen during training, alike on all replicas, kept on resume.

Would catch replicas that choose differently, a choice that is not used, a second choice that loses
outer state or leaves replicas apart, and a resume that chooses again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint.manifest import read_manifest
from megatron_edit.config import EditConfig
from megatron_edit.host.checkpoint.loading import changed_settings
from tests.harness import Flags
from tests.host.layouts import GATHER, LAYOUTS
from tests.host.runs import EditRun, cached_run, run_edit
from tests.host.spy_state import WARMUP
from tests.host.test_resume import assert_continues, assert_same_syncs, facts

HOOK = "tests.host.spy_state:record_with_fixed_measurements"
AUTO: Flags = {
    "edit_auto": True, "edit_sync_interval": None, "edit_warmup_steps": WARMUP, "train_iters": 92
}  # fmt: skip
FAST, SLOW = "1e9", "4e5"  # bytes per second
SECOND_CHOICE = WARMUP + 40  # the step before it, with a slower link
NAMES = ["blocking", "overlap", "tp2-pp2"]


def choices(run: EditRun) -> list[dict[str, Any]]:
    """The choices in `run.json`."""
    found: list[dict[str, Any]] = json.loads((run.folder / "run.json").read_text())["choices"]
    return found


def train(folder: Path, ranks: int = 1, rates: str = f"{FAST},{SLOW}", *, deviates: bool = False,
          **flags: Any) -> EditRun:  # fmt: skip
    """Train two replicas with fixed measurements."""
    env = {"SPY_RATES": rates, "SPY_DEVIATES": "1" if deviates else ""}
    return run_edit(folder, 2 * ranks, 2, before=HOOK, env=env, **AUTO | flags)


def assert_equal_replicas(run: EditRun) -> None:
    """Check that both replicas recorded the same digest at every sync."""
    first, second = run.digests(0), run.digests(1)
    assert first == second and len(first) == len(run.syncs) >= 3


def test_measures_and_chooses(tmp_path: Path) -> None:
    """With this machine's measurements; the syncs follow the chosen interval."""
    run = run_edit(tmp_path, 2, 2, **AUTO)
    (first, *_) = choices(run)
    measured, settings = first["measured"], first["settings"]
    assert 1e-3 < measured["step"] < 10 and 1e5 < measured["rate"] < 1e12
    assert 0 < measured["latency"] < 1 and first["since"] == WARMUP
    assert run.syncs[0]["iteration"] == WARMUP + settings["sync_interval"]
    said = run.result.ranks[0].stdout
    assert "warm-up of 20 steps: the replicas average at each; then settings are chosen" in said
    assert "chosen after step 20: a sync every " in said
    assert_equal_replicas(run)


def test_fast_link_needs_no_compression(tmp_path: Path) -> None:
    """The shortest interval and fp32. Given flags stay."""
    run = train(tmp_path, edit_fragments=2)
    (choice,) = choices(run)
    settings = choice["settings"]
    assert (settings["sync_interval"], settings["sync_dtype"], settings["delay_steps"]) == (
        8, "fp32", 0
    )  # fmt: skip
    assert settings["fragments"] == 2
    assert [sync["iteration"] - WARMUP for sync in run.syncs[:4]] == [4, 8, 12, 16]
    assert_equal_replicas(run)


ALONE: Flags = {"edit_auto": None, "edit_warmup_steps": None, "train_iters": 120}


def train_alone(folder: Path, **flags: Any) -> EditRun:
    """Train with `--use-edit` alone and a fast link."""
    return train(folder, rates=f"{FAST},{FAST}", **ALONE | flags)


def test_use_edit_alone_is_repeated_by_its_record(tmp_path: Path) -> None:
    """The record gives the same losses and parameters without a measurement: would catch a setting
    that is chosen and not recorded, or recorded and not used."""
    run = cached_run(train_alone, save_interval=29)
    (choice,) = choices(run)
    settings = choice["settings"]
    assert settings["average_moments"] == "both" and settings["final_sync_fraction"] == 0.05
    record = json.loads((run.folder / "run.json").read_text())
    assert record["config"]["warmup_steps"] == WARMUP and record["config"]["scale_beta2"]
    assert record["training"]["last_local_step"] == 114
    assert "final synchronous phase after step 114" in run.result.ranks[0].stdout
    alone: Flags = {"edit_warmup_steps": None, "edit_sync_interval": None, "train_iters": 120}
    again = run_edit(tmp_path, 2, 2, **alone, edit_settings=run.folder / "run.json")
    assert "chosen after" not in again.result.ranks[0].stdout
    assert again.lines("loss.jsonl") == run.lines("loss.jsonl")
    assert again.digests(0) == run.digests(0)
    assert_same_syncs(run, again)


@pytest.mark.parametrize("step", [87, 116])
def test_chosen_final_phase_is_resumed(tmp_path: Path, step: int) -> None:
    """From a checkpoint before the phase, and from one within it."""
    run = cached_run(train_alone, save_interval=29)
    resumed = train_alone(tmp_path, load=run.folder / "saves", ckpt_step=step)
    assert choices(resumed) == choices(run)
    assert_continues(run.folder, tmp_path, step, 2)


def test_expensive_warmup_ends_early(tmp_path: Path) -> None:
    """A warm-up of a share of the training ends as soon as it has cost too much; a given one does
    not. Its resume, and its record, have the same warm-up."""
    flags = ALONE | {"train_iters": 300, "exit_interval": 60, "eval_iters": 0}
    slow = cached_run(train, rates=f"{SLOW},{SLOW}", save_interval=20, **flags)
    (choice,) = choices(slow)
    assert (
        choice["since"]
        == 20
        < json.loads((slow.folder / "run.json").read_text())["config"]["warmup_steps"]
    )
    assert slow.syncs[0]["iteration"] > 20
    iterations = [line["iteration"] for line in slow.lines("loss.jsonl")]
    assert iterations == list(range(1, len(iterations) + 1))
    resumed = train(tmp_path / "r", rates=f"{SLOW},{SLOW}", load=slow.folder / "saves",
                    ckpt_step=40, **flags)  # fmt: skip
    assert choices(resumed) == [choice]
    assert_continues(slow.folder, tmp_path / "r", 40, 2)
    given = train(tmp_path / "g", rates=f"{SLOW},{SLOW}", **flags | {"edit_warmup_steps": 30})
    assert choices(given)[0]["since"] == 30


def test_checkpoint_without_a_choice_keeps_its_settings(tmp_path: Path) -> None:
    """From rounds with given settings, in a longer training: would catch other settings, a refusal
    because of the longer warm-up, and rounds that begin later."""
    whole = cached_run(train_fixed, save_interval=30, train_iters=300, edit_warmup_steps=10)
    resumed = train(tmp_path, load=whole.folder / "saves", ckpt_step=30,
                    **ALONE | {"train_iters": 300, "exit_interval": 60})  # fmt: skip
    assert "chosen after" not in resumed.result.ranks[0].stdout
    assert_continues(whole.folder, tmp_path, 30, 2)
    assert_same_syncs(whole, resumed)


def train_fixed(folder: Path, **flags: Any) -> EditRun:
    """Train with given settings."""
    fixed: Flags = {"edit_auto": None, "edit_sync_interval": 8, "exit_interval": 60}
    return train(folder, **fixed | flags)


def test_warmup_that_is_over_goes_on_to_measure(tmp_path: Path) -> None:
    """A checkpoint of synchronous steps after W: eleven more are made, and settings are chosen."""
    whole = cached_run(train_fixed, save_interval=30, edit_strategy="ddp", train_iters=120,
                       edit_sync_interval=None, edit_warmup_steps=None)  # fmt: skip
    resumed = train(tmp_path, load=whole.folder / "saves", ckpt_step=30, **ALONE)
    assert "warm-up until step 41: links and steps are measured" in resumed.result.ranks[0].stdout
    assert choices(resumed)[0]["since"] == 41
    assert_equal_replicas(resumed)


def test_short_training_has_fixed_settings(tmp_path: Path) -> None:
    """Too few steps to measure in: a line says so, and rounds begin."""
    run = run_edit(tmp_path, 2, 2, **ALONE | {"train_iters": 30, "edit_sync_interval": None})
    said = run.result.ranks[0].stdout
    assert "30 iterations are too few to measure" in said
    assert "warm-up of 3 steps: the replicas average at each\n" in said
    assert [sync["iteration"] for sync in run.syncs] == [11, 19, 27, 30]


def train_with_slower_link(name: str) -> tuple[EditRun, int, Flags]:
    """Train with a save every twenty steps, once for all tests; also return the ranks of a replica
    and the flags."""
    ranks, flags = LAYOUTS["tp2-pp2"] if name == "tp2-pp2" else (1, {})
    if name == "overlap":
        ranks, flags = 2, {"edit_sync_mode": "overlap", **GATHER}
    flags = flags | {"deviates": True}
    return cached_run(train, ranks, save_interval=20, **flags), ranks, flags


@pytest.mark.parametrize("name", NAMES)
def test_slower_link_changes_the_settings(name: str) -> None:
    """After three syncs that leave the prediction all units sync, and the next round begins with
    another choice."""
    run, _, _ = train_with_slower_link(name)
    first, second = choices(run)
    assert first["settings"] != second["settings"] and second["settings"]["delay_steps"] > 0
    # Exposed times are known from the second sync on.
    assert second["since"] == SECOND_CHOICE == WARMUP + 5 * first["settings"]["sync_interval"]
    assert_equal_replicas(run)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("blocking", SECOND_CHOICE + 20),
        ("overlap", WARMUP + 20),
        ("tp2-pp2", SECOND_CHOICE),
        *(pytest.param(name, step, marks=pytest.mark.full)
          for name, step in (("blocking", WARMUP + 20), ("blocking", SECOND_CHOICE),
                             ("overlap", SECOND_CHOICE), ("overlap", SECOND_CHOICE + 20),
                             ("tp2-pp2", WARMUP + 20), ("tp2-pp2", SECOND_CHOICE + 20))),
    ],
)  # fmt: skip
def test_resume_keeps_the_choice(tmp_path: Path, name: str, step: int) -> None:
    """The choice of the checkpoint is kept, and the resumed run equals the uninterrupted one
    (before the second choice except for its time: that of the last sync is not known again)."""
    whole, ranks, flags = train_with_slower_link(name)
    first, second = choices(whole)
    saves = whole.folder / "saves"
    resumed = train(tmp_path, ranks, load=saves, ckpt_step=step, **flags)
    kept = first if step < second["since"] else second
    if kept is second:
        assert_continues(whole.folder, tmp_path, step, 2 * ranks)
        assert_same_syncs(whole, resumed)
    assert_equal_replicas(resumed)
    assert choices(resumed)[0] == kept
    assert read_manifest(saves / f"iter_{step:07d}").choice == kept


# ---- A-EDiT: seconds are chosen


STEPS_PER_ROUND = 16  # on average: steps of 0.125 and 0.25 s, rounds of 3 s


def train_timed(folder: Path, **flags: Any) -> EditRun:
    """Train two replicas by scripted clocks on which a step of replica 1 lasts twice as long."""
    env = {
        "SPY_RATES": f"{SLOW},{SLOW}", "SPY_HOOKS": "script_clock", "SPY_FACTORS": "[0.125, 0.25]",
    }  # fmt: skip
    timed: Flags = {"edit_strategy": "a-edit", "edit_min_round_steps": 0, "num_workers": 0}
    return run_edit(folder, 2, 2, before=HOOK, env=env, **AUTO | timed | flags)


def test_a_edit_chooses_seconds(tmp_path: Path) -> None:
    """Would catch replicas that choose by their own steps, or do not use what is chosen. The
    choice is resumed at the first sync, and its delayed units land in the resumed run: it equals
    the uninterrupted one, bit for bit."""
    whole = cached_run(train_timed, save_interval=18)
    (choice,) = choices(whole)
    settings, measured = choice["settings"], choice["measured"]
    assert (measured["step"], measured["slowest"]) == (0.1875, 0.25)
    assert settings["sync_seconds"] == 0.1875 * STEPS_PER_ROUND == 3.0
    assert 0 < settings["delay_steps"] < 12
    assert [sync["inner_steps"] for sync in whole.syncs] == [[24, 12], [24, 12], [48, 24]]
    assert "every 3 s (about 16 steps)" in whole.result.ranks[0].stdout
    assert_equal_replicas(whole)
    saves = whole.folder / "saves"
    kept = read_manifest(saves / "iter_0000038")
    assert kept.choice == choice and all(replica.pending for replica in kept.replicas)
    resumed = train_timed(tmp_path, load=saves, ckpt_step=38)
    assert choices(resumed) == [choice]
    assert facts(tmp_path, 2) == facts(whole.folder, 2)
    assert_same_syncs(whole, resumed)
    assert "settings changed" not in resumed.result.ranks[0].stdout
    # Without `--edit-auto` the chosen values are those that were used; the steps were none.
    changes = changed_settings(kept, EditConfig(use_edit=True, strategy="a-edit")) or ""
    assert "--edit-sync-seconds 3.0 -> 600.0" in changes and "--edit-sync-interval" not in changes
