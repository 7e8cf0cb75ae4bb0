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
    "between": "was killed by signal 9",
    "during": "was killed by signal 9",
    "stopped": "was stopped for 1 s and has been killed",
    "results": "the process that passes on the results of writing has ended",
}


@pytest.mark.parametrize("case", WORDS)
def test_lost_worker_fails_one_save(tmp_path: Path, case: str) -> None:
    """Of replica 1, in the third of four saves: one line says so, training and the other saves go
    on with a new worker. Would catch a rank that waits for the worker for ever."""
    flags: Flags = {"train_iters": 12, **DROPOUT}
    run = run_edit(
        tmp_path, 2, 2, before="tests.host.spy_worker:disturb_worker", timeout=60,
        env={"SPY_RANK": "1", "SPY_CASE": case}, save=tmp_path / "saves", save_interval=3,
        **flags, **ASYNC,
    )  # fmt: skip
    error = run.result.ranks[0].stderr
    failure = "the checkpoint of iteration 9 could not be written (replica 1, rank 0: "
    assert error.count(failure) == 1 and error.count("could not be written") == 1
    assert WORDS[case] in error.partition(failure)[2].splitlines()[0]
    assert "Traceback" not in error + run.result.ranks[1].stderr
    assert newest(tmp_path / "saves") == 12
    assert facts(tmp_path, 2) == facts(cached_run(run_edit, 2, 2, before=HOOK, **flags).folder, 2)
