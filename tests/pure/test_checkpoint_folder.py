"""The folder of checkpoints: whatever moment a save is cut off in, a complete one is loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint import folder as module
from megatron_edit.checkpoint.folder import TRACKER, CheckpointFolder, Found

# What a commit does to the disk; each of them may be the last that happens.
OPERATIONS = (
    (Path, "rename"), (os, "replace"), (Path, "write_text"), (Path, "touch"), (shutil, "rmtree"),
)  # fmt: skip
FILES = ("common.pt", "metadata.json", "edit/outer/__0_0.distcp", "edit/edit.json")


class Crash(BaseException):
    """The power is gone: nothing may catch it."""


def write(path: Path, label: str, files: tuple[str, ...] = FILES) -> None:
    """A checkpoint whose files say which one it is."""
    for name in files:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(label.encode())


def label_of(found: Found | None) -> str:
    """What the files of a complete checkpoint say; they must be whole, and of one save."""
    assert found is not None and found.has_manifest and found.path.name.startswith("iter_")
    labels = {(found.path / name).read_text() for name in FILES}
    assert len(labels) == 1, labels
    return labels.pop()


def saved(folder: CheckpointFolder, iteration: int, job: str = "old") -> str:
    """A save that came through; its label."""
    label = f"{job} {iteration}"
    write(folder.partial(iteration, job), label)
    folder.commit(iteration, job)
    return label


def remove_half(path: Path, *, from_end: bool) -> None:
    """As a removal that is cut off leaves a folder."""
    files = sorted((p for p in path.rglob("*") if p.is_file()), reverse=from_end)
    for file in files[: len(files) // 2]:
        file.unlink()


def is_cut_off(folder: CheckpointFolder, iteration: int, job: str, last: int, how: str) -> bool:
    """Commit and crash in the operation numbered `last`; whether there was one."""
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
    """Folders that are no checkpoints."""
    return [p.name for p in folder.root.iterdir() if p.name.startswith(".") and p.is_dir()]


@pytest.mark.parametrize("how", ["before", "from start", "from end"])
@pytest.mark.parametrize("iteration", [300, 200, 150], ids=["new", "again", "rolled back"])
def test_a_crash_anywhere_in_a_commit(tmp_path: Path, iteration: int, how: str) -> None:
    """Every operation the last one: once its manifest is there, the new checkpoint is loaded.

    Would catch a rename, a removal or a tracker in another order, and a repair that brings back
    what was replaced.
    """
    for last in count():
        folder = CheckpointFolder(tmp_path / str(last))
        for old in (100, 200):
            saved(folder, old)
        write(folder.partial(50, "dead"), "dead 50", FILES[:-1])  # for the sweep
        if iteration < 200:
            (folder.root / TRACKER).write_text("100")
        was_cut_off = is_cut_off(folder, iteration, "new", last, how)
        folder.repair()
        is_untouched = iteration == 200 and last == 0  # the old one is still there
        assert label_of(folder.newest()) == ("old 200" if is_untouched else f"new {iteration}")
        assert label_of(folder.at(100)) == "old 100"
        assert folder.repair() == []
        if not was_cut_off:
            assert last >= 4 and hidden(folder) == []
            return


@pytest.mark.parametrize("again", [False, True])
def test_a_crash_after_a_crash(tmp_path: Path, again: bool) -> None:
    """Two jobs in a row are cut off, each anywhere; the third comes through and tidies up.

    Would catch leftovers of one crash that mislead the repair after the next.
    """
    for first, second in product(range(6), range(6)):
        folder = CheckpointFolder(tmp_path / f"{first}{second}")
        iterations = (100, 100, 100) if again else (100, 200, 300)
        saved(folder, iterations[0])
        is_cut_off(folder, iterations[1], "a", first, "from start")
        folder.repair()
        is_cut_off(folder, iterations[2], "b", second, "from end")
        folder.repair()
        label = label_of(folder.newest())  # of an iteration that is saved again: any
        assert label == f"b {iterations[2]}" or (again and label.endswith(" 100"))
        assert saved(folder, iterations[2], "c") == label_of(folder.newest())
        assert hidden(folder) == [] and folder.tracked() == str(iterations[2])


def test_a_save_without_manifest_does_not_count(tmp_path: Path) -> None:
    """Would catch a repair that completes a save whose files are not all there."""
    folder = CheckpointFolder(tmp_path)
    label = saved(folder, 100)
    write(folder.partial(200, "new"), "new 200", FILES[:-1])
    assert folder.repair() == [] and label_of(folder.newest()) == label
    assert folder.at(200) is None and not folder.is_broken_off(200)


@pytest.mark.parametrize("kinds", [["replaced"], ["partial"], ["replaced", "partial"]])
def test_repair_between_two_renames(tmp_path: Path, kinds: list[str]) -> None:
    """Would catch the loss of both copies, and a repair that undoes a save."""
    folder = CheckpointFolder(tmp_path)
    for kind in kinds:
        write(tmp_path / f".iter_0000200.job.{kind}", kind)
    assert folder.repair() == [folder.final(200)] and label_of(folder.newest()) == kinds[-1]


def test_a_commit_says_what_the_tracker_named(tmp_path: Path) -> None:
    """What Megatron's retention may remove: would catch the name of the new one."""
    folder = CheckpointFolder(tmp_path)
    answers = []
    for iteration in (100, 200, 200):
        write(folder.partial(iteration, "job"), "label")
        answers.append(folder.commit(iteration, "job"))
    (tmp_path / TRACKER).write_text("release")
    write(folder.partial(300, "job"), "label")
    assert [*answers, folder.commit(300, "job")] == [None, 100, 200, None]
    assert (folder.final(300) / module.EDIT / module.LISTED).is_file() and folder.tracked() == "300"


def test_the_sweep(tmp_path: Path) -> None:
    """Would catch one that takes the save of this job that is under way."""
    folder = CheckpointFolder(tmp_path)
    for job in ("mine", "dead"):
        write(folder.partial(200, job), job, FILES[:1])
    saved(folder, 100, "mine")
    assert hidden(folder) == [folder.partial(200, "mine").name]


def test_the_sweep_before_the_first_save(tmp_path: Path) -> None:
    """Would catch a disk that stays full, and the removal of what a repair would bring back."""
    folder = CheckpointFolder(tmp_path)
    write(folder.partial(200, "dead"), "dead", FILES[:-1])
    write(folder.partial(300, "whole"), "whole")
    write(folder.partial(200, "mine"), "mine", FILES[:-1])
    folder.sweep_broken("mine")
    assert sorted(hidden(folder)) == sorted(
        [folder.partial(300, "whole").name, folder.partial(200, "mine").name]
    )


def test_the_sweep_spares_the_save_of_a_stop(tmp_path: Path) -> None:
    """The last save of a run, which others write already; it sweeps all that came before it.

    Would catch a commit that removes half of the checkpoint that comes next.
    """
    folder = CheckpointFolder(tmp_path)
    for iteration, job in ((201, "mine" + module.STOP), (150, "mine")):
        write(folder.partial(iteration, job), job, FILES[:1])
    saved(folder, 200, "mine")
    assert len(hidden(folder)) == 2
    saved(folder, 201, "mine" + module.STOP)
    assert hidden(folder) == [] and folder.tracked() == "201"


def test_a_checkpoint_that_is_somebody_elses(tmp_path: Path, monkeypatch: Any) -> None:
    """A link into an archive that nobody may write to: saved beside, and replaced.

    Would catch a commit that ends with the tracker moved and everything else left undone.
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
        saved(folder, 200, "mine")
    assert folder.tracked() == "200" and (folder.final(200) / module.EDIT / module.LISTED).exists()
    saved(folder, 100, "mine")
    assert sorted(p.name for p in folder.root.iterdir() if p.name.startswith(".")) == []
    assert (archive / FILES[0]).read_text() == "old 100"


def test_where_a_partial_checkpoint_will_lie(tmp_path: Path) -> None:
    """Would catch a name given away that will be gone."""
    folder = CheckpointFolder(tmp_path)
    partial, final = folder.partial(12_345_678, "abc"), folder.final(12_345_678)
    assert module.final_of(partial) == final == module.final_of(final)
    assert module.final_of(partial / "edit" / "replica_1") == final / "edit" / "replica_1"


def place(folder: CheckpointFolder, iteration: int, kind: str) -> None:
    """A checkpoint of one kind."""
    kinds = {
        "listed": (*FILES, "edit/listed"),
        "unlisted": FILES,
        "broken": FILES[:-1],  # its manifest was lost
        "stock": FILES[:2],
        "unmarked": ("mp_rank_00/model.pt",),  # stock Megatron's in an old format, or cut off
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
def test_the_tracker(
    tmp_path: Path, kinds: dict[int, str], tracker: str | None, expected: int | None
) -> None:
    """It wins if what it names is complete, for people roll back by editing it; then the newest.

    Would catch names compared as text, an incomplete one that is loaded, a damaged tracker that
    ends the job, and a newer complete one that is passed over.
    """
    folder = CheckpointFolder(tmp_path)
    for iteration, kind in kinds.items():
        place(folder, iteration, kind)
    if tracker is not None:
        (tmp_path / TRACKER).write_text(tracker, encoding="utf-8")
    found = folder.newest()
    is_ours = expected is not None and kinds.get(expected) in ("listed", "unlisted")
    complete = Found(folder.final(expected or 0), expected, has_manifest=is_ours)
    assert found == (None if expected is None else complete)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"9" * 5000, b"release\xff"])
def test_a_damaged_tracker(tmp_path: Path, content: bytes) -> None:
    """Not even text, or a number that Python refuses to read: the newest, and no exception."""
    folder = CheckpointFolder(tmp_path)
    label = saved(folder, 100)
    (tmp_path / TRACKER).write_bytes(content)
    assert label_of(folder.newest()) == label
    assert saved(folder, 200, "next") == label_of(folder.newest())


def test_release(tmp_path: Path) -> None:
    """Megatron's converted models: loaded while the tracker names them and they are there."""
    folder = CheckpointFolder(tmp_path)
    label = saved(folder, 100)
    (tmp_path / TRACKER).write_text("release\n")
    assert folder.tracked() == "release" and label_of(folder.newest()) == label
    (tmp_path / "release").mkdir()
    assert folder.newest() == Found(tmp_path / "release", None, has_manifest=False)
    assert saved(folder, 200, "next") == label_of(folder.newest())


def test_a_roll_back_after_a_repaired_crash(tmp_path: Path) -> None:
    """Cut off before the tracker, repaired, trained on: the tracker must still win afterwards.

    Would catch a repaired checkpoint that counts as just cut off for ever after.
    """
    for last in range(3):
        folder = CheckpointFolder(tmp_path / str(last))
        saved(folder, 100)
        assert is_cut_off(folder, 200, "a", last, "before")
        folder.repair()
        saved(folder, 300, "b")
        (folder.root / TRACKER).write_text("100")
        assert label_of(folder.newest()) == "old 100", last


def test_no_folder(tmp_path: Path) -> None:
    """A first start: nothing is there, nothing fails, nothing is made."""
    folder = CheckpointFolder(tmp_path / "none")
    assert folder.newest() is None and folder.repair() == [] and folder.tracked() is None
    assert folder.at(100) is None and not folder.is_broken_off(100)
    assert not folder.root.exists()


@pytest.mark.parametrize("kind", ["listed", "unlisted", "stock", "broken", "unmarked", "file"])
def test_at_an_iteration(tmp_path: Path, kind: str) -> None:
    """`--ckpt-step`: what is there without being complete is told from what is not there."""
    folder = CheckpointFolder(tmp_path)
    if kind == "file":
        folder.final(12_345_678).write_text("")
    else:
        place(folder, 12_345_678, kind)
    is_complete = kind in ("listed", "unlisted", "stock")
    found = folder.at(12_345_678)
    assert (found is not None and found.path == folder.final(12_345_678)) == is_complete
    assert folder.is_broken_off(12_345_678) != is_complete
    assert folder.at(2_345_678) is None and not folder.is_broken_off(2_345_678)


def test_where_things_lie(tmp_path: Path) -> None:
    """Stock Megatron loads replica 0: would catch another layout than the documented one."""
    final = CheckpointFolder(tmp_path).final(128)
    assert final == tmp_path / "iter_0000128" == module.replica_folder(final, 0)
    assert module.replica_folder(final, 2) == final / "edit" / "replica_2"
    assert module.manifest_of(final) == final / "edit" / "edit.json"
