"""A real elastic run whose ended replicas are started again, as SLURM or Kubernetes would."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.observe.line_files import LineReader
from tests.harness.elastic_run import ElasticRun, replica_server

NAMES = "abcdefgh"  # of the nominal replicas
POLL_SECONDS = 0.05
START_SECONDS = 90.0  # from the start of the processes to the first commit
WHOLE_SECONDS = 60.0  # from the end of a fault until the run is whole again
END_SECONDS = 60.0  # from the request to stop to the end of all processes
RANKS_SECONDS = 10.0  # from the end of a rank to that of the others of its replica
UNEXPECTED_RESTART = 1.0  # seconds until a replica that has ended by itself is started again
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
        more: flags of training, NAME=VALUE each.
    """

    replicas: int = 4
    ranks: int = 1
    step: float = 0.2
    tau: int = 8
    more: tuple[str, ...] = ()

    @property
    def names(self) -> str:
        """Names of the replicas that the run begins with."""
        return NAMES[: self.replicas]

    def flags(self, folder: Path) -> dict[str, Any]:
        """Return flags of training, besides those of every elastic run."""
        more = (each.partition("=") for each in self.more)
        return {name: value == "true" or value for name, _, value in more} | {
            "train_iters": 50_000,  # more than the run can make
            "micro_batch_size": 1,
            "global_batch_size": self.replicas,
            "edit_sync_interval": self.tau,
            "edit_warmup_steps": 2,
            "tensor_model_parallel_size": self.ranks,
            "save": folder / "saves",
            "save_interval": self.tau * 4,
            "save_retain_interval": 1_000_000,
            "exit_signal_handler": True,
            "log_interval": 100,
        }


@dataclass
class _Process:
    """A replica that runs.

    Attributes:
        codes: with which its ranks may end; empty while it must not end.
        restart: seconds until it is started again after its end; None: never.
        broken: when the first of several ranks was seen to have ended.
    """

    codes: Collection[int] = ()
    restart: float | None = UNEXPECTED_RESTART
    broken: float | None = None


class Watch:
    """An elastic run in a folder.

    Attributes:
        folder: of all its files.
        shape: of the run.
        run: starts and signals its processes.
        is_hub_wanted: whether a hub that ends by itself is started again.
        journal: lines of the hub so far.
        actions: what was done, or has happened, to replicas; `start`, `down`, `freeze`, `thaw`,
            `end`.
        digests: of the parameters at the end, by replica and rank; empty where it did not end.
        hangs, problems: what must not happen, one line each.
    """

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder, self.shape = folder, shape
        for name in ("hits", "triggers/any"):
            (folder / name).mkdir(parents=True)
        self.run = ElasticRun(
            folder, replica_server(), shape.replicas, ranks=shape.ranks,
            flags=shape.flags(folder), before="benchmarks.storm_parts.hooks:install",
            env={"STORM_DIR": str(folder), "STORM_STEP": str(shape.step)},
        )  # fmt: skip
        self.is_hub_wanted = False
        self.journal: list[dict[str, Any]] = []
        self.actions: list[dict[str, Any]] = []
        self.digests: dict[str, list[str]] = {}
        self.hangs: list[str] = []
        self.problems: list[str] = []
        self._reader = LineReader(folder / "hub" / "journal.jsonl")
        self._up: dict[str, _Process] = {}
        self._due: dict[str, float] = {}

    # ---- begin and end

    def begin(self) -> None:
        """Start hub and replicas; wait for the first commit."""
        self.start_hub()
        for name in self.shape.names:
            self.start(name)
        self.wait(lambda: self.events_after("commit", 0.0), START_SECONDS, "no first commit")

    def end(self) -> None:
        """Stop the run on request, and read the digests of the parameters."""
        self.run.ask_hub("stop")
        names = list(self._up)
        for name in names:
            self.expect_end(name, {0}, restart=None)
        self.wait(lambda: not self._up, END_SECONDS, "replicas do not end after `hub stop`")
        for name in names:
            files = [self.run.spy_dir(name) / f"digest-{n}.json" for n in range(self.shape.ranks)]
            self.digests[name] = [json.loads(file.read_text()) for file in files]
        self.is_hub_wanted = False
        self.run.signal_hub(signal.SIGTERM)

    # ---- hub and replicas

    def start_hub(self) -> None:
        """Start the hub, or start it again."""
        self.run.start_hub()
        self.is_hub_wanted = True

    def start(self, name: str) -> None:
        """Start a replica, or start it again."""
        self._due.pop(name, None)
        self.note("start", name)
        self.run.start(name)
        self._up[name] = _Process()

    def expect_end(self, name: str, codes: Collection[int], restart: float | None) -> None:
        """Let a replica end with these exit codes; start it again after some seconds, if any."""
        self._up[name].codes, self._up[name].restart = codes, restart

    def has_ended(self, name: str) -> bool:
        """Return whether a replica does not run now."""
        return name not in self._up

    def note(self, action: str, name: str, when: float | None = None) -> None:
        """Record what was done, or has happened, to a replica."""
        time_ = time.time() if when is None else when
        self.actions.append({"time": time_, "action": action, "name": name})

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
            self.problems.append(f"the hub has ended with {code}")
            self.start_hub()

    def _look_at(self, name: str) -> None:
        process, now = self._up[name], time.monotonic()
        pids, codes = self.run.starts[name][-1].pids, self.run.server.codes
        ended = [codes[pid] for pid in pids if pid in codes]
        if not ended:
            return
        if len(ended) < len(pids):
            process.broken = process.broken or now
            if now > process.broken + RANKS_SECONDS:
                self.hangs.append(f"{name}: ranks run {RANKS_SECONDS:.0f} s after another's end")
                self.run.signal(name, signal.SIGKILL)
            return
        del self._up[name]
        self.note("end", name)
        is_expected = all(code in process.codes for code in ended)
        if not is_expected:
            log = self.run.starts[name][-1].log
            self.problems.append(f"{name} has ended with {ended}, see {log}")
        if process.restart is not None and (name in self.shape.names or not is_expected):
            self._due[name] = now + process.restart

    # ---- waiting

    def events_after(self, event: str, when: float, **having: Any) -> list[dict[str, Any]]:
        """Return lines of the journal of one kind, after a time, with these values."""
        return events_after(self.journal, event, when, **having)

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

    def wait_until_whole(self, when: float, *more: str) -> None:
        """Wait for a commit after a time with samples of all nominal replicas and `more`."""
        names = (*self.shape.names, *more)

        def is_whole() -> bool:
            if self._due or any(self.has_ended(name) for name in names):
                return False
            commits = self.events_after("commit", when)
            return any(all(line["blocks"].get(name) for name in names) for line in commits)

        self.wait(is_whole, WHOLE_SECONDS, "the run is not whole")

    def hang(self, text: str) -> None:
        """Record a hang, and write the stacks of all ranks into their logs."""
        for each in self._up:
            self.run.signal(each, signal.SIGUSR2)
        time.sleep(1.0)
        path = self.folder / "hang.txt"
        with suppress(Exception):
            path.write_text(self.run.ask_hub("status"))
        with path.open("a", encoding="utf-8") as file:
            file.write(self.run.tails(6000))
        self.hangs.append(f"{text}; see {path}")


def events_after(
    journal: list[dict[str, Any]], event: str, when: float, **having: Any
) -> list[dict[str, Any]]:
    """Return lines of a journal of one kind, after a time, with these values."""
    wanted = {"event": event} | having
    return [
        line for line in journal
        if line["time"] > when and all(line.get(key) == wanted[key] for key in wanted)
    ]  # fmt: skip


@contextmanager
def watched(folder: Path, shape: Shape) -> Iterator[Watch]:
    """Begin a run for the `with` block, which may hang; whatever runs at its end is killed."""
    watch = Watch(folder, shape)
    try:
        watch.begin()
        yield watch
    except HangError as error:
        watch.hang(f"{error}")
    finally:
        watch.run.close()
