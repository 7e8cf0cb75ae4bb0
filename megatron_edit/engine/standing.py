"""Where a run stands: told to a checkpoint, and brought back from one to each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_edit.checkpoint.manifest import Ledger, Manifest, ReplicaEntry
from megatron_edit.comm.flags import Flag
from megatron_edit.engine.checks import drift
from megatron_edit.engine.engine import EditEngine
from megatron_edit.engine.pending import pending_of
from megatron_edit.engine.sync.inflight import InflightSync
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.ledger import Dealing


@dataclass(frozen=True)
class Standing:
    """Of one rank, after the switch.

    Attributes:
        entry: where this replica stands.
        round: syncs so far.
        detectors: of all replicas of this run.
        state: anchor and momentum of this rank's shards.
        unit_steps: see `Rounds`.
        pending: syncs that have not landed here.
        replicas_identical: see `Rounds`.
        is_at_sync: whether no replica has made a step since the last sync of all units.
        dealing: of the round that is under way, where replicas run at their own speeds.
        quiet_until: see `EditEngine`.
        round_seconds: how long the last round was.
        is_rejoined: whether a replica comes to the next meeting before it has made a step.
    """

    entry: ReplicaEntry
    round: int
    detectors: DetectorState
    state: OuterState
    unit_steps: Tensor
    pending: Sequence[InflightSync]
    replicas_identical: bool
    is_at_sync: bool
    dealing: Dealing | None
    quiet_until: int = 0
    round_seconds: float = 0.0
    is_rejoined: bool = False


def load_state_dict(engine: EditEngine, standing: Standing) -> None:
    """Start an engine where a checkpoint was written after the switch. Parameters are loaded.

    Collective: all ranks of all replicas.

    Raises:
        DriftError: the replicas had met when it was written, and do not hold the same now.
    """
    plan, entry, rounds = engine.host.plan, standing.entry, engine.rounds
    engine.step = entry.step
    rounds.state, rounds.detectors = standing.state, standing.detectors
    rounds.count, rounds.start = standing.round, entry.step - entry.inner_steps
    rounds.unit_steps, rounds.replicas_identical = standing.unit_steps, standing.replicas_identical
    engine.traffic.flying.extend(standing.pending)
    engine.host.attach_outer_state(standing.state)
    engine.trigger.resume(entry, standing.dealing, is_rejoined=standing.is_rejoined)
    engine.clock.set(entry.phase_seconds)
    if standing.is_at_sync:
        drift.check(plan, engine.groups, drift.plan_digests(plan), "after loading")
    engine.flags.post(Flag.MEET if entry.is_asking else Flag.NONE)
    engine.is_waiting, engine.quiet_until = entry.is_waiting, standing.quiet_until
    engine.adaptive_timeout.begin(standing.round_seconds)


def entry_of(engine: EditEngine) -> ReplicaEntry:
    """Where this replica stands, for a checkpoint. All ranks of the replica come."""
    progress, losses = engine.host.progress(), engine.trigger.losses
    return ReplicaEntry(
        step=engine.step,
        inner_steps=0 if engine.is_warmup else engine.step - engine.rounds.start,
        samples=progress.samples,
        schedule_position=progress.schedule_position,
        losses=losses.payload(),
        last_loss_step=losses.last_step,
        phase_seconds=engine.clock.seconds,
        last_step_seconds=engine.trigger.last_step_seconds,
        is_asking=Flag.MEET in engine.flags.read(),
        is_waiting=engine.is_waiting,
        pending_schedule=progress.pending_schedule,
        round_length=engine.trigger.round_length,
        pending=tuple(pending_of(run) for run in engine.traffic.flying),
    )


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
