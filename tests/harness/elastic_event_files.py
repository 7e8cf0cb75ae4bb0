"""Synthetic event files and journal of an elastic run: replicas with names come and go."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from tests.harness.event_files import BATCH, SEQ_LENGTH, SyntheticRun

Line = dict[str, Any]
BEGAN_AT = 1_790_000_000.0
SECONDS = 10.0  # of a round
STOPPED = {"end": "stopped", "reason": "a signal", "exit_code": 0}
FINISHED = {"end": "finished", "reason": None, "exit_code": 0}
FENCED = {"end": "failed", "reason": "the others went on", "exit_code": 5}
KILLED = None


@dataclasses.dataclass(frozen=True)
class SyntheticEpoch:
    """Rounds with the same members.

    Attributes:
        members: names, in order.
        rounds: how many.
        left: end records of those that left before; None for one that was killed.
        reason: in the journal, of those that left before.
    """

    members: str | tuple[str, ...]
    rounds: int
    left: dict[str, Line | None] = dataclasses.field(default_factory=dict)
    reason: str = "lost"


@dataclasses.dataclass
class SyntheticElasticRun:
    """An elastic run whose event files and journal are made up.

    Attributes:
        epochs: all of them.
        nominal: replicas that the run begins with.
        tau, warmup: sizes.
        is_over: whether it has finished.
        strategy: of the run.
    """

    epochs: list[SyntheticEpoch]
    nominal: int = 3
    tau: int = 4
    warmup: int = 2
    is_over: bool = False
    strategy: str = "edit"
    lines: dict[str, list[Line]] = dataclasses.field(default_factory=dict, init=False)
    journal: list[Line] = dataclasses.field(default_factory=list, init=False)
    _steps: dict[str, int] = dataclasses.field(default_factory=dict, init=False)
    _samples: int = dataclasses.field(default=0, init=False)

    def write(self, folder: Path) -> Path:
        """Write `logs` and `hub` in a folder, and return `logs`."""
        self.lines, self.journal, self._steps, self._samples = {}, [], {}, 0
        self._record("open", 0, 0.0, lineage=0, round=0, digest="")
        self._warm_up()
        number, rng, before = 0, random.Random(0), set[str]()
        for epoch, each in enumerate(self.epochs, start=1):
            at = number * SECONDS
            for name, end in each.left.items():
                self._record("leave", epoch - 1, at + 1, name=name, reason=each.reason)
                if end is not None:
                    self._end(name, end, at + 2)
            for name in sorted({*each.members} - before):
                self._record("join", epoch - 1, at + 3, name=name)
                self._steps.setdefault(name, self.warmup)
                if epoch > 1:
                    self._steps[name] = self.warmup  # a new process
            members = list(each.members)
            self._record("epoch", epoch, at + 4, members=members, leader=members[0], handles=[])
            for _ in range(each.rounds):
                number += 1
                self._round(number, epoch, tuple(members), rng)
            before = {*members}
        if self.is_over:
            for name in self.epochs[-1].members:
                self._end(name, FINISHED, number * SECONDS + 5)
                at = number * SECONDS + 5
                self._record("leave", len(self.epochs), at, name=name, reason="finished")
        return self._write(folder)

    def run(self) -> Line:
        """Return the contents of `run.json`."""
        made_up = SyntheticRun(replicas=self.nominal, tau=self.tau, warmup=self.warmup,
                               strategy=self.strategy).run()  # fmt: skip
        made_up["config"] |= {"hub": "127.0.0.1:29600", "replica_name": "a",
                              "nominal_replicas": self.nominal,
                              "sync_mode": "blocking"}  # fmt: skip
        rounds = sum(epoch.rounds for epoch in self.epochs)
        iterations = self._samples // self.batch if self.is_over else 10 * (rounds + 1) * self.tau
        made_up["training"] |= {"train_iters": iterations, "global_batch_size": self.batch}
        return made_up | {"segment": {"number": 1, "resumed_from": None}}

    @property
    def batch(self) -> int:
        """The global batch size."""
        return BATCH * self.nominal

    def _warm_up(self) -> None:
        for step in range(1, self.warmup + 1):
            self._samples += self.batch
            for name in self.epochs[0].members:
                self._steps[name] = step
                self._step(name, self._samples)

    def _step(self, name: str, samples_all: int) -> None:
        line = {"iteration": samples_all // self.batch, "replica_step": self._steps[name],
                "loss": 3.0 + 1.0 / self._steps[name], "grad_norm": 1.0, "lr": 1e-3,
                "samples": BATCH, "samples_all": samples_all, "tokens": BATCH * SEQ_LENGTH,
                "seconds": SECONDS / self.tau}  # fmt: skip
        self._append(f"replica-{name}.jsonl", line)

    def _round(self, number: int, epoch: int, members: tuple[str, ...], rng: random.Random) -> None:
        at = BEGAN_AT + number * SECONDS
        before, self._samples = self._samples, self._samples + BATCH * self.tau * len(members)
        for name in members:
            for place in range(1, self.tau + 1):
                self._steps[name] += 1
                if place == self.tau:
                    line = {"round": number, "digest": f"{number:016x}"}
                    self._append(f"replica-{name}.jsonl", line)
                is_last = place == self.tau
                self._step(name, self._samples if is_last else before + place * BATCH)
        made_up = SyntheticRun(replicas=len(members), tau=self.tau, warmup=self.warmup)
        sync = made_up._sync(number, rng, BEGAN_AT)
        iteration = self._samples // self.batch
        sync |= {"epoch": epoch, "members": list(members), "samples_all": self._samples,
                 "time": at, "iteration": iteration,
                 "why": [[None] * len(members)] * made_up.units,
                 "round_loss": [3.0] * len(members),
                 "samples": [BATCH * self._steps[name] for name in members]}  # fmt: skip
        self._append("sync.jsonl", sync)
        loss = {"iteration": iteration, "samples": self._samples, "loss": 3.0 + 1.0 / number}
        self._append("loss.jsonl", loss)
        self._record("commit", epoch, number * SECONDS, round=number - 1, members=list(members),
                     samples=self._samples, digest="d", blocks={})  # fmt: skip

    def _end(self, name: str, end: Line, at: float) -> None:
        more = {"iteration": self._steps[name], "samples": 0, "time": BEGAN_AT + at,
                "lines_lost": 0}  # fmt: skip
        self._append(f"replica-{name}.jsonl", end | more)

    def _append(self, name: str, line: Line) -> None:
        self.lines.setdefault(name, []).append(line)

    def _record(self, event: str, epoch: int, at: float, **fields: Any) -> None:
        head = {"seq": len(self.journal) + 1, "time": BEGAN_AT + at, "term": 1, "epoch": epoch,
                "event": event}  # fmt: skip
        self.journal.append(head | fields | {"hash": ""})

    def _write(self, folder: Path) -> Path:
        logs, hub = folder / "logs", folder / "hub"
        for each in (logs, hub):
            each.mkdir(parents=True, exist_ok=True)
        (logs / "run.json").write_text(json.dumps(self.run()))
        for name, lines in self.lines.items():
            (logs / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        text = "".join(json.dumps(line) + "\n" for line in self.journal)
        (hub / "journal.jsonl").write_text(text)
        return logs
