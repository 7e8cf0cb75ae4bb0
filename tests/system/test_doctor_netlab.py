"""`megatron-edit doctor` on two hosts of a network lab, whose links have a known rate.

Skipped if namespaces cannot be created. Would catch: the rate of one direction reported for the
other, latency counted as transfer time, a transfer that is too short to measure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from netlab import Lab

from tests.harness.network_lab import run_on_two_hosts, skip_without_lab

RATE = 100_000_000
TOLERANCE = 0.10  # headers take 4 %


def doctor(lab: Lab, host: int) -> list[str]:
    """Return the command of a host, with two ranks."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}",
        "--nproc-per-node=2", f"--master-addr={lab.address(0)}", "--master-port=29500",
        "-m", "megatron_edit", "doctor", "--json",
    ]  # fmt: skip


@pytest.mark.full
def test_doctor_measures_link_rate(tmp_path: Path) -> None:
    """100 Mbit/s in each direction, 2 ranks per host: pairs and the all-reduce measure this
    rate."""
    skip_without_lab()
    report = json.loads(run_on_two_hosts(tmp_path, RATE, doctor, 200)[0])
    (link,) = report["links"]
    for rate in (
        link["forward_bytes_per_second"],
        link["backward_bytes_per_second"],
        2 * report["all_reduce"]["bytes_per_second"],  # two ranks share the link
    ):
        assert 8 * rate == pytest.approx(RATE, rel=TOLERANCE), report
