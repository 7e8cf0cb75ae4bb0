"""`megatron-edit report` and `watch` on invalid files and names.

Would catch: a traceback, a damaged line that is counted or partly used, a running run shown as
finished, the speed of some replicas shown as that of all, a device replaced by a page.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.tools.cli import main
from megatron_edit.tools.monitor.findings import list_findings
from tests.harness.event_files import BATCH, SyntheticRun, read_run

pytest.importorskip("rich")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must refuse; return its one-line error."""
    assert main(words) == 2, words
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.out == "", captured
    assert captured.err.startswith(f"megatron-edit {words[0]}: ") and "Error" not in captured.err
    return captured.err


# ---- where a run is


def write_resumed(folder: Path, num_syncs: int, iterations: int = 300) -> Path:
    """Write an A-EDiT run, resumed at iteration 250 of 280, with a replica of over 280 steps."""
    made_up = SyntheticRun(strategy="a-edit", replicas=2, rounds=0, train_iters=280)
    made_up.write(folder)
    for replica in range(2):
        path = folder / f"replica-{replica}.jsonl"
        line = json.loads(path.read_text().splitlines()[0])
        lines = [line | {"iteration": i} for i in range(251, iterations + 1)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if num_syncs:
        whole = SyntheticRun(strategy="a-edit", replicas=2, rounds=1).write(folder / "other")
        line = json.loads((whole / "sync.jsonl").read_text())
        line["samples"] = [260 * BATCH, 250 * BATCH]
        (folder / "sync.jsonl").write_text(json.dumps(line) + "\n")
        for replica in range(2):
            with (folder / f"replica-{replica}.jsonl").open("a") as file:
                file.write('{"round": 9, "digest": null}\n')
    return folder


def test_fast_replica_does_not_finish_the_run(tmp_path: Path) -> None:
    """In A-EDiT the steps of one replica are no progress; samples are, from the first sync."""
    early = read_run(write_resumed(tmp_path / "early", 0))
    assert early.iteration == 300
    assert early.progress is None and early.state == "running"
    later = read_run(write_resumed(tmp_path / "later", 1))
    assert later.progress == pytest.approx(510 / 560) and later.state == "running"
    fresh = read_run(
        SyntheticRun(strategy="a-edit", rounds=0, train_iters=100).write(tmp_path / "fresh")
    )
    assert fresh.progress == 0.2


@pytest.mark.parametrize("is_old", [False, True])
def test_iteration_never_exceeds_total(tmp_path: Path, is_old: bool) -> None:
    """A-EDiT run of 280 batches in which one replica made 300 steps. Catches "300 of 280"; in older
    files only sync lines contain the samples of all replicas."""
    folder = write_resumed(tmp_path, 1)
    sync = json.loads((folder / "sync.jsonl").read_text())
    sync["samples"] = [300 * BATCH, 260 * BATCH]
    (folder / "sync.jsonl").write_text(json.dumps(sync) + "\n")
    for replica, made in enumerate((300, 260)):
        path = folder / f"replica-{replica}.jsonl"
        *lines, end = path.read_text().splitlines()
        step = json.loads(lines[-1]) | {"iteration": made}
        if not is_old:
            totals = {"replica_step": made, "samples_all": 2 * 280 * BATCH}
            step |= totals | {"iteration": 280}
        path.write_text("\n".join([*lines[:-1], json.dumps(step), end, ""]))
    run = read_run(folder)
    assert (run.iteration, run.progress, run.state) == (280, 1.0, "finished")
    assert [replica.step for replica in run.replicas] == [300, 260]


@pytest.mark.parametrize("strategy", ["edit", "a-edit"])
def test_speed_with_missing_files_is_estimated_or_unknown(
    tmp_path: Path, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one launch per replica and no shared folder, only the files of one replica exist."""
    made_up = SyntheticRun(strategy=strategy, train_iters=400)
    whole = read_run(made_up.write(tmp_path / "whole"))
    assert whole.speed is not None and whole.remaining_seconds is not None
    folder = made_up.write(tmp_path / "part")
    for replica in (1, 2, 3):
        (folder / f"replica-{replica}.jsonl").unlink()
    part = read_run(folder)
    missing = next(f.text for f in list_findings(part) if "No file of replica 1, 2, 3" in f.text)
    assert main(["report", str(folder)]) == 0 and main(["watch", str(folder), "--once"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    page = (folder / "report.html").read_text(encoding="utf-8")
    if strategy == "edit":
        assert part.speed == pytest.approx(whole.speed, rel=0.05)
        assert part.remaining_seconds == pytest.approx(whole.remaining_seconds, rel=0.05)
        assert "estimated from 1 of 4" in shown and "all replicas, estimated from 1 of 4" in page
        assert "estimated from the others" in missing
    else:
        assert part.speed is None and part.remaining_seconds is None
        assert "only 1 of 4 replicas are seen here" in page and "all replicas, at" not in page
        assert "only 1 of 4" in shown and "cannot be computed" in missing


# ---- damaged files

ODD = ("Infinity", "-Infinity", "NaN", "1e999", "1e300", "-1", '"x"', "[]", "{}", "true",
       "9" * 400, '"\\ud800"', '["$x^$"]', "[" * 99999, "[[1e300]]", "[Infinity]")  # fmt: skip


@pytest.mark.parametrize("name", ["sync.jsonl", "loss.jsonl", "replica-0.jsonl"])
@pytest.mark.filterwarnings("error")
def test_odd_values_count_as_damaged(tmp_path: Path, name: str) -> None:
    """Invalid values in any field: each line is valid or damaged, and the report is written."""
    made_up = SyntheticRun(rounds=3, warmup=5, train_iters=100)
    lines = (made_up.write(tmp_path) / name).read_text().splitlines()
    new = []
    for line in {tuple(json.loads(line)): line for line in lines}.values():
        fields = json.loads(line)
        for field in fields:
            for odd in ODD:
                new.append(json.dumps(fields | {field: "ODD"}).replace('"ODD"', odd))
    (tmp_path / name).write_text("\n".join([*lines, *new, lines[-1]]) + "\n")
    run = read_run(tmp_path)
    assert run.num_damaged[name] > 0.5 * len(new)
    assert run.iteration < 1000 and run.syncs.count < 3 + len(new) / 2
    assert main(["report", str(tmp_path)]) == 0
    assert f"{run.num_damaged[name]} in {name}" in (tmp_path / "report.html").read_text()
    assert main(["watch", str(tmp_path), "--once"]) == 0


@pytest.mark.parametrize("field", ["iteration", "samples", "tokens", "seconds"])
def test_damaged_line_does_not_change_totals(tmp_path: Path, field: str) -> None:
    """Also if only its last field is invalid."""
    path = SyntheticRun(rounds=0, warmup=3, replicas=1).write(tmp_path) / "replica-0.jsonl"
    clean = read_run(tmp_path).replicas[0]
    line = json.loads(path.read_text().splitlines()[-1]) | {"iteration": 4, "loss": 9.0}
    with path.open("a") as file:
        file.write(json.dumps(line | {field: "ODD"}).replace('"ODD"', "1e999") + "\n")
    run = read_run(tmp_path)
    assert run.num_damaged == {"replica-0.jsonl": 1}
    replica = run.replicas[0]
    assert (replica.iteration, len(replica.steps)) == (3, 3)
    assert (replica.mean_speed, replica.loss) == (clean.mean_speed, clean.loss)


@pytest.mark.parametrize("command", ["report", "watch"])
@pytest.mark.parametrize(
    ("part", "change", "complaint"),
    [
        ("versions", None, "no versions"),
        ("topology", {"num_replicas": 2}, "no ranks_per_replica"),
        ("config", {"strategy": "sgd"}, "unknown strategy sgd"),
        ("training", [], "list indices"),
    ],
)
def test_unusable_run_json_is_refused(
    tmp_path: Path, command: str, part: str, change: Any, complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The error is one line with the file and the field."""
    run = SyntheticRun().run()
    run[part] = change
    if change is None:
        del run[part]
    (tmp_path / "run.json").write_text(json.dumps(run))
    error = refused(capsys, command, str(tmp_path))
    assert str(tmp_path / "run.json") in error and complaint in error


@pytest.mark.parametrize("text", ["[" * 99999, "[]", "5", '"x"', "\xff"])
def test_run_json_that_is_no_object_is_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    assert "run.json" in refused(capsys, "report", str(tmp_path))


def test_undecodable_names_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the training command, host name, device name and folder."""
    folder = tmp_path / os.fsdecode(b"log-\xff")
    SyntheticRun(rounds=2).write(folder)
    run = json.loads((folder / "run.json").read_text())
    run["argv"].append("--data-path=\udcff")
    run["topology"]["host"] = run["topology"]["device"] = "n\udcfe"
    run["config"]["log_dir"] = "\udcfd"
    (folder / "run.json").write_text(json.dumps(run))
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "--data-path=\\udcff" in page and "log-\\udcff" in page and "n\\udcfe" in page
    assert main(["watch", str(folder), "--once"]) == 0
    assert main(["watch", str(folder / "later"), "--once"]) == 0
    capsys.readouterr().out.encode("utf-8")


# ---- names


def test_report_never_replaces_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe stands for any device; also if it is named by a symlink."""
    log, pipe, link = (
        SyntheticRun(rounds=0).write(tmp_path / "log"),
        tmp_path / "pipe",
        tmp_path / "link",
    )
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for output in (pipe, link):
        assert str(output) in refused(capsys, "report", str(log), "--output", str(output))
        assert pipe.is_fifo() and link.is_symlink()
    (log / "report.html").symlink_to(pipe)
    refused(capsys, "report", str(log))
    assert pipe.is_fifo()


def test_report_is_written_through_a_symlink(tmp_path: Path) -> None:
    """Whether its target exists or not."""
    log, link = SyntheticRun(rounds=0).write(tmp_path / "log"), tmp_path / "link.html"
    (tmp_path / "pages").mkdir()
    target = tmp_path / "pages" / "page.html"
    link.symlink_to(target)
    for _ in range(2):
        assert main(["report", str(log), "--output", str(link)]) == 0
        assert link.is_symlink() and "<html" in target.read_text(encoding="utf-8")
        target.write_text("older")
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]


def test_impossible_outputs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that are too long, also only with the temporary suffix; symlink loops."""
    log = str(SyntheticRun(rounds=0).write(tmp_path / "log"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "no" / "where.html")
    for name in ("x" * 300, "x" * 253, "loop", "gone", "loop/page.html"):
        refused(capsys, "report", log, "--output", str(tmp_path / name))
    if Path("/proc/self").exists():  # exists and looks writable, but is not
        refused(capsys, "report", log, "--output", "/proc/x.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gone", "log", "loop"]


@pytest.mark.parametrize("command", ["report", "watch"])
def test_unreadable_folders_are_refused(
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invalid names, missing permission, and folders or pipes in place of files."""
    for name in ("x" * 300, "x" * 300 + "/log", "a\0b"):
        refused(capsys, command, str(tmp_path / name))
    folder = SyntheticRun(rounds=1).write(tmp_path / "log")
    (folder / "sync.jsonl").unlink()
    (folder / "sync.jsonl").mkdir()
    assert "sync.jsonl" in refused(capsys, command, str(folder))
    (folder / "sync.jsonl").rmdir()
    os.mkfifo(folder / "sync.jsonl")
    assert "sync.jsonl" in refused(capsys, command, str(folder))
    usual = Path.stat

    def closed(path: Path, **how: bool) -> os.stat_result:
        if path.name == "run.json":  # root may read everything
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, **how)

    monkeypatch.setattr(Path, "stat", closed)
    assert "Permission denied" in refused(capsys, command, str(folder))
