"""Checkpoints of an elastic run are loaded by runs without a hub, by stock Megatron, and by
replicas that return.

Needs torch 2.14. Would catch state that only another elastic run can read, samples that are
repeated or left out after the load, a schedule that begins elsewhere, and a replica that cannot
copy the state of the others once it has loaded one.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import Flags, tiny_gpt, train
from tests.harness.elastic_run import ElasticRun, elastic_run
from tests.harness.torch_groups import HAS_GROUPS
from tests.host.layouts import LAYOUTS
from tests.host.runs import EditRun, run_edit, run_stock
from tests.host.test_elastic import consumed
from tests.host.test_hub_runs import digests_of

pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
BATCH, LAST = 12, 40
# Residuals of these types are not in checkpoints of a run with a hub.
WIRES: Flags = {"edit_sync_dtype": "int8"}
STOCK: Flags = {"train_iters": LAST, "global_batch_size": BATCH, "lr_decay_style": "cosine"}
FLAGS: Flags = {**STOCK, "edit_warmup_steps": 0}


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
    """What the two replicas that remain of three have saved, in the middle of the training, where
    not all units were at the anchor and the exchange of some was under way."""
    folder = tmp_path_factory.mktemp("elastic")
    saves = folder / "saves"
    # In three steps two replicas consume two global batches, and three replicas three.
    flags = {**FLAGS, **WIRES, "save": saves, "save_interval": 100, "exit_interval": 20,
             "edit_sync_interval": 6, "edit_fragments": 2, "edit_delay_steps": 1}  # fmt: skip
    with elastic_run(folder, 3, flags=flags, start="abc") as run:
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
        tmp_path_factory.mktemp("resumed"), 2, 2, before="tests.host.spy_state:record_all",
        load=saved.folder, edit_sync_interval=4, **WIRES, **FLAGS,
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
    found, whole = train(tiny_gpt(load=saved.folder, **STOCK), 1), run_stock(tmp_path, 1, **STOCK)
    assert sorted(found.losses) == list(range(saved.iteration + 1, LAST + 1))
    first = next(line for line in resumed.lines("loss.jsonl") if "loss" in line)
    assert first["iteration"] == saved.iteration + 1
    assert found.losses[saved.iteration + 1] == pytest.approx(first["loss"], rel=1e-4)
    assert found.consumed_samples[LAST] == LAST * BATCH
    assert found.lr == pytest.approx({step: whole.lr[step] for step in found.lr})


OLDER, EQUAL, NEWER = "older", "equal", "newer"
TRACKER = "latest_checkpointed_iteration.txt"


def saved_iteration(saves: Path) -> int:
    """The iteration of the newest checkpoint; 0 without one."""
    path = saves / TRACKER
    return int(path.read_text()) if path.exists() else 0


def start_both(run: ElasticRun, **flags: Any) -> None:
    """Start `a`, which becomes the leader, and `b`."""
    count = len(run.events("join"))
    run.start("a", **flags)
    run.wait_for(lambda: len(run.events("join")) > count)
    run.start("b", **flags)


def kill_both(run: ElasticRun) -> None:
    """Kill `a` and `b`, and wait until the hub has noticed it."""
    for name in "ab":
        run.signal(name, signal.SIGKILL)
    run.wait_for(lambda: len(run.events("leave")) == 2, 100)


def check_return(run: ElasticRun, name: str, members: str, **flags: Any) -> None:
    """Start a replica while others wait or train: it takes their state, with their step count."""
    (counter := run.spy_dir(name) / "first-counter.txt").unlink(missing_ok=True)
    earlier = len(run.events("commit"))
    run.start(name, **flags)
    with_it = run.wait_for(
        lambda: [x for x in run.events("commit")[earlier:] if x["members"] == list(members)]
    )
    run.wait_for(counter.exists)
    first = 4 * with_it[0]["round"]  # steps of the donor before the round of the copy
    assert first <= float(counter.read_text()) <= first + 4
    run.wait_for_commits(len(run.events("commit")) + 2)


@pytest.mark.parametrize(
    ("age", "layout"),
    [
        (OLDER, "plain"),
        (EQUAL, "tp2"),
        (NEWER, "m2"),
        *(pytest.param(*case, marks=pytest.mark.system)
          for case in ((EQUAL, "plain"), (NEWER, "plain"), (OLDER, "m2"), (OLDER, "tp2"))),
    ],
)  # fmt: skip
def test_killed_replica_returns_with_a_checkpoint(tmp_path: Path, age: str, layout: str) -> None:
    """Of an older state than the last commit, of that commit, or of a later one, which is void, as
    all were lost and have begun again before it. The donor has loaded none, or that older one.
    Then a third replica without a checkpoint joins."""
    ranks, more = LAYOUTS[layout]
    saves, first = tmp_path / "saves", 4
    interval = 1 if age == EQUAL else first
    flags = {"train_iters": 5000, "global_batch_size": 8, "save_interval": interval,
             "edit_warmup_steps": 0, **more}  # fmt: skip
    with elastic_run(
        tmp_path / "run", 2, ranks=ranks, minimum=2, flags=flags,
        before="tests.host.spy_state:record_moments",
    ) as run:  # fmt: skip
        start_both(run, save=saves)
        if age == NEWER:
            run.wait_for(lambda: saved_iteration(saves) >= 5 * first)
            kill_both(run)
            start_both(run, load=saves, ckpt_step=first)
            run.wait_for(lambda: len(run.events("open")) == 2)
        run.wait_for_commits(len(run.events("commit")) + 2)
        run.signal("b", signal.SIGKILL)
        run.wait_for(lambda: "a: waiting" in run.ask_hub("status"), 30)
        last = run.events("commit")[-1]["samples"] // 8
        loaded = {OLDER: first, EQUAL: last, NEWER: saved_iteration(saves)}[age]
        assert (loaded > last) is (age == NEWER) and (loaded < last) is (age == OLDER)
        check_return(run, "b", "ab", load=saves, ckpt_step=loaded)
        check_return(run, "c", "abc")
        run.ask_hub("stop")
        run.finish("abc")
        assert f"at iteration {loaded}" in run.starts["b"][-1].log.read_text()
        assert digests_of(run, "a") == digests_of(run, "b") == digests_of(run, "c")


@pytest.mark.parametrize("layout", ["plain", pytest.param("tp2", marks=pytest.mark.system)])
def test_all_replicas_are_lost_and_return(tmp_path: Path, layout: str) -> None:
    """With the same command, which has --save and --load, and then one of them is lost again. The
    donor has loaded an older checkpoint than the one that copies its state, or none."""
    ranks, more = LAYOUTS[layout]
    saves = tmp_path / "saves"
    flags = {"train_iters": 5000, "global_batch_size": 8, "save": saves, "load": saves,
             "save_interval": 10, "edit_warmup_steps": 0, **more}  # fmt: skip
    with elastic_run(
        tmp_path, 2, ranks=ranks, flags=flags, before="tests.host.spy_state:record_moments"
    ) as run:
        start_both(run)
        run.wait_for(lambda: saved_iteration(saves) >= 20)
        kill_both(run)
        before = saved_iteration(saves)
        start_both(run)
        run.wait_for(lambda: saved_iteration(saves) > before)
        run.signal("b", signal.SIGKILL)
        run.wait_for(lambda: run.events("commit")[-1]["members"] == ["a"])
        check_return(run, "b", "ab")
        run.ask_hub("stop")
        run.finish("ab")
        assert digests_of(run, "a") == digests_of(run, "b")
