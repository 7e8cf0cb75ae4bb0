"""Findings on this machine: versions, devices, and the interfaces that gloo and NCCL would use."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from megatron_edit import __version__
from megatron_edit.comm.interfaces import GLOO_INTERFACE, interfaces, why_unreachable
from megatron_edit.host.devices import unusable_gpus

_NCCL = "NCCL_SOCKET_IFNAME"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_MANY_CONNECTIONS = "32"


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    HINT = "hint"  # works, but could be better
    BAD = "bad"  # training would fail


@dataclass(frozen=True)
class DoctorFinding:
    """One finding.

    Attributes:
        name: what was checked.
        value: the result.
        level: severity.
        remedy: what to do; empty if nothing.
    """

    name: str
    value: str
    level: Level = Level.OK
    remedy: str = ""


def table(findings: Iterable[DoctorFinding]) -> str:
    """Return the findings as aligned lines, each with its remedy below it."""
    rows = list(findings)
    width = max((len(row.name) for row in rows), default=0)
    lines = []
    for row in rows:
        lines.append(f"{row.level:<4}  {row.name:<{width}}  {row.value}")
        if row.remedy:
            lines.append(f"{'':4}  {'':{width}}  -> {row.remedy}")
    return "\n".join(lines) + "\n"


def local_findings(env: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Yield findings on versions and devices. Slow."""
    for name, version in versions().items():
        yield DoctorFinding(name, version)
    yield from device_findings(env)


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


def interface_findings(env: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Yield findings on the interfaces that gloo and NCCL would use."""
    shown = (f"{name} {' '.join(found)}" for name, found in interfaces().items() if found)
    yield DoctorFinding("interfaces", ", ".join(shown) or "none")
    for variable in (GLOO_INTERFACE, _NCCL):
        if chosen := env.get(variable):
            yield DoctorFinding(variable, chosen)
    if (problem := why_unreachable()) is not None:
        where, remedy = problem
        level = Level.BAD if missing_interface(env) else Level.HINT
        remedy = f"other machines cannot reach it: for a training with them {remedy}"
        yield DoctorFinding("gloo's interface", where, level, remedy)


def missing_interface(env: Mapping[str, str]) -> str:
    """Return an interface that gloo is told to use and this machine lacks; empty if none is."""
    there = interfaces()
    chosen = env.get(GLOO_INTERFACE, "").split(",")
    return next((name for name in chosen if name and name not in there), "")


def machine_facts() -> dict[str, Any]:
    """Return the facts about this machine that other ranks of a launch need, as JSON values."""
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "missing": missing_interface(os.environ),
    }
