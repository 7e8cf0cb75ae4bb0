"""Where a run stands after the switch: what a checkpoint brings back to one rank."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.checkpoint.manifest import Ledger, Manifest, ReplicaEntry
from megatron_edit.engine.state import OuterState
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.ledger import Dealing


@dataclass(frozen=True)
class Standing:
    """See above.

    Attributes:
        entry: where this replica stands.
        round: syncs so far.
        detectors: of all replicas of this run.
        state: anchor and momentum of this rank's shards.
        is_at_sync: whether no replica has made a step since the last sync.
        dealing: of the round that is under way, where replicas run at their own speeds.
    """

    entry: ReplicaEntry
    round: int
    detectors: DetectorState
    state: OuterState
    is_at_sync: bool
    dealing: Dealing | None


def detectors_to_lists(state: DetectorState) -> dict[str, list[list[float]]]:
    """For a manifest: exact."""
    return {name: tensor.tolist() for name, tensor in vars(state).items()}


def ledger_of(dealing: Dealing) -> Ledger:
    """For a manifest."""
    return Ledger(dealing.target, dealing.frontier, dealing.holes, dealing.quotas)


def dealing_of(manifest: Manifest) -> Dealing | None:
    """The dealing of the round that was under way; None where steps were counted.

    Raises:
        ValueError: its fields contradict each other.
    """
    if (ledger := manifest.ledger) is None:
        return None
    return Dealing(
        manifest.num_replicas, ledger.target, ledger.frontier, ledger.holes, ledger.quotas
    )
