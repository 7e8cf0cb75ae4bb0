"""Describe the devices of a machine, and measure the copy rate of one.

    python benchmarks/gpu_parts/device.py cuda

Prints JSON. It runs in a separate process, as a context on a device would keep its memory.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch

COPIED_NUMEL, NUM_COPIES = 1 << 26, 10  # 256 MiB
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
        copy_rate: bytes per second that a device reads and writes in a copy within its memory.
    """

    name: str
    count: int
    versions: dict[str, str]
    copy_rate: float


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
        return Devices("CPU", 1, {}, copy_rate(device))
    torch.cuda.init()
    return Devices(
        name=torch.cuda.get_device_name(0),
        count=torch.cuda.device_count(),
        versions={"cuda": str(torch.version.cuda), "nccl": nccl_version()},
        copy_rate=copy_rate(device),
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


def copy_rate(device: str) -> float:
    """Return the bytes per second that a device reads and writes in a copy within its memory."""
    source = torch.ones(COPIED_NUMEL, device=device)
    target = torch.empty_like(source)
    seconds = [_seconds_of_copy(source, target) for _ in range(NUM_COPIES)]
    return 2 * float(source.nbytes) / min(seconds)


def _seconds_of_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    if source.device.type != "cuda":
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    print(json.dumps(asdict(describe_devices(sys.argv[1]))))
