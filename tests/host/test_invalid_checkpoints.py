"""Checkpoints that cannot be loaded: one line that names the file, exit code 2, no file changed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint.folder import TRACKER
from tests.harness import Flags, TrainResult, tiny_gpt, train
from tests.host.runs import edit_flags

LAST = "iter_0000004"
KINDS = {
    "replica-0": "__0_0.distcp",
    "replica-1": "edit/replica_1/__0_0.distcp",
    "outer": "edit/outer/__0_0.distcp",
    "metadata": ".metadata",
    "outer-metadata": "edit/outer/.metadata",
    "metadata-json": "metadata.json",
    "random": "edit/random/replica1_pp0_tp0_dp0.pt",
    "manifest": "edit/edit.json",
}
CORE = {"replica-1-flipped", "outer-truncated", "random-missing", "manifest-text"}
LENGTH: Flags = {"train_iters": 1000, "save_interval": 2}


@dataclass(frozen=True)
class Saved:
    """Folders of checkpoints, each with iteration 4 only.

    Attributes:
        good: saved by two replicas between two syncs.
        other: saved with another seed; files have the same names and, mostly, sizes.
        stock: saved by stock Megatron.
    """

    good: Path
    other: Path
    stock: Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Save the checkpoints once per module; tests damage copies."""
    root = tmp_path_factory.mktemp("bad")
    found = Saved(root / "good", root / "other", root / "stock")
    ends = {**LENGTH, "exit_interval": 4}
    train(edit_flags(2, save=found.good, **ends), 2)
    train(edit_flags(2, save=found.other, seed=4321, **ends), 2)
    train(tiny_gpt(save=found.stock, **ends), 1)
    for folder in (found.good, found.other, found.stock):
        shutil.rmtree(folder / "iter_0000002")
    return found


def load(folder: Path, hook: str = "spy:shorten_grace", **flags: Any) -> TrainResult:
    """Try to resume two replicas from a folder, for two steps."""
    argv = edit_flags(2, **{**LENGTH, "exit_interval": 6, "load": folder, **flags})
    return train(argv, 2, before=f"tests.host.{hook}", check=False, timeout=110)


def contents(folder: Path) -> dict[str, Any]:
    """Return size, modification time and digest of everything in a folder, or of a file."""
    found: dict[str, Any] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path)] = (status.st_size, status.st_mtime_ns, digest)
    return found


def assert_refused(folder: Path, *named: str, **flags: Any) -> None:
    """Check for a refusal in one line with all of `named` and a remedy, and an unchanged folder."""
    before = contents(folder)
    ranks = load(folder, **flags).ranks
    errors = "\n".join(f"rank {rank.rank}: {rank.stderr[-1500:]}" for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2], errors
    lines = [x for rank in ranks for x in rank.stderr.splitlines() if "megatron_edit: " in x]
    assert "Traceback" not in errors
    assert len(lines) == 1 and lines[0].startswith("megatron_edit: "), lines
    assert all(name in lines[0] for name in named), lines[0]
    assert lines[0].count("; ") >= 1  # the remedy
    assert "lm loss" not in "".join(rank.stdout for rank in ranks)
    assert contents(folder) == before


# ---- files


def truncate(path: Path, other: Path) -> None:
    """Truncate the file, as a full disk or an interrupted copy would."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, other: Path) -> None:
    """Flip one bit in the middle."""
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def remove(path: Path, other: Path) -> None:
    """Remove the file."""
    path.unlink()


def swap(path: Path, other: Path) -> None:
    """Replace it by the file of the same name from another checkpoint."""
    assert path.read_bytes() != other.read_bytes()
    shutil.copyfile(other, path)


def overwrite(path: Path, other: Path) -> None:
    """Replace the contents by text."""
    path.write_text("This is not the file that you are looking for.\n")


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "truncated": truncate,
    "flipped": flip,
    "missing": remove,
    "swapped": swap,
    "text": overwrite,
}


def damages() -> list[Any]:
    """Return every applicable pair of damage and kind of file."""
    found = []
    for kind in KINDS:
        for damage in DAMAGES:
            if damage == "swapped" and kind in ("metadata-json", "manifest"):
                continue  # metadata.json is the same everywhere; a manifest belongs to its files
            name = f"{kind}-{damage}"
            marks = () if name in CORE else pytest.mark.full
            found.append(pytest.param(kind, damage, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("kind", "damage"), damages())
def test_damaged_file_is_refused(saved: Saved, tmp_path: Path, kind: str, damage: str) -> None:
    """Would catch a file that any rank reads without checking it, and a checkpoint that is partly
    loaded before the damage is noticed."""
    folder = shutil.copytree(saved.good, tmp_path / "ck")
    name = KINDS[kind]
    DAMAGES[damage](folder / LAST / name, saved.other / LAST / name)
    # Without its manifest the checkpoint is incomplete, and the tracker names no checkpoint.
    is_gone = (kind, damage) == ("manifest", "missing")
    assert_refused(folder, *([str(folder), "4"] if is_gone else [str(folder / LAST / name)]))


# ---- the manifest


# ---- models


MODELS: dict[str, Flags] = {
    "layers": {"num_layers": 4},
    "hidden": {"hidden_size": 32},
    "vocabulary": {"vocab_size": 255},
    "positions": {"max_position_embeddings": 128},
    "untied": {"untie_embeddings_and_output_weights": True},
}


@pytest.mark.full
@pytest.mark.parametrize("origin", ["good", "stock"])
@pytest.mark.parametrize("case", MODELS)
def test_checkpoint_of_other_model_is_refused(saved: Saved, origin: str, case: str) -> None:
    """Would catch a model into which only the matching tensors are loaded, from EDiT's checkpoint
    or from stock Megatron's."""
    folder: Path = getattr(saved, origin)
    assert_refused(folder, f"--load {folder / LAST}", **MODELS[case])


@pytest.mark.full
@pytest.mark.parametrize("damage", ["truncated", "missing", "text"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_damaged_stock_checkpoint_is_refused(
    saved: Saved, tmp_path: Path, damage: str, name: str
) -> None:
    """It has no checksums: Megatron's error becomes one line. Would catch random weights, too."""
    folder = shutil.copytree(saved.stock, tmp_path / "ck")
    DAMAGES[damage](folder / LAST / name, folder)
    assert_refused(folder, f"--load {folder / LAST}")


# ---- flags and trackers


@pytest.mark.full
def test_missing_ckpt_step_is_refused(saved: Saved) -> None:
    """Would catch another checkpoint being loaded instead of the requested one."""
    assert_refused(saved.good, "--ckpt-step 3", "iter_0000003", ckpt_step=3)


@pytest.mark.full
def test_late_rank_reports_first_refusal(saved: Saved) -> None:
    """The first rank has already refused when another reaches the load. Would catch a rank that
    reports the closed store instead."""
    assert_refused(saved.good, "--ckpt-step 3", ckpt_step=3, hook="spy_kill:delay_rank_1")


@pytest.mark.full
def test_invalid_tracker_is_ignored_if_checkpoint_exists(saved: Saved, tmp_path: Path) -> None:
    """A complete checkpoint is found without the tracker; if there is none, loading is refused."""
    folder = shutil.copytree(saved.good, tmp_path / "ck")
    (folder / TRACKER).write_text("\x00\x00")
    before = contents(folder)
    result = load(folder)
    assert [rank.returncode for rank in result.ranks] == [0, 0]
    assert f"resuming from {folder / LAST}" in result.ranks[0].stdout
    assert contents(folder) == before
    shutil.rmtree(folder / LAST)
    assert_refused(folder, str(folder))


@pytest.mark.full
def test_tracker_without_checkpoint_is_refused(saved: Saved, tmp_path: Path) -> None:
    """Would catch a run that starts from scratch and overwrites the user's folder."""
    folder = shutil.copytree(saved.good, tmp_path / "ck")
    shutil.rmtree(folder / LAST)
    assert_refused(folder, str(folder), "4")


@pytest.mark.full
def test_first_start_has_no_checkpoint(tmp_path: Path) -> None:
    """The command of a job saves to the folder that it loads from; it starts from the seed."""
    result = load(tmp_path / "none", exit_interval=2, save=tmp_path / "link" / ".." / "none")
    fresh = load(tmp_path / "none", exit_interval=2, load=None)
    assert [rank.returncode for rank in result.ranks] == [0, 0]
    assert result.losses == fresh.losses != {}


@pytest.mark.parametrize("saves", [None, "other"])
def test_load_folder_without_checkpoint_is_refused(tmp_path: Path, saves: str | None) -> None:
    """Would catch a mistyped path with which a run starts from random weights."""
    save = None if saves is None else tmp_path / saves
    result = load(tmp_path / "none", exit_interval=2, save=save)
    assert [rank.returncode for rank in result.ranks] == [2, 2] and not result.losses
    line = next(x for x in result.ranks[0].stderr.splitlines() if "megatron_edit: " in x)
    assert f"--load {tmp_path / 'none'}: holds no checkpoint, and is not the folder of" in line
    assert not (tmp_path / "none").exists()


@pytest.mark.full
def test_load_from_file_is_refused(tmp_path: Path) -> None:
    """Would catch a mistyped path that starts a run from random weights."""
    file = tmp_path / "file"
    file.write_text("text")
    assert_refused(file, f"--load {file}")
