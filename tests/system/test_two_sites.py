"""Two sites with firewalls, in a network lab: docs/cluster.md says which ports must be open.

Each site is a host of its own with a replica; the rules of its firewall refuse every connection
that the page does not name. Skipped if namespaces cannot be created, or without nftables.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import netlab
import pytest
from netlab import INTERFACE, Lab, fresh_prefix, tool

from tests.harness import tiny_gpt
from tests.harness.launch import REPOSITORY
from tests.harness.network_lab import skip_without_lab
from tests.harness.slurm import wait_until
from tests.harness.torch_groups import HAS_GROUPS

pytestmark = pytest.mark.timeout(400)
full = pytest.mark.full
RENDEZVOUS, LAUNCH, HUB = 29400, 29500, 29600
RANGE = (40000, 40199)
PINNED = f"{RANGE[0]}-{RANGE[1]}"
TOKEN = "0" * 64
# Connections of this host itself, and answers to those that it has opened, always pass.
RULES = """
table inet sites {{
    set refused {{ type ipv4_addr . inet_service; flags dynamic; size 4096; }}
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname lo accept
        ct state established,related accept
        tcp dport {{ {ports} }} accept
        add @refused {{ ip saddr . tcp dport }}
        reject with tcp reset
    }}
}}
"""
MASQUERADE = """
table ip sites {{
    chain post {{
        type nat hook postrouting priority srcnat;
        oifname {interface} masquerade
    }}
}}
"""


@dataclass
class Sites:
    """Two hosts of a lab, with firewalls.

    Attributes:
        lab: site A is its host 0, site B its host 1.
        folder: for logs.
        processes: running launches, by their names.
    """

    lab: Lab
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def call(self, site: int, *argv: str) -> str:
        """Run a command in a site and return its output."""
        done = self.lab.popen(site, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = done.communicate(timeout=20)
        assert done.returncode == 0, output
        return str(output.decode())

    def use_rules(self, site: int, rules: str) -> None:
        """Add rules of nftables to a site."""
        path = self.folder / f"rules{site}"
        path.write_text(rules)
        self.call(site, "nft", "-f", str(path))

    def close(self, site: int, *but: int | str) -> None:
        """Refuse all connections to a site, but those to some ports; pin its own ports."""
        self.call(site, "sysctl", "-qw", f"net.ipv4.ip_local_port_range={RANGE[0]} {RANGE[1]}")
        self.use_rules(site, RULES.format(ports=", ".join(map(str, but)) or "1"))

    def refused(self, site: int) -> str:
        """Return the refused connections, as nftables prints them; empty for none."""
        listing = self.call(site, "nft", "list", "set", "inet", "sites", "refused")
        return listing.partition("elements")[2]

    def start(
        self, name: str, site: int, argv: list[str], prefix: tuple[str, ...] = (), **env: str
    ) -> None:
        """Start a program in a site; its output goes to a file."""
        environment = {
            **os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE, **env,
        }  # fmt: skip
        with self.log(name).open("wb") as out:
            self.processes[name] = self.lab.popen(
                site, [*prefix, sys.executable, "-m", *argv], environment, stdout=out,
                stderr=subprocess.STDOUT, cwd=self.folder,
            )  # fmt: skip

    def log(self, name: str) -> Path:
        """Return the file of a program's output."""
        return self.folder / f"{name}.log"

    def wait(self, *names: str, seconds: float = 150) -> list[int]:
        """Return the exit codes of programs."""
        return [self.processes[name].wait(timeout=seconds) for name in names]

    def texts(self) -> str:
        """Return the end of each output, for messages of failed tests."""
        return "\n".join(
            f"== {name}\n{self.log(name).read_text()[-3000:]}" for name in self.processes
        )


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    """Make two sites without firewalls."""
    skip_without_lab()
    if shutil.which("nft", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("nftables is not installed")
    with Lab(2) as lab:
        yield Sites(lab, tmp_path)


def training(*launch: str, **flags: object) -> list[str]:
    """Return the arguments of Python for a short training with EDiT."""
    short = {"global_batch_size": 8, "train_iters": 4, "edit_warmup_steps": 2,
             "edit_sync_interval": 1, "edit_timeout_seconds": 20, "use_edit": True}  # fmt: skip
    model = tiny_gpt(**(short | flags))
    return [*launch, "-m", "megatron_edit", str(REPOSITORY / "scripts/pretrain_gpt.py"), *model]


def replica_of(sites: Sites, replica: int) -> list[str]:
    """Return the launch of one replica, of one rank."""
    return training(
        "torch.distributed.run", "--nproc-per-node=1", "--master-addr=127.0.0.1",
        f"--master-port={LAUNCH}", edit_num_replicas=2, edit_replica_id=replica,
        edit_rendezvous=f"{sites.lab.address(0)}:{RENDEZVOUS}",
    )  # fmt: skip


def test_one_launch_per_replica_needs_only_the_documented_ports(sites: Sites) -> None:
    """Would catch a connection to a port that the page does not name."""
    sites.close(0, RENDEZVOUS, PINNED)
    sites.close(1, PINNED)
    for site in range(2):
        sites.start(f"replica{site}", site, replica_of(sites, site))
    assert sites.wait("replica0", "replica1") == [0, 0], sites.texts()
    assert "sync 2 after iteration 4" in sites.log("replica0").read_text()
    assert [sites.refused(site) for site in range(2)] == ["", ""]


@full
def test_single_launch_needs_only_the_documented_ports(sites: Sites) -> None:
    """The port of torchrun instead of the rendezvous."""
    sites.close(0, LAUNCH, PINNED)
    sites.close(1, PINNED)
    for site in range(2):
        launch = ("torch.distributed.run", "--nnodes=2", f"--node-rank={site}",
                  "--nproc-per-node=1", f"--master-addr={sites.lab.address(0)}",
                  f"--master-port={LAUNCH}")  # fmt: skip
        sites.start(f"replica{site}", site, training(*launch, edit_num_replicas=2))
    assert sites.wait("replica0", "replica1") == [0, 0], sites.texts()
    assert [sites.refused(site) for site in range(2)] == ["", ""]


@full
def test_higher_address_connects_to_lower(sites: Sites) -> None:
    """Over gloo site B, with the higher address, needs no open port. Would catch a new version of
    gloo that connects in the other direction."""
    sites.close(0, RENDEZVOUS, PINNED)
    sites.close(1)
    for site in range(2):
        sites.start(f"replica{site}", site, replica_of(sites, site))
    assert sites.wait("replica0", "replica1") == [0, 0], sites.texts()


@full
def test_closed_ports_end_the_run_with_a_message(sites: Sites) -> None:
    """Only the rendezvous is open at site A. Would catch a hang."""
    sites.close(0, RENDEZVOUS)
    sites.close(1, PINNED)
    for site in range(2):
        sites.start(f"replica{site}", site, replica_of(sites, site))
    assert sites.wait("replica0", "replica1") == [1, 1]  # of torchrun
    for site in range(2):
        text = sites.log(f"replica{site}").read_text()
        assert "meeting group 0: not all 2 ranks joined" in text, text[-3000:]
        assert "exitcode  : 4" in text
    assert f"{sites.lab.address(1)} . 40" in sites.refused(0)


@full
@pytest.mark.skipif(not HAS_GROUPS, reason="elastic runs need a later torch")
def test_elastic_run_needs_only_the_documented_ports(sites: Sites) -> None:
    """A hub at site A; replica b is killed and comes back, which copies the state."""
    sites.close(0, HUB, PINNED)
    sites.close(1, PINNED)
    hub = f"{sites.lab.address(0)}:{HUB}"
    sites.start("hub", 0, ["megatron_edit", "hub", "--state-dir", "hub", "--listen", hub],
                EDIT_HUB_TOKEN=TOKEN)  # fmt: skip

    def start(name: str, site: int) -> None:
        flags = training(edit_hub=hub, edit_replica_name=name, edit_nominal_replicas=2,
                         train_iters=100_000, edit_sync_interval=10)  # fmt: skip
        sites.start(name, site, ["megatron_edit", *flags[2:]], EDIT_HUB_TOKEN=TOKEN)

    def has(text: str, after: int = 0) -> Callable[[], bool]:
        return lambda: text in sites.log("hub").read_text()[after:]

    start("a", 0)
    start("b", 1)
    wait_until(has("hub: commit"), 120, sites.texts)
    sites.lab.kill(sites.processes["b"])
    wait_until(has("hub: leave b"), 60, sites.texts)
    seen = len(sites.log("hub").read_text())
    start("b", 1)
    wait_until(has(": a, b (", seen), 120, sites.texts)
    assert [sites.refused(site) for site in range(2)] == ["", ""]


@contextmanager
def behind_nat(sites: Sites, inside: str) -> Iterator[tuple[str, ...]]:
    """Make a machine with address `inside` behind a router, which is site B.

    Yields:
        Words before a command that run it there.
    """
    name, gateway = fresh_prefix() + "inside", inside.rpartition(".")[0] + ".1"
    netlab.run("ip", "netns", "add", name)
    try:
        sites.call(1, "ip", "link", "add", "lan", "type", "veth", "peer", "name", INTERFACE,
                   "netns", name)  # fmt: skip
        sites.call(1, "ip", "address", "add", f"{gateway}/24", "dev", "lan")
        sites.call(1, "ip", "link", "set", "lan", "up")
        sites.call(1, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        sites.use_rules(1, MASQUERADE.format(interface=INTERFACE))
        netlab.run("ip", "-n", name, "address", "add", f"{inside}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            netlab.run("ip", "-n", name, "link", "set", interface, "up")
        netlab.run("ip", "-n", name, "route", "add", "default", "via", gateway)
        yield (tool("ip"), "netns", "exec", name)
    finally:
        for process in sites.processes.values():
            sites.lab.kill(process)
        netlab.run("ip", "netns", "delete", name)


@full
@pytest.mark.parametrize(("inside", "code"), [("192.168.5.2", 0), ("10.5.0.2", 1)])
def test_nat_works_only_for_a_higher_address(sites: Sites, inside: str, code: int) -> None:
    """Replica 1 is behind NAT: gloo publishes its inside address, to which replica 0 connects if
    that is the lower one. Would catch a page that promises too much, or too little."""
    with behind_nat(sites, inside) as prefix:
        sites.start("replica0", 0, replica_of(sites, 0))
        sites.start("replica1", 1, replica_of(sites, 1), prefix)
        assert sites.wait("replica0", "replica1") == [code, code], sites.texts()
