"""Replicas whose ranks are started by `ft_launcher` of NVIDIA's resiliency extension.

Skipped where it is missing, or older than Megatron requires (docs/slurm.md).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import Flags, tiny_gpt
from tests.harness.launch import REPOSITORY
from tests.harness.ports import free_ports
from tests.harness.slurm import wait_until
from tests.harness.torch_groups import HAS_GROUPS

LAUNCHER = Path(sys.executable).with_name("ft_launcher")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not LAUNCHER.exists(), reason="ft_launcher is not installed"),
]
# Longer than any wait here: these tests are about ranks that die.
TIMEOUTS = ("--ft-rank-section-timeouts", "setup:500,step:500,checkpointing:500",
            "--ft-rank-out-of-section-timeout", "500")  # fmt: skip
MODEL: Flags = {
    "global_batch_size": 8, "log_interval": 50, "use_edit": True, "edit_warmup_steps": 2,
    "edit_sync_interval": 20, "enable_ft_package": True, "save": "save", "save_interval": 60,
}  # fmt: skip


@dataclass
class Launches:
    """Programs of one test, which end with it.

    Attributes:
        folder: working directory.
        processes: by their names.
    """

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *argv: str) -> None:
        """Start a program; its output goes to a file."""
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
                            "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        with (self.folder / f"{name}.log").open("wb") as out:
            self.processes[name] = subprocess.Popen(
                argv, env=env, cwd=self.folder, stdout=out, stderr=subprocess.STDOUT
            )

    def start_replica(self, name: str, **flags: Any) -> None:
        """Start a replica of two ranks by ft_launcher."""
        (port,) = free_ports(1)
        self.start(
            name, str(LAUNCHER), "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1",
            "--max-restarts", "3", *TIMEOUTS, "-m", "megatron_edit",
            str(REPOSITORY / "scripts" / "pretrain_gpt.py"), *tiny_gpt(**(MODEL | flags)),
        )  # fmt: skip

    def kill_rank(self, name: str) -> None:
        """Kill the last rank of a replica."""
        found = {}
        for process in psutil.Process(self.processes[name].pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.cmdline()[1:4] == ["-u", "-m", "megatron_edit"]:
                    found[process.pid] = process.ppid()
        # Without children of ranks, which write checkpoints.
        ranks = [pid for pid, parent in found.items() if parent not in found]
        assert len(ranks) == 2, self.texts()
        os.kill(ranks[-1], signal.SIGKILL)

    def texts(self) -> str:
        """Return the end of each output, for messages of failed tests."""
        logs = ((name, self.folder / f"{name}.log") for name in self.processes)
        return "\n".join(f"== {name}\n{path.read_text()[-2500:]}" for name, path in logs)

    def close(self) -> None:
        """End all programs; a launcher ends its ranks."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=45)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    """End what a test has started."""
    found = Launches(tmp_path)
    yield found
    found.close()


def test_all_replicas_restart_without_a_hub(launches: Launches) -> None:
    """After the loss of a rank all go back to the newest checkpoint. Would catch a restarted
    replica that the others, or its own rendezvous, refuse."""
    place = f"127.0.0.1:{free_ports(1)[0]}"
    for replica in range(2):
        launches.start_replica(
            f"replica{replica}", edit_num_replicas=2, edit_replica_id=replica,
            edit_rendezvous=place, train_iters=300, load="save",
        )  # fmt: skip
    tracker = launches.folder / "save" / "latest_checkpointed_iteration.txt"
    wait_until(tracker.exists, 150, launches.texts)
    launches.kill_rank("replica1")
    codes = [process.wait(timeout=300) for process in launches.processes.values()]
    assert codes == [0, 0], launches.texts()
    assert tracker.read_text() == "300"
    for replica in range(2):
        text = (launches.folder / f"replica{replica}.log").read_text()
        assert "will restart worker group" in text
    assert "replica 1 did not reach the sync" in (launches.folder / "replica0.log").read_text()


@pytest.mark.skipif(not HAS_GROUPS, reason="elastic runs need a later torch")
def test_replica_of_elastic_run_comes_back(launches: Launches) -> None:
    """The others train on meanwhile. Would catch a launcher that ends the replica."""
    hub = f"127.0.0.1:{free_ports(1)[0]}"
    edit = (sys.executable, "-m", "megatron_edit")
    launches.start("hub", *edit, "hub", "--state-dir", "hub", "--listen", hub)
    for name in ("a", "b"):
        launches.start_replica(
            name, edit_hub=hub, edit_replica_name=name, edit_nominal_replicas=2,
            train_iters=100_000, save_interval=1_000_000, exit_signal_handler=True,
        )  # fmt: skip

    def events(kind: str, after: int = 0) -> list[dict[str, Any]]:
        path = launches.folder / "hub" / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = (json.loads(line) for line in lines)
        return [event for event in found if event["event"] == kind and event["seq"] > after]

    wait_until(lambda: bool(events("commit")), 150, launches.texts)
    launches.kill_rank("b")
    wait_until(lambda: bool(events("leave")), 60, launches.texts)
    (left,) = events("leave")
    assert (left["name"], left["reason"]) == ("b", "lost")

    def both_commit() -> bool:
        return any(event["members"] == ["a", "b"] for event in events("commit", left["seq"]))

    wait_until(both_commit, 200, launches.texts)
    launches.start("stop", *edit, "hub", "stop", hub)
    assert launches.processes["stop"].wait(timeout=60) == 0
    assert [launches.processes[name].wait(timeout=150) for name in ("a", "b")] == [0, 0]
