"""Tests in a network lab: namespaces joined by links of a known rate (``benchmarks/netlab.py``)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from netlab import INTERFACE, Lab, LabUnavailableError, require_lab

ROOT = Path(__file__).resolve().parents[2]


def skip_without_lab() -> None:
    """Skip the test, with the reason, if this machine or user cannot create a lab."""
    try:
        require_lab()
    except LabUnavailableError as error:
        pytest.skip(str(error))


def run_on_two_hosts(
    folder: Path, rate: float, command: Callable[[Lab, int], list[str]], timeout: float
) -> list[str]:
    """Run a command on each of two hosts; both must exit with 0.

    Args:
        folder: folder for their output.
        rate: link rate in each direction, bits per second.
        command: returns the command of a host.
        timeout: seconds.

    Returns:
        Standard output of each host.
    """
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }  # fmt: skip
    logs, errors = ([folder / f"{kind}{host}" for host in range(2)] for kind in ("host", "errors"))
    with Lab(2, rate) as lab:
        processes = []
        for host in range(2):
            with logs[host].open("wb") as out, errors[host].open("wb") as err:
                argv = command(lab, host)
                processes.append(lab.popen(host, argv, environment, stdout=out, stderr=err))
        codes = [process.wait(timeout=timeout) for process in processes]
    assert codes == [0, 0], errors[0].read_text()[-3000:]
    return [log.read_text() for log in logs]
