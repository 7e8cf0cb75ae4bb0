"""The doctor between two hosts of a network lab, whose links have a known rate.

Skipped where namespaces cannot be made. Would catch: a rate of one direction taken for the
other's, the time of an answer counted as that of the payload, a transfer too short to be believed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from netlab import INTERFACE, Lab, LabUnavailableError, require_lab  # noqa: E402

RATE = 100_000_000
TOLERANCE = 0.10  # headers take 4 %


@pytest.mark.full
def test_the_rate_of_a_link(tmp_path: Path) -> None:
    """100 Mbit/s each way, 2 ranks per host: pairs and all ranks at once measure the same link."""
    try:
        require_lab()
    except LabUnavailableError as error:
        pytest.skip(str(error))
    with Lab(2, RATE) as lab:
        processes = []
        for host in range(2):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}",
                "--nproc-per-node=2", f"--master-addr={lab.address(0)}", "--master-port=29500",
                "-m", "megatron_edit", "doctor", "--no-host", "--json",
            ]  # fmt: skip
            environment = {
                **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }  # fmt: skip
            log = (tmp_path / f"host{host}").open("wb")
            errors = (tmp_path / f"errors{host}").open("wb")
            processes.append(lab.popen(host, command, environment, stdout=log, stderr=errors))
        codes = [process.wait(timeout=200) for process in processes]
    assert codes == [0, 0], (tmp_path / "errors0").read_text()[-3000:]
    report = json.loads((tmp_path / "host0").read_text())
    (link,) = report["links"]
    for rate in (
        link["forward_bytes_per_second"],
        link["backward_bytes_per_second"],
        2 * report["all_reduce"]["bytes_per_second"],  # two ranks share the link
    ):
        assert 8 * rate == pytest.approx(RATE, rel=TOLERANCE), report
