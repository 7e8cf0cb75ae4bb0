"""Launches of one replica each that cannot meet: all end soon, with one line that says why."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from netlab import INTERFACE, Lab, run

from tests.harness.launch import REPOSITORY
from tests.harness.network_lab import skip_without_lab
from tests.harness.ports import free_ports
from tests.host.runs import edit_flags
from tests.system.test_four_hosts import NAMED
from tests.system.test_launch import FLAGS, SCRIPT, Launch, processes_of, start

pytestmark = pytest.mark.timeout(300)


def flags(replica: int, rendezvous: str, num_replicas: int = 2) -> list[str]:
    """Return the flags of a launch."""
    own = {"edit_replica_id": replica, "edit_rendezvous": rendezvous}
    return edit_flags(num_replicas, **own, **FLAGS)


def assert_ends(launch: Launch, code: int, *texts: str, within: float = 30) -> None:
    """Check that a launch ends in so many seconds, and that its only line on the console has the
    texts."""
    start = time.monotonic()
    _, output = launch.finish()
    assert time.monotonic() - start < within
    assert f"exitcode  : {code}" in output, output[-3000:]
    lines = [line for line in output.splitlines() if line.startswith("megatron_edit: ")]
    assert len(lines) == 1 and all(text in lines[0] for text in texts), lines
    assert "]: Traceback" not in output and output.count("[c10d]") < 4, output[-3000:]


def wait_until_said(launch: Launch, text: str) -> None:
    until = time.monotonic() + 90
    while text not in launch.log.read_text():
        assert time.monotonic() < until and launch.process.poll() is None, launch.log.read_text()
        time.sleep(0.2)


def test_other_number_of_replicas_ends_both_launches(tmp_path: Path) -> None:
    """Would catch launches that wait ten minutes for replicas that nobody has started."""
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    launches = [
        start([str(SCRIPT), *flags(replica, rendezvous, number)], 1, tmp_path / f"{replica}.out")
        for replica, number in enumerate((2, 4))
    ]
    for launch in launches:
        texts = ("--edit-num-replicas ", "must be as on replica ", ", which has ")
        assert_ends(launch, 2, *texts, within=60)  # from its start on


def test_waits_are_told_and_a_silent_listener_is_named(tmp_path: Path) -> None:
    """Nobody listens for ten seconds; then something does that never answers."""
    (port,) = free_ports(1)
    place = f"127.0.0.1:{port}"
    launch = start([str(SCRIPT), *flags(1, place)], 1, tmp_path / "launch.out")
    wait_until_said(launch, f"waiting for replica 0 at {place} (Connection refused)")
    with socket.create_server(("127.0.0.1", port)):
        assert_ends(launch, 2, f"--edit-rendezvous {place}: replica 1 on ", "accepts connections")


def test_killed_launch_is_named(tmp_path: Path) -> None:
    """Would catch a launch that waits ten minutes, or for hours, for one that was killed."""
    place = f"[::1]:{free_ports(1)[0]}"
    script = tmp_path / "waiting.py"
    script.write_text("import time\nprint('waits', flush=True)\ntime.sleep(200)\n")
    first = start([str(SCRIPT), *flags(0, place)], 1, tmp_path / "0.out")
    (tmp_path / "log").mkdir()
    second = start(
        [str(script), *flags(1, place), "--edit-log-dir", str(tmp_path / "log")],
        1,
        tmp_path / "1.out",
    )
    until = time.monotonic() + 90
    while not list((tmp_path / "log").glob("replica-1.log")):
        assert time.monotonic() < until, second.log.read_text()
        time.sleep(0.2)
    for process in processes_of(script):
        os.kill(process, signal.SIGKILL)
    second.process.wait(timeout=10)
    assert_ends(first, 4, "replica 1 on ", " has ended: it was killed, or its machine is lost")


@pytest.mark.clone
def test_launch_without_a_compiler_ends_all(
    tmp_path: Path, megatron_clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica has a clone of its own, without compiled helpers."""
    place, launches = f"127.0.0.1:{free_ports(1)[0]}", []
    without_helpers = shutil.ignore_patterns("*.so")
    for replica in range(2):
        clone = tmp_path / f"clone-{replica}"
        shutil.copytree(megatron_clone / "megatron", clone / "megatron", ignore=without_helpers)
        for file in megatron_clone.glob("*.py"):
            shutil.copy(file, clone)
        if replica == 1:
            monkeypatch.setenv("CXX", "no-compiler")
        log = tmp_path / f"{replica}.out"
        launches.append(start([str(clone / "pretrain_gpt.py"), *flags(replica, place)], 1, log))
    rule = f"cannot be compiled on {socket.gethostname()} (without no-compiler); install make"
    folder = tmp_path / "clone-1/megatron/core/datasets"
    cause = f"Megatron's C++ helper for data sets in {folder}: {rule}"
    assert_ends(launches[1], 2, f"megatron_edit: {cause}", within=60)
    assert_ends(launches[0], 2, f"megatron_edit: replica 1 on {socket.gethostname()}: {cause}")


def start_named(lab: Lab, host: int, names: dict[str, str], words: list[str], log: Path) -> Launch:
    """Start torchrun on a host `nodeH` whose own name leads to 127.0.1.1, as Debian sets it up.

    Args:
        lab: has the host.
        host: its number.
        names: addresses of the other names that it knows.
        words: after torchrun's name.
        log: receives the output.
    """
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    env.pop("GLOO_SOCKET_IFNAME", None)
    hosts, known = log.with_suffix(".hosts"), {"localhost": "127.0.0.1", f"node{host}": "127.0.1.1"}
    hosts.write_text("".join(f"{address} {name}\n" for name, address in (known | names).items()))
    argv = ["unshare", "--uts", "sh", "-c", NAMED, f"node{host}", str(hosts)]
    argv += [sys.executable, "-m", "torch.distributed.run", *words]
    with log.open("wb") as out:
        process = lab.popen(
            host, argv, env, cwd=log.parent, stdout=out, stderr=subprocess.STDOUT
        )  # fmt: skip
    return Launch(process, log)


def test_launches_find_the_interface_on_the_way_to_each_other(tmp_path: Path) -> None:
    """Where the names of the machines lead to the loopback. Would catch launches that end with exit
    code 2, and groups of gloo, also Megatron's, on an address that the other cannot reach."""
    skip_without_lab()
    with Lab(2) as lab:
        place = f"{lab.address(0)}:29600"
        launches = [
            start_named(
                lab, replica, {},
                ["--master-addr=127.0.0.1", "--master-port=29500", "-m", "megatron_edit",
                 str(SCRIPT), *flags(replica, place)],
                tmp_path / f"{replica}.out",
            )
            for replica in range(2)
        ]  # fmt: skip
        for code, output in map(Launch.finish, launches):
            assert code == 0, output[-3000:]


@pytest.mark.parametrize("is_one_network", [True, False])
def test_host_of_the_store_whose_name_leads_to_the_loopback(
    is_one_network: bool, tmp_path: Path
) -> None:
    """A single launch: its first machine reaches its own store over the loopback. It takes the
    network of the other one; if that is not one of its own, the launch ends at once with the
    remedy. Would catch 600 s and exit code 4."""
    skip_without_lab()
    with Lab(2) as lab:
        if not is_one_network:
            words = ["ip", "-n", lab._hosts[0]]
            run(*words, "address", "delete", f"{lab.address(0)}/24", "dev", INTERFACE)
            run(*words, "address", "add", f"{lab.address(0)}/32", "dev", INTERFACE)
            run(*words, "route", "add", f"{lab.address(1)}/32", "dev", INTERFACE)
        launches = [
            start_named(
                lab, host, {"node0": lab.address(0)} if host else {},
                ["--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1", "--master-addr=node0",
                 "--master-port=29500", "-m", "megatron_edit", str(SCRIPT),
                 *edit_flags(2, **FLAGS)],
                tmp_path / f"{host}.out",
            )
            for host in range(2)
        ]  # fmt: skip
        if is_one_network:
            for code, output in map(Launch.finish, launches):
                assert code == 0, output[-3000:]
            return
        cause = "node0: gloo listens on 127.0.1.1 (where the machine's name leads): other machines"
        remedy = f"; export GLOO_SOCKET_IFNAME={INTERFACE} there"
        assert_ends(launches[0], 2, cause, remedy, within=95)
        assert launches[1].finish()[0] != 0
