"""The context of the engine's communication: no gradients, and errors with step and replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_edit.comm.heartbeat import HeartbeatMonitor
from megatron_edit.comm.stop import StopBoard
from megatron_edit.engine.state import RunState
from megatron_edit.engine.status import EngineStatus
from megatron_edit.errors import FencedError, ReplicaLostError


@dataclass(frozen=True)
class ErrorContext:
    """Disables gradients, and adds the step and the lost replicas to errors.

    Attributes:
        state, status: of the engine.
        board: has the heartbeats of the other replicas.
        is_elastic: whether this is a run with a hub.
    """

    state: RunState
    status: EngineStatus
    board: StopBoard
    is_elastic: bool

    @property
    def is_alone(self) -> bool:
        """Whether this replica acts without the others: in an elastic run, between two syncs."""
        return self.is_elastic and not self.status.is_warmup

    @contextmanager
    def __call__(self, what: str = "") -> Iterator[None]:
        """The context of an action.

        Args:
            what: the action, for messages; empty is the sync of the round, or the warm-up.
        """
        try:
            with torch.no_grad():
                yield
        except ReplicaLostError as error:
            if error.has_context:
                raise
            place = f"{what or self.status.activity} (step {self.state.step})"
            if self.is_alone:
                raise FencedError(f"a rank of this replica is lost in {place}: {error}") from error
            raise with_lost_replicas(error, self.board.heartbeat, place) from error
        except Exception as error:
            error.add_note(f"in round {self.status.round} of EDiT, after step {self.state.step}")
            raise

    def explain(self, error: Exception) -> Exception:
        """An error of the progress thread; a lost replica with its number and place."""
        if not isinstance(error, ReplicaLostError):
            return error
        try:
            with self():
                raise error
        except ReplicaLostError as found:
            return found


# ---- Adds the lost replicas and the place in training to errors between replicas


def with_lost_replicas(
    error: ReplicaLostError, heartbeat: HeartbeatMonitor, place: str
) -> ReplicaLostError:
    """Return the error with the lost replicas, as far as they can be determined, and the place.

    Blocks: the host, some seconds, in which replicas that are not lost report it.

    Args:
        error: of a collective with other replicas.
        place: activity and step, for the message.
    """
    lost = error.lost or heartbeat.find_lost()
    return error.with_context(lost, place, has_joined=not heartbeat.is_waiting)
