"""Saving and loading: policies, stops, A-EDiT, stock checkpoints, other layouts, retention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.tools.cli import main
from tests.harness import Flags, tiny_gpt, train
from tests.host.layouts import GATHER
from tests.host.runs import EditRun, cached_run, run_edit, run_stock
from tests.host.test_aedit import AEDIT
from tests.host.test_elastic import consumed
from tests.host.test_resume import DROPOUT, HOOK, assert_continues, facts, records

pytestmark = pytest.mark.timeout(300)
STOP = {"SPY_HOOKS": "slow,signal_replica_1", "SPY_SLEEP": "[0.01, 0.05]", "SPY_STEP": "9"}


def manifest(saves: Path, iteration: int) -> dict[str, Any]:
    """Read the manifest of a checkpoint."""
    path = saves / f"iter_{iteration:07d}" / "edit" / "edit.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def newest(saves: Path) -> int:
    """Return the iteration that the tracker names."""
    return int((saves / "latest_checkpointed_iteration.txt").read_text())


@pytest.mark.parametrize("policy", ["leader", pytest.param("reset", marks=pytest.mark.system)])
def test_single_inner_state_save_waits_for_sync(tmp_path: Path, policy: str) -> None:
    """A save due after step 6, within a round, is announced and done once, after step 8. At the
    load the other replicas take the leader's moments, or reset theirs."""
    saves = tmp_path / "saves"
    flags: Flags = {"train_iters": 14, "edit_inner_state": policy, "save_interval": 6}
    first = run_edit(tmp_path / "a", 2, 2, before=HOOK, save=saves, **flags)
    console = first.result.ranks[0].stdout
    assert console.count("the checkpoint of iteration 6 waits for the next sync") == 1
    assert sorted(path.name for path in saves.glob("iter_*")) == [
        "iter_0000008", "iter_0000014"
    ]  # fmt: skip
    assert manifest(saves, 8)["form"] == "leader"
    assert not (saves / "iter_0000008/edit/replica_1").exists()
    again = run_edit(tmp_path / "b", 2, 2, before=HOOK, load=saves, ckpt_step=8, **flags)
    whole, resumed = records(tmp_path / "a", 0), records(tmp_path / "b", 0)
    assert resumed["losses"]["9"] == whole["losses"]["9"]
    is_same = resumed["losses"]["10"] == whole["losses"]["10"]
    assert is_same == (policy == "leader")
    assert None not in again.digests(0) and again.digests(0) == again.digests(1)


@pytest.mark.system
@pytest.mark.parametrize("policy", ["leader", pytest.param("all", marks=pytest.mark.full)])
@pytest.mark.parametrize("step", ["2", "9"], ids=["in-warm-up", "in-a-round"])
def test_stop_saves_state_of_all_replicas(tmp_path: Path, policy: str, step: str) -> None:
    """With either policy, replicas stop at different steps, and each resumes from its own, with the
    result of an uninterrupted run."""
    saves = tmp_path / "saves"
    flags: Flags = {
        "train_iters": 40,
        "edit_sync_interval": 20,
        "edit_inner_state": policy,
        **DROPOUT,
    }
    env = {**STOP, "SPY_STEP": step}
    run_edit(
        tmp_path / "a", 4, 2, before="tests.host.spy_state:record_all", env=env,
        save=saves, save_interval=1000, exit_signal_handler=True, **flags,
    )  # fmt: skip
    kept = manifest(saves, newest(saves))
    assert kept["is_warmup"] or kept["form"] == "all"
    run_edit(tmp_path / "b", 4, 2, before=HOOK, load=saves, **flags)
    whole = cached_run(run_edit, 4, 2, before=HOOK, **flags)
    assert facts(tmp_path / "b", 4) == facts(whole.folder, 4)


def run_clocked(folder: Path, hooks: str, **flags: Any) -> EditRun:
    """Run A-EDiT with scripted clocks; replica 1 is three times as slow."""
    env = {"SPY_HOOKS": f"script_clock,{hooks}".rstrip(","), "SPY_FACTORS": "[1, 3]", **{
        k: v for k, v in STOP.items() if k != "SPY_HOOKS"}}  # fmt: skip
    settings = {
        **AEDIT, "edit_sync_seconds": 7, "global_batch_size": 8, "train_iters": 40,
        "lr_decay_style": "cosine", **DROPOUT, **flags,
    }  # fmt: skip
    return run_edit(folder, 2, 2, before=HOOK, env=env, **settings)


@pytest.mark.system
@pytest.mark.parametrize("moment", ["at-a-sync", "at-a-stop"])
def test_aedit_resume_equals_uninterrupted_run(tmp_path: Path, moment: str) -> None:
    """A-EDiT with scripted clocks, resumed at a sync or where each replica stopped in a round."""
    saves = tmp_path / "saves"
    stop = {} if moment == "at-a-sync" else {"exit_signal_handler": True}
    hooks = "" if moment == "at-a-sync" else "slow,signal_replica_1"
    interval = 10 if moment == "at-a-sync" else 1000
    run_clocked(tmp_path / "a", hooks, save=saves, save_interval=interval, **stop)
    first = min(int(path.name[5:]) for path in saves.glob("iter_*"))
    kept = manifest(saves, first)
    assert any(r["inner_steps"] for r in kept["replicas"]) == (moment == "at-a-stop")
    run_clocked(tmp_path / "b", "", load=saves, ckpt_step=first)
    whole = cached_run(run_clocked, "")
    assert facts(tmp_path / "b", 2) == facts(whole.folder, 2)
    if moment == "at-a-stop":
        both = consumed(tmp_path / "a") + consumed(tmp_path / "b")
        assert sorted(both) == sorted(consumed(whole.folder)) == list(range(40 * 8))


@pytest.mark.system
def test_aedit_saves_final_checkpoint_on_all_replicas(tmp_path: Path) -> None:
    """Replicas end after 55 and 25 steps of their own. If Megatron checked these for multiples of
    11, one replica would save and the other would not, and the run would hang."""
    saves = tmp_path / "saves"
    run = run_clocked(tmp_path / "a", "", save=saves, save_interval=11)
    steps = [len([x for x in run.lines(f"replica-{r}.jsonl") if "loss" in x]) for r in (0, 1)]
    assert [step % 11 == 0 for step in steps] == [True, False]
    assert newest(saves) == 40 and manifest(saves, 40)["form"] == "all"
    # 33 is passed within the final round, which has no meeting before its end: 40 is saved.
    assert sorted(int(path.name[5:]) for path in saves.glob("iter_*")) == [12, 22, 40]


@pytest.mark.parametrize(
    "kind", ["a-edit", *(pytest.param(x, marks=pytest.mark.system) for x in ("edit", "overlap"))]
)
def test_waiting_replica_resumes_at_its_meeting(tmp_path: Path, kind: str) -> None:
    """The slow replica gets a signal while the fast one waits at a meeting, at which an evaluation
    and a save are due, too. The fast one joins that meeting after the resume, before any step.
    Would catch an extra step, a missed meeting, a schedule that is ahead, and units that have not
    landed when Megatron's loop begins."""
    saves = tmp_path / "saves"
    every = 3 if kind == "a-edit" else 12
    flags: dict[str, Any] = {
        "global_batch_size": 8, "train_iters": 24, "lr_decay_style": "cosine", **DROPOUT,
        "eval_interval": every, "eval_iters": 1, "exit_signal_handler": True,
    }  # fmt: skip
    env = {"SPY_FACTORS": "[1, 1]", "SPY_STEP": "7", "SPY_SLEEP": "[0, 0.3]"}
    clock = "script_clock," if kind == "a-edit" else ""
    if kind == "a-edit":
        flags |= {**AEDIT, "edit_sync_seconds": 10}
    else:
        flags["edit_sync_interval"] = 10
    if kind == "overlap":
        flags |= GATHER
    variants: tuple[tuple[str, str, Flags], ...] = (
        ("a", f"{clock}slow,signal_replica_1", {"save": saves, "save_interval": every}),
        ("b", clock, {"load": saves, "save": tmp_path / "more", "save_interval": every}),
        ("whole", clock, {}),
    )
    for name, hooks, extra in variants:
        hooked = {"SPY_HOOKS": hooks.rstrip(","), **env}
        run_edit(tmp_path / name, 2, 2, before=HOOK, env=hooked, **flags, **extra)
    first, second = manifest(saves, newest(saves))["replicas"]
    assert first["is_waiting"] and not second["is_waiting"] and first["step"] > second["step"]
    assert facts(tmp_path / "b", 2) == facts(tmp_path / "whole", 2)
    lines = [(tmp_path / name / "loss.jsonl").read_text().splitlines() for name in ("b", "whole")]
    # The whole run has the lines before the resume first. The evaluation at the meeting is dropped.
    losses = [[line for line in each if '"loss"' in line] for each in lines]
    if kind == "a-edit":
        losses = [[each[-1]] for each in losses]
    assert losses[0] == losses[1][-len(losses[0]) :]


@pytest.mark.parametrize("final", [0.25, pytest.param(0.0, marks=pytest.mark.system)])
def test_stop_while_replica_waits_at_last_meeting(tmp_path: Path, final: float) -> None:
    """The waiting replica joins the meeting before Megatron's loop begins, as the last meeting.

    Would catch replicas that disagree on the purpose of a meeting and, before a final phase, a loss
    that only some of them report.
    """
    saves = tmp_path / "saves"
    flags: Flags = {"global_batch_size": 8, "train_iters": 12 if final else 9,
                    "edit_sync_interval": 10, "edit_delay_steps": 2, "exit_signal_handler": True,
                    "edit_final_sync_fraction": final, **DROPOUT}  # fmt: skip
    env = {"SPY_STEP": "5", "SPY_SLEEP": "[0, 0.3]", "SPY_HOOKS": "slow,signal_replica_1"}
    run_edit(
        tmp_path / "a",
        2,
        2,
        before=HOOK,
        env=env,
        save=saves,
        save_interval=99,
        **flags,
    )
    first, second = manifest(saves, newest(saves))["replicas"]
    assert first["is_waiting"] and first["step"] == 9 > second["step"]
    resumed = run_edit(tmp_path / "b", 2, 2, before=HOOK, load=saves,
                       edit_timeout_seconds=30, **flags)  # fmt: skip
    whole = run_edit(tmp_path / "whole", 2, 2, before=HOOK, **flags)
    assert facts(tmp_path / "b", 2) == facts(tmp_path / "whole", 2)
    after = resumed.lines("loss.jsonl")
    assert after == whole.lines("loss.jsonl")[-len(after) :]


@pytest.mark.system
def test_aedit_resumes_in_warmup(tmp_path: Path) -> None:
    """The data ledger starts after the warm-up's samples. Would catch samples that repeat."""
    saves, flags = tmp_path / "saves", {"edit_warmup_steps": 6, "edit_sync_seconds": 5}
    run_clocked(tmp_path / "a", "", save=saves, save_interval=3, **flags)
    run_clocked(tmp_path / "b", "", load=saves, ckpt_step=3, **flags)
    assert facts(tmp_path / "b", 2) == facts(tmp_path / "a", 2)
    for rank in range(2):
        whole, resumed = (
            json.loads((tmp_path / name / f"fetched-{rank}.json").read_text()) for name in "ab"
        )
        assert resumed == whole[-len(resumed) :]


def test_stop_in_warmup_completes_all_due_saves(tmp_path: Path) -> None:
    """The replicas stop a few steps after one of them got a signal; all saves until then complete.

    Would catch a save that one replica skips, so that it never becomes complete.
    """
    saves = tmp_path / "saves"
    run = run_edit(
        tmp_path / "a", 2, 2, before=HOOK, env={**STOP, "SPY_STEP": "5"}, save=saves,
        save_interval=1, exit_signal_handler=True, train_iters=500, edit_warmup_steps=1000,
    )  # fmt: skip
    assert run.result.ranks[0].returncode == 0 and 5 < newest(saves) < 50
    names = [path.name for path in saves.iterdir() if path.is_dir()]
    assert sorted(names) == [f"iter_{i + 1:07d}" for i in range(newest(saves))]


@pytest.mark.system
def test_second_stop_after_resume_at_meeting(tmp_path: Path) -> None:
    """The fast replica waits at its meeting again, without a step in between, when the slow one
    gets the second signal. The final result is that of an uninterrupted run."""
    saves = tmp_path / "saves"
    flags: Flags = {"global_batch_size": 8, "train_iters": 16, "edit_sync_interval": 10,
                    "save": saves, "load": saves, "save_interval": 1000,
                    "exit_signal_handler": True, **DROPOUT}  # fmt: skip
    env = {"SPY_SLEEP": "[0, 0.3]", "SPY_HOOKS": "slow,signal_replica_1"}
    for name, step in (("a", "5"), ("b", "9")):
        run_edit(tmp_path / name, 2, 2, before=HOOK, env={**env, "SPY_STEP": step}, **flags)
        first, second = manifest(saves, newest(saves))["replicas"]
        assert first["is_waiting"] and first["step"] == 12 > second["step"]
    run_edit(tmp_path / "c", 2, 2, before=HOOK, **flags)
    run_edit(tmp_path / "whole", 2, 2, before=HOOK, **{**flags, "save": None, "load": None})
    assert facts(tmp_path / "c", 2) == facts(tmp_path / "whole", 2)


@pytest.mark.parametrize(
    "flags", [{"edit_strategy": "ddp", "edit_sync_interval": 128}, {"edit_warmup_steps": 9}]
)
def test_warmup_after_local_training_is_refused(tmp_path: Path, flags: Flags) -> None:
    """Gradients of different parameters must never be averaged: exit 2, one line."""
    saves = tmp_path / "saves"
    run_edit(
        tmp_path / "a",
        2,
        2,
        save=saves,
        save_interval=5,
        exit_interval=5,
        train_iters=9,
    )
    run = run_edit(
        tmp_path / "b", 2, 2, before="tests.host.spy:shorten_grace", load=saves,
        train_iters=9, check=False, **flags,
    )  # fmt: skip
    assert [rank.returncode for rank in run.result.ranks] == [2, 2]
    lines = [x for r in run.result.ranks for x in r.stderr.splitlines() if "megatron_edit:" in x]
    assert len(lines) == 1 and ("begun rounds" in lines[0] or "train locally" in lines[0])


@pytest.mark.system
def test_aedit_resume_with_real_clock_loses_no_sample(tmp_path: Path) -> None:
    """A-EDiT with the real clock, stopped and resumed: no sample is lost, and digests are equal."""
    flags: Flags = {**AEDIT, "edit_sync_seconds": 0.4, "train_iters": 60, "global_batch_size": 8,
                    "save": tmp_path / "saves", "load": tmp_path / "saves", "save_interval": 1000,
                    "pipeline_model_parallel_size": 2, "exit_signal_handler": True}  # fmt: skip
    runs = []
    for name, hooks in (("a", "slow,signal_replica_1"), ("b", "slow")):
        env = {**STOP, "SPY_HOOKS": hooks}
        runs.append(run_edit(tmp_path / name, 4, 2, before=HOOK, env=env, **flags))
    both = consumed(tmp_path / "a") + consumed(tmp_path / "b")
    # Both ends of the pipeline read the same samples.
    assert sorted(both) == sorted(2 * list(range(60 * 8)))
    assert runs[1].digests(0) == runs[1].digests(1) and runs[1].digests(0)


def test_checkpoints_from_stock_to_edit_and_back(tmp_path: Path) -> None:
    """EDiT starts from stock Megatron's checkpoint with its parameters as anchor, and stock
    Megatron loads EDiT's checkpoint. Loss, samples and schedule continue."""
    stock, edit = tmp_path / "stock", tmp_path / "edit"
    flags: Flags = {"train_iters": 24, "lr_decay_style": "cosine", "global_batch_size": 8}
    save = {"save_interval": 8, "exit_interval": 8}
    one = run_stock(tmp_path / "a", 2, save=stock, **save, **flags)
    two = run_edit(
        tmp_path / "b", 2, 2, load=stock, save=edit, save_interval=16, exit_interval=16,
        edit_sync_interval=4, **flags,
    )  # fmt: skip
    assert "warm-up is over after step 8" in two.result.ranks[0].stdout
    assert [line["iteration"] for line in two.syncs] == [10, 14]  # counted from the warm-up's end
    three = train(tiny_gpt(load=edit, **flags), 2)
    whole = run_stock(tmp_path / "whole", 2, **flags)
    losses = one.losses | two.result.losses | three.losses
    assert sorted(losses) == list(range(1, 25))
    lr = one.lr | two.result.lr | three.lr
    assert lr == pytest.approx(whole.lr)
    assert three.consumed_samples[24] == 24 * 8
    for step, loss in losses.items():
        assert loss == pytest.approx(whole.losses[step], rel=0.05)


RESHAPES: dict[str, tuple[int, Flags, int, Flags]] = {
    # The micro-batches of a replica are the same: 1 sample on each of 2 ranks, or 2 on one.
    "m2-to-m1": (2, {"micro_batch_size": 1}, 1, {"micro_batch_size": 2}),
    "tp2-to-tp1": (2, {"tensor_model_parallel_size": 2}, 1, {}),
    "pp2-to-tp2": (2, {"pipeline_model_parallel_size": 2}, 2, {"tensor_model_parallel_size": 2}),
    "one-to-pp2": (1, {}, 2, {"pipeline_model_parallel_size": 2}),
}


@pytest.mark.parametrize(
    "reshape", ["tp2-to-tp1", *(pytest.param(x, marks=pytest.mark.full) for x in RESHAPES)]
)
@pytest.mark.parametrize(
    "step",
    [pytest.param(5, id="at-a-sync", marks=pytest.mark.system), pytest.param(7, id="in-mid-round")],
)
def test_resume_in_other_layout_matches_norms(tmp_path: Path, reshape: str, step: int) -> None:
    """Momentum and anchor are loaded into other shards: later norms are the same."""
    old_ranks, old, new_ranks, new = RESHAPES[reshape]
    flags: Flags = {"train_iters": 12, "dist_ckpt_optim_fully_reshardable": True, "swiglu": True,
                    "lr": 1e-4}  # fmt: skip
    whole = cached_run(run_edit, 2 * old_ranks, 2, save_interval=1, **flags, **old)
    resumed = run_edit(
        tmp_path / "b", 2 * new_ranks, 2, load=whole.folder / "saves", ckpt_step=step,
        **flags, **new,
    )  # fmt: skip
    before = {line["round"]: line for line in whole.syncs}
    assert len(resumed.syncs) >= 2
    for line in resumed.syncs:
        for mine, theirs in zip(line["norms"], before[line["round"]]["norms"], strict=True):
            assert mine == pytest.approx(theirs, rel=2e-3)
        theirs = before[line["round"]]["update_norm"]
        assert line["update_norm"] == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("tensor", [2, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "wire",
    [{"edit_sync_dtype": "int8"}, pytest.param({"edit_strategy": "sparse-loco"},
                                               marks=pytest.mark.system)],
    ids=["int8", "sparse-loco"],
)  # fmt: skip
def test_residuals_resume_in_other_layout(tmp_path: Path, tensor: int, wire: Flags) -> None:
    """Copies of a parameter that had no residual of their own take that of the first copy."""
    saves = tmp_path / "saves"
    flags: Flags = {"train_iters": 12, "lr": 1e-4, **wire}
    reshapes: Flags = {"dist_ckpt_optim_fully_reshardable": True}
    new: Flags = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": 2 // tensor}
    whole = run_edit(
        tmp_path / "a", 2, 2, save=saves, save_interval=7, **flags, **reshapes
    )  # fmt: skip
    resumed = run_edit(
        tmp_path / "b", 4, 2, load=saves, ckpt_step=7, **flags, **reshapes, **new
    )  # fmt: skip
    before = {line["round"]: line["norms"] for line in whole.syncs}
    assert len(resumed.syncs) >= 2
    for line in resumed.syncs:
        for mine, theirs in zip(line["norms"], before[line["round"]], strict=True):
            assert mine == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize(
    "step",
    [pytest.param(5, id="at-a-sync", marks=pytest.mark.system), pytest.param(7, id="in-mid-round")],
)
def test_asynchronous_save_resumes_exactly(tmp_path: Path, step: int) -> None:
    """Another process writes while training continues; the saved state is that at the save."""
    saves = tmp_path / "saves"
    flags: Flags = {"train_iters": 12, "edit_offload": True, "edit_sync_mode": "overlap", **GATHER}
    run_edit(
        tmp_path / "a", 4, 2, before=HOOK, save=saves, save_interval=step,
        async_save=True, use_persistent_ckpt_worker=True, async_strategy="mcore", **flags,
    )  # fmt: skip
    run_edit(tmp_path / "b", 4, 2, before=HOOK, load=saves, ckpt_step=step, **flags)
    assert_continues(tmp_path / "a", tmp_path / "b", step, 4)


def test_inspect_prints_checkpoint_contents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints round, replicas and digest checks, and refuses a damaged checkpoint."""
    saves = tmp_path / "saves"
    run_edit(tmp_path / "a", 2, 2, save=saves, save_interval=7, train_iters=8)
    assert main(["inspect", str(saves), "--ckpt-step", "7", "--verify"]) == 0
    text = capsys.readouterr().out
    for part in ("iteration 7, 56 samples, in round 2", "2 replicas x 1 ranks, form all",
                 "momentum and anchor", "complete: yes", "all read and equal",
                 "embedding, layer.1, layer.2, final", "  replica  step  in"):  # fmt: skip
        assert part in text
    assert main(["inspect", str(saves / "iter_0000007"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["round"] == 1
    victim = next((saves / "iter_0000007/edit/outer").glob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-1])
    assert main(["inspect", str(saves), "--ckpt-step", "7"]) == 2
    assert str(victim) in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 2


@pytest.mark.system
def test_pretrained_checkpoint_is_used_at_first_start_only(tmp_path: Path) -> None:
    """The same command resumes from `--load`. Would catch a restart from the pretrained one."""
    base, saves = tmp_path / "base", tmp_path / "saves"
    run_edit(tmp_path / "a", 1, 1, save=base, save_interval=4, train_iters=4)
    flags: Flags = {"save": saves, "load": saves, "save_interval": 4, "pretrained_checkpoint": base}
    run_edit(tmp_path / "b", 2, 2, before=HOOK, exit_interval=4, train_iters=12, **flags)
    run_edit(tmp_path / "c", 2, 2, before=HOOK, train_iters=12, **flags)
    whole = flags | {"save": tmp_path / "whole", "load": tmp_path / "whole"}
    run_edit(tmp_path / "d", 2, 2, before=HOOK, train_iters=12, **whole)
    assert_continues(tmp_path / "d", tmp_path / "c", 4, 2)


@pytest.mark.system
def test_aedit_saves_at_switch_and_retains_checkpoints(tmp_path: Path) -> None:
    """Evaluated in warm-up, saved at the switch and at the first syncs beyond multiples of 5, of
    which the first beyond multiples of 10 are retained.

    Would catch a save with the iteration of that evaluation, and a retention that keeps none.
    """
    saves = tmp_path / "saves"
    flags: Flags = {"edit_warmup_steps": 4, "eval_interval": 3, "eval_iters": 1, "save": saves}
    run_clocked(tmp_path / "a", "", save_interval=4, exit_interval=4, **flags)
    assert newest(saves) == 4 and manifest(saves, 4)["replicas"][0]["step"] == 4
    flags["save"] = saves = tmp_path / "more"
    run = run_clocked(tmp_path / "b", "", save_interval=5, save_retain_interval=10, **flags)
    kept = sorted(int(path.name[5:]) for path in saves.glob("iter_*"))
    assert [k // 10 for k in kept] == [1, 2, 4] or [k // 10 for k in kept] == [1, 2, 3, 4]
    assert kept[-1] == 40 and len(run.syncs) > 3


def test_log_progress_is_written_by_one_replica(tmp_path: Path) -> None:
    """With --log-progress one replica writes the log, and finds its own lines at each save."""
    saves = tmp_path / "saves"
    run_edit(
        tmp_path / "a",
        4,
        2,
        save=saves,
        save_interval=3,
        train_iters=6,
        log_progress=True,
    )
    lines = (saves / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[3] for line in lines].count("Saved checkpoint") == 2
    assert sum("Starting job" in line for line in lines) == 1
