"""Joining: the stores behind a replica's own Megatron world and behind the sync groups.

Every replica is a complete `torch.distributed` world of its own (design section 1). Under a
single launch the replicas share the launch's store, each under a prefix; with one launch per
replica each keeps its launch's store, and all meet on a second one at `--edit-rendezvous`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.replica_ids import LOOK, LaunchRegistry, launch_key
from megatron_edit.constants import LEAST_TIMEOUT_SECONDS
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.flags import flag, parse_endpoint

JOIN_TIMEOUT = timedelta(minutes=10)
SOON = timedelta(seconds=3)
LEAVING_TIMEOUT = timedelta(minutes=1)
# Building the index of a large data set, or compiling, may take a replica hours.
SETUP_TIMEOUT = timedelta(hours=6)
_SHARED = "edit/shared"  # prefix in the store that all replicas reach


@dataclass
class ReplicaWorld:
    """This process's place, and the stores that it reaches the others through.

    Attributes:
        placement: who this process is.
        replica_store: for the replica's own default process group (`pretrain(store=...)`).
        shared_store: seen by the ranks of all replicas.
        timeout: longest wait at a sync.
        registry: of the launches, until training begins; None in a single launch.
    """

    placement: Placement
    replica_store: dist.Store
    shared_store: dist.Store
    timeout: timedelta
    registry: LaunchRegistry | None = None
    _saved_environment: dict[str, str | None] = field(default_factory=dict)

    def announce(self, event: str) -> None:
        """Tell all replicas that this one has come to `event` (rank 0 of the replica says so)."""
        if self.placement.rank == 0:
            self.shared_store.set(f"{event}/{self.placement.replica}", "1")

    def after_first_replica(self, event: str) -> None:
        """Wait until replica 0 has announced `event`. Returns at once on replica 0.

        For work on shared files: replica 0 does it, the others then find it done.

        Raises:
            ReplicaLostError: replica 0 did not announce it.
        """
        if self.placement.replica > 0:
            self.wait_for(f"{event}/0", SETUP_TIMEOUT)

    def shared_text(
        self, key: str, make: Callable[[], str], timeout: timedelta = SETUP_TIMEOUT
    ) -> str:
        """A text that the first rank of all makes and all ranks of all replicas learn.

        Raises:
            ReplicaLostError: the first rank did not make it within `timeout`.
        """
        if self.placement.global_rank == 0:
            self.shared_store.set(key, make())
        self.wait_for(key, timeout, replica=0)
        return str(self.shared_store.get(key).decode())

    def after_all_replicas(self, event: str) -> None:
        """Announce `event` and wait until all replicas have."""
        self.announce(event)
        for replica in range(self.placement.num_replicas):
            self.wait_for(f"{event}/{replica}", SETUP_TIMEOUT)

    def begin_training(self) -> None:
        """All replicas are set up. A launch that comes from now on ends by itself.

        Raises:
            UsageError: two launches have the same replica id; then on every rank.
        """
        if self.registry is not None:
            self.registry.begin()
            self.registry = None

    def agree(self, event: str, complaint: str | None) -> str | None:
        """Let all ranks of all replicas hear one of their complaints, if there is any.

        Blocks until every rank has said its own and heard the answer.
        """
        if complaint is not None:
            self.shared_store.set(f"{event}/complaint", complaint)
        self._count_rank(f"{event}/said")
        self.wait_for(f"{event}/said/all", SETUP_TIMEOUT)
        key = f"{event}/complaint"
        heard = self.shared_store.get(key).decode() if self.shared_store.check([key]) else None
        self.let_all_read(f"{event}/heard")
        return heard

    def let_all_read(self, event: str, timeout: timedelta = SETUP_TIMEOUT) -> None:
        """All ranks come here when they have read something; the first rank waits for them.

        It may host the store, so it must not leave before.
        """
        self._count_rank(event)
        if self.placement.global_rank == 0:
            self.wait_for(f"{event}/all", timeout)

    def first_rank_announces(self, event: str) -> bool:
        """Whether the first rank of all comes to `event`, too, now or soon after.

        For who would otherwise say what the first rank says already.
        """
        if self.placement.global_rank == 0:
            with suppress(RuntimeError):  # the store may be gone: then nobody asks it
                self.shared_store.set(event, "1")
            return True
        try:
            self.shared_store.wait([event], SOON)
        except dist.DistNetworkError:
            return True  # it hosted the store, and has left
        except RuntimeError:
            return False
        return True

    def exit_barrier(self, timeout: timedelta = LEAVING_TIMEOUT) -> None:
        """Training is over: wait until it is for all ranks of all replicas, or for a while.

        Who closes a connection takes back what its other end has not read yet, and the ranks of
        another replica would miss the last records. Once all are here, nobody reads any more.

        Args:
            timeout: after which this rank leaves alone. Whoever failed never comes.
        """
        try:
            self._count_rank("leaving")
            self.shared_store.wait(["leaving/all"], timeout)
        except RuntimeError:
            return  # somebody failed; or the store has gone with its host, which had waited for all

    def _count_rank(self, event: str) -> None:
        everybody = self.placement.num_replicas * self.placement.ranks_per_replica
        if self.shared_store.add(f"{event}/count", 1) == everybody:
            self.shared_store.set(f"{event}/all", "1")

    def wait_for(self, key: str, timeout: timedelta, *, replica: int | None = None) -> None:
        """Wait until somebody has set a key of the shared store.

        Args:
            key: of the store; `event/r` is what replica r announces.
            timeout: longest wait.
            replica: whose key it is, where its name does not say so, or not that alone.

        Raises:
            ReplicaLostError: nobody did within `timeout`, or the store is gone.
            UsageError: before training, two launches have the same replica id.
        """
        try:
            self._wait(key, timeout)
        except RuntimeError as error:
            event, _, last = key.rpartition("/")
            if replica is None and last.isdecimal():
                key, replica = event, int(last)
            raise ReplicaLostError(self._absence(key, replica, timeout, error)) from error

    def _wait(self, key: str, timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while self.registry is not None:
            self.registry.check()
            left = timedelta(seconds=end - time.monotonic())
            if left <= LOOK:
                break
            try:
                self.shared_store.wait([key], LOOK)
                return
            except dist.DistNetworkError:
                raise
            except RuntimeError:
                continue
        self.shared_store.wait([key], timedelta(seconds=max(end - time.monotonic(), 0.001)))

    def _absence(
        self, event: str, replica: int | None, timeout: timedelta, error: RuntimeError
    ) -> str:
        """Who did not come, and what to look at."""
        who = "some rank of some replica" if replica is None else f"replica {replica}"
        if isinstance(error, dist.DistNetworkError):
            reason = str(error).partition("\n")[0]
            return f"the store broke while {who} was waited for ({event}): {reason}"
        is_joining = timeout == JOIN_TIMEOUT
        what = f"has not {'joined' if is_joining else 'come'} ({event})"
        remedy = "look at what it said last"
        place = self.placement
        if is_joining and replica not in (None, place.replica) and not place.is_single_launch:
            remedy = f"is it started, with {flag('replica_id')} {replica}?"
        return f"{who} {what} within {_in_words(timeout)}; {remedy}"

    def enter_environment(self, env: MutableMapping[str, str]) -> None:
        """Make `RANK` and `WORLD_SIZE` those of the replica; `leave_environment` undoes it."""
        values = {
            "RANK": str(self.placement.rank),
            "WORLD_SIZE": str(self.placement.ranks_per_replica),
        }
        for name, value in values.items():
            self._saved_environment.setdefault(name, env.get(name))
            env[name] = value

    def leave_environment(self, env: MutableMapping[str, str]) -> None:
        """Put back what `enter_environment` changed."""
        for name, value in self._saved_environment.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        self._saved_environment.clear()


def _in_words(time: timedelta) -> str:
    seconds = time.total_seconds()
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def join(
    placement: Placement, *, rendezvous: str | None, timeout_seconds: float | None
) -> ReplicaWorld:
    """Open the stores. Blocks until the store's host is there.

    Args:
        placement: this process's place.
        rendezvous: HOST:PORT of the shared store, where each replica has its own launch.
        timeout_seconds: longest wait at a sync; None is the least that `auto` comes to.

    Raises:
        UsageError: the launch has no store, the rendezvous cannot be reached, or another launch
            has the same replica id.
    """
    launch_store = _store_of_launch(placement)
    timeout = timedelta(seconds=timeout_seconds or LEAST_TIMEOUT_SECONDS)
    if placement.is_single_launch:
        replica_store = dist.PrefixStore(f"edit/replica{placement.replica}", launch_store)
        shared_store = dist.PrefixStore(_SHARED, launch_store)
        return ReplicaWorld(placement, replica_store, shared_store, timeout)
    shared_store = dist.PrefixStore(_SHARED, _rendezvous_store(rendezvous, placement))
    registry = LaunchRegistry(shared_store, launch_store, placement)
    registry.register(JOIN_TIMEOUT)
    return ReplicaWorld(placement, launch_store, shared_store, timeout, registry)


def _store_of_launch(placement: Placement) -> dist.Store:
    """The store of torchrun or of the batch system, through the usual environment variables."""
    alone = placement.num_replicas * placement.ranks_per_replica == 1
    if "MASTER_ADDR" not in os.environ and (alone or placement.ranks_per_replica == 1):
        if placement.is_single_launch and not alone:
            raise _no_master()
        return dist.HashStore()  # a launch of one process needs nobody to meet
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise _no_master()
    # rank and world as the launcher gave them: this runs before `enter_environment`.
    store, _, _ = next(iter(dist.rendezvous("env://", timeout=JOIN_TIMEOUT)))
    return store


def _no_master() -> UsageError:
    return UsageError(
        "environment MASTER_ADDR, MASTER_PORT (not set)",
        "several ranks need a place to meet",
        "launch with torchrun, or set both in the batch script",
    )


def _rendezvous_store(rendezvous: str | None, placement: Placement) -> dist.Store:
    host, port = parse_endpoint(rendezvous or "")
    is_host = placement.replica == 0 and placement.rank == 0
    try:
        return dist.TCPStore(host, port, None, is_host, JOIN_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        if is_host and (store := _other_launch(host, port)) is not None:
            return store
        action = "listen on it" if is_host else "reach replica 0 there"
        raise UsageError(
            f"{flag('rendezvous')} {rendezvous}",
            f"replica {placement.replica} on {socket.gethostname()} could not {action} "
            f"({str(error).splitlines()[0]})",
            "check the address, that the port is free and open, and that replica 0 was started",
            is_local=True,
        ) from error


def _other_launch(host: str, port: int) -> dist.Store | None:
    """The store of another launch that has replica 0 on this machine, if that holds the port."""
    try:
        store = dist.TCPStore(host, port, None, False, SOON, wait_for_workers=False)
        store.wait([f"{_SHARED}/{launch_key(0)}"], SOON)
    except RuntimeError:
        return None
    return store
