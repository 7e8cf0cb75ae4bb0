"""Read-only state of the engine, which the host may query at any time. No communication."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_edit.comm.control import ControlRecord, DelayedFlags, Flag
from megatron_edit.engine.state import RunState
from megatron_edit.engine.sync.manager import SyncManager
from megatron_edit.method.ledger import BlockAssignment


class EngineStatus:
    """Read-only state of the engine; the same on all ranks of the replica.

    Args:
        syncs: that are under way.
        flags: of rank 0 of the replica.
    """

    def __init__(self, state: RunState, syncs: SyncManager, flags: DelayedFlags) -> None:
        self._state, self._syncs, self._flags = state, syncs, flags

    @property
    def step(self) -> int:
        """s, attempted optimizer steps so far."""
        return self._state.step

    @property
    def timeout_seconds(self) -> float:
        """How long this rank waits for other replicas that make no progress."""
        return self._state.timeout.seconds

    @property
    def is_warmup(self) -> bool:
        """Whether gradients are averaged at every step, in the warm-up or in the final synchronous
        phase: there is no anchor."""
        return not self._syncs.has_outer_state

    @property
    def is_final_phase(self) -> bool:
        """Whether the next step is one of the final synchronous phase."""
        return self._state.last_local_step is not None

    @property
    def was_warmup_step(self) -> bool:
        """Whether gradients were averaged in the last step, of the warm-up or the final phase."""
        state = self._state
        if self.is_warmup:  # where no round is between the two phases, that is a step of both
            return self.step != state.last_local_step or state.rounds.count == 0
        return state.rounds.count == 0 and self.step == state.round_start  # the rounds begin

    @property
    def is_mid_round(self) -> bool:
        """Whether the replicas may differ: they have made steps since the last sync of all units,
        or its landing mixes in their own parameters."""
        return not self.is_warmup and not self._state.replicas_identical

    @property
    def round_began_identical(self) -> bool:
        """Whether all replicas held the anchor in all units when the round began."""
        return self._state.rounds.replicas_identical

    @property
    def inner_steps(self) -> int:
        """Steps of this replica in the current round."""
        return self._state.inner_steps

    @property
    def num_syncs(self) -> int:
        """Syncs so far."""
        return self._state.rounds.count

    @property
    def round(self) -> int:
        """The round whose sync is landing, or else the next one."""
        sync = self._syncs.landing
        return sync.plan.round if sync is not None else self.num_syncs + 1

    @property
    def activity(self) -> str:
        """The joint activity of the replicas now, for messages."""
        if not self.is_warmup:
            return f"the sync of round {self.round}"
        return "the final synchronous phase" if self.is_final_phase else "the warm-up"

    @property
    def records(self) -> Sequence[ControlRecord]:
        """Records of the last meeting, by replica; empty before it."""
        return self._state.records

    @property
    def assignment(self) -> BlockAssignment | None:
        """Blocks of the current round by replica; None where rounds are counted in steps."""
        return self._state.rounds.assignment

    def block(self, step: int) -> int | None:
        """The block that this replica consumes in a step of the current round; None if none."""
        return self._state.block(step)

    @property
    def assignment_epoch(self) -> int:
        """Number of assignments so far; data prefetched under an earlier one is invalid."""
        return self._state.assignment_epoch

    @property
    def has_pending_units(self) -> bool:
        """Whether units of the landing sync have not landed yet."""
        return self._syncs.has_pending_units

    @property
    def num_shard_elements(self) -> int:
        """Elements of all units in the shards of all ranks of the replica."""
        return int(self._syncs.footprint.unit_numels.sum())

    @property
    def state_bytes_per_rank(self) -> float:
        """Bytes of the rounds' state beside the model, on average over the ranks of the replica."""
        footprint = self._syncs.footprint
        return footprint.state_bytes / len(footprint.unit_numels)

    @property
    def steps_of_others(self) -> int:
        """Lower bound of the optimizer steps of the other replicas in this launch. For display; no
        decision may depend on it."""
        return self._flags.steps_of_others

    @property
    def is_stop_seen(self) -> bool:
        """Whether this replica has received a request to stop."""
        return Flag.STOP in self._flags.latest

    @property
    def is_stopping(self) -> bool:
        """Whether this replica must stop here, because a replica stops on request."""
        return self._state.is_stopping

    @property
    def has_replica_stopped(self) -> bool:
        """Whether a replica stopped on request at the last meeting: no other meeting follows."""
        return self._state.has_replica_stopped

    @property
    def suppresses_joint_actions(self) -> bool:
        """Whether evaluations, saves and exits are suppressed at this step: replicas were stopped
        at different steps, and some passed this one before they stopped."""
        return self.step <= self._state.suppressed_until_step
