"""Reproduce a double free in torch's coalesced all-gather over gloo, without Megatron.

    python benchmarks/coalesced_gathers.py              # coalesced: crashes, mostly within a minute
    python benchmarks/coalesced_gathers.py --separate   # one by one, like our CPU backend

AddressSanitizer reports `c10d::ProcessGroupGloo::runLoop`, in two threads. With gcc's:

    ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:fast_unwind_on_malloc=0 \\
        LD_PRELOAD=$(gcc -print-file-name=libasan.so) python benchmarks/coalesced_gathers.py

One rank is enough: several gathers of one group must end at about the same time. With
`--in-flight 1` it does not crash.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    """Run gathers for some seconds; print their number."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--separate", action="store_true", help="do not coalesce")
    parser.add_argument("--seconds", type=float, default=60.0, help="(default: 60)")
    parser.add_argument("--in-flight", type=int, default=8, help="gathers at once (default: 8)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # about the deprecated name of the single gather
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    buffers = [torch.zeros(256) for _ in range(args.in_flight)]
    count, end = 0, time.monotonic() + args.seconds
    while time.monotonic() < end:
        works = [start(buffer, args.separate) for buffer in buffers]
        for work in works:
            work.wait()
        count += len(works)
    print(f"{count} gathers without a crash")
    dist.destroy_process_group()


def start(buffer: torch.Tensor, separate: bool) -> Any:
    """Start an in-place gather of a buffer from the only rank; returns its handle."""
    if separate:
        return dist.all_gather_into_tensor(buffer, buffer[:], async_op=True)
    with dist._coalescing_manager(async_ops=True) as handle:  # as Megatron calls it
        dist.all_gather_into_tensor(buffer, buffer[:], async_op=True)
    return handle


if __name__ == "__main__":
    main()
