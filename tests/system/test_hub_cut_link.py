"""An elastic run of three hosts, of which one loses its link, and has it back.

Would catch: replicas that wait for one that they cannot reach, or one that trains on by itself
after the others have gone on without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from netlab import INTERFACE, Lab

from tests.harness import tiny_gpt
from tests.harness.elastic_run import ElasticRun, replica_server
from tests.harness.launch import REPOSITORY
from tests.harness.network_lab import skip_without_lab
from tests.harness.torch_groups import HAS_GROUPS

pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
NAMES, PORT = "abc", 29600
TOKEN = "a token of sixteen bytes or more"


def start(lab: Lab, host: int, argv: list[str], log: Path, **more: str) -> subprocess.Popen[bytes]:
    """Start a command of the package on a host."""
    env = os.environ | {
        "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE,
        "EDIT_HUB_TOKEN": TOKEN, **more,
    }  # fmt: skip
    with log.open("wb") as out:
        argv = [sys.executable, "-m", "megatron_edit", *argv]
        return lab.popen(host, argv, env, cwd=log.parent, stdout=out, stderr=subprocess.STDOUT)


def start_replica(lab: Lab, host: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start the replica of a host, which has one rank."""
    flags = tiny_gpt(
        use_edit=True, edit_hub=f"{lab.address(0)}:{PORT}", edit_replica_name=NAMES[host],
        edit_nominal_replicas=3, edit_warmup_steps=2, edit_sync_interval=4,
        edit_log_dir=folder / "logs", train_iters=2000, global_batch_size=12,
    )  # fmt: skip
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
    script = str(REPOSITORY / "scripts/pretrain_gpt.py")
    return start(lab, host, [script, *flags], folder / f"{NAMES[host]}.log", **ranks)


@pytest.mark.timeout(300)
def test_host_without_a_link_is_left_out_and_must_start_again(tmp_path: Path) -> None:
    skip_without_lab()
    run = ElasticRun(tmp_path, replica_server(), 3)  # to read what is written
    with Lab(3) as lab:
        argv = ["hub", "--state-dir", str(tmp_path / "hub"), "--listen", f"{lab.address(0)}:{PORT}"]
        hub = start(lab, 0, argv, tmp_path / "hub.log")
        replicas = [start_replica(lab, host, tmp_path) for host in range(3)]
        run.wait_for_commits(2, 120)
        lab.set_connected(2, False)
        run.wait_for(lambda: run.events("leave"), 60)
        run.wait_for_commits(len(run.events("commit")) + 2, 60)
        assert run.events("commit")[-1]["members"] == ["a", "b"]
        assert replicas[2].poll() is None
        lab.set_connected(2, True)
        assert replicas[2].wait(60) == 5
        replicas[2] = start_replica(lab, 2, tmp_path)
        run.wait_for(lambda: run.events("commit")[-1]["members"] == ["a", "b", "c"], 60)
        run.wait_for_commits(len(run.events("commit")) + 1, 60)
        run.check_blocks()
        assert [line["reason"] for line in run.events("leave")] == ["lost"]
        assert hub.poll() is None and [each.poll() for each in replicas] == [None] * 3
