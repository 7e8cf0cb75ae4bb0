"""The memory of the rounds, taken before training: a lack of it is found at the start."""

from __future__ import annotations

from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.engine import EditEngine
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.host.checkpoint.choosing import check_on_all_ranks


def reserve_memory(engine: EditEngine, world: ReplicaWorld) -> None:
    """Allocate what the rounds need beside the model, before the warm-up or a load.

    Collective: all ranks of all replicas.

    Raises:
        UsageError: some rank has too little memory; on every rank.
    """

    def reserve() -> None:
        try:
            engine.reserve_memory()
        except RuntimeError as error:  # also torch.OutOfMemoryError
            nbytes = engine.status.state_bytes_per_rank
            raise UsageError(
                f"about {nbytes / 1e9:.3g} GB per rank for anchor, outer momentum and syncs",
                f"must fit beside the model ({str(error).partition('. ')[0]})",
                f"use more ranks per replica, or {flag('offload')}",
            ) from error

    check_on_all_ranks(world, "memory", reserve, what="memory")
