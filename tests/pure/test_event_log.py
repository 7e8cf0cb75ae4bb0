"""Event files of a run after a run, in one folder.

Would catch: lines of an earlier run that are read as the new run's, files of one run that are
renamed to different numbers, an earlier file that is overwritten.
"""

from __future__ import annotations

import json
import math
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
from megatron_edit.method.detector import Verdict
from megatron_edit.method.loss_check import LossVerdict
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.metrics import SyncMetrics
from megatron_edit.observe.records import Ending, Iteration, LossRecord, SyncRecord
from megatron_edit.observe.reports import loss_rejections, sync_line, sync_summary
from megatron_edit.tools.monitor.run import MonitoredRun
from tests.harness.event_files import MadeUp

pytest.importorskip("rich")


def start(folder: Path, made_up: MadeUp) -> list[EventLog]:
    """A run begins: its logs, by replica. All of them are made before the first run.json is."""
    places = [Placement(made_up.replicas, r, 1, 0, is_single_launch=True)
              for r in range(made_up.replicas)]  # fmt: skip
    logs = [EventLog(folder, place) for place in places]
    for log in logs:
        log.begin(made_up.run())
    return logs


def step(logs: Sequence[EventLog], iteration: int) -> None:
    """All replicas make an iteration."""
    for log in logs:
        log.on_iteration(
            Iteration(iteration, iteration, 3.0, 1.0, 1e-3, 8, 16 * iteration, 1024, 0.1)
        )


def texts(folder: Path) -> dict[str, str]:
    """Content by name."""
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("strategy", ["edit", "ddp"])
def test_a_new_run_is_read_alone(tmp_path: Path, strategy: str) -> None:
    """In the warm-up, before it has a sync or a loss of its own, nothing is the earlier run's."""
    MadeUp(rounds=5).write(tmp_path)
    watched, later = MonitoredRun(tmp_path), MadeUp(rounds=5, strategy=strategy)
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
        assert not run.losses.curve()[0].size
    for log in logs:
        log.close()


def test_files_of_a_run_get_one_number(tmp_path: Path) -> None:
    """Also where runs have other files: no sync, fewer replicas, numbers that an older version
    let drift apart. And never is one overwritten."""
    first = texts(MadeUp(rounds=2, replicas=3).write(tmp_path))
    logs = start(tmp_path, MadeUp(replicas=2))
    step(logs, 1)
    assert {n: t for n, t in texts(tmp_path).items() if ".1." in n} == {
        name.replace(".json", ".1.json"): text for name, text in first.items()
    }
    (tmp_path / "loss.4.jsonl").write_text("kept")
    start(tmp_path, MadeUp(replicas=3))
    found = texts(tmp_path)
    numbered = {name for name in found if ".5." in name}
    assert numbered == {"run.5.json", "replica-0.5.jsonl", "replica-1.5.jsonl"}
    assert [name for name in found if name.count(".") == 1] == ["run.json"]
    assert found["loss.4.jsonl"] == "kept" and json.loads(found["run.1.json"])


def test_other_replicas_write_no_run(tmp_path: Path) -> None:
    """One launch per replica, each with a folder of its own, used again."""
    place = Placement(2, 1, 1, 0, is_single_launch=False)
    for _ in range(2):
        log = EventLog(tmp_path, place)
        log.begin({})
        step([log], 1)
        log.close()
    assert set(texts(tmp_path)) == {"replica-1.jsonl", "replica-1.1.jsonl"}


def test_a_run_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    """By run.json alone: nothing else of the earlier run was there, or has come yet."""
    watched = MonitoredRun(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(MadeUp(replicas=2).run()))
    watched.poll()
    assert len(watched.replicas) == 2
    start(tmp_path, MadeUp(replicas=3))
    watched.poll()
    assert len(watched.replicas) == 3


def report(**changes: Any) -> Any:
    """Of a sync of two replicas and three units."""
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
        }, **changes,
    })  # fmt: skip


def test_fields_of_a_sync() -> None:
    """Tables are [unit][replica], and what is not finite is null: catches a table by replica, a
    field under another's name, and lines that are no JSON."""
    line = json.loads(json.dumps(sync_line(report()), allow_nan=False))
    assert line["weights"] == [[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]
    assert line["norms"] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert line["effective_replicas"] == pytest.approx([2.0, 1.0, 1.6])
    assert line["update_norm"] == [1.0, None, None] and line["clip"] == [1.0] * 3
    assert line["why"] == [[None, None]] * 3 and line["round_loss"] == [3.0, None]
    assert (line["inner_steps"], line["samples"]) == ([4, 6], [400, 600])
    assert (line["round"], line["iteration"], line["units"]) == (7, 900, ["a", "b", "c"])


def test_readers_find_what_writers_wrote() -> None:
    """Would catch: a field that the tools look for under another name."""
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


def test_rejected_loss_is_told() -> None:
    """Of the replica and of the others, in the line, on the console and in scalars; every reason
    has its word: catches one that stands for another."""
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


def test_speeds_are_since_the_sync_before() -> None:
    """Of all replicas and of each; bytes inside a replica are those of the round."""
    metrics = SyncMetrics(seq_length=10, inside_bytes=3.0)
    assert "edit/tokens-per-second" not in metrics.values(report(), now=100.0)
    for now in (110.0, 120.0):  # 100 and 200 samples more each time
        samples = [int(n * now / 100) for n in report().samples]
        found = metrics.values(report(samples=samples), now=now)
        assert found["edit/tokens-per-second"] == pytest.approx(100.0)
        assert found["edit/replica-1/tokens-per-second"] == pytest.approx(60.0)
        assert found["edit/exposed-share"] == pytest.approx(0.00346)
        assert found["edit/bytes-inside-replica"] == 12.0


def test_losses_stand_under_their_own_steps(tmp_path: Path) -> None:
    """On replica 0 alone; an unknown one is null. With the samples of their own steps, also of
    those that an earlier process made, or of a whole round."""
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


def test_the_line_of_a_sync_has_what_tuning_goes_by() -> None:
    """Would catch: a console that does not say what of a sync is exposed."""
    parts = sync_summary(report()).split(" | ")
    assert parts[0] == "sync 7 after iteration 900"
    assert parts[-3:] == ["wait (ms): 1.2", "exposed (ms): 34.6", "total (ms): 1500.0"]
