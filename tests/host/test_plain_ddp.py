"""Megatron's DDP without the distributed optimizer: every rank holds the whole outer state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.host.layouts import PLAIN_DDP
from tests.host.runs import run_edit
from tests.host.spy import read_records


def train_plain(
    folder: Path, *, bf16: bool, offload: bool
) -> tuple[list[str | None], list[str], list[dict[str, Any]]]:
    """Train two replicas of two ranks; return digests by sync, final digests and sync lines."""
    folder.mkdir()
    run = run_edit(
        folder, 4, 2, before="tests.host.spy:record", edit_sync_mode="blocking",
        edit_offload=offload, bf16=bf16, train_iters=17, **PLAIN_DDP,
    )  # fmt: skip
    assert run.digests(0) == run.digests(1)
    return run.digests(0), [record["digest"] for record in read_records(folder, 4)], run.syncs


@pytest.mark.parametrize(
    "bf16", [False, pytest.param(True, marks=pytest.mark.full)], ids=["fp32", "bf16"]
)
def test_replicas_agree_and_offload_changes_no_bit(tmp_path: Path, bf16: bool) -> None:
    """For fp32 the main copies are the parameters themselves; for bf16 they are separate. Would
    catch a shard that is written to only one of the two, and one that offload loses."""
    resident = train_plain(tmp_path / "resident", bf16=bf16, offload=False)
    offloaded = train_plain(tmp_path / "offloaded", bf16=bf16, offload=True)
    digests, finals, syncs = resident
    assert len(digests) == 5 and None not in digests and len(set(digests)) == 5
    assert [sync["iteration"] for sync in syncs] == [5, 8, 11, 14, 17]
    assert len(set(finals)) == 1  # the last sync ends the training: all ranks hold the same
    assert (digests, finals) == offloaded[:2]
    for ours, theirs in zip(syncs, offloaded[2], strict=True):
        assert all(ours[key] == theirs[key] for key in ("norms", "weights", "clip", "update_norm"))
