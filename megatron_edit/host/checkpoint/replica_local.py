"""Outer state in memory and on disk: shared by all replicas, or local to one replica.

Replica-local are the snapshots of delayed syncs and the error-feedback residuals of lossy wire
types, also of averaged gradients; they are stored in a separate folder for each replica.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from msgspec import structs
from torch import Tensor

from megatron_edit.checkpoint.files import REMEDY
from megatron_edit.checkpoint.folder import EDIT, OUTER, replica_local_folder
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.comm.compressed_all_reduce import Residual
from megatron_edit.comm.wire import Wire
from megatron_edit.constants import ALL, FP32
from megatron_edit.engine import PendingState, UnitPlan, UnitTensors
from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.outer import (
    AVERAGE,
    GRADIENT_SENT,
    GRADIENT_SUMMED,
    SENT,
    SNAPSHOT,
    SUMMED,
    Kinds,
    LocalPiece,
    load_outer_state,
    shared_kinds,
)
from megatron_edit.saved_state import PendingSync


@dataclass(frozen=True)
class RankShards:
    """This rank's shards of the outer state, or of the gradients.

    Attributes:
        replica: r. `num_replicas`: N.
        wire: type on the wire of this run; of gradients where the pieces are theirs.
        plan: this rank's shards.
    """

    replica: int
    num_replicas: int
    wire: Wire
    plan: UnitPlan
    pieces: Sequence[LocalPiece]

    def owned(self, numel: int) -> slice:
        """Return the elements of a shard whose sum this rank encodes."""
        return self.wire.owned(numel, self.num_replicas, self.replica)


def is_replica_local(pending: Sequence[PendingSync], wire: Wire) -> bool:
    """Return whether a replica has replica-local outer state; the same on all its ranks.

    A pipeline stage may hold none of it, but saves and loads nevertheless: both are collective.

    Args:
        pending: syncs of the replica that have not landed.
        wire: type on the wire; a lossless one to leave out residuals.
    """
    has_snapshot = any(sync.has_snapshot and not all(sync.excluded) for sync in pending)
    return has_snapshot or wire.has_residual


def replica_local_kinds(
    outer: Mapping[str, UnitTensors], pending: Sequence[PendingState], shards: RankShards
) -> Kinds:
    """Return the snapshots of syncs that have not landed, and error-feedback residuals.

    Args:
        pending: syncs that have not landed.
    """
    kinds: dict[str, dict[str, Tensor]] = {}
    if snapshots := _snapshots_of(pending):
        kinds[SNAPSHOT] = snapshots
    if shards.wire.has_residual:
        kinds[SENT] = {name: unit["sent"] for name, unit in outer.items()}
        if shards.wire.sum_codec is not None:
            kinds[SUMMED] = {
                name: _scatter_residual(unit["sent"].numel(), unit["summed"], shards)
                for name, unit in outer.items()
            }
    return kinds


def gradient_kinds(residuals: Sequence[Residual], shards: RankShards) -> Kinds:
    """Return the error-feedback residuals of averaged gradients, by number of the shard.

    Args:
        residuals: of this rank's gradient shards, in order.
        shards: of this rank, with the pieces of gradients.
    """
    return {
        GRADIENT_SENT: {str(i): each.sent for i, each in enumerate(residuals)},
        GRADIENT_SUMMED: {
            str(i): _scatter_residual(each.sent.numel(), each.summed, shards)
            for i, each in enumerate(residuals)
        },
    }


def has_gradient_residuals(manifest: Manifest, wire: Wire, num_replicas: int) -> bool:
    """Return whether a checkpoint has residuals of averaged gradients for these replicas.

    Args:
        wire: type of averaged gradients on the wire of this run.
        num_replicas: N of this run.
    """
    is_same = (wire.name, num_replicas) == (manifest.gradient_wire, manifest.num_replicas)
    return manifest.is_warmup and wire.has_residual and is_same


def load_gradients(checkpoint: Path, shards: RankShards, numels: Sequence[int]) -> list[Residual]:
    """Load the residuals of averaged gradients from a checkpoint that has them.

    Args:
        shards: of this rank, with the pieces of gradients.
        numels: elements of the gradient shards.

    Raises:
        UsageError: the checkpoint lacks a part of a parameter.
    """
    full = {
        kind: {str(i): torch.zeros(numel) for i, numel in enumerate(numels)}
        for kind in (GRADIENT_SENT, GRADIENT_SUMMED)
    }
    load_outer_state(replica_local_folder(checkpoint, shards.replica), shards.pieces, full)
    found = []
    for number, sent in full[GRADIENT_SENT].items():
        owned, summed = shards.owned(sent.numel()), full[GRADIENT_SUMMED][number]
        padded = torch.zeros(shards.wire.owner_numel(sent.numel(), shards.num_replicas))
        padded[: owned.stop - owned.start] = summed[owned]
        found.append(Residual(sent, padded))
    return found


def load_outer(
    checkpoint: Path, manifest: Manifest, pending: Sequence[PendingSync], shards: RankShards
) -> tuple[dict[str, UnitTensors], list[PendingState]]:
    """Load this rank's outer state, and its syncs that had not landed, from a checkpoint.

    Args:
        pending: syncs that had not landed on this replica; none where a new round begins.

    Raises:
        UsageError: the checkpoint lacks a part of a parameter.
    """
    outer, syncs = (
        _allocate_outer(shards.plan, has_anchor=manifest.has_anchor),
        _pending(pending, shards.plan),
    )
    has_residuals = shards.wire.name == manifest.wire and manifest.form == ALL
    is_same = shards.num_replicas == manifest.num_replicas and not manifest.is_warmup
    wire = shards.wire if has_residuals and is_same else Wire.of(FP32)
    kinds = shared_kinds(outer, syncs, has_anchor=manifest.has_anchor)
    load_outer_state(checkpoint / EDIT / OUTER, shards.pieces, kinds)
    if is_replica_local(pending, wire):
        own: dict[str, dict[str, Tensor]] = {}
        if snapshots := _snapshots_of(syncs):
            own[SNAPSHOT] = snapshots
        if wire.has_residual:
            for kind in (SENT,) if wire.sum_codec is None else (SENT, SUMMED):
                own[kind] = {s.name: torch.zeros(s.numel) for s in shards.plan.shards}
        load_outer_state(replica_local_folder(checkpoint, shards.replica), shards.pieces, own)
        for name, sent in own.get(SENT, {}).items():
            outer[name]["sent"] = sent
            if SUMMED in own:
                outer[name]["summed"] = own[SUMMED][name][shards.owned(sent.numel())]
    return outer, syncs


def load_pending(
    checkpoint: Path, manifest: Manifest, replica: int, shards: RankShards
) -> list[PendingState]:
    """Load the syncs of a saved replica that had not landed, to land them here."""
    # Without moments: the inner optimizer state that they belong to is not loaded.
    saved = [structs.replace(sync, moments=()) for sync in manifest.replicas[replica].pending]
    syncs = _pending(saved, shards.plan)
    if is_replica_local(saved, Wire.of(FP32)):
        averages = {name: t for sync in syncs for name, t in sync.averages.items()}
        kinds = {AVERAGE: averages, SNAPSHOT: _snapshots_of(syncs)}
        load_outer_state(replica_local_folder(checkpoint, replica), shards.pieces, kinds)
    return syncs


def _snapshots_of(pending: Sequence[PendingState]) -> dict[str, Tensor]:
    return {name: tensor for sync in pending for name, tensor in sync.snapshots.items()}


def _scatter_residual(numel: int, summed: Tensor, shards: RankShards) -> Tensor:
    """Return the residual of the sums that this rank encodes, at its position in the full shard.

    Args:
        summed: fp32 [>= owned].
    """
    where = shards.owned(numel)
    spread = torch.zeros(numel)
    spread[where] = summed[: where.stop - where.start].cpu()
    return spread


def _allocate_outer(plan: UnitPlan, *, has_anchor: bool) -> dict[str, UnitTensors]:
    """Allocate zeros on the CPU, to be filled by a load."""
    outer = {}
    for shard in plan.shards:
        outer[shard.name] = UnitTensors(momentum=torch.zeros(shard.numel))
        if has_anchor:
            outer[shard.name]["anchor"] = torch.zeros(shard.numel)
    return outer


def _pending(saved: Sequence[PendingSync], plan: UnitPlan) -> list[PendingState]:
    """Return these syncs with zero tensors of this rank, to be filled by a load."""
    numels = {shard.name: shard.numel for shard in plan.shards}

    def state_of(sync: PendingSync) -> PendingState:
        local = [(i, name) for i, name in enumerate(sync.units) if name in numels]
        rollback = sync.tables["rollback"]
        return PendingState(
            sync,
            averages={
                name: torch.zeros(numels[name])
                for i, name in local
                if not sync.is_stepped and not rollback[i]
            },
            snapshots={
                name: torch.zeros(numels[name])
                for i, name in local
                if sync.has_snapshot and not sync.excluded[i]
            },
            moments={
                kind: {name: torch.zeros(numels[name]) for i, name in local if not rollback[i]}
                for kind in sync.moments
            },
        )

    return [state_of(sync) for sync in saved]


# ---- States of all random number generators of a rank, saved in one small file for each rank
#
# Megatron saves one set for all data-parallel ranks with the same part of the model. In timed
# rounds replicas have drawn different numbers, so each rank saves its own.


def streams_name(replica: int) -> str:
    """Return the file name of this rank's random streams."""
    return _name(replica, parallel_state.get_data_parallel_rank(with_context_parallel=True))


def save_streams(path: Path) -> None:
    """Write the present states of this rank's random streams.

    Raises:
        OSError: the file cannot be written.
    """
    data = BytesIO()  # if it cannot write a file, `torch.save` does not report the cause
    torch.save(_capture(), data)
    path.write_bytes(data.getbuffer())


def load_streams(folder: Path, replica: int) -> None:
    """Restore this rank's random streams from a replica that was saved with the same TP and PP.

    If the replica had fewer data-parallel ranks, those of its first rank are used.

    Raises:
        UsageError: the file is damaged.
    """
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for path in (folder / _name(replica, rank), folder / _name(replica, 0)):
        if path.is_file():
            try:
                _restore(torch.load(path, weights_only=True))
            except Exception as error:
                raise UsageError(
                    str(path), f"is broken ({type(error).__name__})", REMEDY
                ) from error
            return


def _name(replica: int, data_rank: int) -> str:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor = parallel_state.get_tensor_model_parallel_rank()
    return f"replica{replica}_pp{stage}_tp{tensor}_dp{data_rank}.pt"


def _capture() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {
            name: tensor_parallel.convert_cuda_rng_state(state, to_graphable=False)
            for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
        },
    }


def _restore(streams: dict[str, Any]) -> None:
    version, numbers, gauss = streams["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, position, has_gauss, cached = streams["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(streams["torch"])
    torch.cuda.set_rng_state(streams["device"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    is_graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name: tensor_parallel.convert_cuda_rng_state(state, to_graphable=is_graphable)
            for name, state in streams["tracker"].items()
        }
    )
