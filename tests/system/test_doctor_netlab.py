"""The doctor between two hosts of a network lab, whose links have a known rate.

Skipped where namespaces cannot be made. Would catch: a rate of one direction taken for the
other's, the time of an answer counted as that of the payload, a transfer too short to be believed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from netlab import Lab

from tests.harness.network_lab import need_lab, run_on_two_hosts

RATE = 100_000_000
TOLERANCE = 0.10  # headers take 4 %


def doctor(lab: Lab, host: int) -> list[str]:
    """The command of a host: two ranks."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}",
        "--nproc-per-node=2", f"--master-addr={lab.address(0)}", "--master-port=29500",
        "-m", "megatron_edit", "doctor", "--no-host", "--json",
    ]  # fmt: skip


@pytest.mark.full
def test_doctor_measures_link_rate(tmp_path: Path) -> None:
    """100 Mbit/s each way, 2 ranks per host: pairs and all ranks at once measure the same link."""
    need_lab()
    report = json.loads(run_on_two_hosts(tmp_path, RATE, doctor, 200)[0])
    (link,) = report["links"]
    for rate in (
        link["forward_bytes_per_second"],
        link["backward_bytes_per_second"],
        2 * report["all_reduce"]["bytes_per_second"],  # two ranks share the link
    ):
        assert 8 * rate == pytest.approx(RATE, rel=TOLERANCE), report
