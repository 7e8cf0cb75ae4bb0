"""A real elastic run on this machine: the hub as a process, and replicas that come and go."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.launch import REPOSITORY
from tests.harness.ports import free_ports
from tests.harness.training import tiny_gpt

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


class ReplicaServer:
    """The client of `replica_server`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.replica_server"],
            cwd=REPOSITORY,
            env=os.environ | _ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.codes: dict[int, int] = {}
        self._started: list[int] = []
        self._changed = threading.Condition()
        self._is_ready = False
        threading.Thread(target=self._listen, daemon=True).start()
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_ready, 120), "no server of replicas"

    def start(self, **wanted: Any) -> int:
        """Start a rank; return its process id."""
        assert self._process.stdin is not None
        with self._changed:
            count = len(self._started)
            self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
            self._process.stdin.flush()
            assert self._changed.wait_for(lambda: len(self._started) > count, 30)
            return self._started[-1]

    def wait(self, pids: Sequence[int], timeout: float) -> list[int]:
        """Wait until ranks have ended; return their exit codes."""
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: all(pid in self.codes for pid in pids), timeout
            )
            assert is_over, f"ranks have not ended after {timeout:.0f} s"
            return [self.codes[pid] for pid in pids]

    def close(self) -> None:
        """Kill all ranks, and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._changed:
                if "started" in told:
                    self.codes.pop(told["started"], None)  # of an earlier rank with the same id
                    self._started.append(told["started"])
                elif "ended" in told:
                    self.codes[told["ended"]] = told["code"]
                else:
                    self._is_ready = True
                self._changed.notify_all()


@dataclass
class Incarnation:
    """One start of a replica.

    Attributes:
        name: of the replica.
        pids: of its ranks.
        log: output of all ranks.
        began: monotonic seconds.
    """

    name: str
    pids: list[int]
    log: Path
    began: float


@dataclass
class ElasticRun:
    """A run in a folder.

    Attributes:
        folder: with `hub/` (the journal), `logs/` (event files), and outputs.
        server: starts ranks.
        nominal: replicas that the run begins with.
        ranks: of a replica.
        flags: of training, besides the usual ones.
        starts: of each replica, by name.
    """

    folder: Path
    server: ReplicaServer
    nominal: int
    ranks: int = 1
    minimum: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    starts: dict[str, list[Incarnation]] = field(default_factory=dict)
    port: int = 0
    before: str | None = None
    _hub: subprocess.Popen[bytes] | None = None

    # ---- hub

    def start_hub(self) -> None:
        """Start the hub, again on the same port and journal if there was one."""
        self.port = self.port or free_ports(1)[0]
        self.folder.mkdir(parents=True, exist_ok=True)
        log = (self.folder / "hub.log").open("ab")
        self._hub = subprocess.Popen(
            [sys.executable, "-m", "megatron_edit", "hub", "--state-dir", str(self.folder / "hub"),
             "--listen", f"127.0.0.1:{self.port}", "--min-replicas", str(self.minimum)],
            cwd=REPOSITORY, env=os.environ | self.env, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log,
        )  # fmt: skip
        log.close()

    def signal_hub(self, number: int) -> None:
        """Send a signal to the hub; wait for its end if it ends."""
        assert self._hub is not None
        self._hub.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._hub.wait(30)

    def ask_hub(self, what: str) -> str:
        """Run `megatron-edit hub status` or `stop`; return what it prints."""
        argv = [sys.executable, "-m", "megatron_edit", "hub", what, f"127.0.0.1:{self.port}"]
        environment = os.environ | self.env
        return subprocess.run(
            argv, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60,
            check=True,
        ).stdout  # fmt: skip

    # ---- replicas

    def start(self, name: str, **more: Any) -> Incarnation:
        """Start a replica, or start it again."""
        count = len(self.starts.setdefault(name, []))
        log = self.folder / f"{name}.{count}.log"
        flags = {
            "use_edit": True,
            "edit_hub": f"127.0.0.1:{self.port}",
            "edit_replica_name": name,
            "edit_nominal_replicas": self.nominal,
            "edit_min_replicas": self.minimum if self.minimum > 1 else None,
            "edit_warmup_steps": 2,
            "edit_sync_interval": 4,
            "edit_log_dir": self.folder / "logs",
            **self.flags,
            **more,
        }
        (port,) = free_ports(1)
        pids = [
            self.server.start(
                argv=tiny_gpt(**flags), cwd=str(self.folder), log=str(log), before=self.before,
                env=self.env | {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks),
                    "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_PORT": str(port),
                    "MASTER_ADDR": "127.0.0.1", "SPY_DIR": str(self.spy_dir(name)),
                },
            )
            for rank in range(self.ranks)
        ]  # fmt: skip
        started = Incarnation(name, pids, log, time.monotonic())
        self.starts[name].append(started)
        return started

    def spy_dir(self, name: str) -> Path:
        """The folder to which spies in a replica write."""
        folder = self.folder / f"spy-{name}"
        folder.mkdir(exist_ok=True)
        return folder

    def signal(self, name: str, number: int, rank: int | None = None) -> None:
        """Send a signal to a rank of the newest start of a replica, or to all of them."""
        pids = self.starts[name][-1].pids
        for pid in pids if rank is None else pids[rank : rank + 1]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self, name: str, timeout: float = 30.0) -> None:
        """Stop all ranks of the newest start, and wait until each of their threads has stopped."""
        self.signal(name, signal.SIGSTOP)
        pids = self.starts[name][-1].pids
        self.wait_for(lambda: all(map(_has_stopped, pids)), timeout, f"{name} frozen")

    def is_running(self, name: str) -> bool:
        """Whether no rank of the newest start has ended."""
        return not any(pid in self.server.codes for pid in self.starts[name][-1].pids)

    def codes(self, name: str, timeout: float = 60.0) -> list[int]:
        """Wait for the end of the newest start of a replica; the exit codes of its ranks."""
        return self.server.wait(self.starts[name][-1].pids, timeout)

    def finish(self, names: str, timeout: float = 120.0) -> None:
        """Wait for the regular end of replicas."""
        for name in names:
            assert self.codes(name, timeout) == [0] * self.ranks, self.tails()

    def stop(self, names: str) -> None:
        """End the run after two more rounds; these replicas take part in it."""
        self.wait_for_commits(len(self.events("commit")) + 2)
        self.ask_hub("stop")
        self.finish(names)

    # ---- what is written

    def journal(self) -> list[dict[str, Any]]:
        """The complete lines of the journal."""
        path = self.folder / "hub" / "journal.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def events(self, event: str) -> list[dict[str, Any]]:
        """The lines of the journal of one kind."""
        return [line for line in self.journal() if line["event"] == event]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of an event file."""
        path = self.folder / "logs" / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, condition: Callable[[], Any], timeout: float = 60.0, what: str = "") -> Any:
        """Wait until a condition holds; return its value."""
        end = time.monotonic() + timeout
        while not (value := condition()):
            assert time.monotonic() < end, f"not within {timeout} s: {what}\n{self.tails()}"
            time.sleep(0.05)
        return value

    def wait_for_commits(self, count: int, timeout: float = 60.0) -> None:
        """Wait until so many rounds are committed."""
        self.wait_for(lambda: len(self.events("commit")) >= count, timeout, f"{count} commits")

    def check_blocks(self) -> int:
        """Check that each block was committed once, and none left out; return how many."""
        committed: dict[int, int] = {}
        commits = self.events("commit")
        for line in commits:
            for runs in line["blocks"].values():
                for start, count in runs:
                    for block in range(start, start + count):
                        assert block not in committed, (block, committed[block], line["round"])
                        committed[block] = line["round"]
        end = max(committed) + 1
        assert sorted(committed) == list(range(end)), "blocks were left out"
        return end

    def tails(self, characters: int = 1500) -> str:
        """The ends of all outputs, for messages."""
        logs = [self.folder / "hub.log", *(s[-1].log for s in self.starts.values())]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-characters:]}" for log in logs)

    def close(self) -> None:
        """Kill what this run has started."""
        for starts in self.starts.values():
            for each in starts:
                for pid in each.pids:
                    if pid not in self.server.codes:
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
        if self._hub is not None:
            with suppress(ProcessLookupError):
                self._hub.kill()
            self._hub.wait()


def _has_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached all threads of a process: on a busy machine it takes a while."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


_SERVERS: list[ReplicaServer] = []


def replica_server() -> ReplicaServer:
    """The server of this process, which starts when it is first needed."""
    if not _SERVERS:
        _SERVERS.append(ReplicaServer())
        atexit.register(_SERVERS[0].close)
    return _SERVERS[0]


@contextmanager
def elastic_run(
    folder: Path, nominal: int, *, start: str = "", **more: Any
) -> Iterator[ElasticRun]:
    """A run with its hub and the replicas `start` (of one letter each) started; everything that it
    has started is killed at the end."""
    run = ElasticRun(folder, replica_server(), nominal, **more)
    try:
        run.start_hub()
        for name in start:
            run.start(name)
        yield run
    finally:
        run.close()
