"""Where training stands, as the host may ask at any time. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.flags import DelayedFlags, Flag
from megatron_edit.engine.host import EngineSettings
from megatron_edit.engine.state import RunState
from megatron_edit.engine.sync.manager import SyncManager
from megatron_edit.method.ledger import BlockAssignment


class EngineStatus:
    """What the engine knows, to be read; the same on all ranks of the replica.

    Args:
        settings: of the engine.
        state: of the run.
        syncs: that are under way.
        flags: of rank 0 of the replica.
    """

    def __init__(
        self, settings: EngineSettings, state: RunState, syncs: SyncManager, flags: DelayedFlags
    ) -> None:
        self._settings, self._state = settings, state
        self._syncs, self._flags = syncs, flags

    @property
    def step(self) -> int:
        """s, attempted optimizer steps so far."""
        return self._state.step

    @property
    def is_warmup(self) -> bool:
        """Whether the replicas train in step, in the warm-up or in the final synchronous phase:
        there is no anchor."""
        return not self._syncs.has_outer_state

    @property
    def is_final_phase(self) -> bool:
        """Whether the next step is one of the final synchronous phase."""
        return self._state.last_local_step is not None

    @property
    def was_warmup_step(self) -> bool:
        """Whether gradients were averaged in the last step, of the warm-up or the final phase."""
        is_in_phase = self.is_warmup and self.step != self._state.last_local_step
        return is_in_phase or self._settings.schedule.is_warmup(self.step)

    @property
    def is_mid_round(self) -> bool:
        """Whether the replicas may differ: they have made steps since the last sync of all units,
        or it keeps something of their parameters."""
        return not self.is_warmup and not self._state.replicas_identical

    @property
    def began_identical(self) -> bool:
        """Whether all replicas held the anchor in all units when the round began."""
        return self._state.rounds.replicas_identical

    @property
    def inner_steps(self) -> int:
        """Steps of this replica in the round that is under way."""
        return self._state.inner_steps

    @property
    def num_syncs(self) -> int:
        """Syncs so far."""
        return self._state.rounds.count

    @property
    def round(self) -> int:
        """The round whose sync is under way, or comes next."""
        sync = self._syncs.landing
        return sync.plan.round if sync is not None else self.num_syncs + 1

    @property
    def activity(self) -> str:
        """What replicas do together now, for messages."""
        if not self.is_warmup:
            return f"the sync of round {self.round}"
        return "the final synchronous phase" if self.is_final_phase else "the warm-up"

    @property
    def records(self) -> Sequence[ControlRecord]:
        """Of the last meeting, by replica; none before it."""
        return self._state.records

    @property
    def assignment(self) -> BlockAssignment | None:
        """The ledger of samples of the round under way; None where steps are counted."""
        return self._state.rounds.assignment

    @property
    def assignment_epoch(self) -> int:
        """How often samples were dealt; data prefetched under another assignment is void."""
        return self._state.assignment_epoch

    @property
    def has_pending_units(self) -> bool:
        """Whether units of the last sync have still to land."""
        return self._syncs.has_pending_units

    @property
    def num_shard_elements(self) -> int:
        """Elements that all ranks of the replica hold of all units together."""
        return int(self._syncs.footprint.unit_numels.sum())

    @property
    def steps_of_others(self) -> int:
        """Optimizer steps that the other replicas have made in this launch: at least so many. For
        display; no decision may follow from it."""
        return self._flags.steps_of_others

    @property
    def is_stop_seen(self) -> bool:
        """Whether a stop from outside has come to this replica."""
        return Flag.STOP in self._flags.latest

    @property
    def is_stopping(self) -> bool:
        """Whether this replica must end here, because a replica was asked to stop."""
        return self._state.is_stopping

    @property
    def has_replica_left(self) -> bool:
        """Whether the last meeting was the last one, because a replica was asked to stop."""
        return self._state.has_left

    @property
    def suppresses_joint_actions(self) -> bool:
        """Whether evaluations, saves and exits are suppressed at this step: replicas were stopped
        at different steps, and some have passed this one before."""
        return self.step <= self._state.suppressed_until_step
