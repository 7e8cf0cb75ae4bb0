"""A script that replaces a function after the plugin has wrapped it is found in the first steps,
and a replica that differs after the warm-up for another reason at the switch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.host.runs import run_edit


@pytest.mark.parametrize(
    ("spy", "hook", "step"),
    [("replace_optimizer_step", "optimizer.step", 1), ("replace_training_log", "training_log", 1)],
)
def test_replaced_hook_ends_training_before_the_first_sync(
    tmp_path: Path, spy: str, hook: str, step: int
) -> None:
    """Would catch replicas that train side by side without a sync, or sync without losses."""
    run = run_edit(tmp_path, 2, 2, before=f"tests.host.spy_hooks:{spy}", check=False)
    assert [rank.returncode for rank in run.result.ranks] == [2, 2]
    message = f"the hook {hook}: was not called by Megatron's training loop in step {step}"
    assert message in run.result.ranks[0].stderr
    assert not (tmp_path / "sync.jsonl").exists()


def test_difference_beyond_rounding_ends_training_at_the_switch(tmp_path: Path) -> None:
    """Would catch replicas that were not averaged, and are equalized with a friendly message."""
    run = run_edit(tmp_path, 2, 2, before="tests.host.spy_hooks:turn_an_update", check=False)
    assert [rank.returncode for rank in run.result.ranks] == [3, 3]
    line = run.result.ranks[0].stderr
    assert "the replicas differ after the warm-up in unit " in line
    assert "and rounding explains at most " in line
    assert not (tmp_path / "sync.jsonl").exists()
