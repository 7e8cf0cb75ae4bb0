"""Saves to a full disk: the failure is reported, training continues, and two in a row end it.

Would catch: a rank that exits, or waits forever, because of a disk error on another rank; a
training that the error changes; a partial checkpoint, or the loss of an older complete one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Flags
from tests.harness.disk import mounted
from tests.host.runs import EditRun, cached_run, run_edit
from tests.host.test_checkpoints import newest
from tests.host.test_resume import DROPOUT, HOOK, assert_continues, facts

pytestmark = pytest.mark.timeout(300)
ASYNC: Flags = {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "one-rank": (2, {}),
    "two-ranks": (4, {}),
    "async": (4, ASYNC),
    "leader": (4, {"edit_inner_state": "leader", "edit_warmup_steps": 3}),
    "warm-up": (4, {"edit_warmup_steps": 9}),
    "int8": (2, {"edit_sync_dtype": "int8", "edit_delay_steps": 2}),
    "tensor": (4, {"tensor_model_parallel_size": 2}),
}
CORE = ("one-rank", "async")
CASES = [pytest.param(name, marks=[] if name in CORE else [pytest.mark.system]) for name in LAYOUTS]


def train(folder: Path, disk: Path, name: str, full: str, *, check: bool = True) -> EditRun:
    """Train twelve steps with saves after 3, 6, 9 and 12; those in `full`, from 1, find no
    space."""
    world_size, flags = LAYOUTS[name]
    return run_edit(
        folder, world_size, 2, before="tests.host.spy_faults:fill_before_saves",
        check=check, env={"SPY_DISK": str(disk), "SPY_FULL": full}, save=disk / "saves",
        save_interval=3, **{"train_iters": 12, **DROPOUT, **flags},
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_failed_save_does_not_stop_training(tmp_path: Path, name: str) -> None:
    """One line reports folder, free and needed space. No partial file remains, the run has the bits
    of an undisturbed one, and the previous checkpoint can be resumed."""
    world_size, flags = LAYOUTS[name]
    flags = {"train_iters": 12, **DROPOUT, **flags}
    with mounted(tmp_path / "disk", 64 << 20) as disk:
        run = train(tmp_path / "a", disk, name, "3")
        error = run.result.ranks[0].stderr
        assert error.count("the checkpoint of iteration 9 could not be written") == 1
        assert "No space left on device" in error
        assert f"{disk / 'saves'} has " in error and "MB free, a checkpoint needs " in error
        assert "the last complete one is that of iteration 6; training goes on" in error
        assert "Traceback" not in error
        left = sorted(path.name for path in (disk / "saves").iterdir())
        assert [n for n in left if "iter_" in n and "latest" not in n] == [
            "iter_0000003", "iter_0000006", "iter_0000012"
        ]  # fmt: skip
        assert newest(disk / "saves") == 12
        whole = cached_run(run_edit, world_size, 2, before=HOOK, **flags)
        assert facts(run.folder, world_size) == facts(whole.folder, world_size)
        assert run.digests(0) == whole.digests(0)
        run_edit(
            tmp_path / "b", world_size, 2, before=HOOK, load=disk / "saves",
            ckpt_step=6, **flags,
        )  # fmt: skip
        if name != "leader":  # with it, the others take the leader's inner state
            assert_continues(whole.folder, tmp_path / "b", 6, world_size)


@pytest.mark.parametrize("name", CASES)
def test_two_failed_saves_in_a_row_end_training(tmp_path: Path, name: str) -> None:
    """All ranks exit with 1 soon, without traceback; the last complete checkpoint resumes."""
    world_size, flags = LAYOUTS[name]
    with mounted(tmp_path / "disk", 64 << 20) as disk:
        run = train(tmp_path / "a", disk, name, "2,3,4,5", check=False)
        assert [rank.returncode for rank in run.result.ranks] == [1] * world_size
        error = run.result.ranks[0].stderr
        assert error.count("could not be written (replica") >= 2
        assert "two in a row: training ends" in error
        assert "training was ended, as two checkpoints in a row could not be written" in error
        assert "Traceback" not in error
        assert newest(disk / "saves") == 3
        (disk / "filler").unlink()
        flags = {"train_iters": 12, **DROPOUT, **flags}
        run_edit(tmp_path / "b", world_size, 2, before=HOOK, load=disk / "saves", **flags)
        whole = cached_run(run_edit, world_size, 2, before=HOOK, **flags)
        if name != "leader":
            assert facts(tmp_path / "b", world_size) == facts(whole.folder, world_size)
