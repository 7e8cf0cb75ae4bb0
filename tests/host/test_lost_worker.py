"""The process that writes asynchronous saves is killed or stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Flags
from tests.host.runs import cached_run, run_edit
from tests.host.test_checkpoints import newest
from tests.host.test_full_disk import ASYNC
from tests.host.test_resume import DROPOUT, HOOK, facts

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
