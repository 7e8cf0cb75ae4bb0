"""Warm-up and final phase of an elastic run: rounds of one step, in which replicas may be lost.

Needs torch 2.14. Would catch: a loss in either of them that ends the run, a step that is not
averaged, a round that goes on in the final phase, and a replica that returns in a phase with
another rate, or in a round of another length.
"""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.elastic_run import ElasticRun, elastic_run
from tests.harness.torch_groups import HAS_GROUPS
from tests.host.layouts import LAYOUTS
from tests.host.runs import run_edit
from tests.host.spy import read_records
from tests.host.test_hub_runs import (
    RECORD,
    TRAINS_ON,
    digests_of,
    losses_of,
)

pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
# Rounds of one step without a penalty whose outer step is the average: local SGD at every step.
AVERAGES: dict[str, Any] = {
    "edit_warmup_steps": 0, "edit_sync_interval": 1, "edit_outer_lr": 1.0,
    "edit_outer_momentum": 0.0, "edit_no_anomaly": True, "edit_no_weighting": True,
    "edit_no_clip": True,
}  # fmt: skip
TIMED: dict[str, Any] = {
    "edit_strategy": "a-edit", "edit_sync_interval": None, "edit_sync_seconds": 0.5,
    "edit_min_round_steps": 1,
}  # fmt: skip
PHASES = [
    {"edit_warmup_steps": 9},
    {"edit_warmup_steps": 0, "edit_final_sync_fraction": 1.0},
    {**TRAINS_ON, "edit_sync_dtype": "fp32", "edit_warmup_steps": 5,
     "edit_final_sync_fraction": 0.5},
]  # fmt: skip


def lengths(run: ElasticRun) -> list[int]:
    """The most steps of a replica in each round."""
    return [max(line["inner_steps"]) for line in run.lines("sync.jsonl")]


def has_committed(run: ElasticRun, blocks: int) -> bool:
    """Whether so many blocks are committed, of four samples each."""
    commits = run.events("commit")
    return bool(commits) and commits[-1]["samples"] // 4 > blocks


@pytest.mark.parametrize("more", PHASES, ids=["warm-up", "final phase", "both"])
@pytest.mark.parametrize("layout", ["m2", "tp2"])
def test_each_step_is_averaged(tmp_path: Path, layout: str, more: dict[str, Any]) -> None:
    """Equal to a run without a hub that averages the parameters after each step."""
    ranks, flags = LAYOUTS.get(layout, (1, {}))
    flags = {**flags, "train_iters": 9, "global_batch_size": 8, "lr_decay_style": "cosine"}
    plain = tmp_path / "plain"
    without = run_edit(
        plain, 2 * ranks, 2, before=RECORD, edit_sync_mode="blocking", **flags, **AVERAGES
    )
    finals = {record["digest"] for record in read_records(plain, 2 * ranks)}
    with elastic_run(
        tmp_path / "hub", 2, ranks=ranks, flags={**flags, **more}, before=RECORD, start="ab"
    ) as run:
        run.finish("ab")
        assert lengths(run) == [1] * 9
        assert run.check_blocks() == 18
        for number, name in enumerate("ab"):
            before = losses_of(without.lines(f"replica-{number}.jsonl"))
            assert losses_of(run.lines(f"replica-{name}.jsonl")) == before
            assert set(digests_of(run, name)) == finals


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        pytest.param("m2", {}, id="waits"),
        pytest.param("tp2", {}, id="two ranks"),
        pytest.param("m2", TRAINS_ON, id="trains on", marks=pytest.mark.full),
        pytest.param("m2", TIMED, id="timed", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_losses_in_warm_up_and_final_phase(
    tmp_path: Path, layout: str, more: dict[str, Any]
) -> None:
    """A replica is killed and returns in the warm-up, and again in the final phase; the run ends
    with each block consumed once, and with equal replicas."""
    ranks, flags = LAYOUTS.get(layout, (1, {}))
    flags = {**flags, "train_iters": 150, "global_batch_size": 12, "lr_decay_style": "cosine",
             "edit_warmup_steps": 30, "edit_final_sync_fraction": 0.5, **more}  # fmt: skip
    with elastic_run(tmp_path, 3, ranks=ranks, flags=flags, before=RECORD, start="abc") as run:
        for phase in (range(30 * 3), range(75 * 3, 150 * 3)):
            run.wait_for(partial(has_committed, run, phase.start + 9))
            run.signal("b", signal.SIGKILL)
            run.wait_for(lambda: run.events("commit")[-1]["members"] == ["a", "c"], 30)
            assert run.events("commit")[-1]["samples"] // 4 in phase, "slower than the test"
            run.start("b")
            run.wait_for(lambda: "b" in run.events("commit")[-1]["members"], 60)
            assert run.events("commit")[-1]["samples"] // 4 in phase, "slower than the test"
        run.finish("abc")
        assert run.check_blocks() == 450
        assert [line["reason"] for line in run.events("leave")][:2] == ["lost", "lost"]
        assert len({d for n in "abc" for d in digests_of(run, n)[:1]}) == 1
        for line in run.events("commit"):
            steps = [sum(count for _, count in runs) for runs in line["blocks"].values()]
            consumed, length = line["samples"] // 4 - sum(steps), max(steps)
            if consumed < 30 * 3 or consumed >= 75 * 3:
                assert length == 1, line["round"]
            elif not more:
                assert length == min(4, -(-(225 - consumed) // len(line["members"])))
        text = run.tails(1_000_000)
        assert "warm-up: the replicas average their parameters after each step" in text
        assert "warm-up is over after round" in text and "final phase after round" in text


@pytest.mark.parametrize("nominal", [2, 4])
@pytest.mark.parametrize("end", [3, 14, 16, 34])
def test_phases_go_on_where_a_checkpoint_is_loaded(tmp_path: Path, end: int, nominal: int) -> None:
    """Of a run without a hub, in its warm-up, in the middle of a round, at a sync and near the
    final phase; then with the same number of replicas, or another. Would catch a warm-up that
    begins again, a final phase that never comes, and a first round that is never committed."""
    saves = tmp_path / "saves"
    flags: dict[str, Any] = {"train_iters": 40, "global_batch_size": 8, "edit_warmup_steps": 6,
                             "edit_sync_interval": 5}  # fmt: skip
    run_edit(tmp_path / "plain", 2, 2, save=saves, save_interval=end, exit_interval=end, **flags)
    flags |= {"load": saves, "edit_final_sync_fraction": 0.1}
    names = "abcd"[:nominal]
    with elastic_run(tmp_path / "hub", nominal, flags=flags, start=names) as run:
        run.finish(names)
        consumed = 8 * end
        for line in run.events("commit"):
            steps = (line["samples"] - consumed) // 8
            left = 36 - consumed // 8
            expected = 1 if consumed < 8 * 6 or left <= 0 else min(5, left)
            assert steps == expected, (line["round"], consumed)
            consumed = line["samples"]
        assert consumed == 8 * 40


def test_checkpoints_of_the_phases_are_loaded_with_a_hub(tmp_path: Path) -> None:
    """One of the warm-up and one of the final phase; without a hub the former is refused, as its
    warm-up would not go on."""
    flags: dict[str, Any] = {"train_iters": 40, "global_batch_size": 8, "edit_warmup_steps": 12,
                             "edit_final_sync_fraction": 0.5}  # fmt: skip
    for end, earlier in ((6, None), (30, 6)):
        saves = tmp_path / f"saves-{end}"
        more: dict[str, Any] = {"save": saves, "save_interval": end, "exit_interval": end}
        if earlier is not None:
            more["load"] = tmp_path / f"saves-{earlier}"
        with elastic_run(tmp_path / f"to-{end}", 2, flags={**flags, **more}, start="ab") as run:
            run.finish("ab")
            assert run.events("commit")[-1]["samples"] == 8 * end
            if earlier is not None:
                counts = [max(line["inner_steps"]) for line in run.lines("sync.jsonl")]
                assert counts == [1] * 6 + [4, 4] + [1] * 10
    refused = run_edit(tmp_path / "plain", 2, 2, check=False, load=tmp_path / "saves-6", **flags)
    text = refused.result.ranks[0].stderr
    assert "--edit-warmup-steps 12: the replicas of" in text and "use 6 or less" in text
    run_edit(tmp_path / "end", 2, 2, load=tmp_path / "saves-30", **flags)
