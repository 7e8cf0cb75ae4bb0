"""Synthetic trainings for `compare_surfaces.py`: event files, and the console log of a launcher.

Nothing of the package is imported and nothing depends on the clock, so that two checkouts read
exactly the same files. As a program it replaces a launcher: `megatron-edit compare --launcher
"python made_up_events.py"` starts it in place of torchrun, without any training.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FUTURE, PAST = 4_000_000_000.0, 1_700_000_000.0  # Unix seconds: of a running, and of a lost run
BATCH, SEQ_LENGTH = 8, 128
Line = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """A synthetic training.

    Attributes:
        strategy: value of `--edit-strategy`.
        replicas, units, rounds, tau, warmup: sizes; `tau` is the length of a round.
        planned: `--train-iters`; 0 for the number of iterations made.
        slow: factor on the step time of the last replica.
        has_rejections: whether replicas are rejected at some syncs, by norm and by loss.
        spike: iteration at which the loss jumps; 0 for none.
        end: end record of each replica; None for a run without one.
        after: iteration of the checkpoint that it resumes from; 0 for a new training.
        number: of the run in its folder.
        is_old: written by a version without segments, evaluations and cumulative samples.
        is_damaged: has lines that are truncated, not JSON, or have wrong fields.
        time: of all files, Unix seconds.
    """

    strategy: str = "edit"
    replicas: int = 4
    units: int = 6
    rounds: int = 30
    tau: int = 8
    warmup: int = 20
    planned: int = 0
    slow: float = 1.0
    has_rejections: bool = False
    spike: int = 0
    end: str | None = "finished"
    after: int = 0
    number: int = 1
    is_old: bool = False
    is_damaged: bool = False
    time: float = FUTURE

    @property
    def is_timed(self) -> bool:
        """Whether replicas make unequal numbers of steps."""
        return self.strategy == "a-edit"

    @property
    def last(self) -> int:
        """The last iteration."""
        return self.after + self.rounds * self.tau + (0 if self.after else self.warmup)

    @property
    def unit_names(self) -> list[str]:
        """Names of the units."""
        return ["embedding", *(f"layer.{i}" for i in range(1, self.units - 1)), "final"]

    def header(self) -> Line:
        """Return the content of run.json."""
        batch = BATCH * self.replicas
        point = {"iteration": self.after, "samples": self.after * batch} if self.after else None
        run: Line = {
            "config": {
                "use_edit": True, "num_replicas": self.replicas, "strategy": self.strategy,
                "warmup_steps": self.warmup, "sync_interval": self.tau, "sync_seconds": 600.0,
                "delay_steps": 0, "anomaly_threshold": 3.0, "no_anomaly": False, "no_clip": False,
                "clip": 10.0, "weight_temperature": 0.5, "interval": "fixed", "log_dir": None,
            },
            "versions": {"megatron_edit": "0.2.0", "python": "3.12.0", "torch": "2.13.0"},
            "topology": {"num_replicas": self.replicas, "ranks_per_replica": 2, "device": "cpu",
                         "host": "node0"},
            "training": {"train_iters": self.planned or self.last, "global_batch_size": batch,
                         "seq_length": SEQ_LENGTH, "inside_bytes_per_step": 21e6},
            "argv": ["pretrain_gpt.py", "--num-layers", "4", "--hidden-size", "64"],
        }  # fmt: skip
        return run if self.is_old else run | {"segment": {"number": self.number,
                                                          "resumed_from": point}}  # fmt: skip

    def files(self) -> Iterator[tuple[str, list[Line]]]:
        """Yield names and lines of the JSON Lines files."""
        rng = random.Random(self.number)
        yield "sync.jsonl", [self._sync(number, rng) for number in self._round_numbers]
        yield "loss.jsonl", [line for i in self._steps for line in self._losses(i, rng)]
        for replica in range(self.replicas):
            yield f"replica-{replica}.jsonl", list(self._replica(replica, rng))

    @property
    def _steps(self) -> range:
        return range(self.after + 1, self.last + 1)

    @property
    def _round_numbers(self) -> range:
        first = max(0, self.after - self.warmup) // self.tau
        return range(first + 1, first + self.rounds + 1)

    def _loss(self, iteration: int, rng: random.Random) -> float:
        loss = 2.4 + 8 / math.sqrt(iteration + 1) + rng.gauss(0, 0.03)
        return loss + 5 * (self.spike <= iteration < self.spike + 3)

    def _losses(self, iteration: int, rng: random.Random) -> Iterator[Line]:
        line: Line = {"iteration": iteration, "loss": self._loss(iteration, rng)}
        if self.is_old:
            yield line
            return
        samples = {"samples": iteration * BATCH * self.replicas}
        yield line | samples
        if iteration % 20 == 0:
            for split, name in (("validation", None), ("validation", "code"), ("test", None)):
                loss = line["loss"] + 0.25 * len(split)
                found = {"iteration": iteration, "validation_loss": loss, "split": split}
                yield found | samples | {"perplexity": 20.0, "name": name}

    def _replica(self, replica: int, rng: random.Random) -> Iterator[Line]:
        slowdown = self.slow if replica == self.replicas - 1 else 1.0
        for i in self._steps:
            if self.is_timed and slowdown > 1 and i % 3 == 0 and i > self.warmup:
                continue
            ended, rest = divmod(i - self.warmup, self.tau)
            if i > self.warmup and not rest and self.rounds:
                digest = ended + (self.is_damaged and replica == 1 and ended > 3)
                yield {"round": ended, "digest": None if ended % 2 else f"{digest:016x}"}
            line: Line = {
                "iteration": i, "replica_step": i, "loss": self._loss(i, rng), "samples": BATCH,
                "samples_all": i * BATCH * self.replicas, "tokens": BATCH * SEQ_LENGTH,
                "seconds": 0.1 * (slowdown if rest else self.slow) * (1 + 0.1 * rng.random()),
                "grad_norm": 1.0, "lr": 1e-3,
            }  # fmt: skip
            if replica == 0 and i % 29 == 0:
                line["loss"] = None
            old = ("iteration", "loss", "samples", "tokens", "seconds", "grad_norm", "lr")
            yield {name: line[name] for name in old} if self.is_old else line
        if self.end is not None and not self.is_old:
            reasons = {"stopped": "signal SIGTERM", "failed": "ValueError: no\nway"}
            code = int(self.end == "failed")
            yield {"end": self.end, "reason": reasons.get(self.end), "iteration": self.last,
                   "samples": self.last * BATCH, "exit_code": code, "lines_lost": code,
                   "time": self.time + replica}  # fmt: skip

    def _sync(self, number: int, rng: random.Random) -> Line:
        out, norms, weights, scores = [], [], [], []
        by_loss = self.has_rejections and number % 11 == 5
        for place, _ in enumerate(self.unit_names):
            scale = (1 + place) * 0.2 * (1 + 3 / number)
            bad = [self.has_rejections and r == 1 and number % 7 == 3 for r in range(self.replicas)]
            bad = (
                [True] * self.replicas
                if self.has_rejections and number == 12 and place == 1
                else bad
            )
            bad = [b or (by_loss and r == 2) for r, b in enumerate(bad)]
            row = [scale * rng.lognormvariate(0, 0.15) * (6 if b else 1) for b in bad]
            raw = [0.0 if b else math.exp(-x / scale) for x, b in zip(row, bad, strict=True)]
            norms.append(row)
            out.append(bad)
            weights.append([x / sum(raw) if sum(raw) else 0.0 for x in raw])
            scores.append([None if number <= 5 else (x / scale - 1) * 5 for x in row])
        iteration = self.warmup + number * self.tau
        exposed = 0.004 + 0.02 * (self.slow > 1)
        line: Line = {
            "round": number, "iteration": iteration, "units": self.unit_names, "norms": norms,
            "time": self.time - 1000 + number * self.tau * 0.1, "z": scores, "anomalous": out,
            "weights": weights, "effective_replicas": [1.0] * self.units, "clip":
            [min(1.0, 0.3 + rng.random() * (0.15 if self.slow > 1 else 1)) for _ in out],
            "update_norm": [1.0] * self.units, "rollback": [all(row) for row in out],
            "inner_steps": [self.tau] * self.replicas, "samples": [iteration * BATCH] *
            self.replicas, "wire_bytes": 12_345_678 + 1000 * (number % 3) * self.is_timed,
            "state_bytes": 80_000_000, "seconds": {
                "wait": 0.6 * exposed, "exchange": 0.1 * exposed, "outer": 0.3 * exposed,
                "exposed": exposed, "total": 3 * exposed * (0.8 + 0.4 * rng.random())},
        }  # fmt: skip
        if not self.is_old:
            why = ["loss" if by_loss and r == 2 else "norm" for r in range(self.replicas)]
            line["why"] = [[w if b else None for w, b in zip(why, row, strict=True)] for row in out]
            line["round_loss"] = [9.5 if w == "loss" else 3.0 for w in why]
            line["loss_z"] = [None] * self.replicas
        return line


TRAININGS: Mapping[str, Sequence[Training]] = {
    "usual": [Training(slow=1.4, has_rejections=True, spike=150)],
    "running": [Training(replicas=2, end=None, planned=400)],
    "timed": [Training("a-edit", replicas=3, slow=1.5)],
    "many": [Training(replicas=9, units=16, rounds=520, tau=1, has_rejections=True, end="stopped")],
    "resumed": [Training(rounds=6, end="stopped"),
                Training(rounds=5, after=52, number=2, end=None),
                Training(rounds=9, after=84, number=3)],
    "damaged": [Training(rounds=12, is_damaged=True, end=None, time=PAST)],
    "failed": [Training(rounds=3, end="failed", planned=900)],
    "old": [Training(is_old=True, rounds=9)],
    "warmup": [Training(rounds=0, warmup=30, end=None, planned=100)],
    "ddp": [Training("ddp", rounds=0, warmup=50)],
    "single": [Training(replicas=1, rounds=9)],
}  # fmt: skip


def write_training(folder: Path, runs: Sequence[Training]) -> None:
    """Write the event files of all runs of a training.

    Args:
        folder: for the files of the newest run, and the renamed files of earlier runs.
        runs: from the first to the newest.
    """
    folder.mkdir(parents=True)
    for run in runs:
        middle = "" if run is runs[-1] else f".{run.number}"
        (folder / f"run{middle}.json").write_text(json.dumps(run.header()))
        for name, lines in run.files():
            path = folder / name.replace(".jsonl", f"{middle}.jsonl")
            text = "".join(json.dumps(line) + "\n" for line in lines)
            if run.is_damaged and name == "replica-3.jsonl":
                continue
            if run.is_damaged:
                text = text.replace("\n", '\n{"iteration": -1, "loss": 3}\nno JSON\n', 1) + '{"cut'
            path.write_text(text)
        for path in folder.iterdir():
            os.utime(path, (run.time, run.time))


def fake_launcher(words: Sequence[str]) -> int:
    """Print and write the output of a training; returns the exit code.

    Args:
        words: the arguments of the launcher.
    """
    values = dict(zip(words, [*words[1:], ""], strict=True))
    seed, strategy = int(values.get("--seed", "1")), values.get("--edit-strategy", "stock")
    if (strategy, seed) == ("stock", 2):
        print("this training fails")
        return 7
    steps, rng = int(values["--train-iters"]), random.Random(f"{strategy} {seed}")
    for rank in range(2):
        where = f"on (tensor, pipeline) model parallel rank (0, {rank})"
        print(f" > number of parameters {where}: 5000")
    for i in range(1, steps + 1):
        print(f" iteration {i:8}/{steps:8} | consumed samples: {i * 4 * BATCH} | elapsed time per "
              f"iteration (ms): {rng.uniform(90, 110):.1f} | global batch size: {4 * BATCH} | "
              f"lm loss: {3 + 5 / i + rng.gauss(0, 0.1):.6E} |")  # fmt: skip
        if i % 10 == 0:
            print(f" validation loss at iteration {i} | lm loss value: {3 + 5 / i:.6E} | ")
    if "--edit-log-dir" in values:
        warmup, is_synchronous = int(values.get("--edit-warmup-steps", "0")), strategy == "ddp"
        run = Training(strategy, rounds=0 if is_synchronous else (steps - warmup) // 4, tau=4,
                       warmup=steps if is_synchronous else warmup, number=seed)  # fmt: skip
        write_training(Path(values["--edit-log-dir"]), [replace(run, end=None)])
    return 0


if __name__ == "__main__":
    raise SystemExit(fake_launcher(sys.argv[1:]))
