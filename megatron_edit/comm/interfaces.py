"""The network interfaces of this machine, and the one that gloo would listen on."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address, ip_interface
from pathlib import Path

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"  # where gloo listens if the machine's name leads nowhere
_VIRTUAL = ("docker", "veth", "br-", "virbr")
_ADAPTERS = Path("/sys/class/infiniband")
_NO_SUBNET = ("fe80:0000:0000:0000", "0000:0000:0000:0000")  # the default one, and none


def interfaces() -> dict[str, list[str]]:
    """Return the IPv4 addresses of the interfaces that are up."""
    stats = psutil.net_if_stats()
    return {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
    }


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
