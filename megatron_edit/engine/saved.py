"""State of the engine in a checkpoint: entries of the manifest, and the tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Required, TypedDict

from torch import Tensor

from megatron_edit.comm.compressed_all_reduce import Residual
from megatron_edit.engine.plan import RoundState
from megatron_edit.saved_state import PendingSync, ReplicaEntry


@dataclass(frozen=True)
class PendingState:
    """A sync that has begun and not landed, with no message in flight.

    Attributes:
        averages: fp32 [numel] of this rank's shards by unit, before the outer step.
        snapshots: fp32 [numel] by unit, the parameters when the sync began.
        moments: fp32 [numel] by kind and unit, means of moments of the inner optimizer; every kind
            has an entry on every rank, even if it holds no unit.
    """

    sync: PendingSync
    averages: Mapping[str, Tensor]
    snapshots: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]


class UnitTensors(TypedDict, total=False):
    """Outer state of this rank's shard of one unit, fp32. A missing key is as after the switch.

    Keys:
        anchor: [numel]; missing where it equals the parameters.
        momentum: [numel].
        sent: [numel], error-feedback residual of this replica's addends.
        summed: [>= owned], error-feedback residual of the sums of the chunk that this rank encodes.
    """

    anchor: Tensor
    momentum: Required[Tensor]
    sent: Tensor
    summed: Tensor


@dataclass(frozen=True)
class EngineState:
    """Everything that `EditEngine.load_state_dict` needs to resume. Tensors are not copied.

    Attributes:
        rounds: state that is the same on all replicas.
        is_warmup: whether gradients are averaged at every step, in the warm-up or in the final
            phase; then only the step, the number of syncs and `gradients` are used.
        outer: anchor, momentum and residuals of this rank's shards, by unit.
        gradients: error-feedback residuals of the averaged gradients, of each gradient shard in
            order; empty where gradients are not averaged, or without error feedback.
        pending: syncs that have not landed.
        round_seconds: duration of the last round.
        suppressed_until_step: last step at which evaluations, saves and exits are suppressed,
            because replicas were stopped at different steps and some have passed it already.
        is_at_sync: whether no replica has made a step since the last sync of all units. Set when a
            checkpoint is read, which has all replicas; `EditEngine.state_dict` does not set it.
    """

    replica: ReplicaEntry
    rounds: RoundState
    is_warmup: bool
    outer: Mapping[str, UnitTensors]
    pending: Sequence[PendingState]
    round_seconds: float
    suppressed_until_step: int = 0
    is_at_sync: bool = False
    gradients: Sequence[Residual] = ()
