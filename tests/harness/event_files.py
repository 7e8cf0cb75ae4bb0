"""Synthetic event files of a training, of any size and with chosen faults."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.config import EditConfig
from megatron_edit.tools.cli import main
from megatron_edit.tools.monitor.findings import list_findings
from megatron_edit.tools.monitor.membership import HubJournal
from megatron_edit.tools.monitor.run import MonitoredRun

SEQ_LENGTH, BATCH = 128, 8


@dataclasses.dataclass(frozen=True)
class SyntheticRun:
    """A training whose event files are made up.

    Attributes:
        replicas, units, rounds, tau, warmup: sizes.
        strategy: name of the strategy.
        train_iters: planned iterations; None: as many as are written.
        slow: slowdown factor by replica.
        anomalous_replica: a replica that is rejected in some rounds.
        rollbacks: rounds with a rollback.
        exposed: exposed seconds of a sync.
        change: may alter a line of sync.jsonl.
    """

    replicas: int = 4
    units: int = 6
    rounds: int = 30
    tau: int = 8
    warmup: int = 20
    strategy: str = "edit"
    train_iters: int | None = None
    slow: dict[int, float] = dataclasses.field(default_factory=dict)
    anomalous_replica: int | None = None
    rollbacks: tuple[int, ...] = ()
    exposed: float = 0.004
    change: Callable[[dict[str, Any]], None] = lambda _: None

    @property
    def iterations(self) -> int:
        """Number of iterations that are written."""
        return self.warmup + self.rounds * self.tau

    def write(self, folder: Path) -> Path:
        """Write the event files and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps(self.run()))
        rng = random.Random(0)
        start = time.time() - self.rounds * self.tau * 0.1
        with (folder / "sync.jsonl").open("w") as file:
            for number in range(1, self.rounds + 1):
                line = self._sync(number, rng, start)
                self.change(line)
                file.write(json.dumps(line) + "\n")
        with (folder / "loss.jsonl").open("w") as file:
            for i in range(1, self.iterations + 1):
                file.write(json.dumps({"iteration": i, "loss": self._loss(i, rng)}) + "\n")
        for replica in range(self.replicas):
            with (folder / f"replica-{replica}.jsonl").open("w") as file:
                for i in range(1, self.iterations + 1):
                    ended, rest = divmod(i - self.warmup, self.tau)
                    if i > self.warmup and not rest:
                        line = {"round": ended, "digest": f"{ended:016x}"}
                        file.write(json.dumps(line) + "\n")
                    file.write(json.dumps(self._step(i, replica, rng)) + "\n")
        return folder

    def run(self) -> dict[str, Any]:
        """Return the contents of `run.json`."""
        is_counted = self.strategy not in ("a-edit", "ddp")
        interval: dict[str, Any] = {"sync_interval": self.tau} if is_counted else {}
        config = EditConfig(
            use_edit=True, num_replicas=self.replicas, strategy=self.strategy,
            warmup_steps=self.warmup,
            **interval,
        )  # fmt: skip
        return {
            "config": dataclasses.asdict(config),
            "requested_sync_mode": "auto",
            "versions": {"megatron_edit": "0.1.0", "megatron_core": "0.19.2", "torch": "2.13.0",
                         "python": "3.12.0"},
            "topology": {"num_replicas": self.replicas, "ranks_per_replica": 2,
                         "single_launch": True, "device": "cpu", "host": "node0"},
            "training": {"train_iters": self.train_iters or self.iterations,
                         "global_batch_size": BATCH * self.replicas, "seq_length": SEQ_LENGTH,
                         "inside_bytes_per_step": 21e6},
            "argv": ["pretrain_gpt.py", "--use-edit"],
        }  # fmt: skip

    def _loss(self, iteration: int, rng: random.Random) -> float:
        return 2.4 + 8.0 / math.sqrt(iteration + 1) + rng.gauss(0, 0.03)

    def _step(self, iteration: int, replica: int, rng: random.Random) -> dict[str, Any]:
        mine, slowest = self.slow.get(replica, 1.0), max(self.slow.values(), default=1.0)
        seconds = 0.1 * mine * (1 + 0.1 * rng.random())
        ended = iteration - self.warmup
        if ended <= 0:
            seconds *= slowest / mine
        elif ended % self.tau == 0:  # a faster replica waits
            seconds += 0.1 * self.tau * (slowest - mine) + self.exposed
        return {"iteration": iteration, "loss": self._loss(iteration, rng), "grad_norm": 1.0,
                "lr": 1e-3, "samples": BATCH, "tokens": BATCH * SEQ_LENGTH,
                "seconds": round(seconds, 6)}  # fmt: skip

    def _sync(self, number: int, rng: random.Random, start: float) -> dict[str, Any]:
        names = ["embedding", *(f"layer.{i}" for i in range(1, self.units - 1)), "final"]
        is_bad = self.anomalous_replica is not None and number % 7 == 3
        norms, scores, weights, anomalous = [], [], [], []
        for place in range(self.units):
            scale = (1 + place) * 0.2 * (1 + 3 / number)
            row = [scale * rng.lognormvariate(0, 0.15) for _ in range(self.replicas)]
            out = [is_bad and replica == self.anomalous_replica for replica in range(self.replicas)]
            if number in self.rollbacks and place == 1:
                out = [True] * self.replicas
            row = [x * 6 if bad else x for x, bad in zip(row, out, strict=True)]
            raw = [0.0 if bad else math.exp(-x / scale) for x, bad in zip(row, out, strict=True)]
            total = sum(raw)
            norms.append(row)
            anomalous.append(out)
            weights.append([x / total if total else 0.0 for x in raw])
            scores.append([None if number <= 5 else (x / scale - 1) * 5 for x in row])
        iteration = self.warmup + number * self.tau
        seconds = {"wait": 0.4 * self.exposed, "exchange": 0.3 * self.exposed,
                   "outer": 0.3 * self.exposed, "exposed": self.exposed,
                   "total": 3 * self.exposed}  # fmt: skip
        return {
            "round": number, "iteration": iteration, "time": start + number * self.tau * 0.1,
            "units": names, "norms": norms, "z": scores, "anomalous": anomalous,
            "weights": weights, "effective_replicas": [1.0] * self.units,
            "clip": [min(1.0, 0.6 + rng.random()) for _ in names],
            "update_norm": [1.0] * self.units,
            "rollback": [all(row) for row in anomalous],
            "inner_steps": [self.tau] * self.replicas,
            "samples": [iteration * BATCH] * self.replicas, "wire_bytes": 12_345_678,
            "state_bytes": 80_000_000,
            "seconds": {n: v * (0.8 + 0.4 * rng.random()) for n, v in seconds.items()},
        }  # fmt: skip


def read_run(folder: Path, state_dir: Path | None = None) -> MonitoredRun:
    """Read the event files of a run once, and the journal of its hub."""
    run = MonitoredRun(folder, None if state_dir is None else HubJournal(state_dir))
    run.poll()
    return run


def finding_texts(run: MonitoredRun) -> str:
    """Return the texts of all findings, with their levels."""
    return " ".join(f"{finding.level}: {finding.text}" for finding in list_findings(run))


def page_and_frame(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, str]:
    """Return the page of `report` and one frame of `watch`."""
    assert main(["report", str(folder), *more]) == 0
    capsys.readouterr()
    assert main(["watch", str(folder), "--once", *more]) == 0
    return (folder / "report.html").read_text(encoding="utf-8"), capsys.readouterr().out
