"""Four hosts, each a network namespace with a name of its own, in one launch of two replicas.

Would catch: torchrun numbers the hosts by their names as texts (node1, node10, node11, node2), and
replicas are made of hosts in this order; a rank that trains in another replica than it reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from netlab import INTERFACE, Lab

from megatron_edit.tools.cli import main
from tests.harness import tiny_gpt
from tests.harness.launch import REPOSITORY
from tests.harness.network_lab import skip_without_lab
from tests.host.runs import edit_flags

SCRIPT = REPOSITORY / "scripts/pretrain_gpt.py"
NAMES = ("node1", "node2", "node10", "node11")
FLAGS = {"train_iters": 6, "global_batch_size": 8}


# Of a host, which has a mount namespace of its own: gives it a name, and the names of the others.
NAMED = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


def start(
    lab: Lab, host: int, names: Sequence[str], flags: list[str], log: Path
) -> subprocess.Popen[bytes]:
    """Start torchrun on one host, under its own name."""
    hosts = log.with_suffix(".hosts")
    hosts.write_text("".join(f"{lab.address(n)} {name}\n" for n, name in enumerate(names)))
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=4", "--nproc-per-node=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={lab.address(0)}:29500",
        f"--rdzv-conf=is_host={int(host == 0)}", "-m", "megatron_edit", str(SCRIPT), *flags,
    ]  # fmt: skip
    named = ["unshare", "--uts", "sh", "-c", NAMED, names[host], str(hosts), *torchrun]
    env = os.environ | {
        "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE,
    }  # fmt: skip
    with log.open("wb") as out:
        return lab.popen(host, named, env, cwd=log.parent, stdout=out, stderr=subprocess.STDOUT)


def train(folder: Path, *more: str, names: Sequence[str] = NAMES) -> tuple[list[int], str]:
    """Train on the four hosts; return the exit codes and the output of all."""
    folder.mkdir()
    logs = [folder / f"{name}.log" for name in names]
    flags = [*edit_flags(2, edit_log_dir=folder / "log", **FLAGS), *more]
    with Lab(4) as lab:
        # The last name first: the order of arrival must not matter either.
        running = [start(lab, host, names, flags, logs[host]) for host in reversed(range(4))]
        codes = [process.wait(timeout=80) for process in running]
    return codes, "".join(log.read_text() for log in logs)


def hosts_of(folder: Path) -> list[list[str]]:
    """Return the hosts of each replica by run.json."""
    run = json.loads((folder / "log/run.json").read_text())
    return [list(hosts) for hosts in run["topology"]["hosts"]]


def losses_of(folder: Path) -> list[str]:
    return (folder / "log/loss.jsonl").read_text().splitlines()


@pytest.mark.timeout(600)
def test_replicas_are_made_of_hosts_in_natural_order(tmp_path: Path) -> None:
    """The losses do not depend on which host has which rank."""
    skip_without_lab()
    codes, output = train(tmp_path / "hosts")
    assert codes == [0] * 4, output[-5000:]
    assert hosts_of(tmp_path / "hosts") == [["node1", "node2"], ["node10", "node11"]]
    assert output.count("replica 0 is on node1 (1 rank), node2 (1 rank)") == 1
    assert output.count("replica 1 is on node10 (1 rank), node11 (1 rank)") == 1
    codes, output = train(tmp_path / "ranks", "--edit-placement", "ranks")
    assert codes == [0] * 4, output[-5000:]
    assert hosts_of(tmp_path / "ranks") == [["node1", "node10"], ["node11", "node2"]]
    assert losses_of(tmp_path / "hosts") == losses_of(tmp_path / "ranks")
    assert len(losses_of(tmp_path / "hosts")) == 6


@pytest.mark.full
@pytest.mark.timeout(300)
def test_first_process_may_be_in_the_second_replica(tmp_path: Path) -> None:
    """torchrun's rank 0 is on node10. Would catch: what it reports to the others, or prints, is
    that of global rank 0, and lost."""
    skip_without_lab()
    names = ("node2", "node9", "node10", "node11")
    save = ["--save", str(tmp_path / "save"), "--save-interval", "6"]
    codes, output = train(tmp_path / "run", *save, names=names)
    assert codes == [0] * 4, output[-5000:]
    assert hosts_of(tmp_path / "run") == [["node2", "node9"], ["node10", "node11"]]
    assert output.count("replica 1 is on node10 (1 rank), node11 (1 rank)") == 1
    assert (tmp_path / "save/latest_checkpointed_iteration.txt").read_text() == "6"


@pytest.mark.timeout(300)
def test_file_with_an_unknown_host_is_refused(tmp_path: Path) -> None:
    """One line, on one host only."""
    skip_without_lab()
    file = tmp_path / "placement.txt"
    file.write_text("node1 node2\nnode10 node12\n")
    codes, output = train(tmp_path / "run", "--edit-placement", str(file))
    assert all(codes), output[-3000:]
    assert output.count(f"megatron_edit: --edit-placement {file}: names node12") == 1, output
    assert not (tmp_path / "run/log/run.json").exists()


def test_check_refuses_tensor_parallel_overlap_on_a_shared_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Would catch an "ok" of a check without GPUs, in which the flag is dropped."""
    overlap = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--tp-comm-overlap"]
    flags = [*tiny_gpt(global_batch_size=8), *overlap, "--use-edit", "--edit-num-replicas", "2"]
    assert main(["check", str(SCRIPT), *flags, "--hosts", "node1:4"]) == 2
    assert "--tp-comm-overlap: 2 replicas are on node1" in capsys.readouterr().err


def test_check_shows_which_host_is_in_which_replica(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*tiny_gpt(global_batch_size=8), "--use-edit", "--edit-num-replicas", "2"]
    hosts = "node1:1,node2:1,node10:1,node11:1"
    assert main(["check", str(SCRIPT), *flags, "--hosts", hosts]) == 0
    output = capsys.readouterr().out
    assert "replica 0 is on node1 (1 rank), node2 (1 rank)\n" in output
    assert "warning: replica" not in output
