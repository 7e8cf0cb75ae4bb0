"""A network lab on one machine: network namespaces connected by links of a configurable rate.

Each host is a namespace of its own with one interface; a further namespace is the switch, a bridge
to which the hosts are connected by veth pairs. Nothing is created or changed outside these
namespaces, so deleting them removes everything. Needs root and Debian's `iproute2`.

    with Lab(2, 100_000_000) as lab:
        server = lab.popen(0, ["python3", "server.py", lab.address(0)])
        lab.set_rate(20_000_000)
        print(lab.measure_bandwidth())

A rate limits what a host sends. Both directions between two hosts are therefore limited
independently, as on a full-duplex link.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
INTERFACE = "link0"  # of every host
MAX_HOSTS = 200
# A token bucket must hold what may be sent at once: a segmentation-offloaded packet of 64 KiB, and
# the bytes of one tick of a coarse timer.
MIN_BURST_BYTES = 128 * 1024
BURST_SECONDS = 0.004
QUEUE_SECONDS = 0.05  # length of the send queue; packets beyond it are dropped
SKIPPED_SECONDS = 0.3  # at the start of a measured transfer: the full bucket
_numbers = itertools.count()
_NAMESPACES = Path("/run/netns")
_TRANSFER = str(Path(__file__).with_name("netlab_transfer.py"))


class LabError(RuntimeError):
    """The lab cannot be created or used; the message is one line."""


class LabUnavailableError(LabError):
    """This machine or this user cannot create a lab."""


def fresh_prefix() -> str:
    """Return a name prefix for the namespaces of one lab, unique on this machine."""
    return f"lab{os.getpid()}-{next(_numbers)}-"


def require_lab() -> None:
    """Check that a lab can be created on this machine.

    Raises:
        LabUnavailableError: it cannot; the message says what is missing.
    """
    if os.geteuid() != 0:
        raise LabUnavailableError("network namespaces need root: run this as root")
    for name in ("ip", "tc"):
        tool(name)
    probe = fresh_prefix() + "probe"
    try:
        run("ip", "netns", "add", probe)
        run("ip", "netns", "delete", probe)
    except LabError as error:
        raise LabUnavailableError(f"no network namespaces here: {error}") from error


def tool(name: str) -> str:
    """Return the path of a command of iproute2."""
    # For users other than root, /usr/sbin may not be on the path.
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise LabUnavailableError(f"{name} is missing: install iproute2")
    return path


def run(name: str, *arguments: str) -> str:
    """Run a command of iproute2 and return its output.

    Raises:
        LabError: the command failed.
    """
    done = subprocess.run(
        [tool(name), *arguments], capture_output=True, text=True, start_new_session=True
    )
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise LabError(f"{name} {' '.join(arguments)}: {reason}")
    return done.stdout


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack like Ctrl-C, so that `with` blocks end."""
    with _handler_set(ENDING_SIGNALS, _raise_exit):
        yield


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore signals during a clean-up, which a second Ctrl-C would leave incomplete."""
    with _handler_set((signal.SIGINT, *ENDING_SIGNALS), signal.SIG_IGN):
        yield


@contextmanager
def _handler_set(numbers: tuple[signal.Signals, ...], handler: object) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers, and only it receives signals
        return
    before = {number: signal.signal(number, handler) for number in numbers}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def _raise_exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


class Lab:
    """A context manager whose hosts exist inside the `with` block.

    At its end, also on an exception, SIGTERM or SIGHUP, every process still running in a host is
    killed and the namespaces are deleted. Only SIGKILL leaves them behind, named `lab<pid>-...`.

    Args:
        num_hosts: at least 1.
        rate_bits_per_second: of each host's link; None is no limit.
    """

    def __init__(self, num_hosts: int, rate_bits_per_second: float | None = None) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise LabError(f"{num_hosts} hosts: must be 1 to {MAX_HOSTS}")
        self.num_hosts = num_hosts
        self.rate = rate_bits_per_second
        prefix = fresh_prefix()
        self._switch = prefix + "switch"
        self._hosts = [f"{prefix}host{host}" for host in range(num_hosts)]
        self._made: list[str] = []
        self._processes: list[subprocess.Popen[Any]] = []
        self._signals = ExitStack()

    def __enter__(self) -> Self:
        require_lab()
        atexit.register(self.close)
        try:
            self._signals.enter_context(leaving_on_signals())
            self._build()
            self.set_rate(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    def set_rate(self, rate_bits_per_second: float | None) -> None:
        """Change the rate of all links, also while they are in use; None is no limit."""
        for name in self._hosts:
            if rate_bits_per_second is not None:
                _root_queue(name, "replace", *_token_bucket(rate_bits_per_second))
            elif '"tbf"' in run("tc", "-j", "-n", name, "qdisc", "show", "dev", INTERFACE):
                _root_queue(name, "delete")
        self.rate = rate_bits_per_second

    def set_connected(self, host: int, is_connected: bool) -> None:
        """Cut the link of a host, or connect it again. What is sent meanwhile is lost, as with a
        cable that is pulled at the switch."""
        state = "up" if is_connected else "down"
        run("ip", "-n", self._switch, "link", "set", f"port{host}", state)

    def popen(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command in a host; `options` are those of `subprocess.Popen`."""
        command = [tool("ip"), "netns", "exec", self._hosts[host], *argv]
        # A session of its own: Ctrl-C must reach only this program, which then cleans up.
        process = subprocess.Popen(command, env=env, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def kill(self, process: subprocess.Popen[Any]) -> None:
        """Kill a process that `popen` started, with its children. It may have ended already."""
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with suppress(ValueError):
            self._processes.remove(process)

    def sent_bytes(self) -> list[int]:
        """Return the bytes sent by each host so far, with headers (once per offloaded packet)."""
        # Counted as received by the switch: one call for all hosts.
        links = json.loads(run("ip", "-n", self._switch, "-s", "-j", "link", "show"))
        received = {link["ifname"]: int(link["stats64"]["rx"]["bytes"]) for link in links}
        return [received[f"port{host}"] for host in range(self.num_hosts)]

    def measure_bandwidth(self, source: int = 0, target: int = 1, *, seconds: float = 1.0) -> float:
        """Measure the payload bits per second of one TCP connection between two hosts."""
        end = [sys.executable, _TRANSFER]
        receive = [*end, "receive", self.address(target), str(SKIPPED_SECONDS), str(seconds)]
        receiver = self.popen(target, receive, stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None, "the pipe was asked for"
        port = receiver.stdout.readline().strip()
        sender = self.popen(source, [*end, "send", self.address(target), port])
        try:
            return float(receiver.communicate(timeout=seconds + SKIPPED_SECONDS + 15)[0])
        except (subprocess.TimeoutExpired, ValueError) as error:
            raise LabError(f"no transfer from host {source} to host {target}") from error
        finally:
            self.kill(receiver)
            self.kill(sender)

    def close(self) -> None:
        """End the processes in the hosts and delete the namespaces. May be called again.

        Raises:
            LabError: a namespace could not be deleted; all others have been.
        """
        failures: list[LabError] = []
        with signals_ignored():
            for process in list(self._processes):
                self.kill(process)
            for name in self._made:
                try:
                    _delete(name)
                except LabError as error:
                    failures.append(error)
            self._made.clear()
        self._signals.close()
        atexit.unregister(self.close)
        if failures:
            raise failures[0]

    def _build(self) -> None:
        for name in (self._switch, *self._hosts):
            self._made.append(name)  # recorded first: a signal may follow the creation
            run("ip", "netns", "add", name)
        run("ip", "-n", self._switch, "link", "add", "bridge", "up", "type", "bridge")
        for host, name in enumerate(self._hosts):
            port = ("ip", "-n", self._switch, "link")
            peer = ("type", "veth", "peer", "name", INTERFACE, "netns", name)
            run(*port, "add", f"port{host}", *peer)
            run(*port, "set", f"port{host}", "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                run("ip", "-n", name, "link", "set", interface, "up")


def burst_bytes(rate: float | None) -> float:
    """Return the bytes that an idle link passes at once, beyond its rate (bits per second)."""
    return 0.0 if rate is None else max(MIN_BURST_BYTES, rate / 8 * BURST_SECONDS)


def _token_bucket(rate: float) -> list[str]:
    latency = f"{round(QUEUE_SECONDS * 1e3)}ms"
    burst = str(round(burst_bytes(rate)))
    return ["tbf", "rate", f"{round(rate)}bit", "burst", burst, "latency", latency]


def _root_queue(name: str, action: str, *rest: str) -> None:
    run("tc", "-n", name, "qdisc", action, "dev", INTERFACE, "root", *rest)


def _delete(name: str) -> None:
    if (_NAMESPACES / name).exists():
        # A process still running there would keep the namespace alive without its name.
        for pid in run("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run("ip", "netns", "delete", name)
