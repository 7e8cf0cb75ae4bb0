"""When a save takes place, in which form, and what a loading replica reads: without Megatron."""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_edit.checkpoint.files import record_of
from megatron_edit.checkpoint.folder import CheckpointFolder, manifest_of
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.comm.placement import Placement
from megatron_edit.constants import ALL, LEADER
from megatron_edit.host.checkpoint import choosing
from megatron_edit.host.checkpoint import random as streams
from megatron_edit.host.checkpoint.committing import _finish
from megatron_edit.host.checkpoint.loading import LoadControl
from megatron_edit.host.checkpoint.saving import SaveControl
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.saved_state import ReplicaEntry
from tests.pure.test_committing import part

anything: Any = SimpleNamespace


class Saves:
    """A replica whose saves are noted, not written: of two, five steps after a sync."""

    def __init__(self, policy: str = ALL, **status: Any) -> None:
        self.plans: list[Any] = []
        clock = anything(pause=lambda: None, resume=lambda: None)
        records = [anything(step=12, inner_steps=2), anything(step=10, inner_steps=0)]
        self.engine = anything(
            land_all=lambda: None, clock=clock, settings=anything(timed=None),
            status=anything(**{
                "step": 15, "suppresses_joint_actions": False, "is_warmup": False,
                "is_mid_round": True, "has_replica_left": False, "records": records,
                "began_identical": True, "num_syncs": 3, **status,
            }),
        )  # fmt: skip
        self.args = Namespace(save_interval=5, exit_interval=None, global_batch_size=8)
        writer: Any = anything(write=lambda plan, call: self.plans.append(plan))
        host = anything(
            arguments=self.args, iteration_of=lambda step, iteration, own: iteration + step - own
        )
        progress: Any = RunProgress(self.engine, host, 0, 2)
        self.control = SaveControl(policy, writer, self.engine, host, progress, is_first=False)

    def save(self, iteration: int) -> list[Any]:
        """Megatron asks for a save; the plans so far."""
        self.control.save(anything(arguments={"iteration": iteration}))
        return self.plans


def test_between_two_syncs_the_anchor_is_kept() -> None:
    """At a sync it is the parameters: catches a resume from the wrong anchor."""
    saves = Saves()
    (plan,) = saves.save(15)
    assert (plan.form, plan.has_anchor, plan.has_outer, plan.name) == (ALL, True, True, "15/3")
    at_sync = Saves(is_mid_round=False).save(15)[0]
    assert (at_sync.has_anchor, at_sync.is_of_a_stop) == (False, False)
    warmup = Saves(is_warmup=True, is_mid_round=False).save(15)[0]
    assert (warmup.form, warmup.has_anchor, warmup.has_outer) == (LEADER, False, False)


def test_nothing_is_saved_twice() -> None:
    """At the end of training Megatron asks again; where others have passed nobody saves."""
    saves = Saves()
    assert len(saves.save(15)) == len(saves.save(15)) == 1
    saves.engine.status.step = 16
    assert len(saves.save(16)) == 2
    assert Saves(suppresses_joint_actions=True).save(15) == []


def test_a_stop_right_after_a_save() -> None:
    """Is saved all the same: the others are elsewhere, and one name stands for all of them."""
    saves = Saves()
    saves.save(15)
    saves.engine.status.has_replica_left = True
    with saves.control.ending():
        plan = saves.save(15)[-1]
    assert len(saves.plans) == 2 and plan.is_of_a_stop and plan.form == ALL
    assert (plan.name, plan.iteration, plan.own_iteration) == ("stop/12", 12, 15)
    assert plan.has_anchor


def test_one_inner_state_waits_for_a_sync() -> None:
    """And is saved at once where replicas have met, whatever Megatron's interval."""
    saves = Saves("leader")
    assert saves.save(15) == []
    with saves.control.deciding(16, is_planned=False):
        assert saves.args.save_interval == 5
    saves.engine.status.step, saves.engine.status.is_mid_round = 18, False
    with saves.control.deciding(18, is_planned=False):
        assert saves.args.save_interval == 18
        (plan,) = saves.save(18)
    assert (plan.form, plan.has_anchor, saves.args.save_interval) == (LEADER, False, 5)


def test_who_was_asked_to_stop_does_not_save_alone() -> None:
    """Megatron would, at once; the others are not there. Saves that are due take place."""
    saves = Saves()
    with saves.control.deciding(17, is_planned=False):
        assert saves.save(17) == []
    with saves.control.deciding(20, is_planned=False):
        assert len(saves.save(20)) == 1
    with saves.control.deciding(21, is_planned=True):
        saves.engine.status.step = 21
        assert len(saves.save(21)) == 2


@pytest.mark.parametrize(("form", "sources"), [(ALL, [0, 1, 0, 1]), (LEADER, [0, 0, 0, 0])])
def test_each_replica_loads_its_own_inner_state(form: str, sources: list[int]) -> None:
    """More replicas than saved share them out: catches all of them with that of replica 0."""
    manifest: Any = anything(num_replicas=2, form=form)
    nobody: Any = None
    found = [
        LoadControl(nobody, anything(placement=anything(replica=r)), nobody)._source(manifest)
        for r in range(4)
    ]
    assert found == sources


def test_every_file_is_read_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is loaded: catches files that nobody looks at, and those that all read."""
    for number in range(7):
        (tmp_path / f"file{number}").write_text("x")
    files = {f"file{n}": record_of(tmp_path / f"file{n}") for n in range(7)}
    entry = ReplicaEntry(1, 0, 1, 1)
    manifest = Manifest(
        1, ALL, "edit", 2, 2, {}, {}, ("u",), False, 1, (entry,) * 2, {}, 8, 4, files=files
    )
    manifest_of(tmp_path).parent.mkdir()
    manifest_of(tmp_path).write_text(manifest.text())
    read: list[str] = []
    monkeypatch.setattr(choosing, "check_content", lambda path, name, record: read.append(name))
    args = Namespace(finetune=False, no_load_optim=False, group_query_attention=False)
    for replica in range(2):
        for rank in range(2):
            world: Any = anything(placement=Placement(2, replica, 2, rank, True))
            choosing._sound_manifest(tmp_path, args, world)
    assert sorted(read) == sorted(files)


@pytest.mark.parametrize(("retain", "left"), [(None, [10, 20, 30]), (20, [20, 30])])
def test_retained_and_removed(tmp_path: Path, retain: int | None, left: list[int]) -> None:
    """When the next one is complete, the one before goes unless it is to be kept."""
    for iteration in (10, 20, 30):
        mine = part(tmp_path, iteration=iteration, retain=retain)
        manifest_of(mine.partial).parent.mkdir(parents=True)
        manifest_of(mine.partial).write_text(mine.manifest.text())
        _finish(mine)
    folder = CheckpointFolder(tmp_path)
    assert [n for n in (10, 20, 30) if folder.final(n).is_dir()] == left
    assert folder.tracked() == "30"


def test_random_streams_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them, those that Megatron tracks, too; of another replica where that is asked for.
    Catches dropout that repeats itself, or is another replica's, after a resume."""
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
