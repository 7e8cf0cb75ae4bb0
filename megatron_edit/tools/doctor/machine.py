"""This machine: versions, devices, and the interfaces that gloo and NCCL would use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_edit import __version__
from megatron_edit.comm.interfaces import (
    GLOO_INTERFACE,
    interfaces,
    is_loopback,
    outer_interfaces,
    own_address,
)
from megatron_edit.host.devices import unusable_gpus
from megatron_edit.tools.doctor.finding import DoctorFinding, Level

_NCCL = "NCCL_SOCKET_IFNAME"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_MANY_CONNECTIONS = "32"


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines."""
    found = {
        "megatron_edit": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda of torch": str(torch.version.cuda or "none"),
    }
    for package in ("transformer-engine", "apex"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def device_findings(env: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Yield findings on CUDA devices, NCCL, and the number of hardware queues."""
    if (unusable := unusable_gpus(env)) is not None:
        remedy = "install a torch that can use them, or train with --edit-device cpu"
        yield DoctorFinding("CUDA devices", f"none, but {unusable}", Level.BAD, remedy)
        return
    if not torch.cuda.is_available():
        remedy = "" if torch.version.cuda is None else "check the driver, CUDA_VISIBLE_DEVICES"
        yield DoctorFinding(
            "CUDA devices", "none: Megatron would run on CPU and gloo", Level.HINT, remedy
        )
        return
    count = torch.cuda.device_count()
    yield DoctorFinding("CUDA devices", f"{count} x {torch.cuda.get_device_name(0)}")
    yield DoctorFinding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    major, _ = torch.cuda.get_device_capability(0)
    yield connections_finding(env, major)


def connections_finding(env: Mapping[str, str], major: int) -> DoctorFinding:
    """Return the finding on the number of hardware queues.

    Args:
        major: of the GPU's compute capability; below 10 (Blackwell) Megatron requires one queue
            with tensor or context parallelism.
    """
    value = env.get(_CONNECTIONS, "not set")
    if value == _MANY_CONNECTIONS:
        return DoctorFinding(_CONNECTIONS, value)
    remedy = f"export {_CONNECTIONS}={_MANY_CONNECTIONS}: more exchanges overlap"
    if major < 10:
        remedy += "; 1 only with tensor or context parallelism, where Megatron requires it"
    return DoctorFinding(_CONNECTIONS, value, Level.HINT, remedy)


def interface_findings(
    env: Mapping[str, str], there: Mapping[str, list[str]], address: str, *, is_single_host: bool
) -> Iterator[DoctorFinding]:
    """Yield findings on the interfaces that gloo and NCCL would use.

    Args:
        there: addresses by interface, from `interfaces`.
        address: from `own_address`.
        is_single_host: whether all ranks are on one machine, where the loopback is enough.
    """
    shown = ", ".join(f"{name} {' '.join(found)}" for name, found in there.items() if found)
    yield DoctorFinding("interfaces", shown or "none")
    outer = outer_interfaces(there)
    preferred = outer[0] if outer else "eth0"
    for variable in (GLOO_INTERFACE, _NCCL):
        if chosen := env.get(variable):
            found = _chosen(variable, chosen, there)
            leads_out = variable == _NCCL or chosen != "lo"
            yield found if leads_out else _on_loopback(found, preferred, is_single_host)
    if not env.get(GLOO_INTERFACE):
        name = next((name for name, found in there.items() if address in found), "none")
        value = f"{name}, where this machine's name leads ({address})"
        found = DoctorFinding("gloo's interface", value)
        leads_out = not is_loopback(address)
        yield found if leads_out else _on_loopback(found, preferred, is_single_host)
    if not env.get(_NCCL) and torch.cuda.is_available() and len(outer) > 1 and not is_single_host:
        remedy = f"export {_NCCL}={preferred} to be sure"
        yield DoctorFinding("NCCL's interface", f"one of {', '.join(outer)}", Level.HINT, remedy)


def _on_loopback(found: DoctorFinding, preferred: str, is_single_host: bool) -> DoctorFinding:
    """Return the finding on an interface that other machines cannot reach."""
    remedy = f"export {GLOO_INTERFACE}={preferred}"
    if not is_single_host:
        return replace(found, level=Level.BAD, remedy=remedy)
    remedy = f"other machines cannot reach it: for a training with them {remedy}"
    return replace(found, level=Level.HINT, remedy=remedy)


def _chosen(variable: str, chosen: str, there: Mapping[str, list[str]]) -> DoctorFinding:
    """Check a chosen interface. NCCL takes prefixes, ^ for others, = for full names; gloo names."""
    if chosen.startswith("^"):
        return DoctorFinding(variable, chosen)
    names = [name.removeprefix("=") for name in chosen.split(",")]
    missing = [name for name in names if not any(_matches(name, x, variable) for x in there)]
    if missing:
        remedy = f"use one of {', '.join(there)}"
        return DoctorFinding(variable, f"{chosen}: there is no {missing[0]}", Level.BAD, remedy)
    return DoctorFinding(variable, chosen)


def _matches(word: str, name: str, variable: str) -> bool:
    return name.startswith(word) if variable == _NCCL else name == word


def machine_facts() -> dict[str, Any]:
    """Return the facts about this machine that other ranks of a launch need, as JSON values."""
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "interfaces": interfaces(),
        "address": own_address(),
        "chosen": {
            name: os.environ[name] for name in (GLOO_INTERFACE, _NCCL) if name in os.environ
        },
    }


def unusable_interfaces(machine: Mapping[str, Any], *, is_single_host: bool) -> list[DoctorFinding]:
    """Return why gloo or NCCL could not connect a rank on a machine; empty if they can.

    Args:
        machine: from `machine_facts`.
        is_single_host: whether all ranks are on one machine.
    """
    found = interface_findings(
        machine["chosen"], machine["interfaces"], machine["address"], is_single_host=is_single_host
    )
    return [finding for finding in found if finding.level is Level.BAD]
