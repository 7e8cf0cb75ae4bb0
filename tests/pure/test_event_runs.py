"""Which differences the comparison of event files ignores and which it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.event_runs import compare

SYNC = {"round": 1, "time": 5.0, "norms": [[0.1, 0.2]], "seconds": {"wait": 0.1}}
STEP = {"iteration": 1, "loss": 2.5, "seconds": 0.1}
RUN = {"argv": ["a.py", "--x"], "topology": {"host": "a", "device": "cpu"}, "versions": {"x": "1"}}


def record(folder: Path, sync: dict[str, Any], step: dict[str, Any], run: dict[str, Any]) -> Path:
    """Write a record of one run with one line in each file."""
    events = folder / "edit/events"
    events.mkdir(parents=True)
    for name, line in (("sync.jsonl", sync), ("replica-0.jsonl", step), ("run.json", run)):
        (events / name).write_text(json.dumps(line) + "\n")
    return folder


def changed(line: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the line with other values."""
    return {**line, **fields}


def test_times_and_hosts_are_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = record(tmp_path / "one", SYNC, STEP, RUN)
    run = {"argv": ["b.py", "--x"], "topology": {"host": "b", "device": "cpu"}, "versions": {}}
    two = record(
        tmp_path / "two", changed(SYNC, time=6.0, seconds={}), changed(STEP, seconds=0.2), run
    )
    assert compare(one, two) == 0
    assert capsys.readouterr().out == "1 runs, 3 lines: no files differ\n"


DIFFERENT = {
    "last-digit": (changed(SYNC, norms=[[0.1, 0.20000000000000004]]), STEP, RUN),
    "whole-number": (changed(SYNC, round=1.0), STEP, RUN),
    "new-field": (SYNC, changed(STEP, more=1), RUN),
    "order": (SYNC, dict(reversed(STEP.items())), RUN),
    "longer-list": (SYNC, STEP, changed(RUN, argv=["a.py", "--x", "--y"])),
    "device": (SYNC, STEP, changed(RUN, topology={"host": "a", "device": "cuda"})),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_all_other_differences_are_found(tmp_path: Path, name: str) -> None:
    one = record(tmp_path / "one", SYNC, STEP, RUN)
    two = record(tmp_path / "two", *DIFFERENT[name])
    assert compare(one, two) == 1


def test_missing_line_file_or_run_is_a_difference(tmp_path: Path) -> None:
    one = record(tmp_path / "one", SYNC, STEP, RUN)
    short = record(tmp_path / "short", SYNC, STEP, RUN)
    (short / "edit/events/sync.jsonl").write_text("")
    lost = record(tmp_path / "lost", SYNC, STEP, RUN)
    (lost / "edit/events/replica-0.jsonl").unlink()
    (tmp_path / "empty").mkdir()
    assert [compare(one, other) for other in (short, lost, tmp_path / "empty")] == [1, 1, 1]
