"""`megatron-edit report` and `watch` on elastic runs: replicas have names, and come and go.

Would catch: a column of one replica read as another's, a run shown as failed because one replica
left it, a replica whose lines are not found, a leave without its reason.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_edit.observe.events import move_aside
from megatron_edit.tools.cli import main
from megatron_edit.tools.monitor.findings import list_findings
from megatron_edit.tools.monitor.membership import HubJournal
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.summary import describe_schedule, replica_table
from tests.harness.elastic_event_files import (
    BEGAN_AT,
    FENCED,
    KILLED,
    STOPPED,
    SyntheticElasticRun,
    SyntheticEpoch,
)
from tests.harness.event_files import BATCH, SyntheticRun, finding_texts, page_and_frame, read_run

pytest.importorskip("rich")
EPOCHS = [
    SyntheticEpoch("abc", 4),
    SyntheticEpoch("ac", 3, {"b": KILLED}),
    SyntheticEpoch("abc", 3),
    SyntheticEpoch("ac", 2, {"b": STOPPED}, "signal"),
    SyntheticEpoch(("a", "c", "node-4.rack7"), 4),
]
COMPLETE = SyntheticElasticRun(EPOCHS, is_over=True)


def set_age(logs: Path, seconds: float) -> None:
    """Let all files be older."""
    moment = time.time() - seconds
    for path in logs.iterdir():
        os.utime(path, (moment, moment))


# ---- who took part


def test_replicas_are_read_by_name(tmp_path: Path) -> None:
    run = read_run(COMPLETE.write(tmp_path))
    assert run.num_damaged == {} and run.missing == []
    assert [replica.name for replica in run.replicas] == ["a", "b", "c", "node-4.rack7"]
    assert [replica.name for replica in run.members] == ["a", "c", "node-4.rack7"]
    assert [replica.step for replica in run.replicas] == [66, 14, 66, 18]
    assert len(run.replicas[1].steps) == 2 + 4 * 4 + 3 * 4
    assert run.samples == run.syncs.records[-1].samples_all == COMPLETE._samples
    assert (run.state, run.progress) == ("finished", 1.0)
    assert run.losses[0][-1] == COMPLETE._samples


def test_columns_follow_the_names(tmp_path: Path) -> None:
    """A column stays with its replica when another one leaves before it."""
    run = read_run(COMPLETE.write(tmp_path))
    lines = COMPLETE.lines["sync.jsonl"]
    norms = run.syncs.by_replica(lambda sync: sync.norms.mean(axis=0), 4)
    names = [replica.name for replica in run.replicas]
    for row, line in zip(norms, lines, strict=True):
        means = dict(zip(line["members"], np.mean(line["norms"], axis=0), strict=True))
        expected = [means.get(name, np.nan) for name in names]
        assert row == pytest.approx(expected, nan_ok=True)
    of_b = [line["weights"] for line in lines if "b" in line["members"]]
    mean_weight = np.mean([[w[1] for w in x] for x in of_b])
    assert replica_table(run).rows[1][-2] == f"{mean_weight:.3f}"
    assert [len(sync.members) for sync in run.syncs.records][-7:] == [3, 2, 2, 3, 3, 3, 3]


def test_changes_of_the_members(tmp_path: Path) -> None:
    membership = read_run(COMPLETE.write(tmp_path)).membership
    found = [(c.round, c.epoch, c.came, [span.name for span in c.left])
             for c in membership.changes]  # fmt: skip
    assert found == [
        (1, 1, ("a", "b", "c"), []), (5, 2, (), ["b"]), (8, 3, ("b",), []),
        (11, 4, (), ["b"]), (13, 5, ("node-4.rack7",), []),
    ]  # fmt: skip
    assert membership.share("b") == 7 / 16 and membership.share("a") == 1
    assert [span.next_round for span in membership.spans["b"]] == [5, 11]
    assert membership.changes[1].time == BEGAN_AT + 50


def test_growing_run_equals_complete_run(tmp_path: Path) -> None:
    """Files of replicas that join appear later. Would catch files that are looked for once."""
    logs = COMPLETE.write(tmp_path / "whole")
    whole, growing = read_run(logs, logs.parent / "hub"), tmp_path / "growing" / "logs"
    (tmp_path / "growing" / "hub").mkdir(parents=True)
    growing.mkdir()
    run = MonitoredRun(growing, HubJournal(tmp_path / "growing" / "hub"))
    contents = {path.relative_to(logs.parent): path.read_bytes() for path in logs.parent.rglob("*")
                if path.is_file()}  # fmt: skip
    for part in range(1, 6):
        for name, content in contents.items():
            is_complete = name.name == "run.json"
            if "node-4" in name.name and part < 4:
                continue
            size = len(content) if is_complete else len(content) * part // 5
            if not is_complete or part == 1:
                (growing.parent / name).write_bytes(content[:size])
        run.poll()
    assert run.num_damaged == {} and run.state == "finished"
    assert run.membership.changes == whole.membership.changes
    assert run.syncs.elapsed == whole.syncs.elapsed
    steps = {replica.name: (replica.step, len(replica.steps)) for replica in run.replicas}
    assert steps == {r.name: (r.step, len(r.steps)) for r in whole.replicas}
    assert run.journal is not None and run.journal.leader == "a"


def test_joiner_without_a_step_is_not_anomalous(tmp_path: Path) -> None:
    """It has weight 0 in its first sync."""
    run = SyntheticElasticRun([SyntheticEpoch("ab", 3), SyntheticEpoch("abc", 1)], nominal=2)
    logs = run.write(tmp_path)
    line = run.lines["sync.jsonl"][-1]
    line["why"] = [[None, None, "no-step"] for _ in line["units"]]
    line["anomalous"] = [[False, False, True] for _ in line["units"]]
    text = "".join(json.dumps(each) + "\n" for each in run.lines["sync.jsonl"])
    (logs / "sync.jsonl").write_text(text)
    assert read_run(logs).syncs.num_anomalies == 0
    line["why"][0][1], line["anomalous"][0][1] = "norm", True
    text = "".join(json.dumps(each) + "\n" for each in run.lines["sync.jsonl"])
    (logs / "sync.jsonl").write_text(text)
    assert read_run(logs).syncs.anomaly_shares(3)[1] > 0


def test_new_epoch_with_the_same_members_is_a_change(tmp_path: Path) -> None:
    """A replica that was lost and came back within a round, or groups that were formed again."""
    epochs = [SyntheticEpoch("ab", 2), SyntheticEpoch("ab", 2)]
    run = read_run(SyntheticElasticRun(epochs, nominal=2).write(tmp_path))
    assert [(c.epoch, c.came, c.left) for c in run.membership.changes] == [
        (1, ("a", "b"), ()), (2, (), ())
    ]  # fmt: skip


# ---- faults and the end


@pytest.mark.parametrize("has_journal", [False, True])
@pytest.mark.parametrize(
    ("end", "reason", "shown", "is_warned"),
    [
        (KILLED, "lost", "b (no end record)", True),
        (FENCED, "lost", "b (failed with exit code 5)", True),
        (STOPPED, "signal", "b (stopped: a signal)", False),
    ],
)
def test_run_goes_on_without_a_replica(
    tmp_path: Path, end: dict[str, Any] | None, reason: str, shown: str, *, is_warned: bool,
    has_journal: bool, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    epochs = [SyntheticEpoch("abc", 3), SyntheticEpoch("ac", 3, {"b": end}, reason)]
    logs = SyntheticElasticRun(epochs).write(tmp_path)
    run = read_run(logs, tmp_path / "hub" if has_journal else None)
    assert run.state == "running" and run.failure is None
    assert run.speed == pytest.approx(2 * BATCH * 128 * 4 / 10)
    assert ("Replica b was lost before sync 4" in finding_texts(run)) == is_warned
    assert "note: 2 of nominally 3 replicas take part." in finding_texts(run)
    if is_warned:
        assert "warning: Replica b" in finding_texts(run) and "start it again" in finding_texts(run)
    more = ["--state-dir", str(tmp_path / "hub")] if has_journal else []
    for text in page_and_frame(logs, capsys, *more):
        assert (f"b ({reason})" if has_journal else shown) in text
        assert "Members: a, c (epoch 2)" in text
        assert ("leader: a" if has_journal else "give --state-dir of the hub") in text


def test_replica_that_came_back_is_a_note(tmp_path: Path) -> None:
    """With the number of its losses; leaves on request are not counted."""
    epochs = [*EPOCHS, SyntheticEpoch("abc", 2), SyntheticEpoch("ac", 2, {"b": FENCED}),
              SyntheticEpoch("abc", 1)]  # fmt: skip
    run = read_run(SyntheticElasticRun(epochs).write(tmp_path))
    (text,) = [finding.text for finding in list_findings(run) if "Replica b" in finding.text]
    assert text == (
        "Replica b was lost before sync 19 (the last of 2 times); failed with exit code 5: the "
        "others went on. It has come back."
    )
    assert "note: Replica b" in finding_texts(run)


def test_journal_gives_reasons_and_news(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Evictions, restarts of the hub, and what no sync shows yet."""
    epochs = [SyntheticEpoch("abc", 3), SyntheticEpoch("ac", 3, {"b": KILLED}, "evicted")]
    logs = SyntheticElasticRun(epochs).write(tmp_path)
    with (tmp_path / "hub" / "journal.jsonl").open("a") as file:
        for line in (
            {"event": "open", "term": 3, "epoch": 2},
            {"event": "leave", "term": 3, "epoch": 2, "name": "c", "reason": "lost",
             "time": BEGAN_AT},
            {"event": "join", "term": 3, "epoch": 2, "name": "d"},
            {"event": "join", "term": 3, "epoch": 2, "name": "../e"},
            {"event": "epoch", "term": 3, "epoch": [], "members": ["f"], "leader": "f"},
            *({"event": "leave", "term": 3, "epoch": 2, "name": "g", "reason": "lost",
               "time": BEGAN_AT, "failed_joins": count} for count in range(1, 5)),
        ):  # fmt: skip
            file.write(json.dumps(line) + "\n")
        file.write('{"event": "jo')
    run = read_run(logs, logs.parent / "hub")
    assert "Replica b was evicted by the hub before sync 4; no end record." in finding_texts(run)
    assert "note: The hub was started again 2 times." in finding_texts(run)
    failed = "Replica g was lost before it took part, 4 times in a row: look at its output."
    assert f"warning: {failed}" in finding_texts(run)
    assert run.num_damaged == {"journal.jsonl": 2}
    page, frame = page_and_frame(logs, capsys, "--state-dir", str(tmp_path / "hub"))
    assert "Since the last sync: c has left (lost, " in page and "; d joining" in page
    assert "c has left" in re.sub(r"\s+", " ", frame)


@pytest.mark.parametrize(
    ("ends", "age", "state"),
    [
        ({"a": STOPPED, "c": STOPPED}, 0, "stopped"),
        ({"a": FENCED, "c": STOPPED}, 0, "failed"),
        ({"a": STOPPED}, 0, "running"),
        ({"a": FENCED}, 3600, "failed"),  # c was killed, and a could not go on alone
        ({}, 3600, "lost"),
    ],
)
def test_end_of_all_members_ends_the_run(
    tmp_path: Path, ends: dict[str, dict[str, Any]], age: float, state: str
) -> None:
    epochs = [SyntheticEpoch("abc", 3), SyntheticEpoch("ac", 3, {"b": FENCED})]
    made_up = SyntheticElasticRun(epochs)
    logs = made_up.write(tmp_path)
    for name, end in ends.items():
        with (logs / f"replica-{name}.jsonl").open("a") as file:
            file.write(json.dumps(end | {"time": BEGAN_AT + 99}) + "\n")
    set_age(logs, age)
    run = read_run(logs)
    assert run.state == state
    assert ("Replica a failed" in finding_texts(run)) == (state == "failed")


def test_loss_in_warm_up_ends_the_run(tmp_path: Path) -> None:
    """There are no syncs yet: all that have a file are members."""
    logs = SyntheticElasticRun([SyntheticEpoch("abc", 0)]).write(tmp_path)
    assert [replica.name for replica in read_run(logs).members] == ["a", "b", "c"]
    with (logs / "replica-b.jsonl").open("a") as file:
        file.write(json.dumps(FENCED | {"exit_code": 4, "time": BEGAN_AT}) + "\n")
    assert read_run(logs).state == "failed"


def test_phases_of_rounds_of_one_step_count_in_no_share(tmp_path: Path) -> None:
    """Nor in the finding on exposed time, which a longer interval would not change. Would catch:
    rounds of warm-up and final phase in it, and a text that says that gradients are averaged."""
    logs = SyntheticElasticRun([SyntheticEpoch("abc", 12)], is_over=True).write(tmp_path)
    usual, header = read_run(logs), json.loads((logs / "run.json").read_text())
    records = usual.syncs.records
    header["config"] |= {"warmup_steps": records[3].iteration, "final_sync_fraction": 0.4}
    header["training"]["last_local_step"] = records[7].iteration
    (logs / "run.json").write_text(json.dumps(header))
    run = read_run(logs)
    assert run.syncs.count == 12 and run.syncs.sent_bytes == usual.syncs.sent_bytes
    assert run.syncs.elapsed == records[7].time - records[3].time
    for place, name in ((0, "wait"), (3, "exposed")):
        seconds = sum(sync.seconds[place] for sync in records[4:8])
        assert run.syncs.share(name) == pytest.approx(seconds / run.syncs.elapsed), name
    text = describe_schedule(run.facts)
    assert f"after step {records[7].iteration} parameters are averaged at every step" in text


def test_warm_up_with_a_hub_has_syncs(tmp_path: Path) -> None:
    """Would catch: a reader who waits for the end of the warm-up."""
    run = read_run(SyntheticElasticRun([SyntheticEpoch("abc", 0)]).write(tmp_path))
    assert "No sync yet: in the warm-up there is one after each step." in finding_texts(run)


# ---- files


def test_resumed_elastic_run_is_read_with_its_earlier_files(tmp_path: Path) -> None:
    """Other members went on from the checkpoint; a file that is left of an earlier run, and was
    not written to since, is not theirs."""
    first = SyntheticElasticRun([SyntheticEpoch("abz", 6)])
    logs = first.write(tmp_path)
    point = first.lines["sync.jsonl"][3]["samples_all"]
    for path in (*logs.glob("*.json"), *logs.glob("*.jsonl")):
        if path.name != "replica-z.jsonl":
            move_aside([path], 1)
    set_age(logs, 3600)
    second = SyntheticElasticRun([SyntheticEpoch("bc", 3)], nominal=3)
    second.write(tmp_path)
    for name in ("sync.jsonl", "loss.jsonl", "replica-b.jsonl", "replica-c.jsonl"):
        lines = second.lines[name]
        for line in lines:
            for field in ("samples_all", *(["samples"] if name == "loss.jsonl" else [])):
                if field in line:
                    line[field] += point
            if "round" in line:
                line["round"] += 4
        (logs / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = second.run() | {
        "segment": {"number": 2, "resumed_from": {"iteration": 9, "samples": point}}
    }
    (logs / "run.json").write_text(json.dumps(record))
    run = read_run(logs)
    assert run.num_damaged == {}
    assert run.resumed_at == [point // (3 * BATCH)]
    assert [sync.round for sync in run.syncs.records] == [1, 2, 3, 4, 5, 6, 7]
    assert [replica.name for replica in run.members] == ["b", "c"]
    assert {replica.name for replica in run.replicas} == {"a", "b", "c"} | {"z"}  # in sync.1.jsonl
    assert run.replicas[-1].name in "cz" and run.samples == second.lines["sync.jsonl"][-1][
        "samples_all"
    ]  # fmt: skip
    assert [(c.round, c.came) for c in run.membership.changes] == [
        (1, ("a", "b", "z")),
        (5, ("c",)),
    ]


def test_file_of_an_earlier_run_is_not_read(tmp_path: Path) -> None:
    logs = SyntheticElasticRun([SyntheticEpoch("ab", 2)], nominal=2).write(tmp_path)
    for name in ("replica-old.jsonl", "replica-a.1.jsonl"):
        (logs / name).write_bytes((logs / "replica-a.jsonl").read_bytes())
    hour_ago = time.time() - 3600
    os.utime(logs / "replica-old.jsonl", (hour_ago, hour_ago))
    assert [replica.name for replica in read_run(logs).replicas] == ["a", "b"]


def test_missing_file_of_a_member_is_reported(tmp_path: Path) -> None:
    """Its machine may have a folder of its own."""
    logs = COMPLETE.write(tmp_path)
    (logs / "replica-c.jsonl").unlink()
    run = read_run(logs)
    assert [replica.name for replica in run.missing] == ["c"]
    assert "No file of replica c in this folder" in finding_texts(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"members": ["a", "a"]}, {"members": ["a", "../b"]}, {"members": "ab"}, {"members": []},
        {"members": ["a", "b", "c"]}, {"members": [1, 2]}, {"epoch": None}, {"epoch": -1},
        {"samples_all": "many"}, {"why": [["no-step"]]}, {"why": None},
    ],
)  # fmt: skip
def test_damaged_members_are_counted(tmp_path: Path, changes: dict[str, Any]) -> None:
    made_up = SyntheticElasticRun([SyntheticEpoch("ab", 2)], nominal=2)
    logs = made_up.write(tmp_path)
    with (logs / "sync.jsonl").open("a") as file:
        file.write(json.dumps(made_up.lines["sync.jsonl"][-1] | changes) + "\n")
    run = read_run(logs)
    assert run.num_damaged == {"sync.jsonl": 1} and run.syncs.count == 2
    assert [replica.name for replica in run.replicas] == ["a", "b"]


# ---- what is shown


def test_page_and_frame_show_members(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The picture, the changes, and each replica's share of the syncs."""
    logs = COMPLETE.write(tmp_path)
    page, frame = page_and_frame(logs, capsys, "--state-dir", str(tmp_path / "hub"))
    assert "elastic, nominally 3 replicas x 2 ranks" in page
    assert "elastic, nominally 3 replicas x 2 ranks" in re.sub(r"\s+", " ", frame)
    assert page.count("<figure") == 10 and "<h3>Members</h3>" in page
    assert "4 replicas in all, 4 changes of the epoch; at the last sync a, c, node-4.rack7" in page
    for text in (page, frame):
        assert "Members: a, c, node-4.rack7 (epoch 5); leader: a" in text
        assert "b (lost)" in text and "b (signal)" in text and "43.8 %" in text
    settings = page.index("<summary>")
    plain = re.sub(r"xmlns(:\w+)?=\"[^\"]*\"", "", page[:settings])
    assert not [word for word in ("nan", "None", "http", "<script") if word in plain]
    assert "effective replicas" in page and "of 2 to 3: the median unit" in page


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "made_up",
    [
        SyntheticElasticRun([SyntheticEpoch("abc", 0)]),
        SyntheticElasticRun([SyntheticEpoch("abc", 1)]),
        SyntheticElasticRun([SyntheticEpoch("a", 2)], nominal=1),
        SyntheticElasticRun(EPOCHS, strategy="a-edit"),
        SyntheticElasticRun([SyntheticEpoch(tuple(f"{'x' * 60}{n}" for n in range(12)), 2),
                             SyntheticEpoch(tuple(f"{'x' * 60}{n}" for n in range(10)), 2)]),
    ],
    ids=["warm-up", "first sync", "one", "a-edit", "many"],
)  # fmt: skip
def test_every_kind_of_elastic_run_is_shown(
    tmp_path: Path, made_up: SyntheticElasticRun, capsys: pytest.CaptureFixture[str]
) -> None:
    page, frame = page_and_frame(made_up.write(tmp_path), capsys)
    assert "Members: " in page and "Members: " in frame


def test_advice_is_valid_in_an_elastic_run(tmp_path: Path) -> None:
    """A delay can hide its syncs, overlap cannot."""
    made_up = SyntheticElasticRun([SyntheticEpoch("abc", 6)])
    logs = made_up.write(tmp_path)
    for line in made_up.lines["sync.jsonl"]:
        line["seconds"] |= {"exposed": 0.8, "wait": 0.1}
    text = "".join(json.dumps(line) + "\n" for line in made_up.lines["sync.jsonl"])
    (logs / "sync.jsonl").write_text(text)
    hiding = "of the time: raise --edit-sync-interval, or hide the exchange (--edit-delay-steps)."
    assert hiding in finding_texts(read_run(logs))
    for line in made_up.lines["sync.jsonl"]:
        line["seconds"]["wait"] = 4.0
    text = "".join(json.dumps(line) + "\n" for line in made_up.lines["sync.jsonl"])
    (logs / "sync.jsonl").write_text(text)
    assert "The leader waited for the others 40.0 %" in finding_texts(read_run(logs))


@pytest.mark.parametrize("command", ["report", "watch"])
def test_wrong_state_dir_is_refused_in_one_line(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = COMPLETE.write(tmp_path / "run")
    plain = SyntheticRun(rounds=2).write(tmp_path / "plain")
    (tmp_path / "folder" / "journal.jsonl").mkdir(parents=True)
    hub = tmp_path / "run" / "hub"
    for folder, state_dir, message in (
        (logs, tmp_path / "none", "holds no journal.jsonl"),
        (logs, tmp_path / "folder", "holds no journal.jsonl"),
        (logs, logs, "holds no journal.jsonl"),
        (plain, hub, "this run has no hub"),
    ):
        assert main([command, str(folder), "--state-dir", str(state_dir)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
