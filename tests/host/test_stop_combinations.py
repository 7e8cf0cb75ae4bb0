"""Stops during other events: a delayed sync, an asynchronous or failing save, a planned exit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import Flags
from tests.host.layouts import GATHER
from tests.host.runs import cached_run, run_edit
from tests.host.test_checkpoints import STOP, manifest, newest
from tests.host.test_resume import DROPOUT, HOOK, facts

pytestmark = pytest.mark.timeout(300)
ASYNC = {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}
LATE: dict[str, dict[str, Any]] = {
    "delay": {"edit_delay_steps": 6},
    "fragments": {"edit_fragments": 2, "edit_delay_steps": 3, "edit_mix": 0.25, **GATHER},
    "co2": {"edit_strategy": "co2", "edit_sync_dtype": "int8"},
    "async": ASYNC,
    "async-delay": {**ASYNC, "edit_delay_steps": 6, "edit_sync_dtype": "int4"},
}
SYSTEM = pytest.mark.system
CORE: dict[tuple[str, str], list[pytest.MarkDecorator]] = {
    ("9", "async"): [],
    **{case: [SYSTEM] for case in (("9", "fragments"), ("14", "fragments"), ("14", "async"))},
}


@pytest.mark.parametrize(
    ("step", "name"),
    [
        pytest.param(step, name, marks=CORE.get((step, name), [pytest.mark.full]))
        for step in ("9", "14")
        for name in LATE
    ],
)
def test_stop_during_delayed_sync_or_async_save(tmp_path: Path, name: str, step: str) -> None:
    """Replicas stop at different steps, some before a sync lands, some after it. The resumed run
    has the result of an uninterrupted one."""
    saves = tmp_path / "saves"
    flags: Flags = {"train_iters": 30, "edit_sync_interval": 8, **DROPOUT, **LATE[name]}
    run_edit(
        tmp_path / "a", 4, 2, before=HOOK, env={**STOP, "SPY_STEP": step}, save=saves,
        save_interval=1000, exit_signal_handler=True, **flags,
    )  # fmt: skip
    kept = manifest(saves, newest(saves))
    assert kept["form"] == "all" and any(entry["inner_steps"] for entry in kept["replicas"])
    run_edit(tmp_path / "b", 4, 2, before=HOOK, load=saves, **flags)
    whole = cached_run(run_edit, 4, 2, before=HOOK, **flags)
    assert facts(tmp_path / "b", 4) == facts(whole.folder, 4)


@pytest.mark.system
@pytest.mark.parametrize("step", ["15", "16", "17"])
def test_stop_near_exit_interval(tmp_path: Path, step: str) -> None:
    """With --exit-interval, and a signal on one replica a step before, at or after it, all exit
    with 0, and the checkpoint can be loaded."""
    saves = tmp_path / "saves"
    flags: Flags = {"train_iters": 24, "edit_sync_interval": 20, **DROPOUT}
    run_edit(
        tmp_path / "a", 2, 2, before=HOOK, env={**STOP, "SPY_STEP": step}, save=saves,
        save_interval=1000, exit_signal_handler=True, exit_interval=16, **flags,
    )  # fmt: skip
    run_edit(tmp_path / "b", 2, 2, before=HOOK, load=saves, **flags)
    whole = cached_run(run_edit, 2, 2, before=HOOK, **flags)
    assert facts(tmp_path / "b", 2) == facts(whole.folder, 2)


@pytest.mark.system
def test_stop_among_skipped_iterations(tmp_path: Path) -> None:
    """--iterations-to-skip between the steps at which the replicas stop: they save one checkpoint,
    and each resumes from its own step. Would catch two incomplete checkpoints."""
    saves = tmp_path / "saves"
    flags: Flags = {"train_iters": 40, "edit_sync_interval": 20, "save": saves, "load": saves,
                    "save_interval": 1000, "iterations_to_skip": [8, 9, 10, 11, 12, 13],
                    **DROPOUT}  # fmt: skip
    env = {**STOP, "SPY_STEP": "7", "SPY_SLEEP": "[0, 0.3]"}
    run_edit(tmp_path / "a", 2, 2, before=HOOK, env=env, exit_signal_handler=True, **flags)
    first, second = manifest(saves, newest(saves))["replicas"]
    assert first["step"] > 7 >= second["step"]
    run_edit(tmp_path / "b", 2, 2, before=HOOK, **flags)
    flags["save"] = flags["load"] = tmp_path / "none"
    run_edit(tmp_path / "whole", 2, 2, before=HOOK, **flags)
    assert facts(tmp_path / "b", 2) == facts(tmp_path / "whole", 2)
