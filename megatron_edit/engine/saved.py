"""What a checkpoint keeps of the engine: entries of the manifest, and the tensors beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Required, TypedDict

from torch import Tensor

from megatron_edit.engine.plan import RoundState
from megatron_edit.saved_state import PendingSync, ReplicaEntry


@dataclass(frozen=True)
class PendingState:
    """A sync that has begun and not landed. Nothing of it is on the wire.

    Attributes:
        sync: what the manifest says of it.
        averages: fp32 [numel] of this rank's shards by unit; without the outer step.
        snapshots: the same, of the parameters at its start.
        moments: fp32 [numel] by kind and unit, means of moments of the inner optimizer; a kind has
            an entry on every rank, also where none of its units has.
    """

    sync: PendingSync
    averages: Mapping[str, Tensor]
    snapshots: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]


class UnitTensors(TypedDict, total=False):
    """Outer state of this rank's shard of one unit, fp32. Missing ones are as after the switch.

    Keys:
        anchor: [numel]; missing where it is the parameters.
        momentum: [numel].
        sent: [numel], error-feedback residual of this replica's addends.
        summed: [>= owned], the same of the sums of the chunk that this rank encodes.
    """

    anchor: Tensor
    momentum: Required[Tensor]
    sent: Tensor
    summed: Tensor


@dataclass(frozen=True)
class EngineState:
    """Everything that `EditEngine.load_state_dict` needs to go on. Tensors are not copied.

    Attributes:
        replica: where this replica stands.
        rounds: what all replicas know alike.
        is_warmup: whether the replicas train in step, in the warm-up or in the final phase; then
            nothing else counts but the step and the number of syncs.
        outer: anchor, momentum and residuals of this rank's shards, by unit.
        pending: syncs that have not landed.
        round_seconds: how long the last round was.
        suppressed_until_step: up to which evaluations, saves and exits are suppressed, because
            replicas were stopped at different steps and some have passed them already.
        is_at_sync: whether no replica has made a step since the last sync of all units. A
            checkpoint knows it of all replicas; `EditEngine.state_dict` does not say it.
    """

    replica: ReplicaEntry
    rounds: RoundState
    is_warmup: bool
    outer: Mapping[str, UnitTensors]
    pending: Sequence[PendingState]
    round_seconds: float
    suppressed_until_step: int = 0
    is_at_sync: bool = False
