"""The hub's journal: what was written is there after any crash, and nothing else is.

Would catch: a line that was acted on and is lost, a torn line that is believed, a changed, moved or
missing line that is not noticed, two hubs on one journal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.elastic.journal import FILE_NAME, Journal, JournalError
from megatron_edit.errors import UsageError
from tests.harness.hub import read_journal


def write_lines(folder: Path, count: int) -> None:
    journal = Journal.open(folder, clock=lambda: 7.0)
    for number in range(count):
        journal.append(1, number // 2, "commit", round=number, members=["a", "b"])
    journal.close()


def test_lines_are_read_back_in_order(tmp_path: Path) -> None:
    write_lines(tmp_path, 3)
    journal = Journal.open(tmp_path)
    journal.append(2, 5, "end", reason="finished")
    entries = read_journal(tmp_path)
    assert entries == list(journal.entries())
    assert [entry.seq for entry in entries] == [1, 2, 3, 4]
    assert [entry.term for entry in entries] == [1, 1, 1, 2]
    assert entries[3].fields == {"reason": "finished"} and entries[3].epoch == 5
    line = json.loads((tmp_path / FILE_NAME).read_text().splitlines()[0])
    assert set(line) == {"seq", "time", "term", "epoch", "event", "round", "members", "hash"}
    journal.close()


@given(st.integers(min_value=0, max_value=10_000))
def test_torn_last_line_is_cut_off(tmp_path_factory: pytest.TempPathFactory, kept: int) -> None:
    """A file that ends anywhere has the complete lines before, and goes on after them."""
    folder = tmp_path_factory.mktemp("journal")
    write_lines(folder, 3)
    path = folder / FILE_NAME
    whole = path.read_bytes()
    size = kept % (len(whole) + 1)
    path.write_bytes(whole[:size])
    journal = Journal.open(folder)
    kept = whole[:size].count(b"\n")
    assert len(list(journal.entries())) == kept
    journal.append(2, 0, "open")
    journal.close()
    assert [entry.seq for entry in read_journal(folder)] == list(range(1, kept + 2))


@pytest.mark.parametrize("damage", ["changed", "missing", "moved", "no JSON", "no field"])
def test_damaged_line_is_refused(tmp_path: Path, damage: str) -> None:
    write_lines(tmp_path, 3)
    path = tmp_path / FILE_NAME
    lines = path.read_text().splitlines()
    if damage == "changed":
        lines[1] = lines[1].replace('"a"', '"c"')
    elif damage == "missing":
        del lines[1]
    elif damage == "moved":
        lines[0], lines[1] = lines[1], lines[0]
    else:
        lines[1] = "{" if damage == "no JSON" else "{}"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match=r"line [12].*is damaged"):
        Journal.open(tmp_path)


def test_second_hub_is_refused(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    with pytest.raises(UsageError, match="another hub has it"):
        Journal.open(tmp_path)
    journal.close()
    Journal.open(tmp_path).close()


def test_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="must be a writable folder"):
        Journal.open(tmp_path / "file")


def test_other_writer_ends_the_hub(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.append(1, 0, "open")
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b"x")
    with pytest.raises(JournalError, match="another process"):
        journal.append(1, 0, "end")


@pytest.mark.parametrize("fault", ["short write", "failed sync", "other bytes"])
def test_line_that_may_not_be_durable_ends_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    journal, write, read = Journal.open(tmp_path), os.write, os.pread
    journal.append(1, 0, "open")
    if fault == "short write":
        monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[:-3]))
    elif fault == "failed sync":
        monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "I/O error")))
    else:
        monkeypatch.setattr(os, "pread", lambda *given: read(*given).replace(b"e", b"f"))
    with pytest.raises(JournalError):
        journal.append(1, 0, "commit")
    monkeypatch.undo()
    with pytest.raises(JournalError, match="an earlier line may not be on the disk"):
        journal.append(1, 0, "commit")


def test_lines_are_synced_before_they_are_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub before may have ended between writing a line and syncing it."""
    write_lines(tmp_path, 3)
    done: list[str] = []

    def noting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            done.append(what)
            return function(*given)

        return noted

    monkeypatch.setattr(os, "fsync", noting("sync", os.fsync))
    monkeypatch.setattr(os, "pread", noting("read", os.pread))
    Journal.open(tmp_path).close()
    assert done[:3] == ["sync", "sync", "read"]  # file and folder
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(UsageError, match="cannot be synced"):
        Journal.open(tmp_path)


def test_entries_of_new_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    Journal.open(tmp_path / "a" / "b").close()
    assert {str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)} <= set(synced)


def test_open_journal_keeps_its_last_lines_only(tmp_path: Path) -> None:
    write_lines(tmp_path, 3)
    journal = Journal.open(tmp_path)
    end = journal.append(2, 5, "end", reason="finished")
    assert journal.last == end
    assert journal.last_commit is not None and journal.last_commit.fields["round"] == 2
    run = journal.run
    journal.close()
    again = Journal.open(tmp_path)
    assert again.run == run and len(run) == 16 and again.last == end
    again.close()
