"""`megatron-edit inspect` of a checkpoint of an elastic run: members and digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint.folder import CheckpointFolder, manifest_path
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.saved_state import ReplicaEntry
from megatron_edit.tools.cli import main

DIGEST = "4f018106a76f160f-5f4ddcbc2742f071"


def inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    """Return what is printed for a checkpoint of two replicas without files."""
    path = manifest_path(CheckpointFolder(tmp_path).final(500))
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = (ReplicaEntry(500, 0, 500, 500), ReplicaEntry(400, 0, 400, 400))
    manifest = Manifest(
        500, "leader", "edit", 2, 1, {}, {}, ("final",), False, entries, 1, 1, (), {},
        round=1, detectors={}, **changes,
    )  # fmt: skip
    path.write_text(manifest.text())
    assert main(["inspect", str(tmp_path)]) == 0
    return capsys.readouterr().out


def test_members_and_digest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = inspected(tmp_path, capsys, members=("a", "node-4.rack7"), digest=DIGEST)
    assert (
        "strategy edit: elastic, nominally 2 replicas x 1 ranks, form leader (of the leader)" in out
    )
    assert "  members: a, node-4.rack7\n" in out
    assert f"  digest of anchor and momentum: {DIGEST}\n" in out
    assert "\n       replica  step  in" in out and "\n  node-4.rack7   400  " in out


def test_members_that_are_missing_are_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may save with fewer members than it began with."""
    out = inspected(tmp_path, capsys, members=("a", "replica 0"), digest=DIGEST)
    assert "  members: a\n" in out and "\n  replica 0   400  " in out


@pytest.mark.parametrize("members", [(), ("0", "1")])
def test_run_without_a_hub_has_neither(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], members: tuple[str, ...]
) -> None:
    """Also where an older version wrote it."""
    out = inspected(tmp_path, capsys, members=members)
    assert "strategy edit: 2 replicas x 1 ranks, form leader (of replica 0)" in out
    assert "members" not in out and "digest of" not in out
    assert "\n  replica  step  in the round" in out and "\n        1   400  " in out
