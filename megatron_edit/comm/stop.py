"""Stop requests (a signal, the end of the allotted time), propagated to all replicas.

They are sent through the shared store, not through the sync groups: replicas that run at their own
speed must not wait for a meeting to receive them. Rank 0 of every replica polls the store in a
thread of its own, outside of training; heartbeats use the same thread. The other ranks of a replica
have no further connection to the shared store: rank 0 relays heartbeats to them through the
replica's own store.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
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
FROZEN_SECONDS = 15.0  # more than the time-out of an exchange: the main thread says more of it


class StepState(Protocol):
    """The steps of a replica."""

    @property
    def launch_steps(self) -> int:
        """Steps in this launch."""

    @property
    def timer(self) -> TimeTrigger | None:
        """Requests meetings where replicas run at their own speeds; else None."""

    @property
    def makes_no_exchange(self) -> bool:
        """Whether no exchange can be in flight: outside of the steps of training, as in a save."""


class StopBoard:
    """Announces and receives stop requests through the shared store.

    Args:
        store: shared by all replicas.
        heartbeat: reports and reads heartbeats in the same thread.
        is_watching: whether this rank polls for stop requests and exchanges heartbeats, over a
            separate connection.
        poll_seconds: between two polls.
        frozen_seconds: without a heartbeat after which a replica in an exchange is lost.
        end_process: called with the exit code where one is: the main thread waits for it.
        replica_store: of the replica's own ranks, for heartbeats; None where it has one rank.
    """

    def __init__(
        self,
        store: dist.Store,
        heartbeat: HeartbeatMonitor,
        *,
        is_watching: bool,
        poll_seconds: float = POLL_SECONDS,
        frozen_seconds: float = math.inf,
        end_process: Callable[[int], object] = os._exit,
        replica_store: dist.Store | None = None,
    ) -> None:
        self.heartbeat = heartbeat
        self._frozen_seconds, self._end_process = frozen_seconds, end_process
        self._store = store
        self._seen, self._closed = threading.Event(), threading.Event()
        self._threads = list[threading.Thread]()
        if is_watching:
            self._repeat(self._poll, store.clone, poll_seconds)
        if replica_store is not None:
            # Waiting ranks read over the connection that they have: there may be thousands.
            action = heartbeat.relay if is_watching else heartbeat.read
            connect = replica_store.clone if is_watching else lambda: replica_store
            self._repeat(action, connect, POLL_SECONDS)

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
            control: all ranks of the replica, of which rank 0 reports and polls.
            meeting: counts the records that this rank has sent.
            sync: counts the exchanges that it has begun.
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
            is_over=lambda: steps.makes_no_exchange,
        )
        poll_seconds = POLL_SECONDS
        if timer is not None:
            poll_seconds = min(
                poll_seconds, max(LEAST_POLL_SECONDS, timer.length / POLLS_PER_PHASE)
            )
        return cls(
            world.shared_store,
            heartbeat,
            is_watching=is_first,
            poll_seconds=poll_seconds,
            frozen_seconds=world.timeout.total_seconds() + FROZEN_SECONDS,
            replica_store=world.replica_store if place.num_replicas > 1 < control.size else None,
        )

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
        """Stop polling. Idempotent: only the first call waits.

        Joins its threads: an interpreter that exits while a Python thread is in the store's C++
        code aborts the process (exit code -6).
        """
        self._closed.set()
        self.heartbeat.is_closed = True
        until = time.monotonic() + JOIN_SECONDS
        while self._threads:
            self._threads.pop().join(max(0.0, until - time.monotonic()))

    def _repeat(
        self,
        action: Callable[[dist.Store], None],
        connect: Callable[[], dist.Store],
        seconds: float,
    ) -> None:
        """Start a thread that repeats an action on a store.

        Connects here, while the host of the store is known to live: `close` would have to wait for
        a thread that connects to a host that has just ended.
        """
        first = connect()

        def run() -> None:
            store: dist.Store | None = first
            while not self._closed.wait(seconds):
                try:
                    store = store or connect()
                    action(store)
                except dist.DistNetworkError:
                    return  # the store is gone with its host: training will fail and report it
                except RuntimeError:
                    store = None  # time-out: retry over a new connection

        thread = threading.Thread(target=run, name="edit-stop-board", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _poll(self, store: dist.Store) -> None:
        if not self.is_seen and store.check([KEY]):
            self._seen.set()
        self.heartbeat.exchange(store)
        if frozen := self.heartbeat.frozen(self._frozen_seconds, time.monotonic()):
            error = ReplicaLostError(
                f"replica {', '.join(map(str, frozen))} was lost in an exchange: it has sent no "
                f"heartbeat for {self._frozen_seconds:g} s"
            )
            sys.stderr.write(f"megatron_edit: {error}\n")
            sys.stderr.flush()
            self._end_process(error.exit_code)
