"""A stop from outside (a signal, the end of the allotted time) on its way to all replicas.

It travels through the shared store, not through the sync groups: replicas that run at their own
speed must not wait for a meeting to learn of it. Rank 0 of every replica asks the store from a
thread of its own, off the training's path; signs of life take the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.heartbeat import HeartbeatMonitor, ReplicaProgress
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import ReplicaLostError

KEY = "stop"
POLL_SECONDS = 0.5
JOIN_SECONDS = 10.0  # for a question that is under way


class StopBoard:
    """Where a stop is announced and seen.

    Args:
        store: shared by all replicas; it is asked through a connection of its own.
        heartbeat: what this rank tells and hears of the replicas' progress.
        is_watching: whether this rank asks for stops.
        poll_seconds: between two questions.
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
        step: Callable[[], int],
    ) -> StopBoard:
        """Where this rank learns of stops, and of the others' progress.

        Args:
            world: whose store is asked.
            control: all ranks of the replica: rank 0 speaks and asks.
            meeting: counts the records that this rank has given.
            sync: counts the exchanges that it has begun.
            step: steps of this replica in this launch.
        """
        place, is_first = world.placement, control.rank == 0

        def where() -> ReplicaProgress:
            return ReplicaProgress(meeting.num_started, sync.num_started, step())

        heartbeat = HeartbeatMonitor(
            place.replica,
            place.num_replicas,
            where,
            is_telling=is_first,
            store_host=None if place.is_single_launch else 0,
        )
        return cls(world.shared_store, heartbeat, is_watching=is_first)

    def announce(self) -> None:
        """Tell all replicas to stop at their next step boundary.

        Raises:
            ReplicaLostError: the store is gone, and with it the replica that held it.
        """
        try:
            self._store.set(KEY, "1")
        except RuntimeError as error:
            raise ReplicaLostError(f"the store that all share does not answer: {error}") from error
        self._seen.set()

    @property
    def is_seen(self) -> bool:
        """Whether this rank knows of a stop. No communication."""
        return self._seen.is_set()

    def close(self) -> None:
        """Ask no more. Idempotent.

        The thread is over then: an interpreter that ends while a thread of its own is in the
        store's C++ code aborts the process (exit code -6).
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
                return  # the store is gone with its host: training fails, and says so, by itself
            except RuntimeError:
                store = None  # it took too long: ask again, over a new connection

    def _poll(self, store: dist.Store) -> None:
        if self._is_watching and not self.is_seen and store.check([KEY]):
            self._seen.set()
        self.heartbeat.exchange(store)
