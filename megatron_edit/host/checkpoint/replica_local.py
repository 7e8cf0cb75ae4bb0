"""Outer state of each replica alone: snapshots of delayed syncs, debts of lossy wire types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_edit.checkpoint.folder import EDIT, OUTER, own_folder
from megatron_edit.checkpoint.manifest import ALL, Manifest, PendingSync
from megatron_edit.comm.collectives import Group
from megatron_edit.comm.wire import Wire
from megatron_edit.engine.engine import EditEngine
from megatron_edit.engine.pending import SNAPSHOT, bring_back, pending_of, tensors_of
from megatron_edit.engine.sync.inflight import InflightSync
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.host.checkpoint.outer import (
    SENT,
    SUMMED,
    Kinds,
    Piece,
    kinds_of,
    load_outer_state,
)


def has_own(pending: Sequence[PendingSync], wire: Wire) -> bool:
    """Whether a replica has outer state of its own; the same answer on all its ranks.

    A pipeline stage may hold nothing of it. It saves and loads all the same: Megatron does that
    together.

    Args:
        pending: syncs of the replica that have not landed.
        wire: type on the wire; one that loses nothing if what is owed is not wanted.
    """
    has_snapshot = any(sync.has_snapshot and not all(sync.excluded) for sync in pending)
    return has_snapshot or wire.has_residual


@dataclass(frozen=True)
class OwnState:
    """Outer state of one replica alone.

    Attributes:
        kinds: to write, or to fill.
        owed: by unit, what this rank still owes of the sums that it encodes, and where its elements
            lie in the shard; the kind `summed` has it spread over whole shards.
    """

    kinds: Kinds
    owed: Mapping[str, tuple[Tensor, slice]]

    @classmethod
    def of(
        cls, state: OuterState, runs: Sequence[InflightSync], wire: Wire, sync: Group
    ) -> OwnState:
        """Snapshots of syncs that have not landed, and what a lossy wire type owes.

        Args:
            state: of this rank.
            runs: that have not landed.
            wire: type on the wire; one that loses nothing if what is owed is not wanted.
            sync: the group that sums.
        """
        kinds: dict[str, dict[str, Tensor]] = {}
        if snapshots := tensors_of(runs)[SNAPSHOT]:
            kinds[SNAPSHOT] = snapshots
        owed = {}
        for name, unit in state.units.items():
            if unit.residual is None or not wire.has_residual:
                continue
            numel = unit.anchor.numel()
            where = wire.owned(numel, sync.size, sync.rank)
            owed[name] = unit.residual.summed[: where.stop - where.start], where
            spread = torch.zeros(numel)
            spread[where] = owed[name][0].cpu()
            kinds.setdefault(SENT, {})[name] = unit.residual.sent
            kinds.setdefault(SUMMED, {})[name] = spread
        return cls(kinds, owed)

    def take_owed(self) -> None:
        """After `kinds` were filled: give this rank its part of `summed`."""
        for name, (target, where) in self.owed.items():
            target.copy_(self.kinds[SUMMED][name][where])


def load_state(
    checkpoint: Path,
    manifest: Manifest,
    engine: EditEngine,
    pieces: Sequence[Piece],
    state: OuterState,
    runs: Sequence[InflightSync],
) -> None:
    """Fill outer state from a checkpoint: what all replicas share, and what is this one's.

    Args:
        checkpoint: its folder.
        manifest: of it.
        engine: that goes on.
        pieces: of this rank.
        state: mutated.
        runs: that had not landed on this replica; mutated. None, where other replicas go on.

    Raises:
        UsageError: the checkpoint lacks a part of a parameter.
    """
    sync, wire = engine.groups.sync, engine.settings.wire
    is_owed = wire.name == manifest.wire and manifest.form == ALL
    is_owed = is_owed and sync.size == manifest.num_replicas and not manifest.is_warmup
    with torch.no_grad():
        kinds = kinds_of(state, runs, has_anchor=manifest.has_anchor)
        load_outer_state(checkpoint / EDIT / OUTER, pieces, kinds)
        wanted = wire if is_owed else Wire.of("fp32")
        if has_own([pending_of(run) for run in runs], wanted):
            own = OwnState.of(state, runs, wanted, sync)
            load_outer_state(own_folder(checkpoint, sync.rank), pieces, own.kinds)
            own.take_owed()


def land_saved(
    checkpoint: Path,
    manifest: Manifest,
    replica: int,
    engine: EditEngine,
    pieces: Sequence[Piece],
    state: OuterState,
) -> None:
    """Let what had not landed on a saved replica land, on its parameters in this rank.

    Collective: the ranks of the pipeline stage.
    Mutates: the main shards, and inner moments that are not finite.

    Args:
        checkpoint: its folder.
        manifest: of it.
        replica: whose parameters are loaded.
        engine: gives the host's plan and the groups.
        pieces: of this rank.
        state: anchor and momentum, which the outer steps have moved already.
    """
    saved = manifest.replicas[replica].pending
    runs = [bring_back(engine, pending, state) for pending in saved]
    if has_own(saved, Wire.of("fp32")):
        load_outer_state(own_folder(checkpoint, replica), pieces, tensors_of(runs))
    for run in runs:
        run.check_finite()
        while not run.is_done:
            shard, has_bad_moments = run.land_next()
            if has_bad_moments:
                engine.host.zero_nonfinite_moments(shard)
