"""The network lab: it creates hosts, limits their links, and removes everything at the end.

Skipped if namespaces cannot be created. Would catch: a wrong rate (with an offloaded packet larger
than the bucket), a rate that cannot be changed, and remaining namespaces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from netlab import INTERFACE, Lab, LabError, LabUnavailableError

from tests.harness.launch import REPOSITORY
from tests.harness.network_lab import skip_without_lab

RATE = 100_000_000
TOLERANCE = 0.15  # headers are 4 % of the bytes in the bucket; the rest allows for a busy machine

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
def require_network_lab() -> None:
    """Skip with the reason if this machine or user cannot create a lab."""
    skip_without_lab()


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Create a lab of two hosts without rate limit."""
    with Lab(2) as made:
        yield made


def namespaces(pid: int) -> list[str]:
    """Return the names of the namespaces of a process's labs."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.startswith(f"lab{pid}-")]


def interfaces() -> list[str]:
    """Return the interfaces of this machine."""
    return sorted(os.listdir("/sys/class/net"))


def test_link_rate_can_be_set_and_changed(lab: Lab) -> None:
    """In both directions, and byte counters agree with the transfer."""
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
    """A command sees the interfaces of its host and the given environment."""
    code = "import os; print(sorted(os.listdir('/sys/class/net')), os.environ['WHO'])"
    process = lab.popen(
        1, [sys.executable, "-c", code], {"WHO": "host 1"}, stdout=subprocess.PIPE, text=True
    )
    stdout, _ = process.communicate(timeout=10)
    assert repr(INTERFACE) in stdout and "eth0" not in stdout and stdout.endswith("host 1\n")


def test_error_leaves_no_namespaces() -> None:
    """Namespaces, interfaces and processes are removed, even if processes are running."""
    before = interfaces()
    with pytest.raises(ZeroDivisionError), Lab(3, RATE) as lab:
        busy = [lab.popen(host, ["sleep", "60"]) for host in range(3)]
        assert len(namespaces(os.getpid())) == 4  # including the switch
        raise ZeroDivisionError
    assert namespaces(os.getpid()) == []
    assert interfaces() == before
    assert [process.returncode for process in busy] == [-signal.SIGKILL] * 3


def test_failed_construction_leaves_no_namespaces() -> None:
    """A rate that `tc` refuses is reported in one line."""
    with pytest.raises(LabError, match=r"^tc .*\btbf\b[^\n]*$"), Lab(1, 0):
        pass
    assert namespaces(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_leaves_no_namespaces(number: signal.Signals) -> None:
    """For the usual signals that end a benchmark."""
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
    """For missing root privileges and missing iproute2."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(LabUnavailableError, match=r"^network namespaces need root[^\n]*$"):
            Lab(1).__enter__()
    monkeypatch.setattr("netlab.shutil.which", lambda *_args, **_options: None)
    with pytest.raises(LabUnavailableError, match=r"^ip is missing: install iproute2$"):
        Lab(1).__enter__()
