"""A-EDiT's progress: the same iteration of all replicas together in every output."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from megatron_edit.tools.monitor.run import MonitoredRun
from tests.harness import Flags
from tests.host.runs import EditRun
from tests.host.test_aedit import run_timed

BATCH, TRAIN_ITERS = 8, 60
RUN: Flags = {
    "train_iters": TRAIN_ITERS, "global_batch_size": BATCH, "micro_batch_size": 2,
    "edit_sync_seconds": 12, "edit_warmup_steps": 4, "log_interval": 5,
}  # fmt: skip
UNEQUAL = {"SPY_FACTORS": "[1, 2]"}  # seconds per step: replica 0 makes 79 steps, replica 1 41
LINE = re.compile(r" iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \|")
NUMBERS = {
    "sync": re.compile(r"\[edit\] sync \d+ after iteration (\d+)"),
    "evaluation": re.compile(r"validation loss at iteration (\d+) \|"),
    "saving": re.compile(r"saving checkpoint at iteration +(\d+) to"),
    "memory": re.compile(r"\(before save_checkpoint for iteration (\d+)\)"),
    "complete": re.compile(r"checkpoint of iteration (\d+) is complete"),
}


def console(run: EditRun) -> str:
    """Return the output of replica 0."""
    return run.result.ranks[0].stdout


def log_lines(run: EditRun) -> list[tuple[int, int, int]]:
    """Return iteration, total iterations and consumed samples of each of Megatron's log lines."""
    return [(int(x[1]), int(x[2]), int(x[3])) for x in LINE.finditer(console(run))]


def numbers(run: EditRun, kind: str) -> list[int]:
    """Return the iterations in the console lines of a kind."""
    return [int(found) for found in NUMBERS[kind].findall(console(run))]


def assert_one_number(run: EditRun, start: int = 0) -> None:
    """Check that console and event files count global batches of all replicas, never decreasing."""
    found = [int(x[1]) for x in re.finditer(r"(?: |at |after )iteration +(\d+)(?:/| \|)",
                                            console(run))]  # fmt: skip
    assert found == sorted(found) and start < found[0] and found[-1] <= TRAIN_ITERS
    for iteration, total, samples in log_lines(run):
        assert (iteration, total) == (samples // BATCH, TRAIN_ITERS)
    shown = [iteration for iteration, _, _ in log_lines(run)]
    assert len(set(shown)) == len(shown)
    whole = [sum(line["samples"]) // BATCH for line in run.syncs]
    assert numbers(run, "sync") == [line["iteration"] for line in run.syncs] == whole
    for line in run.lines("loss.jsonl"):
        assert line["iteration"] == line["samples"] // BATCH
    for replica in (0, 1):
        lines = [x for x in run.lines(f"replica-{replica}.jsonl") if "loss" in x]
        assert all(x["iteration"] == x["samples_all"] // BATCH for x in lines)
        counts = [x["samples_all"] for x in lines]
        assert counts == sorted(counts) and counts[-1] <= TRAIN_ITERS * BATCH
        steps = [x["replica_step"] for x in lines]
        assert steps == list(range(steps[0], steps[0] + len(steps)))


def assert_round_losses(*runs: EditRun) -> None:
    """Check for one line per sync, over a run and its resume, with the mean over the steps of the
    round."""
    warmup = RUN["edit_warmup_steps"]
    losses = [
        [x["loss"] for run in runs for x in run.lines(f"replica-{replica}.jsonl")
         if x.get("replica_step", 0) > warmup]
        for replica in (0, 1)
    ]  # fmt: skip
    expected = []
    for sync in (sync for run in runs for sync in run.syncs):
        own = [steps[:count] for steps, count in zip(losses, sync["inner_steps"], strict=True)]
        losses = [steps[len(used) :] for steps, used in zip(losses, own, strict=True)]
        expected.append((sync["iteration"], fmean([*own[0], *own[1]])))
    lines = [x for run in runs for x in run.lines("loss.jsonl") if "loss" in x]
    found = [(x["iteration"], x["loss"]) for x in lines if x["iteration"] > warmup]
    assert [iteration for iteration, _ in found] == [iteration for iteration, _ in expected]
    assert [x for _, x in found] == pytest.approx([x for _, x in expected], rel=1e-12)
    assert losses == [[], []]


def test_console_and_event_files_show_same_iteration(tmp_path: Path) -> None:
    """Would catch a line that shows replica 0's own 79 steps, or samples that no replica consumed,
    and an evaluation or checkpoint with another iteration than the sync at which it happened."""
    run = run_timed(
        tmp_path, 2, 2, "script_clock", UNEQUAL, save=tmp_path / "saves", save_interval=20,
        eval_interval=20, eval_iters=1, log_throughput=True, timing_log_level=1, **RUN,
    )  # fmt: skip
    assert_one_number(run)
    assert_round_losses(run)
    at = [next(n for n in numbers(run, "sync") if n >= due) for due in (20, 40, 60)]
    for kind in ("evaluation", "saving", "memory"):
        assert numbers(run, kind) == at, kind
    assert sorted(numbers(run, "complete")) == at
    assert log_lines(run)[-1] == (TRAIN_ITERS, TRAIN_ITERS, TRAIN_ITERS * BATCH)
    assert f"validation loss at iteration {TRAIN_ITERS} on test set" in console(run)
    own = [x["replica_step"] for x in run.lines("replica-0.jsonl") if "loss" in x]
    assert own[-1] > TRAIN_ITERS  # replica 0 makes more steps than that, so the test is not vacuous
    watched = MonitoredRun(tmp_path)
    watched.poll()
    assert (watched.iteration, watched.progress) == (TRAIN_ITERS, 1.0)
    assert [replica.step for replica in watched.replicas] == [own[-1], 2 * TRAIN_ITERS - own[-1]]


def test_logged_times_are_per_global_iteration(tmp_path: Path) -> None:
    """The logged time per iteration multiplied by the iterations between lines is the elapsed time.
    Would catch times of replica 0's own steps, which are a third shorter."""
    run = run_timed(
        tmp_path, 2, 2, "script_clock,slow", {**UNEQUAL, "SPY_SLEEP": "[0.05, 0.05]"}, **RUN
    )
    found = re.findall(
        r"\[\S+ (\d+):(\d+):([\d.]+)\] iteration +(\d+)/.*?per iteration \(ms\): ([\d.]+)",
        console(run),
    )
    at = [3600 * int(h) + 60 * int(m) + float(s) for h, m, s, _, _ in found]
    iterations, each = [int(x[3]) for x in found], [float(x[4]) for x in found]
    gaps = [now - then for then, now in pairwise(iterations[1:])]
    spent = sum(ms / 1e3 * gap for ms, gap in zip(each[2:], gaps, strict=True))
    assert abs(spent - (at[-1] - at[1])) < 0.1 * (at[-1] - at[1])


def test_resumed_run_continues_iteration_numbers(tmp_path: Path) -> None:
    """Stopped within a round and resumed. Would catch iterations counted from the launch or of one
    replica only, and a stop message with another iteration than its checkpoint."""
    saves, again = tmp_path / "saves", tmp_path / "again"
    first = run_timed(
        tmp_path, 2, 2, "script_clock,signal_replica_1", {**UNEQUAL, "SPY_STEP": "18"}, save=saves,
        save_interval=100, exit_signal_handler=True, **RUN,
    )  # fmt: skip
    assert_one_number(first)
    (stopped,) = numbers(first, "complete")
    assert numbers(first, "saving") == [stopped]
    message = re.findall(
        r"stopping after iteration (\d+)", console(first)
    )  # absent if a meeting reported it
    assert message in ([], [str(stopped)])
    entries: list[dict[str, Any]] = _manifest(saves)["replicas"]
    assert sum(entry["samples"] for entry in entries) // BATCH == stopped
    assert stopped >= max(iteration for iteration, _, _ in log_lines(first))
    second = run_timed(again, 2, 2, "script_clock", UNEQUAL, load=saves, **RUN)
    assert_one_number(second, stopped - 1)
    assert_round_losses(first, second)
    assert log_lines(second)[-1] == (TRAIN_ITERS, TRAIN_ITERS, TRAIN_ITERS * BATCH)


def _manifest(saves: Path) -> Any:
    (path,) = saves.glob("iter_*/edit/edit.json")
    return json.loads(path.read_text())
