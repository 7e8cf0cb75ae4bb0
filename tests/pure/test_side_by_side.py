"""`megatron-edit report RUN RUN ...`: names, curves, table and settings of several runs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_edit.errors import UsageError
from megatron_edit.tools.cli import main
from megatron_edit.tools.monitor.page import Runs, curves_of
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.summary import names_of
from megatron_edit.tools.pages.charts import RunCurves, part_chart
from megatron_edit.tools.pages.drawing import svg_drawing
from tests.harness.elastic_event_files import FENCED, SyntheticElasticRun, SyntheticEpoch
from tests.harness.event_files import BATCH, SEQ_LENGTH, SyntheticRun, read_run
from tests.harness.resumed_event_files import RunPart, write_runs

TOKENS = BATCH * 4 * SEQ_LENGTH  # of an iteration


def progress(folder: Path) -> tuple[MonitoredRun, RunCurves]:
    run = read_run(folder)
    return run, curves_of("run", run)


def add_evaluation(folder: Path, iteration: int, loss: float, **more: object) -> None:
    line = {"iteration": iteration, "validation_loss": loss, "split": "validation", **more}
    with (folder / "loss.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def change_run(folder: Path, change: dict[str, Any], argv: list[str] | None = None) -> None:
    path = folder / "run.json"
    record = json.loads(path.read_text())
    record["config"] |= change
    record["argv"] = argv or record["argv"]
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["a", "b"], ["a", "b"]),
        (["a/log", "b/log"], ["a", "b"]),
        (["a/log", "b/events"], ["log", "events"]),
        (["x/a/log", "x/b/log"], ["a", "b"]),
        (["x/a/1", "y/a/1", "y/b/1"], ["x/a", "y/a", "y/b"]),
        (["a/log", "b/log", "b/logs"], ["a/log", "b/log", "b/logs"]),
        (["log", "log/log"], None),
        (["."] * 1 + ["a"], None),
    ],
)
def test_names_are_the_shortest_parts_that_differ(
    folders: list[str], names: list[str] | None
) -> None:
    """Would catch five runs that are all called `log`."""
    found = names_of([Path(folder) for folder in folders])
    assert len(set(found)) == len(folders) and all(found)
    assert names is None or found == names


def test_single_points_are_marked() -> None:
    """A line without a marker shows none of its points that have no neighbour."""
    with svg_drawing("points") as drawing:
        drawing.axes.plot([1, 2, 3, 4], [1, math.nan, 2, math.nan])
        drawing.axes.plot([1, 2], [3, 4])
    alone, line = drawing.axes.get_lines()
    assert (alone.get_marker(), line.get_marker()) == ("o", "None")


def test_a_folder_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="is given twice"):
        names_of([Path("a"), Path("b"), Path("b/../a")])


def test_seconds_are_those_of_the_slowest_replica(tmp_path: Path) -> None:
    """All replicas wait for the slowest; would catch a sum over the replicas."""
    run, found = progress(SyntheticRun(slow={2: 2.0}, exposed=0.0).write(tmp_path))
    (tokens, seconds), last = found.seconds, 20 + 30 * 8
    assert tokens[-1] == last * TOKENS and run.tokens == tokens[-1]
    lines = [json.loads(line) for line in (tmp_path / "replica-2.jsonl").read_text().splitlines()]
    steps = [line["seconds"] for line in lines if "seconds" in line]
    assert seconds[-1] == pytest.approx(sum(steps[2:]), rel=0.02)
    assert found.speed == pytest.approx(TOKENS / 0.21, rel=0.03)


def test_seconds_of_an_elastic_run_cover_replicas_that_come_and_go(tmp_path: Path) -> None:
    """36 rounds of 10 s; would catch a clock that stops with the replica that it began with."""
    epochs = [
        SyntheticEpoch("abc", 14),
        SyntheticEpoch("ac", 13, {"b": FENCED}),
        SyntheticEpoch("cd", 9, {"a": None}),
    ]
    logs = SyntheticElasticRun(epochs, is_over=True).write(tmp_path)
    run, found = progress(logs)
    assert found.seconds[1][-1] == pytest.approx(36 * 10, rel=0.05)
    assert run.tokens == run.syncs.records[-1].samples_all * run.facts.seq_length


def test_seconds_and_tokens_continue_after_a_resume(tmp_path: Path) -> None:
    """Lines after the checkpoint of the resume are not counted twice, and start-up is left out."""
    parts = [RunPart(0, 50), RunPart(44, 75), RunPart(68, 100, "finished", None)]
    folder = write_runs(tmp_path / "log", SyntheticRun(rounds=10, replicas=2), parts)
    for replica in range(2):  # the first step of the last run compiles for a minute
        path = folder / f"replica-{replica}.jsonl"
        first, *others = path.read_text().splitlines()
        assert json.loads(first)["iteration"] == 69
        path.write_text("\n".join([json.dumps(json.loads(first) | {"seconds": 60.0}), *others]))
    _, found = progress(folder)
    tokens, seconds = found.seconds
    assert (np.diff(tokens) > 0).all() and (np.diff(seconds) > 0).all()
    assert seconds[-1] == pytest.approx(0.105 * 100, rel=0.05)


def seconds_of_steps(folder: Path, first: int, last: int) -> float:
    """Return the seconds of the steps first + 1 .. last, mean over the replicas."""
    files = list(folder.glob("replica-*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    found = [line["seconds"] for line in lines if first < line.get("iteration", 0) <= last]
    return float(sum(found)) / len(files)


@pytest.mark.parametrize(("fraction", "last"), [(0.0, 260), (0.25, 212)])
def test_parts_of_the_time_are_those_of_the_event_files(
    tmp_path: Path, fraction: float, last: int
) -> None:
    """Exposed time counts, not `total`; neither warm-up nor final phase do."""
    folder = SyntheticRun(exposed=0.2).write(tmp_path / "log")
    change_run(folder, {"final_sync_fraction": fraction})
    run_json = json.loads((folder / "run.json").read_text())
    run_json["training"]["last_local_step"] = last
    (folder / "run.json").write_text(json.dumps(run_json))
    lines = (folder / "sync.jsonl").read_text().splitlines(keepends=True)
    (folder / "sync.jsonl").write_text("".join(lines[: (last - 20) // 8]))
    _, found = progress(folder)
    syncs = [json.loads(line)["seconds"] for line in lines[: (last - 20) // 8]]
    steps = seconds_of_steps(folder, 20, last)
    shares = [sum(sync[name] for sync in syncs) / steps for name in ("wait", "exchange", "outer")]
    assert found.parts == pytest.approx([1 - sum(shares), *shares], abs=1e-3)
    chart = part_chart([found])["parts"]
    texts = [f"{100 * share:.1f} %" for share in found.parts]
    assert chart.text == (
        f"Time of local steps: {texts[0]} of the ideal (wait {texts[1]}, exchange {texts[2]}, "
        f"outer step {texts[3]})."
    )
    assert f">{texts[0]} of the ideal<" in chart.svg


def test_parts_of_an_elastic_run_are_those_of_its_local_rounds(tmp_path: Path) -> None:
    """Would catch the syncs of one step in its warm-up; runs without local steps have no bar."""
    made_up = SyntheticElasticRun([SyntheticEpoch("abc", 9)], is_over=True)
    folder = made_up.write(tmp_path)
    _, before = progress(folder)
    syncs = read_run(folder).syncs.records
    change_run(folder, {"warmup_steps": syncs[4].iteration})
    _, after = progress(folder)
    assert after.exposed == pytest.approx(sum(sync.seconds[:3] for sync in syncs[5:]))
    lengths = [np.ptp(after.seconds_at(np.array(each.local))) for each in (before, after)]
    assert lengths[1] == pytest.approx(lengths[0] * 4 / 9, rel=0.05)
    ddp = curves_of("ddp", read_run(SyntheticRun(strategy="ddp", rounds=0).write(tmp_path / "d")))
    assert not ddp.parts.size and not part_chart([ddp])
    text = part_chart([replace(before, name="a"), ddp])["parts"].text
    assert text.startswith("Time of local steps: a: ") and "ddp" not in text


def table(runs: list[MonitoredRun]) -> dict[str, list[str]]:
    return Runs.of(runs).results


def test_table_agrees_with_the_event_files(tmp_path: Path) -> None:
    """Would catch numbers of one run in the column of another."""
    made_up = {
        "plain": SyntheticRun(strategy="ddp", rounds=0, warmup=100),
        "faulty": SyntheticRun(rounds=10, anomalous_replica=1, rollbacks=(4,), exposed=0.1),
    }
    folders = [each.write(tmp_path / name) for name, each in made_up.items()]
    add_evaluation(folders[0], 50, 9.0)
    add_evaluation(folders[0], 100, 2.5)
    add_evaluation(folders[1], 100, 2.0, name="a")  # two validation sets
    add_evaluation(folders[1], 100, 4.0, name="b")
    runs = [read_run(folder) for folder in folders]
    lines = table(runs)
    dash = "–"  # noqa: RUF001 - a typographic dash
    assert lines["strategy"] == ["ddp", "edit"]
    assert lines["validation loss"] == ["2.5000", "3.0000"]
    assert lines["difference"] == [dash, "+0.5000"]
    assert lines["MB in syncs"] == [dash, "123.46 in 10"]
    # One replica in 6 units of rounds 3 and 10, all four replicas in one unit of round 4.
    assert lines["rejected updates"] == [dash, "16, 1 roll-back"]
    exposed = runs[1].syncs.share("exposed")
    assert exposed is not None and lines["exposed"] == [dash, f"{100 * exposed:.1f} %"]
    assert lines["problems"][0] == "none" and re.fullmatch(r"\d warnings", lines["problems"][1])


def test_only_settings_that_differ_are_shown(tmp_path: Path) -> None:
    """EDiT's settings as used, Megatron's flags as given; the log folder always differs."""
    folders = [SyntheticRun(rounds=1).write(tmp_path / name) for name in "abc"]
    for folder in folders:
        same = [
            "pretrain_gpt.py",
            "--lr",
            "1e-3",
            "--bf16",
            "--use-edit",
            f"--edit-log-dir={folder}",
        ]
        odd = ["train.py", "--bf16", "--lr", "2e-3", "--use-edit", "--edit-clip", "10"]
        change = {"log_dir": str(folder)} | ({"clip": 3.0} if folder.name == "c" else {})
        change_run(folder, change, odd if folder.name == "b" else same)
    assert Runs.of([read_run(folder) for folder in folders]).settings == {
        "script": ["pretrain_gpt.py", "train.py", "pretrain_gpt.py"],
        "--lr": ["1e-3", "2e-3", "1e-3"],
        "--edit-clip": ["10.0", "10.0", "3.0"],
    }


def test_page_and_summary_of_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written to the current folder; the console has the table, warnings and settings."""
    monkeypatch.chdir(tmp_path)
    SyntheticRun(rounds=12, anomalous_replica=1, train_iters=400).write(Path("one/log"))
    SyntheticRun(rounds=4, strategy="diloco").write(Path("two/log"))
    SyntheticElasticRun([SyntheticEpoch("ab", 3)]).write(Path("three"))
    assert main(["report", "one/log", "two/log", "three/logs"]) == 0
    out = capsys.readouterr().out
    assert "| run | one | two | three |" in out and "page: runs.html" in out
    assert "| --edit-strategy | edit | diloco | edit |" in out
    assert "- one, warning: Replica 1 was left out" in out
    page = Path("runs.html").read_text()
    assert page.count("<figure") == 5 and "3 runs side by side" in page
    assert not Path("one/log/report.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("log nowhere", "nowhere: is not a folder"),
        ("log empty", "empty: holds no run.json"),
        ("log other", "other/run.json: was not written by a run"),
        ("log log", "log: is given twice"),
        ("log second --state-dir hub", "--state-dir: belongs to a single run"),
        ("log second --output log", "--output log: cannot be written (must be a file)"),
    ],
)
def test_bad_folders_are_refused_in_one_line(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("log", "second"):
        SyntheticRun(rounds=1).write(Path(name))
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/run.json").write_text("{}")
    assert main(["report", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not Path("runs.html").exists()
