"""The network interfaces of this machine, and the one that gloo listens on.

Without `GLOO_SOCKET_IFNAME` gloo listens on the address of the machine's own name, which other
machines may not reach: on Debian it is 127.0.1.1. Between several machines the interface on the
route to the store that all of them reach is chosen instead.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_interface
from pathlib import Path
from typing import Any

import psutil

from megatron_edit.errors import UsageError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"  # where gloo listens if the machine's name leads nowhere
_VIRTUAL = ("docker", "veth", "br-", "virbr")
_ADAPTERS = Path("/sys/class/infiniband")
_NO_SUBNET = ("fe80:0000:0000:0000", "0000:0000:0000:0000")  # the default one, and none


def interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of the interfaces that are up."""
    found = dict[str, list[str]]()
    for name, family, address, _ in _addresses():
        found.setdefault(name, []).extend([address] if family == socket.AF_INET else [])
    return found


def _addresses() -> Iterator[tuple[str, int, str, str]]:
    """Yield interface, family, address and network mask, of the interfaces that are up."""
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name in stats and stats[name].isup:
            for each in addresses:
                yield name, each.family, each.address.partition("%")[0], each.netmask or ""


def fabrics(adapters: Path = _ADAPTERS) -> tuple[str, ...]:
    """Return what the InfiniBand and RoCE adapters of this machine are known to reach.

    That is the machine itself by its name, the IPv4 networks of the adapters' interfaces, and the
    subnets of InfiniBand by their prefixes, except the default prefix, which many have. Empty if
    there is no adapter.

    Args:
        adapters: folder in which the kernel lists them.
    """
    if not (devices := sorted(adapters.glob("*"))):
        return ()
    owned = {path.name for device in devices for path in device.glob("device/net/*")}
    found = set[str]()
    for name, addresses in psutil.net_if_addrs().items():
        if name in owned or name.startswith("ib"):  # IP over InfiniBand: ib0, ibp3s0, ibs1
            found |= {
                str(ip_interface(f"{each.address}/{each.netmask}").network)
                for each in addresses
                if each.family == socket.AF_INET and each.netmask
            }
    for file in (path for device in devices for path in device.glob("ports/*/gids/0")):
        with suppress(OSError):
            prefix = file.read_text(encoding="ascii").strip()[: len(_NO_SUBNET[0])]
            found |= {prefix} - set(_NO_SUBNET)
    return (socket.gethostname(), *sorted(found))


def own_address() -> str:
    """Return the address of this machine's name, on which gloo listens by default."""
    with suppress(OSError):
        for family, kind, number, _, place in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, number) as probe:
                probe.bind(place)
                return str(place[0])
    return _LOOPBACK


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from this machine only."""
    return ip_address(address.partition("%")[0]).is_loopback


def outer_interfaces(there: Mapping[str, list[str]]) -> list[str]:
    """Return the interfaces that lead to other machines, as far as their names tell."""
    return [
        name for name, found in there.items()
        if found and name != "lo" and not name.startswith(_VIRTUAL)
    ]  # fmt: skip


def why_unreachable() -> tuple[str, str] | None:
    """Return where gloo would listen and the remedy, if other machines cannot reach it there."""
    there = interfaces()
    remedy = f"export {GLOO_INTERFACE}={(outer_interfaces(there) or ['eth0'])[0]} there"
    chosen = os.environ.get(GLOO_INTERFACE, "")
    names = [name for name in chosen.split(",") if name]
    if any(name not in there for name in names):
        return f"{GLOO_INTERFACE}={chosen} (no such interface)", remedy
    address = (there[names[0]] or ["::"])[0] if names else own_address()
    if not is_loopback(address):
        return None
    where = f"{GLOO_INTERFACE}={chosen}" if chosen else "where the machine's name leads"
    return f"gloo listens on {address} ({where})", remedy


def route_address(host: str, port: int) -> str:
    """Return this machine's address on the way to another one. Sends nothing.

    Args:
        host, port: the other one's.

    Raises:
        OSError: there is no way, or no such host.
    """
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0]).partition("%")[0]


def host_facts(store_host: str) -> dict[str, Any]:
    """Return what `choose_interfaces` needs to know about this machine, as JSON values.

    Args:
        store_host: of the store that all ranks reach; empty if not known.

    Returns:
        `host`: its name. `reason`: from `why_unreachable`. `interface` and `address`: those on the
        route to the store, unless that is the loopback or the user has chosen an interface.
        `networks`: else, if the user has chosen none, interfaces and addresses with the lengths
        of their networks' prefixes.
    """
    facts: dict[str, Any] = {"host": socket.gethostname(), "reason": why_unreachable()}
    if os.environ.get(GLOO_INTERFACE):
        return facts
    address = ""
    with suppress(OSError):
        address = route_address(store_host, 1) if store_host else ""
    if address and not is_loopback(address):
        there = {found: name for name, _, found, _ in _addresses()}
        return facts | {"interface": there.get(address, ""), "address": address}
    outer = outer_interfaces(interfaces())
    networks = [
        (name, f"{address}/{mask}")
        for name, family, address, mask in _addresses()
        if family == socket.AF_INET and name in outer
    ]
    return facts | {"networks": networks}


def choose_interfaces(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Choose gloo's interface for each rank. No communication.

    Args:
        facts: `host_facts` of all ranks.

    Returns:
        Names; empty where the default stays, or what the user has set.

    Raises:
        UsageError: there are several machines, and the others cannot reach one of them.
    """
    if len({each["host"] for each in facts}) == 1:
        return [""] * len(facts)
    theirs = sorted({each["address"] for each in facts if each.get("interface")})
    chosen = list[str]()
    for each in facts:
        name = each.get("interface") or _in_network(each.get("networks", ()), theirs)
        if not name and each["reason"] is not None:
            where, remedy = each["reason"]
            raise UsageError(f"{each['host']}: {where}", "other machines cannot reach it", remedy)
        chosen.append(name)
    return chosen


def _in_network(networks: Sequence[Sequence[str]], theirs: Sequence[str]) -> str:
    """Return the interface whose network has all these addresses; empty if none has."""
    for name, address in networks:
        network = ip_interface(address).network
        if theirs and all(ip_address(other) in network for other in theirs):
            return name
    return ""
