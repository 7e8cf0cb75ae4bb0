"""The interface that gloo listens on between several machines."""

from __future__ import annotations

import socket
from collections import namedtuple
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from megatron_edit.comm import interfaces
from megatron_edit.comm.interfaces import choose_interfaces, host_facts, route_address
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError

LOOPS = ("gloo listens on 127.0.1.1 (where the machine's name leads)", "export X=eth0 there")
Address = namedtuple("Address", "family address netmask")


def routed(host: str, name: str = "eth0", address: str = "10.0.0.2", **more: Any) -> dict[str, Any]:
    """A machine with a route to the store over an interface."""
    return {"host": host, "reason": LOOPS, "interface": name, "address": address, **more}


def hosts_the_store(*networks: tuple[str, str], reason: Any = LOOPS) -> dict[str, Any]:
    """The machine of the store, whose own name leads to the loopback."""
    return {"host": "a", "reason": reason, "networks": networks}


def test_interface_on_the_route_is_chosen() -> None:
    """Also where the machine's name leads to the loopback, and other names on other machines.
    Would catch: gloo on 127.0.1.1, which no other machine reaches."""
    assert choose_interfaces([routed("a"), routed("b", "wg0", "10.0.0.3")]) == ["eth0", "wg0"]
    user = {"host": "b", "reason": None}
    assert choose_interfaces([routed("a"), user]) == ["eth0", ""]


def test_single_machine_keeps_the_default() -> None:
    assert choose_interfaces([routed("a"), routed("a"), hosts_the_store()]) == ["", "", ""]


def test_host_of_the_store_takes_the_network_of_the_others() -> None:
    """Its own route to the store is the loopback. Would catch: the first interface taken."""
    networks = ("ib0", "10.9.0.1/255.255.0.0"), ("eth0", "10.0.0.1/255.255.255.0")
    found = [hosts_the_store(*networks), routed("b"), routed("c", "eth1", "10.0.0.3")]
    assert choose_interfaces(found) == ["eth0", "eth0", "eth1"]


@pytest.mark.parametrize(
    "others",
    [
        [routed("b", address="192.168.1.2")],
        [routed("b"), routed("c", address="192.168.1.2")],
        [{"host": "b", "reason": None}],
        [routed("b", "", "fd00::2")],
    ],
    ids=["other network", "two networks", "chosen by the user", "no interface"],
)
def test_unreachable_machine_is_refused_with_a_remedy(others: list[dict[str, Any]]) -> None:
    """Would catch: a launch that waits ten minutes and ends with code 4."""
    with pytest.raises(UsageError) as caught:
        choose_interfaces([hosts_the_store(("eth0", "10.0.0.1/255.255.255.0")), *others])
    assert str(caught.value) == f"a: {LOOPS[0]}: other machines cannot reach it; {LOOPS[1]}"
    reachable = hosts_the_store(reason=None)  # its name leads to an address that others reach
    assert choose_interfaces([reachable, routed("b")]) == ["", "eth0"]


def test_facts_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: an interface of the user that is replaced, one that is down, a virtual one."""
    v4, v6 = socket.AF_INET, socket.AF_INET6
    addresses = {
        "lo": [Address(v4, "127.0.0.1", "255.0.0.0")],
        "docker0": [Address(v4, "172.17.0.1", "255.255.0.0")],
        "eth0": [Address(v4, "10.0.0.1", "255.255.255.0"), Address(v6, "fe80::1%eth0", None)],
        "eth1": [Address(v6, "fd00::1", None)],
        "down0": [Address(v4, "10.0.1.1", "255.255.255.0")],
    }
    stats = {name: SimpleNamespace(isup=name != "down0") for name in addresses}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(interfaces, "own_address", lambda: "127.0.1.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    routes = {"v4": "10.0.0.1", "v6": "fd00::1", "self": "127.0.0.1"}
    monkeypatch.setattr(interfaces, "route_address", lambda host, port: routes[host])
    for host, name in (("v4", "eth0"), ("v6", "eth1")):
        facts = host_facts(host)
        assert (facts["interface"], facts["address"]) == (name, routes[host])
    for host in ("self", ""):
        facts = host_facts(host)
        assert facts["networks"] == [("eth0", "10.0.0.1/255.255.255.0")]
        assert facts["reason"][1] == "export GLOO_SOCKET_IFNAME=eth0 there"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert host_facts("v4").keys() == {"host", "reason"}


def test_route_address_is_that_of_this_machine() -> None:
    """In both families. Would catch: an address of the other machine."""
    assert [route_address(host, 1) for host in ("127.0.0.1", "::1")] == ["127.0.0.1", "::1"]
    with pytest.raises(OSError, match=r".+"):
        route_address("no.such.host.invalid", 1)


def test_chosen_interface_is_in_the_environment_until_detachment() -> None:
    """For Megatron's own groups, too. Would catch: one that stays for the next run of the process,
    and one of the user that is lost."""
    store = dist.HashStore()
    for given in ({}, {"GLOO_SOCKET_IFNAME": ""}):
        world = ReplicaWorld(Placement(2, 0, 1, 0, True), store, store, timedelta(seconds=1))
        now: dict[str, str] = dict(given)
        world.enter_environment(now)
        assert now.get("GLOO_SOCKET_IFNAME") == given.get("GLOO_SOCKET_IFNAME")
        world.interface = "eth0"
        world.enter_environment(now)
        assert now["GLOO_SOCKET_IFNAME"] == "eth0"
        world.leave_environment(now)
        assert now == given
