"""Start, follow and end trainings on this machine or in the hosts of a network lab.

`Forks` forks ranks from a process that has already imported the slow modules; `Hosts` starts each
rank in a host of a network lab, on a core of its own. Both give a `Training`, which waits for a
measurement or for the end. GPUs are hidden from the ranks unless requested.
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import (
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from multiprocessing.synchronize import Event
from pathlib import Path
from types import ModuleType

from netlab import INTERFACE, Lab

from .gpt import Link, flag_words

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"
SCRIPT = REPOSITORY / "scripts" / "pretrain_gpt.py"
TORCHFT_SCRIPT = BENCHMARKS / "frame" / "pretrain_torchft.py"
TORCHFT_FRAGMENTS = 4
DONE = "[after training is done]"
NUM_TAIL_LINES = 40
PROBE_SECONDS = 60.0  # for the imports, and the first use of a GPU
GRACE_SECONDS = 30  # for the other ranks after a failure, and beyond the time limit
FIRST_LAB_PORT = 29500
# Importing these takes most of the start of a training. Megatron is not among them: the plugin must
# be imported first.
PRELOADED = ("torch", "torch.distributed.tensor", "torch._inductor.compile_fx", "torch.utils.data")
_PR_SET_PDEATHSIG = 1


class RunFailedError(RuntimeError):
    """A training failed or took too long; the message holds the end of its output."""


@dataclass(frozen=True)
class Rank:
    """The command of one rank.

    Attributes:
        words: flags of the script.
        environment: variables in addition to torchrun's and those of this module.
        script: path of the training script, or another command of `megatron-edit`.
        python: interpreter, in a host of a lab.
        checkout: of the package, in a host of a lab.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    script: Path = SCRIPT
    python: str = sys.executable
    checkout: Path = REPOSITORY


class Training:
    """The running ranks of a training.

    Args:
        name: for messages.
        folder: for their output.
        others_are_done: called when all ranks but the first have ended.
    """

    def __init__(
        self, name: str, folder: Path, others_are_done: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = folder
        self._name = name
        self._codes: list[Callable[[], int | None]] = []
        self._others_are_done = others_are_done

    def add(self, code: Callable[[], int | None]) -> None:
        """Add the next rank; `code` returns its exit code, None while it runs."""
        self._codes.append(code)

    def log(self, rank: int = 0) -> Path:
        """Return the console file of a rank; for later replicas it may hold only the start."""
        return self.folder / f"console{rank}.log"

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes by rank; None while a rank runs."""
        return [code() for code in self._codes]

    def failed(self, reason: str, rank: int) -> RunFailedError:
        """Return the error to raise, with the last output of a rank."""
        logs = [self.log(rank), *sorted(self.folder.rglob("replica-*.log"))]
        output, source = "\n".join(filter(None, map(tail, logs))), rank
        if not output:  # the first rank may report for all
            output, source = tail(self.log()), 0
        return RunFailedError(f"{self._name}: {reason}; last output of rank {source}:\n{output}")

    def until[T](self, probe: Callable[[], T | None], *, limit: float, poll: float) -> T:
        """Call `probe` every `poll` seconds until it returns a result, and return that.

        Raises:
            RunFailedError: a rank has ended before, or `limit` seconds have passed.
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

    def to_end(
        self, callback: Callable[[], None], *, limit: float, poll: float, may_fail: bool = False
    ) -> list[int]:
        """Wait until all ranks have ended, and call `callback` every `poll` seconds until then.

        Returns the exit codes. They may differ from 0 where training was over, as an interpreter
        may crash in its shutdown. With `may_fail` ranks may fail, and only `limit` is an error.

        Raises:
            RunFailedError: a rank ended too early, or `limit` seconds have passed.
        """
        deadline = time.monotonic() + limit
        codes_now = self.exit_codes if may_fail else self._checked_codes
        while any(code is None for code in codes_now()):
            codes = self.exit_codes()
            if all(code is not None for code in codes[1:]):
                self._others_are_done()
            if any(codes):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                raise self.failed(f"not done after {limit:.0f} s", 0)
            callback()
            time.sleep(poll)
        return [code or 0 for code in codes_now()]

    def _checked_codes(self) -> list[int | None]:
        codes = self.exit_codes()
        for rank, code in enumerate(codes):
            if code and not is_over(self.folder, rank):
                raise self.failed(f"rank {rank} exited with {code}", rank)
        return codes


class Forks:
    """Starts trainings on this machine; several threads may do so at once.

    Args:
        first_port: where to start the search for free ports.
        time_limit: seconds of a training; ranks end themselves some time after it.
        gpus: whether ranks may use the GPUs of this machine. They are forked only if CUDA works in
            a fork, which is tried: importing a module may have looked for GPUs, and CUDA does not
            work in forks of a process that has done so. Else they are started as new processes.

    Attributes:
        are_forked: whether ranks are forked from a process that has imported the slow modules.
    """

    def __init__(self, first_port: int, time_limit: float, *, gpus: bool = False) -> None:
        self._last_port, self._choice = first_port - 1, threading.Lock()
        self._limit_seconds = int(time_limit) + GRACE_SECONDS
        os.environ["OMP_NUM_THREADS"] = "1"  # the ranks share this machine's cores
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["PYTHONPATH"] = _python_path()  # for the forkserver started below
        # By this variable torch counts GPUs without CUDA.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._context: SpawnContext | ForkServerContext
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self.are_forked = not gpus or _works_in_fork(self._context)
        if not self.are_forked:
            self._context = multiprocessing.get_context("spawn")

    @contextmanager
    def training(
        self, name: str, folder: Path, ranks: Sequence[Rank], *, apart: bool = False,
        one_machine: bool = True,
    ) -> Iterator[Training]:  # fmt: skip
        """Run ranks inside the `with` block; those still running at its end are killed.

        Args:
            name: for messages.
            folder: for their output.
            ranks: in order.
            apart: whether each rank is a job of its own.
            one_machine: whether LOCAL_RANK and LOCAL_WORLD_SIZE show that they share a machine.
        """
        with self._choice:
            ports = free_ports(self._last_port, len(ranks) if apart else 1)
            self._last_port = ports[-1]  # a used port may stay occupied for a while
        done = self._context.Event()
        training = Training(name, folder, done.set)
        processes: list[ForkServerProcess | SpawnProcess] = []
        try:
            for number, rank in enumerate(ranks):
                place = (number, len(ranks)) if one_machine and not apart else (0, 1)
                port = ports[number if apart else 0]
                torchrun = torchrun_variables(number, len(ranks), "127.0.0.1", port, apart, place)
                env = torchrun | {"GLOO_SOCKET_IFNAME": "lo"} | dict(rank.environment)
                event = None if number or apart else done
                given = (rank, env, training.log(number), self._limit_seconds, event)
                # Not a daemon: daemons may not have child processes, which asynchronous saves need.
                process = self._context.Process(target=run_rank, args=given)
                process.start()
                processes.append(process)
                training.add(partial(getattr, process, "exitcode"))
            yield training
        finally:
            for process in processes:
                _kill_group(process)
            for process in processes:
                process.join()


class Hosts:
    """Starts trainings in the hosts of a lab, one after another.

    Args:
        lab: ranks beyond its number of hosts begin at the first one again.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._port = FIRST_LAB_PORT

    @contextmanager
    def training(
        self, name: str, folder: Path, ranks: Sequence[Rank], *, apart: bool = False
    ) -> Iterator[Training]:
        """Run ranks like `Forks.training`, with unlimited links at the start and at the end."""
        self.lab.set_rate(None)
        self._port += 1  # the last port may stay occupied for a while
        training, processes = Training(name, folder), []
        try:
            for number, rank in enumerate(ranks):
                host = number % self.lab.num_hosts
                address = self.lab.address(host if apart else 0)
                env = os.environ | torchrun_variables(
                    number, len(ranks), address, self._port, apart, (0, 1)
                )
                env |= _HOST_VARIABLES | dict(rank.environment)
                env["PYTHONPATH"] = _python_path(rank.checkout)
                launcher = [rank.python, "-m", "megatron_edit", str(rank.script)]
                argv = [*_pin_to_core(host), *launcher, *rank.words]
                with training.log(number).open("w") as log:
                    process = self.lab.popen(
                        host, argv, env, stdout=log, stderr=log, cwd=rank.checkout
                    )
                processes.append(process)
                training.add(process.poll)
            yield training
        finally:
            self.lab.set_rate(None)
            for process in processes:
                self.lab.kill(process)


def torchft_ranks(
    lab: Lab, words: Sequence[Sequence[str]], python: str, interval: int
) -> list[Rank]:
    """Return the ranks of a streaming DiLoCo of torchft, each a job apart in a host of a lab.

    Args:
        words: Megatron's flags of each rank.
        python: interpreter that has torchft.
        interval: steps of a round.
    """
    own = {"torchft-sync-every": interval, "torchft-fragments": TORCHFT_FRAGMENTS,
           # As many steps as torchft allows, to hide as much as possible.
           "torchft-sync-delay": interval // TORCHFT_FRAGMENTS - 1}  # fmt: skip
    places = {"NUM_REPLICAS": f"{len(words)}", "FIRST_ADDRESS": lab.address(0)}
    return [
        Rank([*each, *flag_words(own)], places | {"REPLICA": f"{host}"}, TORCHFT_SCRIPT, python)
        for host, each in enumerate(words)
    ]


def measure_link(lab: Lab, rate: float | None, repeat: int) -> Link:
    """Measure the bandwidth of a lab's links at a rate."""
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
    """Return torchrun's variables for a rank; `place` is its local rank and local world size."""
    values = {
        "RANK": 0 if apart else number,
        "WORLD_SIZE": 1 if apart else count,
        "LOCAL_RANK": place[0],
        "LOCAL_WORLD_SIZE": place[1],
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()}


def run_rank(
    rank: Rank, env: Mapping[str, str], log: Path, limit_seconds: int, others_are_done: Event | None
) -> None:
    """Run the script of a rank in its forked process, for at most `limit_seconds`.

    The first rank hosts the store, so it exits last.
    """
    os.setsid()  # a process group of its own, to be killed with all its children
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the parent
    signal.alarm(limit_seconds)
    try:
        with log.open("w", buffering=1) as console:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(console.fileno(), stream.fileno())
        os.environ.update(env)
        from megatron_edit.launcher import main

        code = main([str(rank.script), *rank.words])
        if code:
            raise SystemExit(code)
    finally:
        if others_are_done is not None:
            with suppress(OSError):
                others_are_done.wait(GRACE_SECONDS)


def is_over(folder: Path, rank: int) -> bool:
    """Return whether the console or replica log of a rank says that training is over."""
    files = (folder / f"console{rank}.log", folder / f"replica-{rank}.log")
    return any(DONE in path.read_text(errors="replace") for path in files if path.exists())


def tail(log: Path) -> str:
    """Return the end of a log; empty where the file does not exist."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-NUM_TAIL_LINES:])


def load_script(path: Path = SCRIPT) -> ModuleType:
    """Load a script as a module without running its main function."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, f"no Python file: {path}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_ports(after: int, count: int) -> list[int]:
    """Return the next free ports after a number.

    They should be below the ephemeral ports, which outgoing connections could occupy before the
    ranks do.
    """
    found: list[int] = []
    port = after
    while len(found) < count:
        port += 1
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
    return found


def _python_path(checkout: Path = REPOSITORY) -> str:
    """Return PYTHONPATH with the folders of the package and of the benchmarks first."""
    paths = (str(checkout), str(BENCHMARKS), os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, paths))


def _works_in_fork(context: ForkServerContext) -> bool:
    """Return whether CUDA works in a process that is forked from the server of a context."""
    process = context.Process(target=use_gpu, daemon=True)
    process.start()
    process.join(PROBE_SECONDS)
    code = process.exitcode
    process.kill()
    return code == 0


def use_gpu() -> None:
    """Use CUDA in this process, also in the thread of a backward pass; raises if it fails."""
    import torch

    weight = torch.ones(64, 64, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()
    torch.cuda.synchronize()


def _kill_group(process: ForkServerProcess | SpawnProcess) -> None:
    """Kill a rank and its children, such as Megatron's checkpoint writers."""
    assert process.pid is not None, "it has been started"
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # where it has not created its process group yet


def _pin_to_core(host: int) -> list[str]:
    """Return a taskset prefix that pins each host to a core, reused where there are too few.

    Real hosts do not share cores, and without pinning the competition for cores would differ from
    run to run.
    """
    if shutil.which("taskset") is None:
        return []
    return ["taskset", "--cpu-list", str(host % (os.cpu_count() or 1))]
