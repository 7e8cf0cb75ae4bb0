"""An encoded exchange uses both directions of a slow link at once, also where a rank comes late.

Skipped where namespaces cannot be made. Would catch: two ranks that send to each other over one
connection of gloo, one after the other, which nearly doubles the time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from late_exchange import NUMEL  # noqa: E402
from netlab import INTERFACE, Lab, LabUnavailableError, require_lab  # noqa: E402

RATE = 10_000_000
SLACK = 1.35  # of the link's time: headers, codec and polls; one after the other is 1.8


def test_a_late_rank_costs_only_its_lateness(tmp_path: Path) -> None:
    """1 million int8 over 10 Mbit/s: 0.8 s, whoever comes 50 ms late."""
    try:
        require_lab()
    except LabUnavailableError as error:
        pytest.skip(str(error))
    with Lab(2, RATE) as lab:
        processes = []
        for host in range(2):
            command = [sys.executable, str(Path(__file__).with_name("late_exchange.py"))]
            environment = {
                **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": str(host),
                "MASTER_ADDR": lab.address(0), "GLOO_SOCKET_IFNAME": INTERFACE,
            }  # fmt: skip
            log = (tmp_path / f"host{host}").open("wb")
            errors = (tmp_path / f"errors{host}").open("wb")
            processes.append(lab.popen(host, command, environment, stdout=log, stderr=errors))
        codes = [process.wait(timeout=120) for process in processes]
    assert codes == [0, 0], (tmp_path / "errors0").read_text()[-3000:]
    rows = [json.loads((tmp_path / f"host{host}").read_text()) for host in range(2)]
    seconds = sorted(max(pair) for pair in zip(*rows, strict=True))
    assert seconds[len(seconds) // 2] < SLACK * 8 * NUMEL / RATE, rows
