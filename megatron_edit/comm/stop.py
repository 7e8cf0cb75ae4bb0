"""Stop requests (a signal, the end of the allotted time), propagated to all replicas.

They are sent through the shared store, not through the sync groups: replicas that run at their own
speed must not wait for a meeting to receive them. Rank 0 of every replica polls the store in a
thread of its own, outside of training; heartbeats use the same thread.
"""

from __future__ import annotations

import threading
from typing import Protocol

import torch.distributed as dist

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.heartbeat import HeartbeatMonitor, ReplicaProgress
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.clock import TimeTrigger

KEY = "stop"
POLL_SECONDS = 0.5
LEAST_POLL_SECONDS = 0.05
POLLS_PER_PHASE = 40  # at least: the others need to know when a slow replica will arrive
JOIN_SECONDS = 10.0  # for a request to the store that is in progress


class StepState(Protocol):
    """The steps of a replica."""

    @property
    def launch_steps(self) -> int:
        """Steps in this launch."""

    @property
    def timer(self) -> TimeTrigger | None:
        """Requests meetings where replicas run at their own speeds; else None."""


class StopBoard:
    """Announces and receives stop requests through the shared store.

    Args:
        store: shared by all replicas; it is polled over a separate connection.
        heartbeat: reports and reads heartbeats in the same thread.
        is_watching: whether this rank polls for stop requests.
        poll_seconds: between two polls.
    """

    def __init__(
        self,
        store: dist.Store,
        heartbeat: HeartbeatMonitor,
        *,
        is_watching: bool,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.heartbeat = heartbeat
        self._store, self._is_watching = store, is_watching
        self._poll_seconds = poll_seconds
        self._seen, self._closed = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="edit-stop-board", daemon=True)
        self._watcher.start()

    @classmethod
    def open(
        cls,
        world: ReplicaWorld,
        control: Group,
        meeting: Group,
        sync: Group,
        steps: StepState,
    ) -> StopBoard:
        """Create the board of this rank, with its heartbeat monitor.

        Args:
            world: has the store.
            control: all ranks of the replica, of which rank 0 reports and polls.
            meeting: counts the records that this rank has sent.
            sync: counts the exchanges that it has begun.
            steps: of this replica.
        """
        place, is_first, timer = world.scope, control.rank == 0, steps.timer

        def progress() -> ReplicaProgress:
            return ReplicaProgress(meeting.num_started, sync.num_started, steps.launch_steps)

        heartbeat = HeartbeatMonitor(
            place.replica,
            place.num_replicas,
            progress,
            is_reporting=is_first,
            store_host=None if place.is_single_launch else 0,
            arrival=None if timer is None or not is_first else lambda: timer.arrival,
        )
        poll_seconds = POLL_SECONDS
        if timer is not None:
            poll_seconds = min(
                poll_seconds, max(LEAST_POLL_SECONDS, timer.length / POLLS_PER_PHASE)
            )
        return cls(world.shared_store, heartbeat, is_watching=is_first, poll_seconds=poll_seconds)

    def announce(self) -> None:
        """Tell all replicas to stop at their next step boundary.

        Raises:
            ReplicaLostError: the store is gone, and with it the replica that hosts it.
        """
        try:
            self._store.set(KEY, "1")
        except RuntimeError as error:
            raise ReplicaLostError(f"the store that all share does not answer: {error}") from error
        self._seen.set()

    @property
    def is_seen(self) -> bool:
        """Whether this rank has seen a stop request. No communication."""
        return self._seen.is_set()

    def close(self) -> None:
        """Stop polling. Idempotent.

        Joins the thread: an interpreter that exits while a Python thread is in the store's C++ code
        aborts the process (exit code -6).
        """
        self._closed.set()
        self.heartbeat.is_closed = True
        if self._watcher.is_alive():
            self._watcher.join(JOIN_SECONDS)

    def _watch(self) -> None:
        store = None
        while not self._closed.wait(self._poll_seconds):
            if not (self._is_watching or self.heartbeat.is_listening):
                continue
            try:
                store = store or self._store.clone()
                self._poll(store)
            except dist.DistNetworkError:
                return  # the store is gone with its host: training itself will fail and report it
            except RuntimeError:
                store = None  # time-out: retry over a new connection

    def _poll(self, store: dist.Store) -> None:
        if self._is_watching and not self.is_seen and store.check([KEY]):
            self._seen.set()
        self.heartbeat.exchange(store)
