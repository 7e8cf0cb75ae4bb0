"""Measure exchanges with one late rank on a host of a network lab; print seconds as JSON."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_edit.comm.transport import Transport, stand_alone_group
from megatron_edit.comm.wire import Wire

NUMEL, REPEATS = 1_000_000, 6
LATE_SECONDS = 0.05
POLL_SECONDS = 0.002


def main(rank: int, address: str) -> None:
    """Run the rank of a host, with rank 0 at `address`; the late rank alternates."""
    store = dist.TCPStore(address, 29500, 2, is_master=rank == 0)
    wire, limit = Wire.of("int8"), timedelta(seconds=60)
    on_cpu = Transport("gloo", torch.device("cpu"))
    group = stand_alone_group(
        store, rank, 2, on_cpu, limit, "sync group", num_phases=wire.num_phases
    )
    values, seconds = torch.ones(NUMEL), []
    for repeat in range(REPEATS):
        group.all_gather(torch.zeros(1))  # start together, apart from the late rank
        began = time.monotonic()
        if rank == repeat % 2:
            time.sleep(LATE_SECONDS)
        exchange = wire.start(group, values)
        while not exchange.advance():
            time.sleep(POLL_SECONDS)
        seconds.append(time.monotonic() - began - LATE_SECONDS)
    group.all_gather(torch.zeros(1))
    group.close()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
