"""Describe the devices of a machine.

    python benchmarks/gpu_parts/device.py cuda

Prints JSON. It runs in a separate process, as a context on a device would keep its memory.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch

SECONDS = 120.0


class DeviceError(Exception):
    """There is no usable device of the given type."""


@dataclass(frozen=True)
class Devices:
    """The devices of this machine.

    Attributes:
        name: of the first device.
        count: number of devices.
        versions: of CUDA and NCCL.
    """

    name: str
    count: int
    versions: dict[str, str]


def look(device: str) -> Devices:
    """Describe the devices of a type, `cuda` or `cpu`, in another process.

    Raises:
        DeviceError: torch can use no such device.
    """
    argv = [sys.executable, __file__, device]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"no answer within {SECONDS:g} s; see nvidia-smi") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DeviceError(f"torch finds no GPU ({reason}); without one: --device cpu")
    return Devices(**json.loads(done.stdout.splitlines()[-1]))


def describe_devices(device: str) -> Devices:
    """Describe the devices of a type in this process."""
    if device == "cpu":
        return Devices("CPU", 1, {})
    torch.cuda.init()
    return Devices(
        name=torch.cuda.get_device_name(0),
        count=torch.cuda.device_count(),
        versions={"cuda": str(torch.version.cuda), "nccl": nccl_version()},
    )


def nccl_version() -> str:
    """Return the version of the loaded NCCL: torch reports the one that it was compiled with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(
            ctypes.byref(number)
        )  # loaded by torch, or before
    except (OSError, AttributeError):  # part of torch
        return ".".join(map(str, torch.cuda.nccl.version()))
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


if __name__ == "__main__":
    print(json.dumps(asdict(describe_devices(sys.argv[1]))))
