"""Trainings: their ranks are started on this machine or in a lab's hosts, followed, and ended.

`Forks` starts ranks as children of a process that has imported already what takes long;
`Hosts` starts each in a host of a network lab, on a core of its own. Both give a `Training`, which
waits for what is to be measured, or for the end. Nothing uses a GPU that is not asked to.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from types import ModuleType

from netlab import INTERFACE, Lab

from .gpt import Link

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"
SCRIPT = REPOSITORY / "scripts" / "pretrain_gpt.py"
DONE = "[after training is done]"
NUM_TAIL_LINES = 40
GRACE_SECONDS = 30  # for the others once one has broken off; and until a forgotten rank ends itself
FIRST_LAB_PORT = 29500
# Most of the start of a training is the import of these. Not Megatron: it must not be there before
# the plugin is.
PRELOADED = ("torch", "torch.distributed.tensor", "torch._inductor.compile_fx", "torch.utils.data")
_PR_SET_PDEATHSIG = 1


class RunFailedError(RuntimeError):
    """A training failed or took too long; the message holds the end of its output."""


@dataclass(frozen=True)
class Rank:
    """What one rank is to run.

    Attributes:
        words: flags of the script.
        environment: what it has besides ours and torchrun's.
        script: which.
        python: interpreter, in a lab.
        package: folder that `megatron_edit` is imported from.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    script: Path = SCRIPT
    python: str = sys.executable
    package: Path = REPOSITORY


class Training:
    """Ranks that train.

    Args:
        name: for messages.
        folder: takes what they write.
        others_are_done: called when all ranks but the first have ended.

    Attributes:
        pids: of the ranks.
    """

    def __init__(
        self, name: str, folder: Path, others_are_done: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = folder
        self.pids: list[int] = []
        self._name = name
        self._codes: list[Callable[[], int | None]] = []
        self._others_are_done = others_are_done

    def add(self, pid: int, code: Callable[[], int | None]) -> None:
        """The next rank, and how to ask for its exit code."""
        self.pids.append(pid)
        self._codes.append(code)

    def log(self, rank: int = 0) -> Path:
        """Console output of a rank; of replicas after the first it may have the start alone."""
        return self.folder / f"console{rank}.log"

    def exit_codes(self) -> list[int | None]:
        """By rank; None for those that run."""
        return [code() for code in self._codes]

    def failed(self, reason: str, rank: int) -> RunFailedError:
        """The error to raise."""
        logs = [self.log(rank), *sorted(self.folder.rglob("replica-*.log"))]
        said, speaker = "\n".join(filter(None, map(tail, logs))), rank
        if not said:  # one may speak for all
            said, speaker = tail(self.log()), 0
        return RunFailedError(f"{self._name}: {reason}; rank {speaker} said last:\n{said}")

    def until[T](self, probe: Callable[[], T | None], *, limit: float, poll: float) -> T:
        """What `probe` finds, once it finds anything; asked every `poll` seconds.

        Raises:
            RunFailedError: a rank has ended before, or `limit` seconds were over.
        """
        deadline = time.monotonic() + limit
        while (found := probe()) is None:
            for rank, code in enumerate(self.exit_codes()):
                if code is not None:
                    raise self.failed(f"rank {rank} exited with {code}", rank)
            if time.monotonic() > deadline:
                raise self.failed(f"not done after {limit:.0f} s", 0)
            time.sleep(poll)
        return found

    def to_end(self, callback: Callable[[], None], *, limit: float, poll: float) -> list[int]:
        """Wait until all ranks have ended, and call `callback` every `poll` seconds until then.

        Returns:
            The exit codes. An interpreter that crashes while it shuts down has trained all the
            same: a code other than 0 is no failure where training was over.

        Raises:
            RunFailedError: a rank ended too early, or `limit` seconds were over.
        """
        deadline = time.monotonic() + limit
        while any(code is None for code in self._checked_codes()):
            codes = self.exit_codes()
            if all(code is not None for code in codes[1:]):
                self._others_are_done()
            if any(codes):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                raise self.failed(f"not done after {limit:.0f} s", 0)
            callback()
            time.sleep(poll)
        return [code or 0 for code in self._checked_codes()]

    def _checked_codes(self) -> list[int | None]:
        codes = self.exit_codes()
        for rank, code in enumerate(codes):
            if code and not is_over(self.folder, rank):
                raise self.failed(f"rank {rank} exited with {code}", rank)
        return codes


class Forks:
    """Starts trainings on this machine, one after another.

    Args:
        first_port: where to look for ports that are free.
        time_limit: seconds of a training; ranks end themselves some time after it.
        preload: modules that are imported once, in a process from which all ranks are forked. It
            never uses a device, so that what is forked from it may.
        gpus: whether ranks may use this machine's.
    """

    def __init__(
        self,
        first_port: int,
        time_limit: float,
        preload: Sequence[str] = PRELOADED,
        *,
        gpus: bool = False,
    ) -> None:
        self._last_port = first_port - 1
        self._limit_seconds = int(time_limit) + GRACE_SECONDS
        os.environ["OMP_NUM_THREADS"] = "1"  # the ranks share this machine's cores
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["PYTHONPATH"] = _python_path()  # of the process below
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    @contextmanager
    def training(
        self, name: str, folder: Path, ranks: Sequence[Rank], *, apart: bool = False,
        one_machine: bool = True,
    ) -> Iterator[Training]:  # fmt: skip
        """Ranks that train inside the `with` block; what still runs at its end is killed.

        Args:
            name: for messages.
            folder: takes their output.
            ranks: in order.
            apart: whether each is a job of its own.
            one_machine: whether they know that they are on one machine.
        """
        ports = free_ports(self._last_port, len(ranks) if apart else 1)
        self._last_port = ports[-1]  # one that was used may linger in the kernel
        done = self._context.Event()
        training = Training(name, folder, done.set)
        processes: list[ForkServerProcess] = []
        try:
            for number, rank in enumerate(ranks):
                place = (number, len(ranks)) if one_machine and not apart else (0, 1)
                port = ports[number if apart else 0]
                torchrun = torchrun_variables(number, len(ranks), "127.0.0.1", port, apart, place)
                env = torchrun | {"GLOO_SOCKET_IFNAME": "lo"} | dict(rank.environment)
                event = None if number or apart else done
                given = (rank, env, training.log(number), self._limit_seconds, event)
                # Not a daemon: those may not have children, and asynchronous saves need some.
                process = self._context.Process(target=be_rank, args=given)
                process.start()
                processes.append(process)
                assert process.pid is not None, "it has been started"
                training.add(process.pid, _asked(process))
            yield training
        finally:
            for process in processes:
                _kill_group(process)
            for process in processes:
                process.join()


class Hosts:
    """Starts trainings in the hosts of a lab, one rank in each, one training after another.

    Args:
        lab: of at least as many hosts as any training has ranks.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._port = FIRST_LAB_PORT

    @contextmanager
    def training(
        self, name: str, folder: Path, ranks: Sequence[Rank], *, apart: bool = False
    ) -> Iterator[Training]:
        """As that of `Forks`. Links have no limit: neither the start nor the end need be slow."""
        self.lab.set_rate(None)
        self._port += 1  # the last one may linger in the kernel
        training, processes = Training(name, folder), []
        try:
            for number, rank in enumerate(ranks):
                address = self.lab.address(number if apart else 0)
                env = os.environ | torchrun_variables(
                    number, len(ranks), address, self._port, apart, (0, 1)
                )
                env |= _HOST_VARIABLES | dict(rank.environment)
                env["PYTHONPATH"] = _python_path(rank.package)
                launcher = [rank.python, "-m", "megatron_edit", str(rank.script)]
                argv = [*_core_of(number), *launcher, *rank.words]
                with training.log(number).open("w") as log:
                    process = self.lab.popen(
                        number, argv, env, stdout=log, stderr=log, cwd=rank.package
                    )
                processes.append(process)
                training.add(process.pid, process.poll)
            yield training
        finally:
            self.lab.set_rate(None)
            for process in processes:
                self.lab.kill(process)


def measure_link(lab: Lab, rate: float | None, repeat: int) -> Link:
    """What a lab's links carry at a rate."""
    lab.set_rate(rate)
    return Link(rate, repeat, lab.measure_bandwidth(seconds=2.0))


_HOST_VARIABLES = {
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "OMP_NUM_THREADS": "1",  # the hosts share this machine's cores
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
}


def torchrun_variables(
    number: int, count: int, address: str, port: int, apart: bool, place: tuple[int, int]
) -> dict[str, str]:
    """What torchrun would set for a rank; `place` is its local rank, and of how many."""
    values = {
        "RANK": 0 if apart else number,
        "WORLD_SIZE": 1 if apart else count,
        "LOCAL_RANK": place[0],
        "LOCAL_WORLD_SIZE": place[1],
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()}


def be_rank(
    rank: Rank, env: Mapping[str, str], log: Path, limit_seconds: int, others_are_done: Event | None
) -> None:
    """What the process of a forked rank does: it ends with its script, or with its time.

    The first rank holds the store, so it leaves last.
    """
    os.setsid()  # a group of its own, to be ended with all that it starts
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would wait for it
    signal.alarm(limit_seconds)
    try:
        with log.open("w", buffering=1) as console:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(console.fileno(), stream.fileno())
        os.environ.update(env)
        import_package_from(rank.package)
        from megatron_edit.launcher import main

        code = main([str(rank.script), *rank.words])
        if code:
            raise SystemExit(code)
    finally:
        log.with_suffix(".cpu").write_text(f"{time.process_time():.3f}")
        if others_are_done is not None:
            with suppress(OSError):
                others_are_done.wait(GRACE_SECONDS)


def import_package_from(folder: Path) -> None:
    """Let this process and its children import `megatron_edit` from a folder.

    multiprocessing has imported the benchmark in this process, and with it perhaps the package of
    this checkout; these modules are forgotten where another package is wanted.
    """
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = _python_path(folder)
    if folder != REPOSITORY:
        for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_edit"]:
            del sys.modules[name]


def cpu_seconds(folder: Path) -> float:
    """Of all ranks that were forked for a training, and that have ended by themselves."""
    return sum(float(path.read_text()) for path in folder.glob("*.cpu"))


def is_over(folder: Path, rank: int) -> bool:
    """Whether a rank says, on its console or in its replica's file, that it trained to the end."""
    files = (folder / f"console{rank}.log", folder / f"replica-{rank}.log")
    return any(DONE in path.read_text(errors="replace") for path in files if path.exists())


def tail(log: Path) -> str:
    """The end of a log; nothing of one that is not there."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-NUM_TAIL_LINES:])


def load_script(path: Path = SCRIPT) -> ModuleType:
    """A script as a module, not yet run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"no Python file: {path}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_ports(after: int, count: int) -> list[int]:
    """The next ports that nobody listens on now.

    They are below those that a system gives to outgoing connections: one of these could otherwise
    take a port before the ranks do.
    """
    found: list[int] = []
    port = after
    while len(found) < count:
        port += 1
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
    return found


def _python_path(package: Path = REPOSITORY) -> str:
    """Ours, with what the ranks import before all else."""
    paths = (str(package), str(BENCHMARKS), os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, paths))


def _asked(process: ForkServerProcess) -> Callable[[], int | None]:
    return lambda: process.exitcode


def _kill_group(process: ForkServerProcess) -> None:
    """Kill a rank and what it has started: Megatron's writers of checkpoints."""
    assert process.pid is not None, "it has been started"
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # where it has not come to its own group yet


def _core_of(host: int) -> list[str]:
    """Give each host a core of its own, as far as they go: hosts do not share them in earnest, and
    which process waits for which core would differ from run to run."""
    if shutil.which("taskset") is None:
        return []
    return ["taskset", "--cpu-list", str(host % (os.cpu_count() or 1))]
