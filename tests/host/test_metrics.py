"""Scalars in Megatron's own writers have the values of the event files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Flags
from tests.harness.scalars import documented_scalars
from tests.host.runs import EditRun, run_edit
from tests.host.spy_wandb import ARTIFACTS, CALLS

pytest.importorskip("tensorboard")
Scalars = dict[str, dict[int, float]]


def scalars_of(folder: Path) -> Scalars:
    """Read every scalar of the TensorBoard files in a folder, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: {event.step: event.value for event in accumulator.Scalars(tag)}
        for tag in accumulator.Tags()["scalars"]
    }


def pattern(name: str) -> str:
    """Convert a documented name to a regular expression."""
    return re.escape(name).replace("<r>", r"\d+").replace("<unit>", r"[\w.]+")


def check(run: EditRun, found: Scalars) -> None:
    """Check that our scalars are documented and have the values of the event files."""
    ours = {name for name in found if name.startswith("edit/") and "vs samples" not in name}
    for name in ours:
        assert any(re.fullmatch(pattern(tag), name) for tag in documented_scalars()), name
    assert run.syncs
    for sync in run.syncs:
        at = {name: found[name].get(sync["iteration"]) for name in ours}
        norms = [x for row in sync["norms"] for x in row]
        assert at["edit/round"] == sync["round"]
        assert at["edit/pseudo-gradient-norm/mean"] == pytest.approx(mean(norms), rel=1e-5)
        assert at["edit/pseudo-gradient-norm/max"] == pytest.approx(max(norms), rel=1e-5)
        entropies = [-sum(w * math.log(w) for w in row if w) for row in sync["weights"]]
        assert at["edit/weight-entropy"] == pytest.approx(mean(entropies), rel=1e-4)
        effective = sync["effective_replicas"]
        assert at["edit/effective-replicas/min"] == pytest.approx(min(effective), rel=1e-5)
        assert at["edit/clip-factor/mean"] == pytest.approx(mean(sync["clip"]), rel=1e-5)
        assert at["edit/bytes-between-replicas"] == sync["wire_bytes"]
        for name, seconds in sync["seconds"].items():
            assert at[f"edit/seconds/{name}"] == pytest.approx(seconds, abs=2e-6, rel=1e-5)
        column = [row[1] for row in sync["norms"]]
        assert at["edit/replica-1/pseudo-gradient-norm"] == pytest.approx(mean(column), rel=1e-5)
        by_samples = found["edit/clip-factor/mean vs samples"]
        assert sum(sync["samples"]) in by_samples
    losses = {line["iteration"]: line["loss"] for line in run.lines("loss.jsonl")}
    assert found["edit/lm-loss"] == pytest.approx(losses, rel=1e-5)


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


@pytest.mark.parametrize(
    "flags",
    [
        {"edit_log_units_to_tensorboard": True},
        pytest.param({"edit_delay_steps": 1, "edit_fragments": 2}, marks=pytest.mark.full),
        pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param(
            {"edit_strategy": "a-edit", "edit_sync_seconds": 0.1, "edit_min_round_steps": 4,
             "edit_warmup_steps": 2, "edit_sync_interval": None},
            marks=pytest.mark.full,
        ),
    ],
    ids=["edit", "delay", "stages", "a-edit"],
)  # fmt: skip
def test_tensorboard_scalars_match_event_files(tmp_path: Path, flags: Flags) -> None:
    """Would catch a scalar at the wrong iteration, values of one unit or replica used for all, a
    second replica that writes into the same folder, and a last sync that is never flushed."""
    board = tmp_path / "board"
    ranks = 4 if "pipeline_model_parallel_size" in flags else 2
    run = run_edit(tmp_path, ranks, 2, tensorboard_dir=board, train_iters=12, **flags)
    found = scalars_of(board)
    check(run, found)
    assert len(list(board.iterdir())) == 1, "more than one replica writes"
    assert "lm loss" in found and "grad-norm" in found
    units = {f"edit/unit-{unit}/clip-factor" for unit in run.syncs[0]["units"]}
    assert (units <= set(found)) == ("edit_log_units_to_tensorboard" in flags)
    last = run.syncs[-1]["iteration"]
    assert found["edit/tokens-per-second"][last] > 0
    if "edit_log_units_to_tensorboard" in flags:  # every documented name is in use
        for tag in documented_scalars():
            is_late = "z-score" in tag  # detectors and loss histories are not armed yet
            seen = any(re.fullmatch(pattern(tag), name) for name in found)
            assert seen or is_late, tag


@pytest.mark.parametrize("delay", [0, pytest.param(2, marks=pytest.mark.full)])
def test_wandb_receives_every_sync(tmp_path: Path, delay: int) -> None:
    """With a stub of `wandb` that refuses decreasing steps, which the real module drops."""
    run = run_edit(
        tmp_path, 2, 2, train_iters=12, before="tests.host.spy_wandb:stub",
        env={"SPY_WANDB": str(tmp_path)}, tensorboard_dir=tmp_path / "board",
        wandb_project="p", wandb_exp_name="e", wandb_save_dir=tmp_path / "wandb",
        edit_delay_steps=delay,
    )  # fmt: skip
    calls: list[tuple[dict[str, Any], int]] = json.loads((tmp_path / CALLS).read_text())
    syncs = [values for values, _ in calls if "edit/round" in values]
    assert [values["edit/iteration"] for values in syncs] == [s["iteration"] for s in run.syncs]
    assert [values["edit/bytes-between-replicas"] for values in syncs] == [
        s["wire_bytes"] for s in run.syncs
    ]
    steps = [step for _, step in calls]
    assert steps == sorted(steps)
    assert any("edit/lm-loss" in values for values, _ in calls)
    assert any("lm loss" in values for values, _ in calls), "Megatron's own scalars are missing"


@pytest.mark.system
@pytest.mark.parametrize("is_async", [True, False])
def test_wandb_receives_checkpoint_names(tmp_path: Path, is_async: bool) -> None:
    """They have their final names. Would catch the hidden folder to which a save is written."""
    saves = tmp_path / "saves"
    asynchronous: Flags = {
        "async_save": True,
        "use_persistent_ckpt_worker": True,
        "async_strategy": "mcore",
    }
    run_edit(
        tmp_path, 4, 2, train_iters=9, save=saves, save_interval=4,
        before="tests.host.spy_wandb:stub", env={"SPY_WANDB": str(tmp_path)},
        tensorboard_dir=tmp_path / "board", wandb_project="p", wandb_exp_name="e",
        wandb_save_dir=tmp_path / "wandb", **(asynchronous if is_async else {}),
    )  # fmt: skip
    # Megatron ends wandb before it waits for the last asynchronous save.
    names = [f"iter_{iteration:07d}" for iteration in ((4, 8) if is_async else (4, 8, 9))]
    artifacts = json.loads((tmp_path / ARTIFACTS).read_text())
    assert artifacts == [[f"file://{saves / name}", name] for name in names]


@pytest.mark.full
@pytest.mark.parametrize("is_sharded", [True, False])
def test_bytes_per_step_inside_a_replica(tmp_path: Path, is_sharded: bool) -> None:
    """In fp32 a reduce-scatter and a gather move as much as an all-reduce: 8 bytes per parameter
    between two ranks. Would catch shards that are counted twice, and a wrong group."""
    run = run_edit(tmp_path, 4, 2, train_iters=5, use_distributed_optimizer=is_sharded)
    console = "".join(rank.stdout for rank in run.result.ranks)
    found = re.search(r"number of parameters on .*rank \([0, ]+\): (\d+)", console)
    assert found is not None
    training = json.loads((tmp_path / "run.json").read_text())["training"]
    assert training["inside_bytes_per_step"] == 8 * int(found[1])
    assert training["global_batch_size"] == 8 and training["seq_length"] == 32
