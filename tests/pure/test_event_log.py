"""Event files of successive runs in one folder.

Would catch: lines of an earlier run read as those of the new run, files of one run renamed to
different numbers, an earlier file that is overwritten.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_edit.comm.placement import Placement
from megatron_edit.constants import SYNC_TIMES
from megatron_edit.engine.plan import Decision
from megatron_edit.method.auto import AutoChoice, Measurement, SyncSettings
from megatron_edit.method.detector import Verdict
from megatron_edit.method.loss_check import LossVerdict
from megatron_edit.observe.events import EventLog, files_to_move
from megatron_edit.observe.metrics import (
    LOSS,
    SyncMetrics,
    loss_rejections,
    sync_line,
    sync_summary,
)
from megatron_edit.observe.records import Ending, Iteration, LossRecord, SyncRecord
from megatron_edit.tools.monitor.files import Facts
from megatron_edit.tools.monitor.findings import shorten_sync
from megatron_edit.tools.monitor.run import MonitoredRun
from megatron_edit.tools.monitor.summary import describe_schedule
from tests.harness.event_files import SyntheticRun
from tests.harness.scalars import documented_scalars

pytest.importorskip("rich")


def start(folder: Path, made_up: SyntheticRun) -> list[EventLog]:
    """Start a run and return its logs by replica, all created before the first run.json."""
    places = [Placement(made_up.replicas, r, 1, 0, is_single_launch=True)
              for r in range(made_up.replicas)]  # fmt: skip
    logs = [EventLog(folder, place) for place in places]
    for log in logs:
        log.begin(made_up.run())
    return logs


def step(logs: Sequence[EventLog], iteration: int) -> None:
    """Log one iteration of all replicas."""
    for log in logs:
        log.on_iteration(
            Iteration(iteration, iteration, 3.0, 1.0, 1e-3, 8, 16 * iteration, 1024, 0.1)
        )


def texts(folder: Path) -> dict[str, str]:
    """Return the content of all files by name."""
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("strategy", ["edit", "ddp"])
def test_new_run_is_read_without_earlier_run(tmp_path: Path, strategy: str) -> None:
    """In the warm-up, before its first sync and loss, no values of the earlier run are shown."""
    SyntheticRun(rounds=5).write(tmp_path)
    watched, later = MonitoredRun(tmp_path), SyntheticRun(rounds=5, strategy=strategy)
    watched.poll()
    assert watched.syncs.count == 5
    logs = start(tmp_path, later)
    watched.poll()
    assert watched.syncs.count == 0 and watched.iteration == 0
    step(logs, 1)
    watched.poll()
    for run in (watched, MonitoredRun(tmp_path)):
        run.poll()
        assert run.syncs.count == 0 and run.iteration == 1
        assert not run.losses[0].size
    for log in logs:
        log.close()


def test_files_of_earlier_run_get_same_number(tmp_path: Path) -> None:
    """Also if runs have different files: no sync, fewer replicas, or unequal numbers written by an
    older version. No file is overwritten."""
    first = texts(SyntheticRun(rounds=2, replicas=3).write(tmp_path))
    logs = start(tmp_path, SyntheticRun(replicas=2))
    step(logs, 1)
    assert {n: t for n, t in texts(tmp_path).items() if ".1." in n} == {
        name.replace(".json", ".1.json"): text for name, text in first.items()
    }
    (tmp_path / "loss.4.jsonl").write_text("kept")
    start(tmp_path, SyntheticRun(replicas=3))
    found = texts(tmp_path)
    numbered = {name for name in found if ".5." in name}
    assert numbered == {"run.5.json", "replica-0.5.jsonl", "replica-1.5.jsonl"}
    assert [name for name in found if name.count(".") == 1] == ["run.json"]
    assert found["loss.4.jsonl"] == "kept" and json.loads(found["run.1.json"])


def test_only_replica_0_writes_run_json(tmp_path: Path) -> None:
    """With one launch per replica, each has its own folder, which is reused here."""
    place = Placement(2, 1, 1, 0, is_single_launch=False)
    for _ in range(2):
        log = EventLog(tmp_path, place)
        log.begin({})
        step([log], 1)
        log.close()
    assert set(texts(tmp_path)) == {"replica-1.jsonl", "replica-1.1.jsonl"}


def choice_of(interval: int, dtype: str = "int8", delay: int = 2) -> AutoChoice:
    """A choice of `--edit-auto`."""
    settings = SyncSettings(interval, dtype, 4, delay, 0.8, 0.7, float(interval), "none", 1, 0.0)
    return AutoChoice(settings, 0.98, 0.01, 0.03, 20, Measurement(1.0, 0.1, 1e6, 1e-3, {dtype: 0}))


def test_choices_are_added_to_run_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replica 0 writes the file again with each choice; its writer prints the three lines. No file
    is renamed, as it is the same run."""
    logs = start(tmp_path, SyntheticRun(replicas=2))
    before = json.loads((tmp_path / "run.json").read_text())
    capsys.readouterr()
    for log in logs:
        log.on_choice(choice_of(16), 90, is_resumed=False)
        log.on_choice(choice_of(64), 90, is_resumed=True)
    after = json.loads((tmp_path / "run.json").read_text())
    assert [AutoChoice.from_json(each) for each in after.pop("choices")] == [
        choice_of(16), choice_of(64),
    ]  # fmt: skip
    before["training"]["last_local_step"] = 90
    assert after == before and set(texts(tmp_path)) == {"run.json"}
    printed = capsys.readouterr().out
    line = (
        "chosen after step 20: a sync every {} steps in int8, in 4 fragments, landing 2 steps later"
    )
    assert printed.count(line.format(16)) == 2  # console and replica 1
    assert printed.count(line.format(64)) == 2 and printed.count("(of the checkpoint)") == 6


def test_choice_survives_full_disk(tmp_path: Path) -> None:
    """Catches an error that ends the training; the choice is written once that is possible."""
    (log,) = start(tmp_path, SyntheticRun(replicas=1))
    path, aside = tmp_path / "run.json", tmp_path.with_name("aside")
    tmp_path.rename(aside)
    tmp_path.write_text("no folder")
    log.on_choice(choice_of(16), 90, is_resumed=False)
    tmp_path.unlink()
    aside.rename(tmp_path)
    step([log], 1)
    log.close()
    assert json.loads(path.read_text())["choices"] == [choice_of(16).as_json()]


def test_monitor_shows_chosen_settings(tmp_path: Path) -> None:
    """Before the choice it says that there will be one; then the last one replaces the usual values
    of `config`. Remedies are those of its settings."""
    content = SyntheticRun(replicas=2).run()
    content["config"] |= {"auto": True, "sync_interval": 128}
    facts = Facts.of(json.dumps(content))
    assert describe_schedule(facts) == "warm-up 20 steps, then syncs as chosen at its end"
    content["choices"] = [choice_of(16, delay=0).as_json(), choice_of(64).as_json()]
    facts = Facts.of(json.dumps(content))
    assert (facts.sync_interval, facts.delay_steps, facts.config["sync_dtype"]) == (64, 2, "int8")
    assert describe_schedule(facts) == (
        "warm-up 20 steps, then a sync every 64 steps, landing 2 steps later (chosen in "
        "the warm-up)"
    )
    assert "raise --edit-sync-interval" in shorten_sync(facts)
    # A-EDiT: the seconds are chosen, and the steps are only expected.
    content["config"] |= {"strategy": "a-edit"}
    facts = Facts.of(json.dumps(content))
    assert (facts.sync_interval, facts.config["sync_seconds"]) == (128, 64.0)
    assert "raise --edit-sync-seconds" in shorten_sync(facts)


def test_replaced_run_json_restarts_monitor(tmp_path: Path) -> None:
    """Also if run.json is the only file of both runs."""
    watched = MonitoredRun(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(SyntheticRun(replicas=2).run()))
    watched.poll()
    assert len(watched.replicas) == 2
    start(tmp_path, SyntheticRun(replicas=3))
    watched.poll()
    assert len(watched.replicas) == 3


def report(**changes: Any) -> Any:
    """Return the report of a sync of two replicas and three units."""
    table = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    decision = Decision(
        verdict=Verdict(anomalous=torch.zeros(2, 3, dtype=torch.bool), scores=table / 3),
        norms=table, weights=torch.tensor([[0.5, 1.0, 0.25], [0.5, 0.0, 0.75]]).double(),
        rollback=torch.zeros(3, dtype=torch.bool),
        loss=LossVerdict.without_check(torch.tensor([3.0, math.nan]).double()),
    )  # fmt: skip
    return SimpleNamespace(**{
        "round": 7, "step": 900, "decision": decision, "clip": torch.ones(3),
        "update_norm": torch.tensor([1.0, math.inf, math.nan]), "units": ("a", "b", "c"),
        "inner_steps": (4, 6), "samples": (400, 600), "wire_bytes": 2_000_000,
        "state_bytes": 8, "seconds": {
            "wait": 0.0012, "exchange": 1.0, "outer": 0.1, "exposed": 0.0346, "total": 1.5
        }, "samples_of_all": 1000, "members": (), "epoch": None, **changes,
    })  # fmt: skip


def test_sync_line_has_expected_fields() -> None:
    """Tables are [unit][replica]; non-finite values are null.

    Catches transposed tables, swapped fields, and lines that are not valid JSON.
    """
    line = json.loads(json.dumps(sync_line(report()), allow_nan=False))
    assert line["weights"] == [[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]
    assert line["norms"] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert line["effective_replicas"] == pytest.approx([2.0, 1.0, 1.6])
    assert line["update_norm"] == [1.0, None, None] and line["clip"] == [1.0] * 3
    assert line["why"] == [[None, None]] * 3 and line["round_loss"] == [3.0, None]
    assert (line["inner_steps"], line["samples"]) == ([4, 6], [400, 600])
    assert (line["round"], line["iteration"], line["units"]) == (7, 900, ["a", "b", "c"])


def test_records_round_trip_through_event_lines() -> None:
    """Would catch a field that the tools read under a different name."""
    iteration = Iteration(9, 9, math.nan, None, 1e-3, 8, 144, 1024.0, 0.1)
    ending = Ending("failed", "no\nreason", 1, 9, 72)
    losses = [LossRecord(9, 144, None, 2.5), LossRecord(9, 144, "test", math.nan, "code")]
    assert str(Iteration.of(iteration.line())) == str(iteration)  # NaN is not equal to NaN
    assert [str(LossRecord.of(loss.line())) for loss in losses] == list(map(str, losses))
    read = Ending.of(ending.line(lines_lost=3))
    assert read == replace(ending, reason="no\\nreason", time=read.time, lines_lost=3)
    rejected = LossVerdict(torch.tensor([True, False]), torch.tensor([9.0, 3.0]), torch.ones(2))
    usual = report().decision
    left_out = Verdict(torch.tensor([[True] * 3, [False] * 3]), usual.verdict.scores)
    decision = replace(usual, loss=rejected, verdict=left_out)
    sync = SyncRecord.of(json.loads(json.dumps(sync_line(report(decision=decision)))), 2)
    assert (sync.round, sync.iteration, sync.samples) == (7, 900, [400, 600])
    assert sync.weights.tolist() == [[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]
    assert (sync.rejected, sync.round_loss.tolist()) == ([0], [9.0, 3.0])
    assert sync.seconds.size == len(SYNC_TIMES)
    assert (sync.samples_all, sync.members, sync.epoch) == (1000, (), None)


def test_sync_line_of_an_elastic_run_has_its_members() -> None:
    """The members alone have consumed fewer samples than all replicas so far."""
    members = {"epoch": 3, "members": ("a", "node-4.rack7"), "samples_of_all": 1700}
    line = json.loads(json.dumps(sync_line(report(**members))))
    assert line["samples_all"] == 1700 and "samples_all" not in sync_line(report())
    sync = SyncRecord.of(line, 5)  # however many replicas the run began with
    assert (sync.samples_all, sync.members, sync.epoch) == (1700, ("a", "node-4.rack7"), 3)
    assert sync.samples == [400, 600] and sync.norms.shape == (3, 2)


def test_rejected_loss_is_reported() -> None:
    """In the event line, on the console and in scalars. Catches a reason recorded under the name of
    another."""
    usual = report().decision
    scores = torch.tensor([[math.nan, 4.0, math.nan], [math.nan] * 3]).double()
    norms = usual.norms.clone()
    norms[1, 2] = math.nan
    decision = replace(
        usual,
        norms=norms,
        verdict=Verdict(torch.tensor([[False, True, True], [True] * 3]), scores),
        loss=LossVerdict(
            torch.tensor([False, True]), torch.tensor([3.0, 9.0]), torch.tensor([0.5, 60.0])
        ),
    )
    bad = report(decision=decision)
    line = sync_line(bad)
    assert line["why"] == [[None, "loss"], ["norm", "loss"], ["no-step", "non-finite"]]
    assert (line["round_loss"], line["loss_z"]) == ([3.0, 9.0], [0.5, 60.0])
    assert loss_rejections(bad) == [
        "sync 7 after iteration 900: replica 1 is left out because of its loss 9, 60.0 standard "
        "deviations above its history (the others: 3); look at its data"
    ]
    assert loss_rejections(report()) == []
    found = SyncMetrics(seq_length=10).values(bad, now=0.0)
    assert (found["edit/loss-rejections"], found["edit/loss-z-score/max"]) == (1, 60.0)
    assert found["edit/replica-1/round-loss"] == 9.0


def test_speeds_are_measured_since_previous_sync() -> None:
    """Speed of all replicas and of each; bytes inside a replica are counted per round."""
    metrics = SyncMetrics(seq_length=10, inside_bytes=3.0)
    assert "edit/tokens-per-second" not in metrics.values(report(), now=100.0)
    for now in (110.0, 120.0):  # 100 and 200 samples more each time
        samples = [int(n * now / 100) for n in report().samples]
        found = metrics.values(report(samples=samples, samples_of_all=sum(samples)), now=now)
        assert found["edit/tokens-per-second"] == pytest.approx(100.0)
        assert found["edit/replica-1/tokens-per-second"] == pytest.approx(60.0)
        assert found["edit/exposed-share"] == pytest.approx(0.00346)
        assert found["edit/bytes-inside-replica"] == 12.0


def test_documented_scalars_are_those_of_a_sync() -> None:
    """Would catch a scalar without documentation, and a documented one that was removed."""
    metrics = SyncMetrics(seq_length=10, inside_bytes=3.0, with_units=True)
    losses = LossVerdict(torch.zeros(2, dtype=torch.bool), torch.ones(2), torch.ones(2))
    full = report(update_norm=torch.ones(3))
    full.decision = replace(full.decision, loss=losses)
    metrics.values(full, now=0.0)
    found = {
        re.sub("replica-[01]/", "replica-<r>/", name) for name in metrics.values(full, now=1.0)
    }
    named = {re.sub("unit-[abc]/", "unit-<unit>/", name) for name in found}
    documented = documented_scalars()
    assert {LOSS, *named} == set(documented) and len(documented) == len(set(documented))


def test_losses_are_recorded_under_their_own_steps(tmp_path: Path) -> None:
    """Replica 0 alone records them; an unknown loss is null. Samples are those of the step, also of
    steps of an earlier process, or of a complete round."""
    for replica in range(2):
        log = EventLog(tmp_path, Placement(2, replica, 1, 0, is_single_launch=True))
        for step, samples, batch in ((6, 60, 10), (7, 70, 20), (8, 90, 20)):
            log.count_samples(step, samples, batch)
        log.on_losses(5, [2.0, math.nan, 4.0, 5.0])
        log.on_losses(9, [6.0], 99)
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    assert [(line["iteration"], line["samples"], line["loss"]) for line in lines] == [
        (5, 50, 2.0), (6, 60, None), (7, 70, 4.0), (8, 90, 5.0), (9, 99, 6.0)
    ]  # fmt: skip


def test_sync_summary_shows_exposed_time() -> None:
    """Would catch a console line without the exposed time of a sync."""
    parts = sync_summary(report()).split(" | ")
    assert parts[0] == "sync 7 after iteration 900"
    assert parts[-3:] == ["wait (ms): 1.2", "exposed (ms): 34.6", "total (ms): 1500.0"]


def test_scalars_follow_the_names_of_replicas() -> None:
    """Replicas come and go; one that returns counts its samples from 0."""
    metrics = SyncMetrics(seq_length=10)
    first = report(members=("a", "b"), samples=(400, 600), samples_of_all=1000)
    metrics.values(first, now=0.0)
    second = report(members=("b", "c"), samples=(700, 20), samples_of_all=1150)
    found = metrics.values(second, now=10.0)
    assert found["edit/tokens-per-second"] == pytest.approx(150.0)
    assert found["edit/replica-b/tokens-per-second"] == pytest.approx(100.0)
    assert not {name for name in found if "replica-0" in name or "-c/tokens" in name}
    third = report(members=("b", "c"), samples=(5, 40), samples_of_all=1200)
    assert "edit/replica-b/tokens-per-second" not in metrics.values(third, now=20.0)


def test_files_of_replicas_that_are_not_in_the_run_are_moved(tmp_path: Path) -> None:
    """One of them may join later, and would go on in the file of another run."""
    for name in ("replica-a.jsonl", "replica-b.jsonl", "replica-b.1.jsonl", "replica-3.jsonl"):
        (tmp_path / name).touch()
    moved = files_to_move(tmp_path, "replica-a.jsonl", {"replica-a.jsonl", "replica-c.jsonl"})
    assert {path.name for path in moved[2:-1]} == {
        "replica-a.jsonl", "replica-b.jsonl", "replica-3.jsonl"
    }  # fmt: skip
    assert files_to_move(tmp_path, "replica-b.jsonl", None) == [tmp_path / "replica-b.jsonl"]
