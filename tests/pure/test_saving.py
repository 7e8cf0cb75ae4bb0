"""Saves: when they take place, in which form, and how all ranks' reports become one manifest."""

from __future__ import annotations

import dataclasses
import random
import threading
from argparse import Namespace
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_edit.checkpoint.files import FileRecord, record_of
from megatron_edit.checkpoint.folder import CheckpointFolder, manifest_path
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.constants import ALL, LEADER
from megatron_edit.errors import EditError, ReplicaLostError
from megatron_edit.host.checkpoint import choosing
from megatron_edit.host.checkpoint import replica_local as streams
from megatron_edit.host.checkpoint.async_saves import ANOTHER_RANK_FAILED
from megatron_edit.host.checkpoint.committing import (
    Committer,
    NotPermittedError,
    RankReport,
    RankSave,
    _finish,
    _is_kept,
    _key,
)
from megatron_edit.host.checkpoint.loading import LoadControl
from megatron_edit.host.checkpoint.saving import SaveControl
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.saved_state import ReplicaEntry

REPLICAS, RANKS = 2, 2


def world() -> ReplicaWorld:
    """Return the world of rank 0 of replica 0, with a store in memory."""
    store = dist.HashStore()
    return ReplicaWorld(Placement(REPLICAS, 0, RANKS, 0, True), store, store, timedelta(seconds=1))


def single_world() -> ReplicaWorld:
    """Return the world of the only rank of a replica of an elastic run."""
    store = dist.HashStore()
    return ReplicaWorld(Placement(1, 0, 1, 0, True), store, store, timedelta(seconds=1))


def part(folder: Path, *, iteration: int = 8, retain: int | None = None, **more: Any) -> RankSave:
    """Return the part of a save that belongs to rank 0 of replica 0."""
    manifest = Manifest(
        iteration, ALL, "edit", REPLICAS, RANKS, {}, {}, ("final",), False, (), 8, 4, (), {},
        round=1, detectors={}, **more,
    )  # fmt: skip
    place = CheckpointFolder(folder)
    return RankSave(
        name="8/1", folder=place, job="job", manifest=manifest, entry=entry(0),
        has_model=False, has_outer=False, has_replica_local=False,
        random_file=place.partial(iteration, "job") / "file",
        is_stop_save=False, retain_interval=retain,
    )  # fmt: skip


def entry(step: int, *losses: float) -> ReplicaEntry:
    """Return the manifest entry of a replica; only its last rank has losses."""
    return ReplicaEntry(step, 0, 0, 0, losses=losses, last_loss_step=step if losses else 0)


def test_manifest_collects_entries_and_files_of_all_ranks(tmp_path: Path) -> None:
    """Catches a manifest with one replica only, and losses taken from a rank that has none."""
    here = world()
    for replica in range(REPLICAS):
        for rank in range(RANKS):
            mine = entry(10 + replica, *([0.5 + replica] if rank == RANKS - 1 else []))
            files = {f"{replica}_{rank}": FileRecord(1, "0")}
            text = RankReport([], files, mine).text()
            here.shared_store.set(_key("8/1", replica, rank), text)
    manifest = Committer(here)._gather(part(tmp_path), here.shared_store)
    assert list(manifest.files) == ["0_0", "0_1", "1_0", "1_1"]
    assert [each.step for each in manifest.replicas] == [10, 11]
    assert [list(each.losses) for each in manifest.replicas] == [[0.5], [1.5]]
    assert [each.last_loss_step for each in manifest.replicas] == [10, 11]


def store_report(here: ReplicaWorld, replica: int, rank: int, *errors: str) -> None:
    """Store the report of a rank about its part of the save."""
    here.shared_store.set(_key("8/1", replica, rank), RankReport([*errors]).text())


def test_save_with_write_error_fails_after_all_ranks_report(tmp_path: Path) -> None:
    """Catches a checkpoint completed although a part failed, and a failure before all ranks have
    reported: they may still be writing to the folder that is removed."""
    here = world()
    store_report(here, 0, 0, ANOTHER_RANK_FAILED)
    store_report(here, 0, 1, "disk full")
    store_report(here, 1, 0)
    with pytest.raises(ReplicaLostError, match="rank 1 of replica 1"):
        committer = Committer(here)
        committer._until = 0
        committer._gather(part(tmp_path), here.shared_store)
    for replica, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        store_report(here, replica, rank, *(["disk full"] if (replica, rank) == (0, 1) else []))
    with pytest.raises(EditError, match=r"^replica 0, rank 1: disk full$"):
        Committer(here)._gather(part(tmp_path), here.shared_store)


def run_failed_save(committer: Committer, folder: Path, here: ReplicaWorld) -> None:
    """Run a save that one rank cannot write, until the failure is reported on the console."""
    partial = part(folder).partial
    partial.mkdir(parents=True)
    (partial / "file").write_text("a file")
    for replica, rank in ((0, 1), (1, 0), (1, 1)):
        store_report(here, replica, rank, *(["disk full"] if replica else []))
    committer.start(part(folder))
    assert committer._last is not None
    committer._last.join()
    assert not partial.exists()


def test_two_failed_saves_in_a_row_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the first, the free space is reported, its files are removed, and training
    goes on; the second ends training."""
    here = world()
    committer = Committer(here)
    run_failed_save(committer, tmp_path, here)
    message = capsys.readouterr().err
    assert "iteration 8 could not be written (replica 1, rank 0: disk full)" in message
    assert "MB free; there is" in message and message.endswith("training goes on\n")
    assert f"{tmp_path} has " in message and "there is no complete one yet" in message
    assert not committer.should_end_training
    run_failed_save(committer, tmp_path, here)
    assert (
        committer.should_end_training and "two in a row: training ends" in capsys.readouterr().err
    )


def test_complete_save_resets_failure_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches failures counted over the entire run."""
    here = world()
    committer = Committer(here)
    run_failed_save(committer, tmp_path, here)
    monkeypatch.setattr(Committer, "_complete", lambda *_: None)
    committer.start(part(tmp_path))
    assert committer._last is not None
    committer._last.join()
    monkeypatch.undo()
    run_failed_save(committer, tmp_path, here)
    assert not committer.should_end_training


def test_failed_save_is_counted_if_folder_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a failed disk whose failures are never reported."""

    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    for name in ("newest", "discard"):
        monkeypatch.setattr(CheckpointFolder, name, failing)
    committer = Committer(world())
    for _ in range(2):
        committer._fail(part(tmp_path), OSError(5, "Input/output error"))
    assert committer.should_end_training and "Input/output error" in capsys.readouterr().err


def test_complete_checkpoint_with_stale_tracker_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next run finds the checkpoint by its manifest."""
    committer, save = Committer(world()), part(tmp_path)
    final = save.folder.final(8)
    (final / "edit").mkdir(parents=True)
    (final / "edit" / "edit.json").write_text("{}")
    committer._fail(save, OSError(28, "No space left on device"))
    assert not committer._failures
    assert "iteration 8 is complete, but the tracker may not name it" in capsys.readouterr().err


@pytest.mark.parametrize("exit_code", [0, 5])
def test_replica_that_may_not_complete_a_save_touches_nothing(
    tmp_path: Path, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it could not write its part."""

    def refuse() -> None:
        raise NotPermittedError("no", exit_code)

    here = single_world()
    committer = Committer(here)
    for errors in ([], ["disk full"]):
        save = part(tmp_path)
        save = dataclasses.replace(save, folder=CheckpointFolder(tmp_path, refuse))
        save.partial.mkdir(parents=True, exist_ok=True)
        save.random_file.write_text("a file")
        save.record.errors.extend(errors)
        committer.start(save)
        assert committer._last is not None
        committer._last.join()
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == [save.random_file]
        assert "checkpoint of iteration 8: no" in capsys.readouterr().out
    if exit_code:
        with pytest.raises(NotPermittedError, match="no") as caught:
            committer.wait()
        assert caught.value.exit_code == exit_code
    else:
        committer.wait()


def test_replica_that_leaves_waits_for_its_last_save_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has left may not complete it any more."""
    begun, may_end, committer = threading.Event(), threading.Event(), Committer(single_world())

    def slow(part: RankSave, store: Any) -> None:
        begun.set()
        assert may_end.wait(30)

    monkeypatch.setattr(committer, "_complete", slow)
    committer.settle(30)  # there is none
    committer.start(part(tmp_path))
    assert begun.wait(30)
    committer.settle(0.01)
    assert committer._last is not None and committer._last.is_alive()
    threading.Timer(0.05, may_end.set).start()
    committer.settle(30)
    assert not committer._last.is_alive()


def test_retain_interval_keeps_its_multiples(tmp_path: Path) -> None:
    """All checkpoints are kept without the flag, else those at its multiples."""
    kept = [n for n in (10, 15, 20, 25) if _is_kept(part(tmp_path, retain=20), n)]
    assert kept == [20]
    assert all(_is_kept(part(tmp_path), n) for n in (10, 15, 20, 25))


# ---- When a save takes place, in which form, and which files a replica loads; without Megatron


anything: Any = SimpleNamespace


class Saves:
    """Replica of two, five steps after a sync, whose saves are recorded and not written."""

    def __init__(self, policy: str = ALL, **status: Any) -> None:
        self.plans: list[Any] = []
        clock = anything(pause=lambda: None, resume=lambda: None)
        records = [anything(step=12, inner_steps=2), anything(step=10, inner_steps=0)]
        self.engine = anything(
            land_all=lambda: None, settle=lambda: None, saved_parameters=nullcontext,
            clock=clock, elastic=None,
            settings=anything(assigns_blocks=False),
            status=anything(**{
                "step": 15, "suppresses_joint_actions": False, "is_warmup": False,
                "is_mid_round": True, "has_replica_stopped": False, "records": records,
                "round_began_identical": True, "num_syncs": 3, **status,
            }),
        )  # fmt: skip
        self.args = Namespace(save_interval=5, exit_interval=None, global_batch_size=8)
        writer: Any = anything(write=lambda plan, call: self.plans.append(plan))
        host = anything(
            arguments=self.args,
            counters=anything(iteration_of=lambda step, iteration, own: iteration + step - own),
        )
        progress: Any = RunProgress(self.engine, host, 0, 2)
        self.control = SaveControl(policy, writer, self.engine, host, progress, is_first=False)

    def save(self, iteration: int) -> list[Any]:
        """Save as Megatron does; returns the plans of all saves so far."""
        self.control.save(anything(arguments={"iteration": iteration}))
        return self.plans


def test_anchor_is_saved_only_between_syncs() -> None:
    """At a sync the parameters are the anchor. Catches a resume from a wrong anchor."""
    saves = Saves()
    (plan,) = saves.save(15)
    assert (plan.form, plan.has_anchor, plan.has_outer, plan.name) == (ALL, True, True, "15/3")
    at_sync = Saves(is_mid_round=False).save(15)[0]
    assert (at_sync.has_anchor, at_sync.is_stop_save) == (False, False)
    warmup = Saves(is_warmup=True, is_mid_round=False).save(15)[0]
    assert (warmup.form, warmup.has_anchor, warmup.has_outer) == (LEADER, False, False)


def test_step_is_saved_only_once() -> None:
    """Megatron saves again at the end of training. Nor does a suppressed save take place."""
    saves = Saves()
    assert len(saves.save(15)) == len(saves.save(15)) == 1
    saves.engine.status.step = 16
    assert len(saves.save(16)) == 2
    assert Saves(suppresses_joint_actions=True).save(15) == []


def test_stop_right_after_a_save_is_saved_too() -> None:
    """Other replicas stop at other steps; the saves of all of them share one name."""
    saves = Saves()
    saves.save(15)
    saves.engine.status.has_replica_stopped = True
    with saves.control.final_save():
        plan = saves.save(15)[-1]
    assert len(saves.plans) == 2 and plan.is_stop_save and plan.form == ALL
    assert (plan.name, plan.iteration, plan.own_iteration) == ("stop/12", 12, 15)
    assert plan.has_anchor


def test_stop_request_saves_only_at_the_save_interval() -> None:
    """Megatron would save at once, but the other replicas are at other steps."""
    saves = Saves()
    with saves.control.exit_decision(17, is_planned=False):
        assert saves.save(17) == []
    with saves.control.exit_decision(20, is_planned=False):
        assert len(saves.save(20)) == 1
    with saves.control.exit_decision(21, is_planned=True):
        saves.engine.status.step = 21
        assert len(saves.save(21)) == 2


@pytest.mark.parametrize(("form", "sources"), [(ALL, [0, 1, 0, 1]), (LEADER, [0, 0, 0, 0])])
def test_each_replica_loads_its_own_inner_state(form: str, sources: list[int]) -> None:
    """Additional replicas reuse the saved states in order. Catches all with that of replica 0."""
    manifest: Any = anything(num_replicas=2, form=form)
    unused: Any = None
    found = [
        LoadControl(unused, anything(placement=anything(replica=r)), unused)._source(manifest)
        for r in range(4)
    ]
    assert found == sources


def test_every_file_is_checked_by_exactly_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before loading. Catches files that no rank checks, and files that all ranks read."""
    for number in range(7):
        (tmp_path / f"file{number}").write_text("x")
    files = {f"file{n}": record_of(tmp_path / f"file{n}") for n in range(7)}
    entry = ReplicaEntry(1, 0, 1, 1)
    manifest = Manifest(
        1, ALL, "edit", 2, 2, {}, {}, ("u",), False, (entry,) * 2, 8, 4, (), files,
        round=1, detectors={},
    )  # fmt: skip
    manifest_path(tmp_path).parent.mkdir()
    manifest_path(tmp_path).write_text(manifest.text())
    read: list[str] = []
    monkeypatch.setattr(choosing, "check_content", lambda path, name, record: read.append(name))
    args = Namespace(finetune=False, no_load_optim=False, group_query_attention=False)
    for replica in range(2):
        for rank in range(2):
            world: Any = anything(scope=Placement(2, replica, 2, rank, True))
            choosing._verified_manifest(tmp_path, args, world)
    assert sorted(read) == sorted(files)


@pytest.mark.parametrize(("retain", "left"), [(None, [10, 20, 30]), (20, [20, 30])])
def test_older_checkpoints_are_removed_unless_retained(
    tmp_path: Path, retain: int | None, left: list[int]
) -> None:
    """A checkpoint is removed when the next one is complete, unless it is retained."""
    for iteration in (10, 20, 30):
        mine = part(tmp_path, iteration=iteration, retain=retain)
        manifest_path(mine.partial).parent.mkdir(parents=True)
        manifest_path(mine.partial).write_text(mine.manifest.text())
        _finish(mine)
    folder = CheckpointFolder(tmp_path)
    assert [n for n in (10, 20, 30) if folder.final(n).is_dir()] == left
    assert folder.read_tracker() == "30"


def test_random_streams_are_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams, including those that Megatron tracks, of the requested replica. Catches dropout
    that repeats, or is that of another replica, after a resume."""
    tracked = {"model-parallel-rng": torch.arange(3, dtype=torch.uint8)}
    tracker = anything(get_states=lambda: dict(tracked), set_states=tracked.update)
    zero = {f"get_{kind}_rank": lambda **_: 0 for kind in (
        "data_parallel", "pipeline_model_parallel", "tensor_model_parallel")}  # fmt: skip
    monkeypatch.setattr(streams, "parallel_state", anything(**zero))
    monkeypatch.setattr(streams, "tensor_parallel", anything(
        get_cuda_rng_tracker=lambda: tracker, is_graph_safe_cuda_rng_tracker=lambda _: False,
        convert_cuda_rng_state=lambda state, to_graphable: state.clone(),
    ))  # fmt: skip
    device = [torch.arange(4, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: device[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: device.__setitem__(0, state))

    def draw() -> list[Any]:
        drawn = [random.random(), np.random.random(), torch.rand(1).item()]
        return [*drawn, device[0].tolist(), tracked["model-parallel-rng"].tolist()]

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    drawn = {}
    for replica in range(2):
        (tmp_path / "random").mkdir(exist_ok=True)
        streams.save_streams(tmp_path / "random" / streams.streams_name(replica))
        drawn[replica] = draw()
        device[0] = device[0] + 1
        tracked["model-parallel-rng"] = tracked["model-parallel-rng"] + 1
    for replica in (1, 0, 1):
        streams.load_streams(tmp_path / "random", replica)
        assert draw() == drawn[replica]
    assert drawn[0] != drawn[1]
