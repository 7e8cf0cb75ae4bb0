"""Outer state in memory and on disk: what all replicas share, and what is one replica's own.

A replica's own are the snapshots of delayed syncs and the error-feedback residuals of lossy wire
types; they lie in a folder of their own beside the shared state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_edit.checkpoint.folder import EDIT, OUTER, replica_local_folder
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.comm.wire import Wire
from megatron_edit.constants import ALL, FP32
from megatron_edit.engine import PendingState, UnitPlan, UnitTensors
from megatron_edit.host.checkpoint.outer import (
    AVERAGE,
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
    """Whose outer state it is.

    Attributes:
        replica: r. `num_replicas`: N.
        wire: type on the wire of this run.
        plan: this rank's shards.
        pieces: of this rank.
    """

    replica: int
    num_replicas: int
    wire: Wire
    plan: UnitPlan
    pieces: Sequence[LocalPiece]

    def owned(self, numel: int) -> slice:
        """The elements of a shard whose sum this rank encodes."""
        return self.wire.owned(numel, self.num_replicas, self.replica)


def is_replica_local(pending: Sequence[PendingSync], wire: Wire) -> bool:
    """Whether a replica has outer state of its own; the same answer on all its ranks.

    A pipeline stage may hold nothing of it. It saves and loads all the same: Megatron does that
    together.

    Args:
        pending: syncs of the replica that have not landed.
        wire: type on the wire; one that loses nothing if residuals are not wanted.
    """
    has_snapshot = any(sync.has_snapshot and not all(sync.excluded) for sync in pending)
    return has_snapshot or wire.has_residual


def replica_local_kinds(
    outer: Mapping[str, UnitTensors], pending: Sequence[PendingState], shards: RankShards
) -> Kinds:
    """Snapshots of syncs that have not landed, and error-feedback residuals, to be written.

    Args:
        outer: of this rank.
        pending: that have not landed.
        shards: whose it is.
    """
    kinds: dict[str, dict[str, Tensor]] = {}
    if snapshots := _snapshots_of(pending):
        kinds[SNAPSHOT] = snapshots
    if shards.wire.has_residual:
        kinds[SENT] = {name: unit["sent"] for name, unit in outer.items()}
        kinds[SUMMED] = {name: _spread(unit, shards) for name, unit in outer.items()}
    return kinds


def load_outer(
    checkpoint: Path, manifest: Manifest, pending: Sequence[PendingSync], shards: RankShards
) -> tuple[dict[str, UnitTensors], list[PendingState]]:
    """Outer state of this rank, and its syncs that had not landed, from a checkpoint.

    Args:
        checkpoint: its folder.
        manifest: of it.
        pending: that had not landed on this replica; none, where other replicas go on.
        shards: whose it is.

    Raises:
        UsageError: the checkpoint lacks a part of a parameter.
    """
    outer, syncs = (
        _room(shards.plan, has_anchor=manifest.has_anchor),
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
            for kind in (SENT, SUMMED):
                own[kind] = {s.name: torch.zeros(s.numel) for s in shards.plan.shards}
        load_outer_state(replica_local_folder(checkpoint, shards.replica), shards.pieces, own)
        for name, sent in own.get(SENT, {}).items():
            outer[name]["sent"] = sent
            outer[name]["summed"] = own[SUMMED][name][shards.owned(sent.numel())]
    return outer, syncs


def load_pending(
    checkpoint: Path, manifest: Manifest, replica: int, shards: RankShards
) -> list[PendingState]:
    """What had not landed on a saved replica, to land on its parameters in this rank.

    Args:
        checkpoint: its folder.
        manifest: of it.
        replica: of those that saved.
        shards: this rank's.
    """
    # Without moments: they belong to inner state that is not there.
    saved = [replace(sync, moments=()) for sync in manifest.replicas[replica].pending]
    syncs = _pending(saved, shards.plan)
    if is_replica_local(saved, Wire.of(FP32)):
        averages = {name: t for sync in syncs for name, t in sync.averages.items()}
        kinds = {AVERAGE: averages, SNAPSHOT: _snapshots_of(syncs)}
        load_outer_state(replica_local_folder(checkpoint, replica), shards.pieces, kinds)
    return syncs


def _snapshots_of(pending: Sequence[PendingState]) -> dict[str, Tensor]:
    return {name: tensor for sync in pending for name, tensor in sync.snapshots.items()}


def _spread(unit: UnitTensors, shards: RankShards) -> Tensor:
    """What this rank has lost of the sums that it encodes, in its place in the whole shard."""
    numel = unit["momentum"].numel()
    where = shards.owned(numel)
    spread = torch.zeros(numel)
    spread[where] = unit["summed"][: where.stop - where.start].cpu()
    return spread


def _room(plan: UnitPlan, *, has_anchor: bool) -> dict[str, UnitTensors]:
    """Zeros on the CPU, to be filled."""
    outer = {}
    for shard in plan.shards:
        outer[shard.name] = UnitTensors(momentum=torch.zeros(shard.numel))
        if has_anchor:
            outer[shard.name]["anchor"] = torch.zeros(shard.numel)
    return outer


def _pending(saved: Sequence[PendingSync], plan: UnitPlan) -> list[PendingState]:
    """These syncs, with room for the tensors of this rank."""
    numels = {shard.name: shard.numel for shard in plan.shards}

    def state_of(sync: PendingSync) -> PendingState:
        held = [(i, name) for i, name in enumerate(sync.units) if name in numels]
        rollback = sync.tables["rollback"]
        return PendingState(
            sync,
            averages={
                name: torch.zeros(numels[name])
                for i, name in held
                if not sync.is_stepped and not rollback[i]
            },
            snapshots={
                name: torch.zeros(numels[name])
                for i, name in held
                if sync.has_snapshot and not sync.excluded[i]
            },
            moments={
                kind: {name: torch.zeros(numels[name]) for i, name in held if not rollback[i]}
                for kind in sync.moments
            },
        )

    return [state_of(sync) for sync in saved]
