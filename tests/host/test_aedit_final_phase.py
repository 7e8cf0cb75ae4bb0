"""A-EDiT with a final synchronous phase: replicas at their own speeds, then common steps."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from megatron_edit.checkpoint.manifest import read_manifest
from megatron_edit.tools.monitor.run import MonitoredRun
from tests.harness import Flags
from tests.host.layouts import GATHER, LAYOUTS
from tests.host.runs import EditRun, cached_run, recommended, run_edit, run_stock
from tests.host.spy import read_records
from tests.host.test_aedit import AEDIT, consumed
from tests.host.test_aedit_edges import VARIANTS
from tests.host.test_elastic import consumed as fetched
from tests.host.test_final_phase import assert_replicas_equal
from tests.host.test_resume import DROPOUT, HOOK, facts, records

pytestmark = pytest.mark.timeout(300)
BATCH, TRAIN_ITERS, LAST_LOCAL = 8, 24, 18
# A step of replica 1 takes three times as long. Two steps of warm-up; rounds of 6 and 2 steps.
UNEVEN: dict[str, str] = {"SPY_FACTORS": "[1, 3]"}
PHASE: Flags = {
    **AEDIT, "train_iters": TRAIN_ITERS, "global_batch_size": BATCH, "micro_batch_size": 2,
    "edit_sync_seconds": 6, "edit_final_sync_fraction": 0.25, "lr_decay_style": "cosine",
    "lr_warmup_iters": 3,
}  # fmt: skip


def run_phase(folder: Path, *hooks: str, ranks: int = 1, **flags: Any) -> EditRun:
    """Train an uneven pair of replicas, of so many ranks each, with a final phase."""
    env = {"SPY_HOOKS": ",".join(("script_clock", *hooks)), **UNEVEN, **flags.pop("env", {})}
    return run_edit(folder, 2 * ranks, 2, before=HOOK, env=env, **{**PHASE, **flags})


def assert_phase_equal(folder: Path, other: Path, first: int, world_size: int = 2) -> None:
    """Check that two runs have the same losses and gradient norms from iteration `first` on, and
    the same parameters, moments and counters at the end, bit for bit."""
    assert facts(folder, world_size) == facts(other, world_size)
    for rank in range(world_size):
        for name in ("losses", "grad_norms"):
            mine, theirs = (
                {i: v for i, v in records(each, rank)[name].items() if int(i) >= first}
                for each in (folder, other)
            )
            assert mine == theirs
        assert set(mine) == set(map(str, range(first, TRAIN_ITERS + 1)))


def assert_losses(run: EditRun) -> None:
    """Check for one line per sync with the mean over the steps of the round, the last one included,
    and one for each step of the phase."""
    losses = [
        [x["loss"] for x in run.lines(f"replica-{replica}.jsonl") if "loss" in x]
        for replica in (0, 1)
    ]
    expected, used = dict[int, float](), [2, 2]
    for sync in run.syncs:
        rounds = list(zip(losses, used, sync["inner_steps"], strict=True))
        expected[sync["iteration"]] = fmean(x for own, a, n in rounds for x in own[a : a + n])
        used = [first + count for _, first, count in rounds]
    expected |= zip(range(LAST_LOCAL + 1, TRAIN_ITERS + 1), losses[0][used[0] :], strict=True)
    found = {x["iteration"]: x["loss"] for x in run.lines("loss.jsonl")[2:] if "loss" in x}
    assert found == pytest.approx(expected, rel=1e-12)


def test_uneven_replicas_end_in_the_same_step(tmp_path: Path) -> None:
    """Each sample is consumed once, the last round syncs all units, and from there on both replicas
    count the iterations of stock Megatron, with equal gradients and its learning rates. Would catch
    a replica that goes on alone, or with a step of its own, and an interval that is missed."""
    run = run_phase(
        tmp_path, "record_consumed", save=tmp_path / "saves", save_interval=20, eval_interval=10,
        eval_iters=1, num_workers=2,
    )  # fmt: skip
    assert run.syncs[0]["inner_steps"] == [6, 2]
    assert sum(run.syncs[-1]["samples"]) == LAST_LOCAL * BATCH
    assert sorted(consumed(tmp_path, 2)) == list(range(TRAIN_ITERS * BATCH))
    assert_replicas_equal(run, 1, 2)
    assert [end["step"] for end in facts(tmp_path, 2)] == [TRAIN_ITERS] * 2
    for replica in (0, 1):
        lines = [x for x in run.lines(f"replica-{replica}.jsonl") if "loss" in x]
        found = [(x["iteration"], x["replica_step"], x["samples_all"]) for x in lines[-7:]]
        assert found == [(i, i, i * BATCH) for i in range(LAST_LOCAL, TRAIN_ITERS + 1)]
    assert_losses(run)
    console = run.result.ranks[0].stdout
    assert console.count(f"final synchronous phase after step {LAST_LOCAL}") == 1
    at = re.findall(r"validation loss at iteration (\d+) \|", console)
    assert at[-1] == "20" and len(at) == 2  # at the first sync past 10, and in the phase
    assert read_manifest(tmp_path / "saves" / "iter_0000020").is_final_phase
    norms = [record["grad_norms"] for record in read_records(tmp_path, 2)]
    for iteration in map(str, range(LAST_LOCAL + 1, TRAIN_ITERS + 1)):
        assert norms[0][iteration] == norms[1][iteration]
    watched = MonitoredRun(tmp_path)
    watched.poll()
    assert (watched.iteration, watched.progress) == (TRAIN_ITERS, 1.0)
    assert all(set(replica.starts) == {0} for replica in watched.replicas)  # no restart is found


def test_steps_of_the_phase_equal_stock_megatron(tmp_path: Path) -> None:
    """Samples and parameters of stock Megatron on two ranks from a checkpoint of the phase, bit for
    bit, and the learning rates of a run without rounds. Would catch other samples, another position
    in the schedule, and gradients that are averaged otherwise. Without a clip, as stock Megatron
    sums the gradient norm over two shards."""
    saves = tmp_path / "saves"
    run = run_phase(tmp_path, save=saves, save_interval=LAST_LOCAL, clip_grad=0.0)
    flags = {name: value for name, value in PHASE.items() if not name.startswith("edit_")}
    flags |= {"clip_grad": 0.0}
    run_stock(tmp_path / "stock", 2, load=saves, ckpt_step=LAST_LOCAL, **flags)
    steps = [str(i) for i in range(LAST_LOCAL + 1, TRAIN_ITERS + 1)]
    records = (read_records(tmp_path, 2), read_records(tmp_path / "stock", 2))
    for ours, theirs in zip(*records, strict=True):
        for name in ("losses", "grad_norms"):  # sums of two numbers in fp32, in stock Megatron
            mine, others = ([float.fromhex(x[name][i]) for i in steps] for x in (ours, theirs))
            assert mine == pytest.approx(others, rel=1e-6) and set(theirs[name]) == set(steps)
        assert theirs["batches"] == ours["batches"][-len(theirs["batches"]) :]
        assert theirs["digest"] == ours["digest"]
    plain = {**flags, "edit_strategy": "ddp"}
    counted = cached_run(run_edit, 2, 2, before=HOOK, **plain)
    rates, expected = (
        [x["lr"] for x in each.lines("replica-0.jsonl") if "lr" in x] for each in (run, counted)
    )
    assert rates[-7:] == expected[-7:] and rates[-1] < rates[-7] < max(rates)


@pytest.mark.parametrize("step", [20, 18, 6])
def test_resume_around_the_phase_is_exact(tmp_path: Path, step: int) -> None:
    """In the phase, at its start, and at a sync of the rounds, with dropout. Would catch a counter
    or a position that is not saved, and replicas that resume with different ones."""
    whole = cached_run(run_phase, save_interval=2, **DROPOUT)
    saves = whole.folder / "saves"
    run_phase(tmp_path, load=saves, ckpt_step=step, **DROPOUT)
    manifest = read_manifest(saves / f"iter_{step:07d}")
    assert manifest.is_final_phase == manifest.is_warmup == (step >= LAST_LOCAL)
    assert manifest.samples == step * BATCH
    assert_phase_equal(tmp_path, whole.folder, max(step, LAST_LOCAL) + 1)


@pytest.mark.parametrize("step", [10, 19])
def test_signal_stops_all_and_the_run_resumes(tmp_path: Path, step: int) -> None:
    """Step 10 of replica 1 is in its last round, while replica 0 waits; 19 is in the phase."""
    saves, again = tmp_path / "saves", tmp_path / "again"
    env = {"SPY_STEP": str(step), "SPY_SLEEP": "[0.3, 0.3]"}
    run_phase(
        tmp_path, "signal_replica_1", "slow", env=env, save=saves, save_interval=100,
        exit_signal_handler=True,
    )  # fmt: skip
    (path,) = saves.glob("iter_*")
    manifest = read_manifest(path)
    assert manifest.is_final_phase == (step == 19) and manifest.samples < TRAIN_ITERS * BATCH
    resumed = run_phase(again, load=saves)
    whole = cached_run(run_phase)
    assert_phase_equal(again, whole.folder, max(LAST_LOCAL, manifest.iteration) + 1)
    assert resumed.result.ranks[0].stdout.count("in the final synchronous phase") == (step == 19)


def test_save_in_the_phase_at_a_step_number_of_the_rounds(tmp_path: Path) -> None:
    """Replica 0 saves after its own step 18, at the sync of iteration 13, and with all replicas at
    iteration 18. Would catch a save that a replica takes for one that it has made."""
    saves = tmp_path / "saves"
    run = run_phase(tmp_path, save=saves, save_interval=2, edit_sync_seconds=18)
    assert run.syncs[0]["inner_steps"] == [16, 6]
    assert read_manifest(saves / "iter_0000013").replicas[0].step == 18
    assert read_manifest(saves / "iter_0000018").is_final_phase


def test_checkpoint_at_the_start_of_the_phase_is_retained(tmp_path: Path) -> None:
    """Of iteration 18, the first one past a multiple of 12. Would catch one that is removed because
    the checkpoints of the phase have no ledger."""
    saves = tmp_path / "saves"
    run_phase(tmp_path, save=saves, save_interval=4, save_retain_interval=12)
    assert sorted(path.name for path in saves.glob("iter_*")) == ["iter_0000018", "iter_0000024"]


def test_phase_by_samples_with_evaluations(tmp_path: Path) -> None:
    """With --train-samples the fraction is of samples: 147 of 195 are before the phase."""
    run = run_phase(
        tmp_path, train_iters=None, train_samples=TRAIN_ITERS * BATCH + 3, lr_warmup_iters=0,
        lr_warmup_samples=24, eval_interval=21, eval_iters=1,
    )  # fmt: skip
    console = run.result.ranks[0].stdout
    assert "final synchronous phase after step 19" in console
    assert console.count("validation loss at iteration 21 |") == 1
    assert [end["step"] for end in facts(tmp_path, 2)] == [TRAIN_ITERS] * 2


def test_exit_in_the_phase_and_resume_by_one_replica(tmp_path: Path) -> None:
    """All replicas exit at iteration 20, and each sample is consumed once."""
    first, second, saves = tmp_path / "first", tmp_path / "second", tmp_path / "saves"
    run_phase(first, save=saves, save_interval=100, exit_interval=20)
    assert read_manifest(saves / "iter_0000020").is_final_phase
    resumed = run_edit(second, 1, 1, before=HOOK, load=saves, **PHASE)
    assert sorted(fetched(first) + fetched(second)) == list(range(TRAIN_ITERS * BATCH))
    assert [x["iteration"] for x in resumed.lines("loss.jsonl")] == [21, 22, 23, 24]


def test_number_of_replicas_changes_before_the_phase(tmp_path: Path) -> None:
    """At a sync after an odd number of blocks of half a batch: what remains before the phase is no
    multiple of a batch, and the phase begins there. No sample is repeated or left between."""
    first, second, saves = tmp_path / "first", tmp_path / "second", tmp_path / "saves"
    run_phase(first, save=saves, save_interval=100, exit_interval=4, edit_sync_seconds=5)
    (path,) = saves.glob("iter_*")
    consumed_before = read_manifest(path).samples
    assert consumed_before % BATCH and not read_manifest(path).is_warmup
    resumed = run_edit(second, 1, 1, before=HOOK, load=saves, **PHASE)
    samples = fetched(first) + fetched(second)
    end = TRAIN_ITERS * BATCH - consumed_before % BATCH
    assert sorted(samples) == list(range(end))
    assert "final synchronous phase after step 18" in resumed.result.ranks[0].stdout
    assert resumed.lines("loss.jsonl")[-1]["iteration"] == TRAIN_ITERS


def test_phase_over_whole_training_equals_ddp(tmp_path: Path) -> None:
    """X = 1 equals strategy ddp bit for bit. Would catch a block that is assigned."""
    run_phase(tmp_path, edit_final_sync_fraction=1, **DROPOUT)
    plain = {name: value for name, value in PHASE.items() if not name.startswith("edit_")}
    expected = cached_run(run_edit, 2, 2, before=HOOK, edit_strategy="ddp", **plain, **DROPOUT)
    assert_phase_equal(tmp_path, expected.folder, 1)


@pytest.mark.parametrize("fraction", [0.75, 0.8])
def test_checkpoint_of_rounds_where_a_longer_phase_begins(tmp_path: Path, fraction: float) -> None:
    """At the sync of iteration 6 the phase begins at once, or should have begun before."""
    saves = cached_run(run_phase, save_interval=2, **DROPOUT).folder / "saves"
    flags: Flags = {"edit_final_sync_fraction": fraction, "load": saves, "ckpt_step": 6, **DROPOUT}
    run = run_phase(tmp_path, check=fraction == 0.75, **flags)
    if fraction == 0.75:
        assert "final synchronous phase after step 6" in run.result.ranks[0].stdout
        assert_replicas_equal(run, 1, 2)
    else:
        assert [rank.returncode for rank in run.result.ranks] == [2, 2]
        assert "48 samples, and the rounds of this run end at 40" in run.result.ranks[0].stderr


@pytest.mark.parametrize(
    "layout", ["m2", *(pytest.param(x, marks=pytest.mark.full) for x in ("tp2", "pp2", "ep2"))]
)
def test_recommended_settings_on_other_layouts(tmp_path: Path, layout: str) -> None:
    """A resume in the phase is exact, with averaged moments and scaled beta2. Would catch moments
    or step counts that differ between replicas."""
    ranks, flags = LAYOUTS[layout]
    chosen = {k: v for k, v in recommended().items() if k != "edit_sync_interval"}
    flags = {**chosen, **flags, "global_batch_size": 8 * ranks, **DROPOUT}
    whole = cached_run(run_phase, ranks=ranks, save_interval=20, **flags)
    run = run_phase(tmp_path, ranks=ranks, load=whole.folder / "saves", ckpt_step=20, **flags)
    assert_phase_equal(tmp_path, whole.folder, 21, 2 * ranks)
    assert_replicas_equal(run, ranks, 2)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "all" else [pytest.mark.full]) for n in VARIANTS]
)
def test_late_landings_end_before_the_phase(tmp_path: Path, name: str) -> None:
    """With fragments and a delay, all units land; no sample is lost."""
    run = run_phase(tmp_path, "record_consumed", **VARIANTS[name])
    assert sorted(consumed(tmp_path, 2)) == list(range(TRAIN_ITERS * BATCH))
    assert_replicas_equal(run, 1, 2)
    assert f"final synchronous phase after step {LAST_LOCAL}" in run.result.ranks[0].stdout


@pytest.mark.full
def test_phase_overlap_equals_blocking(tmp_path: Path) -> None:
    """All units land at the start of the phase, in both modes with the same bits."""
    overlapped = cached_run(run_phase, edit_sync_mode="overlap", **GATHER)
    run_phase(tmp_path, edit_sync_mode="blocking", **GATHER)
    assert_phase_equal(tmp_path, overlapped.folder, LAST_LOCAL + 1)
