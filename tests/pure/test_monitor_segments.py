"""`megatron-edit report` and `watch` on trainings that were resumed, evaluated, and ended.

Would catch: a page that begins at the newest resume, repeated iterations that count twice, a run
shown as running after its end, advice that the strategy refuses.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_edit.config import EditConfig
from megatron_edit.tools.cli import main
from megatron_edit.tools.monitor.findings import list_findings
from megatron_edit.tools.monitor.replicas import worst_spike
from megatron_edit.tools.monitor.run import MonitoredRun
from tests.harness.event_files import BATCH, SyntheticRun, finding_texts, page_and_frame, read_run
from tests.harness.resumed_event_files import RunPart, write_runs

pytest.importorskip("rich")
TRAINING = SyntheticRun(rounds=10, warmup=20, replicas=2)  # 100 iterations, a sync every 8 after 20
RESUMED = [RunPart(0, 50), RunPart(44, 75), RunPart(68, 100, "finished", None)]


# ---- segments


def test_all_runs_of_a_resumed_training_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each iteration once, from the run that was continued, as in an uninterrupted training."""
    whole = read_run(TRAINING.write(tmp_path / "whole"))
    folder = write_runs(tmp_path / "log", TRAINING, RESUMED)
    run = read_run(folder)
    for mine, theirs in zip(run.replicas, whole.replicas, strict=True):
        assert len(mine.steps) == 100
        assert [c.tolist() for c in mine.losses] == [c.tolist() for c in theirs.losses]
    assert run.losses[0].tolist() == list(range(1, 101))
    assert run.losses[1].tolist() == whole.losses[1].tolist()
    assert [sync.round for sync in run.syncs.records] == list(range(1, 11))
    assert run.syncs.sent_bytes == whole.syncs.sent_bytes
    assert run.resumed_at == [44, 68] and run.num_damaged == {}
    assert (run.iteration, run.progress, run.state) == (100, 1.0, "finished")
    page, frame = page_and_frame(folder, capsys)
    assert "resumed 2 times, after iteration 44, 68" in page and "resumed 2 times" in frame
    assert "iteration 100 of 100" in frame and "10 syncs" in frame


def test_resume_from_older_checkpoint_drops_later_steps(tmp_path: Path) -> None:
    """It discards steps of two earlier runs."""
    parts = [RunPart(0, 50), RunPart(44, 75), RunPart(28, 60), RunPart(60, 100)]
    run = read_run(write_runs(tmp_path, TRAINING, parts))
    assert run.losses[0].tolist() == list(range(1, 101))
    assert [sync.round for sync in run.syncs.records] == list(range(1, 11))
    assert len(run.replicas[0].steps) == 100


def test_time_between_runs_is_not_training_time(tmp_path: Path) -> None:
    """A resumed job may wait for hours in a queue."""

    def hours_later(_name: str, line: dict[str, Any]) -> None:
        if "time" in line:
            line["time"] += 9000

    parts = [RunPart(0, 44), RunPart(44, 100, change=hours_later)]
    whole = read_run(TRAINING.write(tmp_path / "whole"))
    run = read_run(write_runs(tmp_path / "log", TRAINING, parts))
    between = TRAINING.tau * 0.1  # from the last sync of one run to the first of the next
    assert run.syncs.elapsed == pytest.approx(whole.syncs.elapsed - between, abs=0.01)


def test_other_training_in_folder_is_not_joined(tmp_path: Path) -> None:
    """A training that started again, and files of a version without segments."""
    run = read_run(write_runs(tmp_path / "new", TRAINING, [RunPart(0, 50), RunPart(0, 30)]))
    assert run.resumed_at == [] and run.iteration == 30 and len(run.replicas[0].steps) == 30
    folder = write_runs(tmp_path / "old", TRAINING, RESUMED)
    record = json.loads((folder / "run.json").read_text())
    del record["segment"]
    (folder / "run.json").write_text(json.dumps(record))
    assert read_run(folder).losses[0].tolist() == list(range(69, 101))


def test_run_that_never_reached_checkpoint_is_not_joined(tmp_path: Path) -> None:
    """The resumed run used a checkpoint from elsewhere, in a used folder. A run that was killed
    before it wrote its last lines is part of the training."""
    run = read_run(write_runs(tmp_path / "stranger", TRAINING, [RunPart(0, 30), RunPart(60, 100)]))
    assert run.resumed_at == [] and run.losses[0].tolist() == list(range(61, 101))
    parts = [RunPart(0, 50), RunPart(44, 44, None), RunPart(44, 100)]
    run = read_run(write_runs(tmp_path / "at-once", TRAINING, parts))
    assert run.losses[0].tolist() == list(range(1, 101))
    parts = [RunPart(0, 57, None), RunPart(60, 100)]
    assert read_run(write_runs(tmp_path / "killed", TRAINING, parts)).resumed_at == [60]


def test_resume_with_missing_earlier_files_is_read(tmp_path: Path) -> None:
    """Missing or unreadable files: the page shows the remaining runs."""
    folder = write_runs(tmp_path, TRAINING, RESUMED)
    (folder / "run.2.json").write_text("{")
    run = read_run(folder)
    assert run.resumed_at == [] and run.losses[0].tolist() == list(range(69, 101))
    (folder / "run.2.json").unlink()
    (folder / "run.1.json").unlink()
    assert read_run(folder).losses[0].tolist() == list(range(69, 101))


def test_resume_with_different_number_of_replicas_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_runs(tmp_path, TRAINING, RESUMED, replicas_of={1: 3, 2: 3})
    run = read_run(folder)
    assert [replica.name for replica in run.members] == ["0", "1"]
    assert len(run.replicas) == 3 and run.syncs.count == 10 and run.num_damaged == {}
    page, _ = page_and_frame(folder, capsys)
    assert "nan" not in page


def test_watch_follows_resumed_runs_in_folder(tmp_path: Path) -> None:
    """A reader that has seen each run shows the same as a new reader."""
    watching = MonitoredRun(tmp_path)
    for count in (1, 2, 3):
        for path in tmp_path.iterdir():
            path.unlink()
        write_runs(tmp_path, TRAINING, RESUMED[:count])
        watching.poll()
        fresh = read_run(tmp_path)
        assert watching.resumed_at == fresh.resumed_at == [44, 68][: count - 1]
        assert watching.losses[0].tolist() == fresh.losses[0].tolist()


# ---- how it ended


@pytest.mark.parametrize(
    ("part", "state", "shown"),
    [
        (RunPart(0, 100, "finished", None), "finished", "finished"),
        (RunPart(0, 50), "stopped", "stopped (signal SIGTERM)"),
        (RunPart(0, 50, "stopped", None), "stopped", "stopped"),
        (RunPart(0, 50, "failed", "drift at round 3", 3), "failed", "failed: drift at round 3"),
        (RunPart(0, 50, None), "running", "running"),
        (RunPart(0, 100, None), "running", "running"),  # it may still save
    ],
)
def test_end_record_sets_run_state(
    tmp_path: Path, part: RunPart, state: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = read_run(write_runs(tmp_path, TRAINING, [part]))
    assert run.state == state and run.state_text == shown
    page, frame = page_and_frame(tmp_path, capsys)
    assert f">{shown}</span>" in page and shown in frame


@pytest.mark.parametrize("last", [50, 100])
def test_killed_run_is_lost(tmp_path: Path, last: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if it was killed in the final save, after its last iteration."""
    folder = write_runs(tmp_path, TRAINING, [RunPart(0, last, None)])
    hour_ago = time.time() - 3600
    for path in folder.iterdir():
        os.utime(path, (hour_ago, hour_ago))
    run = read_run(folder)
    assert run.state == "lost" and "lost (no line for 1 h" in page_and_frame(folder, capsys)[1]
    assert "No line for 1 h" in finding_texts(run)


def test_first_failure_is_reported_as_reason(tmp_path: Path) -> None:
    """Other replicas report later that they lost it; the first reason is shown."""
    folder = write_runs(tmp_path, TRAINING, [RunPart(0, 50, "failed", "out of memory", 1)])
    path = folder / "replica-0.jsonl"
    *lines, last = path.read_text().splitlines()
    later = json.loads(last) | {"time": time.time() + 60, "reason": "replica 1 is lost"}
    path.write_text("\n".join([*lines, json.dumps(later)]) + "\n")
    run = read_run(folder)
    assert run.state_text == "failed: out of memory"
    assert list_findings(run)[0].text == "Replica 1 failed with exit code 1: out of memory."


def test_lost_event_lines_are_reported(tmp_path: Path) -> None:
    """Lost lines of all runs are added up."""
    parts = [RunPart(0, 50, lines_lost=3), RunPart(50, 100, "finished", None, lines_lost=2)]
    assert "10 lines of the event files" in finding_texts(
        read_run(write_runs(tmp_path, TRAINING, parts))
    )


# ---- validation


def test_validation_losses_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In page and terminal, and not counted as damaged lines or training losses."""
    folder = write_runs(tmp_path, TRAINING, RESUMED)
    with (folder / "loss.jsonl").open("a") as file:
        test = {"iteration": 100, "samples": 1600, "validation_loss": 3.9876, "split": "test"}
        file.write(json.dumps(test) + "\n")
    run = read_run(folder)
    assert run.num_damaged == {} and run.validation[0].tolist() == [20, 40, 60, 80, 100]
    newest = run.evaluations["validation"]
    assert newest.iteration == 100 and newest.loss == pytest.approx(run.latest_loss + 0.25)
    assert run.losses[0].size == 100
    page, frame = page_and_frame(folder, capsys)
    for text in (f"{newest.loss:.4f}", "3.9876"):
        assert text in page and text in frame
    assert "Validation loss: " in page and page.index(">Loss<") < page.index(">Speed of each")


def test_newest_evaluation_of_an_iteration_is_drawn(tmp_path: Path) -> None:
    """Megatron evaluates again when training ends; the mean of both would belong to neither."""
    folder = write_runs(tmp_path, TRAINING, RESUMED)
    with (folder / "loss.jsonl").open("a") as file:
        last = {"iteration": 100, "samples": 1600, "validation_loss": 2.5, "split": "validation"}
        file.write(json.dumps(last) + "\n")
    run = read_run(folder)
    assert run.validation[1][-1] == run.evaluations["validation"].loss == 2.5


# ---- A-EDiT


def write_unequal(folder: Path, rounds: int = 6) -> Path:
    """Write an A-EDiT run: 10 warm-up steps, then rounds of 4 (replica 0) and 8 steps."""
    made_up = SyntheticRun(strategy="a-edit", replicas=2, rounds=rounds, warmup=10, tau=4,
                     train_iters=10 + 6 * rounds)  # fmt: skip
    lines = {path.name: [json.loads(text) for text in path.read_text().splitlines()]
             for path in made_up.write(folder).glob("*.jsonl")}  # fmt: skip
    batch = 2 * BATCH
    run = made_up.run() | {"segment": {"number": 1, "resumed_from": None}}
    (folder / "run.json").write_text(json.dumps(run))
    for number, line in enumerate(lines["sync.jsonl"], start=1):
        line["samples"] = [BATCH * (10 + 4 * number), BATCH * (10 + 8 * number)]
        line["iteration"] = sum(line["samples"]) // batch
    lines["loss.jsonl"] = lines["loss.jsonl"][:10]
    for number, line in enumerate(lines["loss.jsonl"], start=1):
        line["samples"] = number * batch
    for line in lines["sync.jsonl"]:
        loss = {"iteration": line["iteration"], "samples": sum(line["samples"]), "loss": 3.0}
        lines["loss.jsonl"].append(loss)
    for replica in (0, 1):
        pattern = lines[f"replica-{replica}.jsonl"][0]
        steps, step, per_round = [], 0, 4 * (replica + 1)
        for number in range(rounds + 1):
            for place in range(1, (10 if number == 0 else per_round) + 1):
                step += 1
                before = 10 * batch + (number - 1) * 12 * BATCH
                samples = place * batch if number == 0 else before + place * 12 * BATCH // per_round
                steps.append(pattern | {"iteration": samples // batch, "replica_step": step,
                                        "samples_all": samples})  # fmt: skip
            if number:
                steps.insert(-1, {"round": number, "digest": f"{number:016x}"})
        lines[f"replica-{replica}.jsonl"] = steps
    for name, records in lines.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in records))
    return folder


def test_a_edit_is_drawn_over_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The curves of both replicas end together, though one made twice as many steps."""
    folder = write_unequal(tmp_path)
    run = read_run(folder)
    total = BATCH * (34 + 58)
    slow, fast = (replica.losses[0] for replica in run.replicas)
    assert slow[-1] == pytest.approx(total, abs=BATCH) and fast[-1] == slow[-1]
    assert slow.size == 34 and fast.size == 58
    assert run.losses[0][-1] == slow[-1]
    assert [replica.step for replica in run.replicas] == [34, 58]
    assert run.iteration == 46 and run.progress == 1.0
    page, frame = page_and_frame(folder, capsys)
    assert "samples of all replicas" in page and "replica step" in page
    assert "iteration 46 of 46" in frame and "58 of 46" not in frame


def test_resumed_a_edit_is_read_by_samples(tmp_path: Path) -> None:
    """Repeated steps are found by samples; the progress is known before the first sync."""
    folder = write_unequal(tmp_path)
    for path in folder.glob("*.json*"):
        path.rename(path.with_suffix(f".1{path.suffix}"))
    samples = BATCH * (26 + 42)  # sync 4
    run = json.loads((folder / "run.1.json").read_text())
    run["segment"] = {"number": 2, "resumed_from": {"iteration": 26, "samples": samples}}
    (folder / "run.json").write_text(json.dumps(run))
    for replica, step in ((0, 27), (1, 43)):
        line = {"iteration": 35, "replica_step": step, "samples_all": samples + 2 * BATCH,
                "loss": 3.0, "grad_norm": 1.0, "lr": 1e-3, "samples": BATCH,
                "tokens": BATCH * 128, "seconds": 0.1}  # fmt: skip
        (folder / f"replica-{replica}.jsonl").write_text(json.dumps(line) + "\n")
    found = read_run(folder)
    assert found.syncs.count == 4 and found.resumed_at == [34] and found.num_damaged == {}
    assert [len(replica.steps) for replica in found.replicas] == [27, 43]
    assert found.samples == samples + 2 * BATCH and found.iteration == 35
    assert found.progress == pytest.approx(35 / 46)


def test_a_edit_with_incomplete_last_batch_is_finished(tmp_path: Path) -> None:
    """The end record decides, although samples are left over."""
    folder = write_unequal(tmp_path)
    for replica in (0, 1):
        with (folder / f"replica-{replica}.jsonl").open("a") as file:
            end = {"end": "finished", "iteration": 47, "samples": 1, "time": 1.0, "reason": None,
                   "exit_code": 0, "lines_lost": 0}  # fmt: skip
            file.write(json.dumps(end) + "\n")
    run = json.loads((folder / "run.json").read_text())
    run["training"]["train_iters"] = 47
    (folder / "run.json").write_text(json.dumps(run))
    found = read_run(folder)
    assert (found.state, found.iteration, found.progress) == ("finished", 47, 1.0)


# ---- findings


def test_loss_spike_is_a_finding(tmp_path: Path) -> None:
    """A spike of one replica or of all; noise and the initial descent are no spikes."""

    def spike(name: str, line: dict[str, Any]) -> None:
        if line.get("iteration") in (80, 81) and name == "replica-1.jsonl":
            line["loss"] = 9.0

    run = read_run(write_runs(tmp_path / "one", TRAINING, [RunPart(0, 100, change=spike)]))
    text = finding_texts(run)
    assert "The loss of replica 1 jumped to 9 at iteration 80" in text
    assert "replica 0 jumped" not in text

    def shared(_name: str, line: dict[str, Any]) -> None:
        if line.get("iteration", 0) >= 90 and "loss" in line:
            line["loss"] = 12.0

    run = read_run(write_runs(tmp_path / "all", TRAINING, [RunPart(0, 100, change=shared)]))
    assert "The loss of all replicas jumped to 12 at iteration 90" in finding_texts(run)
    assert "jumped" not in finding_texts(read_run(write_runs(tmp_path / "none", TRAINING, RESUMED)))


def test_noise_has_no_spikes() -> None:
    """None in normal noise of any size or in constant losses; of two jumps the higher one."""
    rng = np.random.default_rng(0)
    for values in (
        3 + 0.3 * rng.normal(size=20_000),
        3 + 8 / np.sqrt(np.arange(1, 20_001)) + 0.03 * rng.normal(size=20_000),
        np.full(1000, 3.0),
    ):
        assert worst_spike(enumerate(values.tolist())) is None
    spike = worst_spike(enumerate([*values.tolist(), 3.5, 3.0, 3.6, 3.6]))
    assert spike is not None and (spike.iteration, spike.loss) == (1002, 3.6)


@pytest.mark.parametrize("strategy", ["edit", "a-edit", "diloco", "co2", "streaming-diloco"])
def test_advice_is_accepted_by_the_strategy(tmp_path: Path, strategy: str) -> None:
    """Every flag that a finding recommends is valid with the strategy."""
    texts = []
    for exposed in (0.1, 0.4):
        made_up = SyntheticRun(strategy=strategy, exposed=exposed, tau=16)
        texts.append(finding_texts(read_run(made_up.write(tmp_path / f"{exposed}"))))
    text = " ".join(texts)
    assert "Exposed syncs took" in text and "waited for the others" in text
    raised = "--edit-sync-seconds" if strategy == "a-edit" else "--edit-sync-interval"
    assert raised in text
    values: dict[str, Any] = {"sync_interval": 32, "delay_steps": 9, "sync_seconds": 99.0}
    for name, value in values.items():
        if f"--edit-{name.replace('_', '-')}" in text:
            EditConfig(use_edit=True, num_replicas=2, strategy=strategy, **{name: value})
    assert ("--edit-strategy a-edit" in text) == (strategy != "a-edit")


def test_slow_replica_and_waiting_are_one_finding(tmp_path: Path) -> None:
    """A waiting replica is not slow; the replica that others wait for is named."""
    others = list_findings(read_run(SyntheticRun(exposed=0.4, slow={2: 1.5}).write(tmp_path / "2")))
    assert len(others) == 1 and "as replica 2 is slow" in others[0].text
    mine = list_findings(read_run(SyntheticRun(exposed=0.4, slow={0: 1.5}).write(tmp_path / "0")))
    assert len(mine) == 1 and "is slow" not in mine[0].text


# ---- the page


def test_title_names_model_host_and_date(tmp_path: Path) -> None:
    folder = write_runs(tmp_path, TRAINING, RESUMED)
    run = json.loads((folder / "run.json").read_text())
    run["argv"] = ["pretrain_gpt.py", "--num-layers", "2", "--hidden-size=64", "--num-layers=4"]
    (folder / "run.json").write_text(json.dumps(run))
    days_ago = time.time() - 3 * 86400
    os.utime(folder / "run.1.json", (days_ago, days_ago))
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    day = time.strftime("%Y-%m-%d", time.localtime(days_ago))
    title = f"edit: training of 4 layers, hidden size 64 on node0, {day}"
    assert f"<title>{title}</title>" in page and f"<h1>{title}</h1>" in page


def test_constant_series_are_shown_as_sentences(tmp_path: Path) -> None:
    folder = SyntheticRun(strategy="diloco", rounds=9).write(tmp_path)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert 'aria-label="Bytes between replicas"' not in page
    assert "12.35 MB sent by a replica at every sync" in page
