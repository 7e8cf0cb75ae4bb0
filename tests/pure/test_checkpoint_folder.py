"""The checkpoint folder: a complete checkpoint is loaded whenever a save is interrupted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint import folder as module
from megatron_edit.checkpoint.folder import TRACKER, CheckpointFolder, FoundCheckpoint
from megatron_edit.errors import EditError

# Disk operations of a commit; a crash may happen in each of them.
OPERATIONS = (
    (Path, "rename"), (os, "replace"), (Path, "write_text"), (Path, "touch"), (shutil, "rmtree"),
)  # fmt: skip
FILES = ("common.pt", "metadata.json", "edit/outer/__0_0.distcp", "edit/edit.json")


class Crash(BaseException):
    """A power failure, which no handler may catch."""


def write(path: Path, label: str, files: tuple[str, ...] = FILES) -> None:
    """Write a checkpoint whose files contain its label."""
    for name in files:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(label.encode())


def label_of(found: FoundCheckpoint | None) -> str:
    """Return the label of a complete checkpoint, all of whose files must be of one save."""
    assert found is not None and found.has_manifest and found.path.name.startswith("iter_")
    labels = {(found.path / name).read_text() for name in FILES}
    assert len(labels) == 1, labels
    return labels.pop()


def commit_save(folder: CheckpointFolder, iteration: int, job: str = "old") -> str:
    """Write and commit a save; return its label."""
    label = f"{job} {iteration}"
    write(folder.partial(iteration, job), label)
    folder.commit(iteration, job)
    return label


def remove_half(path: Path, *, from_end: bool) -> None:
    """Remove half of the files, like an interrupted removal."""
    files = sorted((p for p in path.rglob("*") if p.is_file()), reverse=from_end)
    for file in files[: len(files) // 2]:
        file.unlink()


def crashes_in_commit(
    folder: CheckpointFolder, iteration: int, job: str, last: int, how: str
) -> bool:
    """Commit with a crash in operation number `last`; return whether that operation was reached."""
    numbers = count()

    def watched(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def operation(path: Path, *args: Any, **kwargs: Any) -> Any:
            if next(numbers) < last:
                return real(path, *args, **kwargs)
            if how != "before" and name == "write_text":
                path.write_bytes(b"")
            if how != "before" and name == "rmtree":
                remove_half(path, from_end=how == "from end")
            raise Crash

        return operation

    write(folder.partial(iteration, job), f"{job} {iteration}")
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, watched(getattr(owner, name), name))
        try:
            folder.commit(iteration, job)
        except Crash:
            return True
    return False


def hidden(folder: CheckpointFolder) -> list[str]:
    """Return the names of hidden folders, which are no checkpoints."""
    return [p.name for p in folder.root.iterdir() if p.name.startswith(".") and p.is_dir()]


@pytest.mark.parametrize("how", ["before", "from start", "from end"])
@pytest.mark.parametrize("iteration", [300, 200, 150], ids=["new", "again", "rolled back"])
def test_crash_anywhere_in_commit_leaves_complete_checkpoint(
    tmp_path: Path, iteration: int, how: str
) -> None:
    """After a crash in any operation, the new checkpoint is loaded once its manifest is written.

    Would catch renames, removals or the tracker in a wrong order, and a repair that restores a
    replaced checkpoint.
    """
    for last in count():
        folder = CheckpointFolder(tmp_path / str(last))
        for old in (100, 200):
            commit_save(folder, old)
        write(folder.partial(50, "dead"), "dead 50", FILES[:-1])  # for the sweep
        if iteration < 200:
            (folder.root / TRACKER).write_text("100")
        has_crashed = crashes_in_commit(folder, iteration, "new", last, how)
        folder.repair()
        is_untouched = iteration == 200 and last == 0  # the old one is still there
        assert label_of(folder.newest()) == ("old 200" if is_untouched else f"new {iteration}")
        assert label_of(folder.at(100)) == "old 100"
        assert folder.repair() == []
        if not has_crashed:
            assert last >= 4 and hidden(folder) == []
            return


@pytest.mark.parametrize("again", [False, True])
def test_two_crashes_in_a_row_are_repaired(tmp_path: Path, again: bool) -> None:
    """Two jobs crash in any operation; the third commits and removes their leftovers.

    Would catch leftovers of the first crash that mislead the repair after the second.
    """
    for first, second in product(range(6), range(6)):
        folder = CheckpointFolder(tmp_path / f"{first}{second}")
        iterations = (100, 100, 100) if again else (100, 200, 300)
        commit_save(folder, iterations[0])
        crashes_in_commit(folder, iterations[1], "a", first, "from start")
        folder.repair()
        crashes_in_commit(folder, iterations[2], "b", second, "from end")
        folder.repair()
        label = label_of(folder.newest())  # any of them if the iteration is saved again
        assert label == f"b {iterations[2]}" or (again and label.endswith(" 100"))
        assert commit_save(folder, iterations[2], "c") == label_of(folder.newest())
        assert hidden(folder) == [] and folder.read_tracker() == str(iterations[2])


def test_save_without_manifest_is_not_repaired(tmp_path: Path) -> None:
    """Would catch a repair that completes a save with missing files."""
    folder = CheckpointFolder(tmp_path)
    label = commit_save(folder, 100)
    write(folder.partial(200, "new"), "new 200", FILES[:-1])
    assert folder.repair() == [] and label_of(folder.newest()) == label
    assert folder.at(200) is None and not folder.is_incomplete(200)


@pytest.mark.parametrize("kinds", [["replaced"], ["partial"], ["replaced", "partial"]])
def test_repair_completes_interrupted_replacement(tmp_path: Path, kinds: list[str]) -> None:
    """Would catch the loss of both copies, and a repair that undoes a save."""
    folder = CheckpointFolder(tmp_path)
    for kind in kinds:
        write(tmp_path / f".iter_0000200.job.{kind}", kind)
    assert folder.repair() == [folder.final(200)] and label_of(folder.newest()) == kinds[-1]


def test_nothing_that_others_see_changes_without_permission(tmp_path: Path) -> None:
    """It may be taken back at any moment of a commit. Would catch: a tracker that goes back."""
    for last in count():
        root, asked = tmp_path / str(last), []

        def permit() -> None:
            asked.append(1)  # noqa: B023
            if len(asked) > last:  # noqa: B023
                raise EditError("no")

        folder = CheckpointFolder(root)
        commit_save(folder, 200)
        write(folder.partial(50, "other"), "other 50", FILES[:-1])
        write(folder.partial(100, "job"), "job 100")
        own = CheckpointFolder(root, permit)
        try:
            own.commit(100, "job")
            own.remove(200, "job")
        except EditError:
            pass
        assert folder.at(200) is not None or last == 4
        assert folder.partial(50, "other").exists() == (last < 3)
        assert folder.read_tracker() == ("200" if last < 2 else "100")
        assert (folder.at(100) is None) == (last == 0)
        if last == 4:
            return


def test_commit_returns_previously_tracked_iteration(tmp_path: Path) -> None:
    """Megatron's retention may remove it: would catch the iteration of the new checkpoint."""
    folder = CheckpointFolder(tmp_path)
    answers = []
    for iteration in (100, 200, 200):
        write(folder.partial(iteration, "job"), "label")
        answers.append(folder.commit(iteration, "job"))
    (tmp_path / TRACKER).write_text("release")
    write(folder.partial(300, "job"), "label")
    assert [*answers, folder.commit(300, "job")] == [None, 100, 200, None]
    assert (
        folder.final(300) / module.EDIT / module.LISTED
    ).is_file() and folder.read_tracker() == "300"


def test_commit_sweeps_partial_saves_of_other_jobs(tmp_path: Path) -> None:
    """Would catch a sweep that removes the save in progress of the same job."""
    folder = CheckpointFolder(tmp_path)
    for job in ("mine", "dead"):
        write(folder.partial(200, job), job, FILES[:1])
    commit_save(folder, 100, "mine")
    assert hidden(folder) == [folder.partial(200, "mine").name]


def test_removing_partial_saves_keeps_complete_and_own_saves(tmp_path: Path) -> None:
    """Would catch a disk that stays full, and the removal of a save that a repair can complete."""
    folder = CheckpointFolder(tmp_path)
    write(folder.partial(200, "dead"), "dead", FILES[:-1])
    write(folder.partial(300, "whole"), "whole")
    write(folder.partial(200, "mine"), "mine", FILES[:-1])
    folder.remove_partial_saves("mine")
    assert sorted(hidden(folder)) == sorted(
        [folder.partial(300, "whole").name, folder.partial(200, "mine").name]
    )


def test_sweep_keeps_partial_save_of_a_stop(tmp_path: Path) -> None:
    """Other ranks may already write the last save of a run; its commit sweeps all earlier saves.

    Would catch a commit that removes half of the following checkpoint.
    """
    folder = CheckpointFolder(tmp_path)
    for iteration, job in ((201, "mine" + module.STOP), (150, "mine")):
        write(folder.partial(iteration, job), job, FILES[:1])
    commit_save(folder, 200, "mine")
    assert len(hidden(folder)) == 2
    commit_save(folder, 201, "mine" + module.STOP)
    assert hidden(folder) == [] and folder.read_tracker() == "201"


def test_linked_read_only_checkpoint_is_replaced(tmp_path: Path, monkeypatch: Any) -> None:
    """A checkpoint that is a link into a read-only archive does not hinder later saves.

    Would catch a commit that fails after it has moved the tracker.
    """
    folder, archive = CheckpointFolder(tmp_path / "run"), tmp_path / "archive"
    write(archive, "old 100")
    folder.root.mkdir()
    folder.final(100).symlink_to(archive)

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        assert path.is_relative_to(folder.final(100))
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        touch = Path.touch
        patch.setattr(
            Path, "touch", lambda p: (refuse if p.is_relative_to(folder.final(100)) else touch)(p)
        )
        commit_save(folder, 200, "mine")
    assert (
        folder.read_tracker() == "200"
        and (folder.final(200) / module.EDIT / module.LISTED).exists()
    )
    commit_save(folder, 100, "mine")
    assert sorted(p.name for p in folder.root.iterdir() if p.name.startswith(".")) == []
    assert (archive / FILES[0]).read_text() == "old 100"


def test_final_path_of_partial_checkpoint(tmp_path: Path) -> None:
    """Would catch a reported path that a commit renames."""
    folder = CheckpointFolder(tmp_path)
    partial, final = folder.partial(12_345_678, "abc"), folder.final(12_345_678)
    assert module.final_path(partial) == final == module.final_path(final)
    assert module.final_path(partial / "edit" / "replica_1") == final / "edit" / "replica_1"


def place(folder: CheckpointFolder, iteration: int, kind: str) -> None:
    """Write a checkpoint of one kind."""
    kinds = {
        "listed": (*FILES, "edit/listed"),
        "unlisted": FILES,
        "broken": FILES[:-1],  # its manifest was lost
        "stock": FILES[:2],
        "unmarked": ("mp_rank_00/model.pt",),  # of stock Megatron in an old format, or incomplete
    }
    write(folder.final(iteration), kind, kinds[kind])


TWO = {100: "listed", 200: "listed"}
BROKEN = {100: "listed", 200: "listed", 300: "broken"}


@pytest.mark.parametrize(
    ("kinds", "tracker", "expected"),
    [
        (TWO, "200", 200), (TWO, "100", 100), (TWO, " 100\n", 100), (TWO, "0000100", 100),
        (TWO, None, 200), (TWO, "", 200), (TWO, "latest", 200), (TWO, "-100", 200),
        (TWO, "100.0", 200), (TWO, "100 200", 200), (TWO, "\0\0\0", 200), (TWO, "1²", 200),
        (TWO, "300", 200), (BROKEN, "300", 200), (BROKEN, "100", 100), (BROKEN, None, 200),
        ({100: "listed", 200: "unlisted"}, "100", 200), ({100: "unlisted"}, None, 100),
        ({100: "unlisted", 200: "listed"}, "200", 200),
        ({100: "listed", 200: "unlisted", 300: "listed"}, "100", 200),
        ({100: "unlisted", 200: "unlisted"}, "100", 200),
        ({100: "stock", 200: "stock"}, "200", 200), ({100: "stock", 200: "stock"}, "100", 100),
        ({100: "stock", 200: "stock"}, None, 200), ({100: "stock", 200: "listed"}, "100", 100),
        ({100: "listed", 200: "stock"}, "100", 100), ({100: "stock", 200: "unlisted"}, "100", 200),
        ({100: "unmarked", 200: "unmarked"}, "100", 100), ({100: "unmarked"}, None, None),
        ({100: "listed", 200: "unmarked"}, None, 100), ({100: "broken"}, "100", None),
        ({9_999_999: "listed", 12_345_678: "listed"}, "12345678", 12_345_678),
        ({9_999_999: "listed", 12_345_678: "listed"}, "", 12_345_678),
        ({9_999_999: "listed", 12_345_678: "listed"}, "9999999", 9_999_999),
        ({0: "listed"}, "0", 0), ({}, "100", None), ({}, None, None),
    ],
)  # fmt: skip
def test_tracker_wins_if_complete_else_newest_is_loaded(
    tmp_path: Path, kinds: dict[int, str], tracker: str | None, expected: int | None
) -> None:
    """Users roll back by editing the tracker.

    Would catch iterations compared as text, an incomplete checkpoint that is loaded, a damaged
    tracker that ends the job, and a newer complete checkpoint that is ignored.
    """
    folder = CheckpointFolder(tmp_path)
    for iteration, kind in kinds.items():
        place(folder, iteration, kind)
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker, encoding="utf-8")
    found = folder.newest()
    is_ours = expected is not None and kinds.get(expected) in ("listed", "unlisted")
    complete = FoundCheckpoint(folder.final(expected or 0), expected, has_manifest=is_ours)
    assert found == (None if expected is None else complete)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"9" * 5000, b"release\xff"])
def test_damaged_tracker_falls_back_to_newest(tmp_path: Path, content: bytes) -> None:
    """Bytes that are no text, or a number that Python refuses to parse, raise no exception."""
    folder = CheckpointFolder(tmp_path)
    label = commit_save(folder, 100)
    (tmp_path / TRACKER).write_bytes(content)
    assert label_of(folder.newest()) == label
    assert commit_save(folder, 200, "next") == label_of(folder.newest())


def test_release_checkpoint_is_loaded_while_tracked(tmp_path: Path) -> None:
    """Megatron's converted models are loaded if the tracker names them and they exist."""
    folder = CheckpointFolder(tmp_path)
    label = commit_save(folder, 100)
    (tmp_path / TRACKER).write_text("release\n")
    assert folder.read_tracker() == "release" and label_of(folder.newest()) == label
    (tmp_path / "release").mkdir()
    assert folder.newest() == FoundCheckpoint(tmp_path / "release", None, has_manifest=False)
    assert commit_save(folder, 200, "next") == label_of(folder.newest())


def test_tracker_rollback_works_after_repaired_crash(tmp_path: Path) -> None:
    """After a crash before the tracker update, a repair and more saves, the tracker wins again.

    Would catch a repaired checkpoint that counts as interrupted forever.
    """
    for last in range(3):
        folder = CheckpointFolder(tmp_path / str(last))
        commit_save(folder, 100)
        assert crashes_in_commit(folder, 200, "a", last, "before")
        folder.repair()
        commit_save(folder, 300, "b")
        (folder.root / TRACKER).write_text("100")
        assert label_of(folder.newest()) == "old 100", last


def test_missing_folder_has_no_checkpoint_and_is_not_created(tmp_path: Path) -> None:
    """As in the first start of a run."""
    folder = CheckpointFolder(tmp_path / "none")
    assert folder.newest() is None and folder.repair() == [] and folder.read_tracker() is None
    assert folder.at(100) is None and not folder.is_incomplete(100)
    assert not folder.root.exists()


@pytest.mark.parametrize("kind", ["listed", "unlisted", "stock", "broken", "unmarked", "file"])
def test_at_distinguishes_broken_from_missing_checkpoint(tmp_path: Path, kind: str) -> None:
    """`--ckpt-step`: an incomplete checkpoint is reported differently from a missing one."""
    folder = CheckpointFolder(tmp_path)
    if kind == "file":
        folder.final(12_345_678).write_text("")
    else:
        place(folder, 12_345_678, kind)
    is_complete = kind in ("listed", "unlisted", "stock")
    found = folder.at(12_345_678)
    assert (found is not None and found.path == folder.final(12_345_678)) == is_complete
    assert folder.is_incomplete(12_345_678) != is_complete
    assert folder.at(2_345_678) is None and not folder.is_incomplete(2_345_678)


def test_checkpoint_layout_is_as_documented(tmp_path: Path) -> None:
    """Stock Megatron must be able to load replica 0."""
    final = CheckpointFolder(tmp_path).final(128)
    assert final == tmp_path / "iter_0000128" == module.replica_folder(final, 0)
    assert module.replica_folder(final, 2) == final / "edit" / "replica_2"
    assert module.manifest_path(final) == final / "edit" / "edit.json"
