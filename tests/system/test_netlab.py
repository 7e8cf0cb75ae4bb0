"""The network lab: it makes hosts, limits their links, and takes everything away again.

Skipped where namespaces cannot be made. Would catch: a rate that does not hold (an offloaded
packet bigger than the bucket), a rate that cannot be changed, and anything left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from netlab import INTERFACE, Lab, LabError, LabUnavailableError

from tests.harness.network_lab import need_lab
from tests.harness.launch import REPOSITORY

RATE = 100_000_000
TOLERANCE = 0.15  # headers take 4 % of what the bucket counts; the rest is for a busy machine

HOLD = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from netlab import Lab
with Lab(2) as lab:
    for host in range(2):
        lab.popen(host, ["sleep", "60"])
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module", autouse=True)
def able() -> None:
    """Skip with the reason where this machine or user can have no lab."""
    need_lab()


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Two hosts without a limit."""
    with Lab(2) as made:
        yield made


def namespaces(pid: int) -> list[str]:
    """Names of the namespaces that a process's labs have now."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.startswith(f"lab{pid}-")]


def interfaces() -> list[str]:
    """Interfaces of this machine itself."""
    return sorted(os.listdir("/sys/class/net"))


def test_link_rate_can_be_set_and_changed(lab: Lab) -> None:
    """Both directions, and the counters agree with what the transfer says."""
    lab.set_rate(RATE)
    before = lab.sent_bytes()
    for source, target in ((0, 1), (1, 0)):
        measured = lab.measure_bandwidth(source, target, seconds=0.7)
        assert measured == pytest.approx(RATE, rel=TOLERANCE)
    for now, then in zip(lab.sent_bytes(), before, strict=True):
        assert now - then > 0.7 * RATE * (1 - TOLERANCE) / 8
    lab.set_rate(RATE / 5)
    assert lab.measure_bandwidth(seconds=0.7) == pytest.approx(RATE / 5, rel=TOLERANCE)
    lab.set_rate(None)
    assert lab.measure_bandwidth(seconds=0.3) > 3 * RATE


def test_host_has_own_network_and_environment(lab: Lab) -> None:
    """A command sees its host's interfaces and the environment it was given."""
    code = "import os; print(sorted(os.listdir('/sys/class/net')), os.environ['WHO'])"
    process = lab.popen(
        1, [sys.executable, "-c", code], {"WHO": "host 1"}, stdout=subprocess.PIPE, text=True
    )
    stdout, _ = process.communicate(timeout=10)
    assert repr(INTERFACE) in stdout and "eth0" not in stdout and stdout.endswith("host 1\n")


def test_error_leaves_no_namespaces() -> None:
    """Namespaces, interfaces and processes; also where the hosts are still busy."""
    before = interfaces()
    with pytest.raises(ZeroDivisionError), Lab(3, RATE) as lab:
        busy = [lab.popen(host, ["sleep", "60"]) for host in range(3)]
        assert len(namespaces(os.getpid())) == 4  # the switch, too
        raise ZeroDivisionError
    assert namespaces(os.getpid()) == []
    assert interfaces() == before
    assert [process.returncode for process in busy] == [-signal.SIGKILL] * 3


def test_failed_construction_leaves_no_namespaces() -> None:
    """A rate that `tc` refuses, in one line."""
    with pytest.raises(LabError, match=r"^tc .*\btbf\b[^\n]*$"), Lab(1, 0):
        pass
    assert namespaces(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_leaves_no_namespaces(number: signal.Signals) -> None:
    """The usual ways to end a benchmark from outside."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(REPOSITORY / "benchmarks")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert len(namespaces(process.pid)) == 3
        process.send_signal(number)
        assert process.wait(timeout=10) != 0
    assert namespaces(process.pid) == []


def test_missing_requirements_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not root; no iproute2."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(LabUnavailableError, match=r"^network namespaces need root[^\n]*$"):
            Lab(1).__enter__()
    monkeypatch.setattr("netlab.shutil.which", lambda *_args, **_options: None)
    with pytest.raises(LabUnavailableError, match=r"^ip is missing: install iproute2$"):
        Lab(1).__enter__()
