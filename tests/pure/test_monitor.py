"""`megatron-edit report` and `watch` on complete, growing and damaged event files.

Would catch: a half-written line counted as damaged or read twice, numbers of an earlier run, a
missing warning, a traceback.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_edit.observe.line_files import LineReader
from megatron_edit.tools.cli import main
from megatron_edit.tools.monitor.findings import list_findings
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.summary import sync_table
from megatron_edit.tools.pages.texts import duration
from tests.harness.event_files import BATCH, SEQ_LENGTH, SyntheticRun, read_run

pytest.importorskip("rich")


# ---- lines


def test_growing_file_is_read_line_by_line(tmp_path: Path) -> None:
    """Also before it exists, and if it ends in the middle of a UTF-8 character."""
    path = tmp_path / "x.jsonl"
    file = LineReader(path)
    assert list(file.read()) == []
    text = '{"a": "ä"}\n{"a": 2}\n'.encode()
    found = []
    for end in range(1, len(text) + 1):
        path.write_bytes(text[:end])
        found += list(file.read())
    assert found == [{"a": "ä"}, {"a": 2}]
    assert file.num_damaged == 0 and not file.was_replaced


def test_damaged_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n\xff\xfe\n[1]\n\n{"a": 2}\n{"a"')
    file = LineReader(path)
    assert list(file.read()) == [{"a": 1}, {"a": 2}]
    assert file.num_damaged == 3  # neither the empty line nor the half one at the end


# ---- runs


def test_run_statistics_match_event_lines(tmp_path: Path) -> None:
    made_up = SyntheticRun(train_iters=400, slow={2: 1.5}, anomalous_replica=1, rollbacks=(12,))
    run = read_run(made_up.write(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "sync.jsonl").read_text().splitlines()]
    assert run.syncs.count == 30 and run.iteration == made_up.iterations
    assert run.syncs.sent_bytes == sum(line["wire_bytes"] for line in lines)
    assert run.syncs.num_rollbacks == 1
    left_out = np.array([line["anomalous"] for line in lines]).sum(axis=(0, 1))
    assert run.syncs.anomaly_shares(4) == pytest.approx(left_out / (30 * made_up.units))
    exposed = sum(line["seconds"]["exposed"] for line in lines[1:])
    assert run.syncs.share("exposed") == pytest.approx(
        exposed / (lines[-1]["time"] - lines[0]["time"])
    )
    first = run.syncs.by_unit(lambda sync: sync.norms.mean(axis=1))[0]
    assert first == pytest.approx([np.mean(row) for row in lines[0]["norms"]])
    norms = np.array(lines[-1]["norms"])
    effective = [1 / sum(w * w for w in row) for row in lines[-1]["weights"]]
    cells = sync_table(run, 1).rows[0]
    assert cells[2:4] == [f"{norms.min():.3g}-{norms.max():.3g}", f"{np.median(effective):.2f}/4"]
    assert run.progress == 0.65 and run.state == "running"
    fast, slow = run.replicas[0], run.replicas[2]  # speeds differ between syncs only
    assert slow.speed_between_syncs(run.facts) < 0.75 * fast.speed_between_syncs(run.facts)
    assert slow.mean_speed == pytest.approx(fast.mean_speed, rel=0.05)
    tokens = 140 * BATCH * 4 * SEQ_LENGTH
    assert run.speed is not None
    assert run.remaining_seconds == pytest.approx(tokens / run.speed)
    text = " ".join(finding.text for finding in list_findings(run))
    for part in ("Replica 2 is slow", "Replica 1 was left out", "1 roll-back:"):
        assert part in text


def test_growing_run_equals_complete_run(tmp_path: Path) -> None:
    """Also if it is read in pieces; a newer run in the folder replaces it."""
    SyntheticRun(rounds=6).write(tmp_path / "whole")
    whole, growing = read_run(tmp_path / "whole"), MonitoredRun(tmp_path / "growing")
    growing.poll()
    assert growing.state == "waiting"
    (tmp_path / "growing").mkdir()
    growing.poll()
    assert growing.state == "waiting"
    contents = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    (tmp_path / "growing" / "run.json").write_bytes(contents.pop("run.json"))
    for part in range(1, 8):
        for name, content in contents.items():
            (tmp_path / "growing" / name).write_bytes(content[: len(content) * part // 7])
        growing.poll()
    assert growing.syncs.sent_bytes == whole.syncs.sent_bytes
    assert growing.num_damaged == {} and growing.latest_loss == whole.latest_loss
    for mine, other in zip(growing.replicas, whole.replicas, strict=True):
        assert mine.losses[1].tolist() == other.losses[1].tolist()
    for path in (tmp_path / "growing").glob("*.jsonl"):  # as the writer does
        path.rename(path.with_suffix(".1.jsonl"))
    SyntheticRun(rounds=2, replicas=2).write(tmp_path / "growing")
    growing.poll()
    assert growing.syncs.count == 2 and len(growing.replicas) == 2


def set_nulls(line: dict[str, Any]) -> None:
    """Set all values to null where the format allows it."""
    line["norms"] = [[None] * len(row) for row in line["norms"]]
    line["z"] = line["norms"]
    line["weights"] = [[0.0] * len(row) for row in line["weights"]]
    line["clip"] = [None] * len(line["clip"])
    line["update_norm"] = line["clip"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "made_up",
    [
        SyntheticRun(change=set_nulls, rounds=3),
        SyntheticRun(rounds=0, warmup=5),
        SyntheticRun(rounds=0, warmup=0),
        SyntheticRun(rounds=0, warmup=0, strategy="ddp"),
        SyntheticRun(replicas=1, units=1, rounds=1),
        SyntheticRun(strategy="a-edit", rounds=4, train_iters=1000),
        SyntheticRun(replicas=9, rounds=2, units=80),
    ],
    ids=["nulls", "warm-up", "just begun", "ddp", "one", "a-edit", "many"],
)
def test_report_is_written_for_every_kind_of_run(
    tmp_path: Path, made_up: SyntheticRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made_up.write(tmp_path / "log")
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    without_data = re.sub(r"data:image/png;base64,[^\"]*", "", page)
    for word in ("http", "<script", "url(h", "@import", "nan", "None"):
        settings = without_data.index("<summary>")  # where "None" would be a value, it is "unset"
        visible = re.sub(r"xmlns(:\w+)?=\"[^\"]*\"", "", without_data[:settings])
        assert word not in visible, word
    assert main(["watch", str(folder), "--once"]) == 0
    assert made_up.strategy in capsys.readouterr().out


def test_damaged_lines_are_reported(tmp_path: Path) -> None:
    """Also JSON lines with missing fields, or with another number of replicas."""
    SyntheticRun(rounds=5).write(tmp_path)
    lines = (tmp_path / "sync.jsonl").read_text().splitlines()
    lines[1], lines[2] = lines[1][: len(lines[1]) // 2], '{"round": 3}'
    other = json.loads(lines[3])
    other["norms"] = [row[:2] for row in other["norms"]]
    lines[3] = json.dumps(other)
    (tmp_path / "sync.jsonl").write_text("\n".join(lines) + '\n{"round"')
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "3 in sync.jsonl" in page
    assert read_run(tmp_path).syncs.count == 2


@pytest.mark.parametrize(
    ("made_up", "part"),
    [
        (SyntheticRun(exposed=0.1), "Exposed syncs took"),
        (SyntheticRun(exposed=0.4), "waited for the others"),
        (SyntheticRun(), ""),
    ],
)
def test_findings_appear_only_with_their_cause(
    tmp_path: Path, made_up: SyntheticRun, part: str
) -> None:
    """Each warning appears with its cause; a healthy run has none."""
    found = list_findings(read_run(made_up.write(tmp_path)))
    if part:
        assert any(part in finding.text for finding in found), found
    else:
        assert found == []


def test_silence_of_a_running_training_follows_its_steps(tmp_path: Path) -> None:
    """Would catch: a training that starts, evaluates or syncs slowly is shown as lost."""
    folder = SyntheticRun(rounds=3, train_iters=400).write(tmp_path)
    assert read_run(folder).longest_silence == 600.0  # steps of 0.1 s
    lines = (folder / "replica-0.jsonl").read_text().splitlines()
    slow = [json.dumps(json.loads(line) | {"seconds": 180.0}) for line in lines if "loss" in line]
    (folder / "replica-0.jsonl").write_text("\n".join(slow) + "\n")
    assert read_run(folder).longest_silence == 100 * 180.0


def test_silence_and_missing_files_are_found(tmp_path: Path) -> None:
    SyntheticRun(rounds=4, train_iters=1000).write(tmp_path)
    (tmp_path / "replica-3.jsonl").unlink()
    hour_ago = time.time() - 3600
    for file in tmp_path.iterdir():
        os.utime(file, (hour_ago, hour_ago))
    run = read_run(tmp_path)
    assert run.state == "lost" and [replica.name for replica in run.missing] == ["3"]
    texts = " ".join(finding.text for finding in list_findings(run))
    assert "No line for 1 h" in texts and "No file of replica 3" in texts


# ---- commands


@pytest.mark.parametrize("command", ["report", "watch"])
def test_bad_input_is_refused_in_one_line(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    foreign, broken = tmp_path / "foreign", tmp_path / "broken"
    for folder, text in ((foreign, '{"config": {}}'), (broken, '{"config"')):
        folder.mkdir()
        (folder / "run.json").write_text(text)
    (tmp_path / "empty").mkdir()
    bad = [[str(tmp_path / "file")], [str(foreign)], [str(broken)], [str(foreign), "more"]]
    if command == "report":
        good = str(SyntheticRun(rounds=0).write(tmp_path / "good"))
        bad += [[str(tmp_path / "none")], [str(tmp_path / "empty")],
                [good, "--output", str(tmp_path / "no" / "where.html")],
                [good, "--output", str(tmp_path)]]  # fmt: skip
    else:
        bad += [[str(tmp_path), "--seconds", "0"], [str(tmp_path), "--seconds", "nan"]]
    for words in bad:
        assert main([command, *words]) == 2, words
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and captured.err.startswith(
            f"megatron-edit {command}: "
        )
        assert captured.out == ""


def test_watch_waits_for_run_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the folder exists; without a terminal it prints one frame."""
    assert main(["watch", str(tmp_path / "later")]) == 0
    assert "waiting for" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (61, "1 min 1 s"), (3600, "1 h"), (90061, "1 d 1 h"), (math.nan, "–")],  # noqa: RUF001
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_rejected_losses_are_a_finding(tmp_path: Path) -> None:
    """With replica, count, last loss and the others' median; older files lack the fields."""
    folder = SyntheticRun(train_iters=400).write(tmp_path)
    path = tmp_path / "sync.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert not read_run(folder).syncs.loss_rejections()
    replicas = len(lines[0]["samples"])
    for number, line in enumerate(lines):
        is_bad = number in (10, 11)
        reasons = ["loss" if is_bad and r == 2 else None for r in range(replicas)]
        line["why"] = [reasons] * len(line["units"])
        line["round_loss"] = [9.25 if is_bad and r == 2 else 3.0 for r in range(replicas)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    rejections = run.syncs.loss_rejections()
    assert rejections == {2: (2, lines[11]["iteration"], 9.25, 3.0)}
    (text,) = (f.text for f in list_findings(run) if "because of its loss" in f.text)
    assert text.startswith("Replica 2 was left out of 2 syncs because of its loss")
    assert "9.25" in text and "others' median 3." in text
    for broken in ({"why": [["loss"]]}, {"why": 3}, {"round_loss": [1.0]}):
        path.write_text(json.dumps({**lines[0], **broken}) + "\n")
        assert read_run(folder).num_damaged == {"sync.jsonl": 1}
