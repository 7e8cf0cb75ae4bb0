"""How the parts of a checkpoint, told by all ranks, become one manifest."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_edit.checkpoint.folder import CheckpointFolder
from megatron_edit.checkpoint.manifest import Manifest, ReplicaEntry
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.constants import ALL
from megatron_edit.errors import EditError
from megatron_edit.host.checkpoint.committing import Committer, RankSave, _is_kept, _key

REPLICAS, RANKS = 2, 2


def world() -> ReplicaWorld:
    """Of the first of all ranks, over a store in memory."""
    store = dist.HashStore()
    return ReplicaWorld(Placement(REPLICAS, 0, RANKS, 0, True), store, store, timedelta(seconds=1))


def part(folder: Path, *, iteration: int = 8, retain: int | None = None, **more: Any) -> RankSave:
    """Of that rank."""
    manifest = Manifest(
        iteration, ALL, "edit", REPLICAS, RANKS, {}, {}, ("final",), False, 1, (), {}, 8, 4, **more
    )
    return RankSave(
        name="8/1", folder=CheckpointFolder(folder), job="job", manifest=manifest, entry=entry(0),
        has_model=False, has_outer=False, has_replica_local=False, random_file=folder / "file",
        is_of_a_stop=False, retain_interval=retain,
    )  # fmt: skip


def entry(step: int, *losses: float) -> ReplicaEntry:
    """Of a replica; losses are known to its last rank."""
    return ReplicaEntry(step, 0, 0, 0, losses=losses, last_loss_step=step if losses else 0)


def test_the_manifest_has_what_all_ranks_tell(tmp_path: Path) -> None:
    """Catches files or entries of one replica alone, and losses of a rank that knows none."""
    here = world()
    for replica in range(REPLICAS):
        for rank in range(RANKS):
            mine = entry(10 + replica, *([0.5 + replica] if rank == RANKS - 1 else []))
            files = {f"{replica}_{rank}": {"size": 1, "sha256": "0"}}
            text = json.dumps({"entry": dataclasses.asdict(mine), "files": files})
            here.shared_store.set(_key("8/1", replica, rank), text)
    manifest = Committer(here)._gather(part(tmp_path), here.shared_store)
    assert list(manifest.files) == ["0_0", "0_1", "1_0", "1_1"]
    assert [each.step for each in manifest.replicas] == [10, 11]
    assert [list(each.losses) for each in manifest.replicas] == [[0.5], [1.5]]
    assert [each.last_loss_step for each in manifest.replicas] == [10, 11]


def test_a_rank_that_could_not_write(tmp_path: Path) -> None:
    """Catches a checkpoint that is complete although a part of it failed."""
    here = world()
    here.shared_store.set(_key("8/1", 0, 0), json.dumps({"error": "replica 0: disk full"}))
    with pytest.raises(EditError, match="disk full"):
        Committer(here)._gather(part(tmp_path), here.shared_store)


def test_two_saves_in_a_row_may_not_fail(tmp_path: Path) -> None:
    """The run ends: catches one that goes on for days without a checkpoint."""
    committer = Committer(world())
    for number in range(2):
        committer._errors.append(EditError(str(number)))
    with pytest.raises(EditError, match="1"):
        committer.start(part(tmp_path))


def test_which_checkpoints_are_kept(tmp_path: Path) -> None:
    """All without the flag; else multiples of it."""
    kept = [n for n in (10, 15, 20, 25) if _is_kept(part(tmp_path, retain=20), n)]
    assert kept == [20]
    assert all(_is_kept(part(tmp_path), n) for n in (10, 15, 20, 25))
