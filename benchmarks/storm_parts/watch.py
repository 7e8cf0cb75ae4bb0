"""A real elastic run, under a supervisor that starts ended replicas again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_edit.atomic_files import write_atomic
from megatron_edit.observe.line_files import LineReader
from tests.harness.elastic_run import ElasticRun, replica_server

NAMES = "abcdefgh"  # of the nominal replicas
POLL_SECONDS = 0.05
START_SECONDS = 90.0  # from the start of the processes to the first commit
WHOLE_SECONDS = 60.0  # from the end of a fault until the run is whole again
END_SECONDS = 60.0  # from the request to stop to the end of all processes
RANKS_SECONDS = 10.0  # from the end of a rank to that of the others of its replica
UNEXPECTED_RESTART = 1.0  # seconds until a replica is started again that has ended by itself
ACTIONS, OUTCOME, HUB_PID = "actions.jsonl", "outcome.json", "hub.pid"
KILLED = -int(signal.SIGKILL)


class HangError(Exception):
    """What a fault must lead to has not come in time."""


@dataclass(frozen=True)
class Shape:
    """What is trained.

    Attributes:
        replicas: that the run begins with.
        ranks: of a replica.
        step: seconds of a step; most of it is sleep.
        tau: steps of a round.
        save_rounds: a checkpoint is written about every so many rounds.
        train_iters: more than the run can make.
    """

    replicas: int = 4
    ranks: int = 1
    step: float = 0.2
    tau: int = 8
    save_rounds: int = 4
    train_iters: int = 50_000

    @property
    def names(self) -> tuple[str, ...]:
        """Of the replicas that the run begins with."""
        return tuple(NAMES[: self.replicas])

    def flags(self, folder: Path) -> dict[str, Any]:
        """Flags of training, besides those of every elastic run."""
        return {
            "train_iters": self.train_iters,
            "micro_batch_size": 1,
            "global_batch_size": self.replicas,
            "edit_sync_interval": self.tau,
            "edit_warmup_steps": 2,
            "tensor_model_parallel_size": self.ranks,
            "save": folder / "saves",
            "save_interval": self.tau * self.save_rounds,
            "save_retain_interval": 1_000_000,
            "exit_signal_handler": True,
            "log_interval": 100,
        }


@dataclass
class _Process:
    """A replica that has been started and has not ended.

    Attributes:
        codes: with which its ranks may end; empty while it must not.
        restart: seconds until it is started again after its end; None: never.
        broken: when the first of several ranks was seen to have ended; else None.
    """

    codes: Collection[int] = ()
    restart: float | None = UNEXPECTED_RESTART
    broken: float | None = None


@dataclass
class Watch:
    """The run of one part of a storm.

    Attributes:
        folder: of the part.
        shape: see there.
        is_hub_wanted: whether the hub is to run now; if it ends by itself, it is started again.
        journal: complete lines so far.
        problems: what must not happen, one line each.
    """

    folder: Path
    shape: Shape
    is_hub_wanted: bool = False
    journal: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _up: dict[str, _Process] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("hits", "triggers/any"):
            (self.folder / name).mkdir(parents=True)
        self.run = ElasticRun(
            self.folder, replica_server(), self.shape.replicas, ranks=self.shape.ranks,
            flags=self.shape.flags(self.folder), before="benchmarks.storm_parts.hooks:install",
            env={"STORM_DIR": str(self.folder), "STORM_STEP": str(self.shape.step)},
        )  # fmt: skip
        self._reader = LineReader(self.folder / "hub" / "journal.jsonl")

    # ---- begin and end

    def begin(self) -> None:
        """Start hub and replicas; wait for the first commit."""
        self.start_hub()
        for name in self.shape.names:
            self.start(name)
        self.wait(lambda: self.commits_after(0.0), START_SECONDS, "no first commit")

    def end(self) -> None:
        """Stop the run on request; note the exit codes, and the digests of the parameters."""
        self.note("stop", "")
        self.run.ask_hub("stop")
        names = list(self._up)
        for name in names:
            self.expect_end(name, {0}, restart=None)
        self.wait(lambda: not self._up, END_SECONDS, "replicas do not end after `hub stop`")
        digests = {
            name: [
                json.loads((self.run.spy_dir(name) / f"digest-{rank}.json").read_text())
                for rank in range(self.shape.ranks)
            ]
            for name in names
        }
        self.is_hub_wanted = False
        self.run.signal_hub(signal.SIGTERM)
        write_atomic(self.folder / OUTCOME, json.dumps({"digests": digests}) + "\n")

    def close(self) -> None:
        """Kill whatever runs."""
        self.is_hub_wanted = False
        self.run.close()
        (self.folder / HUB_PID).unlink(missing_ok=True)

    # ---- hub and replicas

    def start_hub(self) -> None:
        """Start the hub, or start it again."""
        self.run.start_hub()
        assert self.run._hub is not None
        write_atomic(self.folder / HUB_PID, f"{self.run._hub.pid}\n")
        self.is_hub_wanted = True

    def start(self, name: str) -> None:
        """Start a replica, or start it again."""
        self._due.pop(name, None)
        self.note("start", name)
        self.run.start(name)
        self._up[name] = _Process()

    def expect_end(self, name: str, codes: Collection[int], restart: float | None) -> None:
        """Let a replica end with these exit codes.

        Args:
            name: of the replica.
            codes: of its ranks.
            restart: seconds until it is started again; None: never.
        """
        self._up[name].codes, self._up[name].restart = codes, restart

    def has_ended(self, name: str) -> bool:
        """Whether a replica does not run now."""
        return name not in self._up

    def supervise(self) -> None:
        """Look at all processes, once; start again what has ended."""
        self.journal.extend(self._reader.read())
        for name in list(self._up):
            self._look_at(name)
        for name, when in list(self._due.items()):
            if time.monotonic() >= when:
                self.start(name)
        hub = self.run._hub
        if self.is_hub_wanted and hub is not None and (code := hub.poll()) is not None:
            self.problem("end", f"the hub has ended with {code}")
            self.start_hub()

    def _look_at(self, name: str) -> None:
        process, now = self._up[name], time.monotonic()
        pids, codes = self.run.starts[name][-1].pids, self.run.server.codes
        ended = [pid for pid in pids if pid in codes]
        if not ended:
            return
        if len(ended) < len(pids):
            process.broken = process.broken or now
            if now > process.broken + RANKS_SECONDS:
                text = f"{name}: ranks run on {RANKS_SECONDS:.0f} s after another has ended"
                self.problem("hang", text)
                self.run.signal(name, signal.SIGKILL)
            return
        found = [codes[pid] for pid in pids]
        del self._up[name]
        is_expected = all(code in process.codes for code in found)
        self.note("end", name, codes=found, is_expected=is_expected)
        if not is_expected:
            log = self.run.starts[name][-1].log
            self.problem("end", f"{name} has ended with {found}, see {log}")
        if process.restart is not None and (name in self.shape.names or not is_expected):
            self._due[name] = now + process.restart

    # ---- what is written

    def note(self, action: str, name: str, when: float | None = None, **more: Any) -> None:
        """Write down what was done, or has happened, to a replica."""
        line = {"time": time.time() if when is None else when, "action": action, "name": name}
        with (self.folder / ACTIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | more) + "\n")

    def problem(self, kind: str, text: str) -> None:
        """Write down what must not happen: a `hang`, an `end`, a lack in the `journal`."""
        self.problems.append(text)
        self.note("problem", "", kind=kind, text=text)

    def events_after(self, event: str, when: float, **having: Any) -> list[dict[str, Any]]:
        """Lines of the journal of one kind, after a time, with these values."""
        return [
            line
            for line in self.journal
            if line["event"] == event and line["time"] > when
            and all(line[key] == value for key, value in having.items())
        ]  # fmt: skip

    def commits_after(self, when: float) -> list[dict[str, Any]]:
        """Commits after a time."""
        return self.events_after("commit", when)

    @property
    def leader(self) -> str:
        """The leader of the newest epoch."""
        epochs = self.events_after("epoch", 0.0)
        return str(epochs[-1]["leader"]) if epochs else ""

    # ---- waiting

    def wait[T](self, condition: Callable[[], T], seconds: float, what: str) -> T:
        """Supervise until a condition holds; return its value.

        Raises:
            HangError: it does not hold after `seconds`.
        """
        until = time.monotonic() + seconds
        while True:
            self.supervise()
            if value := condition():
                return value
            if time.monotonic() > until:
                raise HangError(f"{what} after {seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def pause(self, seconds: float) -> None:
        """Supervise for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.supervise()
            time.sleep(POLL_SECONDS)

    def is_whole(self, when: float, *more: str) -> bool:
        """Whether all nominal replicas, and others that are named, run, and a commit after a time
        has samples of them all."""
        names = (*self.shape.names, *more)
        if self._due or any(self.has_ended(name) for name in names):
            return False
        return any(
            all(line["blocks"].get(name) for name in names) for line in self.commits_after(when)
        )

    def wait_until_whole(self, when: float, *more: str) -> None:
        """Wait for that."""
        self.wait(lambda: self.is_whole(when, *more), WHOLE_SECONDS, "the run is not whole")

    def dump(self, name: str) -> Path:
        """Write what everybody does, after a hang; the stacks come into the logs of the ranks."""
        path = self.folder / name
        for each in self._up:
            self.run.signal(each, signal.SIGUSR2)
        time.sleep(1.0)
        with suppress(Exception):
            path.write_text(self.run.ask_hub("status"))
        with path.open("a", encoding="utf-8") as file:
            file.write(self.run.tails(6000))
        return path


@contextmanager
def watched(folder: Path, shape: Shape) -> Iterator[Watch]:
    """A run that has begun; whatever runs at the end is killed."""
    watch = Watch(folder, shape)
    try:
        watch.begin()
        yield watch
    finally:
        watch.close()


def end_left_hub(folder: Path) -> None:
    """Kill the hub of a part whose benchmark was killed; the replicas have ended with it."""
    with suppress(OSError, ValueError):
        pid = int((folder / HUB_PID).read_text())
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if str(folder / "hub").encode() in argv:
            os.kill(pid, signal.SIGKILL)


def shape_of(settings: Mapping[str, Any]) -> Shape:
    """The shape that the settings of a tape have."""
    return Shape(**{name: settings[name] for name in asdict(Shape())})
