"""What a machine's devices are, and how fast one copies within its memory.

    python benchmarks/gpu_parts/device.py cuda

Prints JSON. A process of its own: a context on a device would stay, and take its memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import torch

COPIED_NUMEL, NUM_COPIES = 1 << 26, 10  # 256 MiB
SECONDS = 120.0


class DeviceError(Exception):
    """There is no such device."""


@dataclass(frozen=True)
class Devices:
    """Those of this machine.

    Attributes:
        name: of the first.
        count: how many there are.
        versions: of what belongs to them.
        copy_rate: bytes per second that are read and written when memory is copied within one.
    """

    name: str
    count: int
    versions: dict[str, str]
    copy_rate: float


def look(device: str) -> Devices:
    """`cuda` or `cpu`, in another process.

    Raises:
        DeviceError: there is none that torch can use.
    """
    argv = [sys.executable, __file__, device]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"it did not answer in {SECONDS:g} s; see nvidia-smi") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DeviceError(f"torch finds no GPU ({reason}); without one: --device cpu")
    return Devices(**json.loads(done.stdout.splitlines()[-1]))


def find(device: str) -> Devices:
    """In this process."""
    if device == "cpu":
        return Devices("CPU", 1, {}, copy_rate(device))
    torch.cuda.init()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Devices(
        name=torch.cuda.get_device_name(0),
        count=torch.cuda.device_count(),
        versions={"cuda": str(torch.version.cuda), "nccl": nccl},
        copy_rate=copy_rate(device),
    )


def copy_rate(device: str) -> float:
    """Bytes per second that the device reads and writes when it copies within its memory."""
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
    print(json.dumps(asdict(find(sys.argv[1]))))
