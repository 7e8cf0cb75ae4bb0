"""The others name a hanging replica and exit with 4; a lost writer of saves costs one save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Flags
from tests.host.runs import cached_run, run_edit
from tests.host.test_aedit import AEDIT, HOOKS, run_timed
from tests.host.test_checkpoints import newest
from tests.host.test_full_disk import ASYNC
from tests.host.test_resume import DROPOUT, HOOK, facts

TRIGGERS: dict[str, Flags] = {
    "edit": {"edit_sync_interval": 20},
    "a-edit": AEDIT | {"edit_sync_seconds": 1},
}
EVALUATIONS = {"eval_interval": 10, "eval_iters": 2}
# Hook that freezes replica 1, its step, flags, and the error message of the others.
FREEZES = {
    "in-warm-up": ("freeze_replica_1", "2", {}, "replica 1 was lost in the warm-up"),
    "before-a-meeting": ("freeze_replica_1", "12", {}, "replica 1 did not reach the sync of round"),
    "in-an-evaluation": ("freeze_in_evaluation", "", EVALUATIONS,
                         "replica 1 did not reach the end of an evaluation"),
    "in-an-exchange": ("freeze_in_exchange", "", {}, "replica 1 was lost in the sync of round 1"),
}  # fmt: skip


def _tier(where: str, trigger: str) -> list[pytest.MarkDecorator]:
    if trigger == "edit":
        return [] if where in ("before-a-meeting", "in-an-exchange") else [pytest.mark.system]
    return [pytest.mark.system if where == "before-a-meeting" else pytest.mark.full]


@pytest.mark.parametrize(
    ("where", "trigger"),
    [
        pytest.param(where, trigger, marks=_tier(where, trigger))
        for where in FREEZES
        for trigger in TRIGGERS
    ],
)
def test_hanging_replica_is_named(tmp_path: Path, where: str, trigger: str) -> None:
    """At any point of training. Would catch a message without the replica, and a survivor that does
    not exit, for example because its own collective is still pending."""
    hook, step, flags, message = FREEZES[where]
    run = run_edit(
        tmp_path, 3, 3, before=HOOKS, check=False, train_iters=500, global_batch_size=6,
        env={"SPY_HOOKS": f"slow,{hook}", "SPY_SLEEP": "[0.01, 0.01, 0.01]", "SPY_STEP": step},
        edit_timeout_seconds=4, **{**TRIGGERS[trigger], **flags},
    )  # fmt: skip
    codes = [rank.returncode for rank in run.result.ranks]
    assert codes == [4, -9, 4]
    for survivor in (0, 2):
        text = run.result.ranks[survivor].stderr
        text += (tmp_path / f"replica-{survivor}.log").read_text() if survivor else ""
        assert message in text, text


@pytest.mark.system
@pytest.mark.parametrize("where", ["before-a-meeting", "in-an-exchange"])
def test_every_rank_of_a_replica_names_the_hanging_one(tmp_path: Path, where: str) -> None:
    """Two ranks in each of two replicas. Would catch: the ranks without a connection of their own,
    to which rank 0 relays heartbeats, blame none or their own replica."""
    hook, step, flags, message = FREEZES[where]
    run = run_edit(
        tmp_path, 4, 2, before=HOOKS, check=False, train_iters=500, global_batch_size=8,
        env={"SPY_HOOKS": f"slow,{hook}", "SPY_SLEEP": "[0.01, 0.01]", "SPY_STEP": step},
        edit_timeout_seconds=4, edit_sync_interval=20, grace=15, **flags,
    )  # fmt: skip
    assert [rank.returncode for rank in run.result.ranks] == [4, 4, -9, -9]
    for rank in run.result.ranks[:2]:
        assert message in rank.stderr, rank.stderr


@pytest.mark.system
def test_replica_that_times_out_first_is_not_blamed(tmp_path: Path) -> None:
    """Replica 1 hangs, but its heartbeat thread does not. Replica 0 reaches the meeting and times
    out seconds before replica 2, whose connection to replica 0 then breaks."""
    run = run_edit(
        tmp_path, 3, 3, before=HOOKS, check=False, train_iters=500, global_batch_size=6,
        env={"SPY_HOOKS": "slow,hang_replica_1", "SPY_SLEEP": "[0.01, 0.01, 0.15]",
             "SPY_STEP": "6"},
        edit_timeout_seconds=4, edit_sync_interval=20, grace=8,
    )  # fmt: skip
    assert [rank.returncode for rank in run.result.ranks][::2] == [4, 4]
    for text in (run.result.ranks[0].stderr, (tmp_path / "replica-2.log").read_text()):
        assert "replica 1 did not reach the sync of round 1" in text, text


@pytest.mark.system
def test_slow_evaluation_does_not_time_out(tmp_path: Path) -> None:
    """Five batches of a second each with a time-out of three seconds: each batch is progress."""
    run_timed(
        tmp_path, 2, 2, "slow,evaluate_slowly", {"SPY_SLEEP": "[0.01, 0.01]"}, train_iters=6,
        global_batch_size=4, eval_interval=4, eval_iters=5, edit_sync_seconds=30,
        edit_timeout_seconds=3,
    )  # fmt: skip


@pytest.mark.system
def test_waiting_for_slow_replica_does_not_time_out(tmp_path: Path) -> None:
    """The run is shorter than the first round: the fast replica waits longer than the time-out for
    a slow one that makes progress."""
    run = run_timed(
        tmp_path, 2, 2, "slow", {"SPY_SLEEP": "[0.01, 0.3]"}, train_iters=40, global_batch_size=4,
        edit_sync_seconds=20, edit_timeout_seconds=3,
    )  # fmt: skip
    assert run.syncs[0]["seconds"]["wait"] > 4


# ---- writers of asynchronous saves


WORDS = {
    "idle": "was killed by signal 9; the next save starts a new one",
    "between": "was killed by signal 9",
    "during": "was killed by signal 9",
    "stopped": "was stopped for 1 s and has been killed",
    "results": "the process that passes on the results of writing has ended",
}


@pytest.mark.parametrize(
    "case", ["during", *(pytest.param(x, marks=pytest.mark.system) for x in WORDS if x != "during")]
)
def test_lost_worker_fails_one_save(tmp_path: Path, case: str) -> None:
    """Of replica 1, in the third of four saves, or none if it was idle: one line says so, training
    and the other saves go on with a new worker. Would catch a rank that waits for ever."""
    flags: Flags = {"train_iters": 12, **DROPOUT}
    run = run_edit(
        tmp_path, 2, 2, before="tests.host.spy_faults:disturb_worker", timeout=60,
        env={"SPY_RANK": "1", "SPY_CASE": case}, save=tmp_path / "saves", save_interval=3,
        **flags, **ASYNC,
    )  # fmt: skip
    error, other = (rank.stderr for rank in run.result.ranks)
    failure = "the checkpoint of iteration 9 could not be written (replica 1, rank 0: "
    assert error.count("could not be written") == error.count(failure) == (case != "idle")
    log = other + (tmp_path / "replica-1.log").read_text()
    assert WORDS[case] in (error.partition(failure)[2].splitlines() or [log])[0]
    assert "Traceback" not in error
    # Without the process that takes its results the worker ends, too, and Python prints why.
    assert log.count("Traceback") == log.count("Process-1:") <= (case == "results"), log
    assert newest(tmp_path / "saves") == 12
    assert facts(tmp_path, 2) == facts(cached_run(run_edit, 2, 2, before=HOOK, **flags).folder, 2)
