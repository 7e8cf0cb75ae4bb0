"""When a save takes place, in which form, and which files a replica loads; without Megatron."""

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
from megatron_edit.checkpoint.folder import CheckpointFolder, manifest_path
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.comm.placement import Placement
from megatron_edit.constants import ALL, LEADER
from megatron_edit.host.checkpoint import choosing
from megatron_edit.host.checkpoint import replica_local as streams
from megatron_edit.host.checkpoint.committing import _finish
from megatron_edit.host.checkpoint.loading import LoadControl
from megatron_edit.host.checkpoint.saving import SaveControl
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.saved_state import ReplicaEntry
from tests.pure.test_committing import part

anything: Any = SimpleNamespace


class Saves:
    """Replica of two, five steps after a sync, whose saves are recorded and not written."""

    def __init__(self, policy: str = ALL, **status: Any) -> None:
        self.plans: list[Any] = []
        clock = anything(pause=lambda: None, resume=lambda: None)
        records = [anything(step=12, inner_steps=2), anything(step=10, inner_steps=0)]
        self.engine = anything(
            land_all=lambda: None, clock=clock, settings=anything(timed=None), elastic=None,
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


def test_save_of_one_inner_state_waits_for_a_sync() -> None:
    """It takes place at the next sync, whatever Megatron's interval."""
    saves = Saves("leader")
    assert saves.save(15) == []
    with saves.control.exit_decision(16, is_planned=False):
        assert saves.args.save_interval == 5
    saves.engine.status.step, saves.engine.status.is_mid_round = 18, False
    with saves.control.exit_decision(18, is_planned=False):
        assert saves.args.save_interval == 18
        (plan,) = saves.save(18)
    assert (plan.form, plan.has_anchor, saves.args.save_interval) == (LEADER, False, 5)


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
        1, ALL, "edit", 2, 2, {}, {}, ("u",), False, 1, (entry,) * 2, {}, 8, 4, files=files
    )
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
