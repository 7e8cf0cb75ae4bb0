"""Checkpoints of an elastic run are loaded by runs without a hub, and by stock Megatron.

Needs torch 2.14. Would catch state that only another elastic run can read, samples that are
repeated or left out after the load, and a schedule that begins elsewhere.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness import Flags, tiny_gpt, train
from tests.harness.elastic_run import elastic_run
from tests.harness.torch_groups import HAS_GROUPS
from tests.host.runs import EditRun, run_edit, run_stock
from tests.host.test_elastic import consumed

pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
BATCH, LAST = 12, 40
FLAGS: Flags = {"train_iters": LAST, "global_batch_size": BATCH, "lr_decay_style": "cosine"}


class Saved(NamedTuple):
    """A checkpoint.

    Attributes:
        folder: of all checkpoints.
        iteration: of the newest.
        samples: that are committed there.
    """

    folder: Path
    iteration: int
    samples: int


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What the two replicas that remain of three have saved, in the middle of the training."""
    folder = tmp_path_factory.mktemp("elastic")
    saves = folder / "saves"
    # In three steps two replicas consume two global batches, and three replicas three.
    flags = {**FLAGS, "save": saves, "save_interval": 100, "exit_interval": 20,
             "edit_sync_interval": 3}  # fmt: skip
    with elastic_run(folder, 3, flags=flags) as run:
        for name in "abc":
            run.start(name)
        run.wait_for_commits(1)
        run.signal("c", signal.SIGKILL)
        for name in "ab":
            assert run.codes(name) == [0], run.tails()
        commit = run.events("commit")[-1]
    assert commit["members"] == ["a", "b"]
    iteration = int((saves / "latest_checkpointed_iteration.txt").read_text())
    assert iteration * BATCH == commit["samples"] < LAST * BATCH
    return Saved(saves, iteration, commit["samples"])


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, saved: Saved) -> EditRun:
    """A run of two replicas without a hub, from there to the end."""
    return run_edit(
        tmp_path_factory.mktemp("resumed"), 2, 2, before="tests.host.spy_resume:record_all",
        load=saved.folder, edit_sync_interval=4, **FLAGS,
    )  # fmt: skip


def test_run_without_hub_loads_an_elastic_checkpoint(saved: Saved, resumed: EditRun) -> None:
    """Each sample that was not committed is consumed once, also those of the lost replica."""
    samples = consumed(resumed.folder)
    assert len(samples) == len(set(samples)) == LAST * BATCH - saved.samples
    assert max(samples) == LAST * BATCH - 1
    iterations = [line["iteration"] for line in resumed.lines("replica-0.jsonl") if "loss" in line]
    assert iterations == list(range(saved.iteration + 1, LAST + 1))
    assert resumed.digests(0) == resumed.digests(1) and resumed.digests(0)


def test_stock_megatron_loads_an_elastic_checkpoint(
    tmp_path: Path, saved: Saved, resumed: EditRun
) -> None:
    """Its first step has the loss of the run without a hub; the schedule is that of a whole run."""
    found, whole = train(tiny_gpt(load=saved.folder, **FLAGS), 1), run_stock(tmp_path, 1, **FLAGS)
    assert sorted(found.losses) == list(range(saved.iteration + 1, LAST + 1))
    first = next(line for line in resumed.lines("loss.jsonl") if "loss" in line)
    assert first["iteration"] == saved.iteration + 1
    assert found.losses[saved.iteration + 1] == pytest.approx(first["loss"], rel=1e-4)
    assert found.consumed_samples[LAST] == LAST * BATCH
    assert found.lr == pytest.approx({step: whole.lr[step] for step in found.lr})
