"""Rendezvous: the stores for a replica's own Megatron world and for the sync groups.

Every replica is a complete `torch.distributed` world of its own (design section 1). Under a
single launch the replicas share the launch's store, each under a prefix; with one launch per
replica each uses its launch's store, and all share a second one at `--edit-rendezvous`.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_edit.comm.first_contact import Wait, answered, in_thread, reach
from megatron_edit.comm.interfaces import GLOO_INTERFACE, choose_interfaces, host_facts
from megatron_edit.comm.placement import Arrangement, Placement, arrange, read_placement
from megatron_edit.comm.replica_ids import LaunchRegistry, launch_key
from megatron_edit.constants import BY_RANKS, MIN_TIMEOUT_SECONDS
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.flags import endpoint_text, flag, parse_endpoint

_JOIN_SECONDS = 600.0
JOIN_TIMEOUT = timedelta(seconds=_JOIN_SECONDS)
SHORT_TIMEOUT = timedelta(seconds=3)
EXIT_TIMEOUT = timedelta(minutes=1)
# Building the index of a large data set, or compilation, may take hours.
SETUP_TIMEOUT = timedelta(hours=6)
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun hosts the store, not rank 0
_SHARED = "edit/shared"  # prefix in the store that all replicas reach
_HOSTS = "hosts/counts"  # key of `host_counts`


def _be_silent(line: str) -> None:
    """Print nothing."""


@dataclass
class ReplicaWorld:
    """Placement of this process, and its stores.

    Attributes:
        placement: of this process among the replicas.
        replica_store: for the replica's own default process group (`pretrain(store=...)`).
        shared_store: shared by the ranks of all replicas.
        timeout: longest wait at a sync.
        registry: of the launches; None in a single launch.
        is_alone: whether `shared_store` is shared by the ranks of this replica alone, as in an
            elastic run; what the replicas have in common is then settled by the hub.
        layout: in an elastic run, hash of all that must be equal on the replicas.
        arrangement: which ranks of the launch, or of all launches, are in which replica, and on
            which hosts; only on the first rank, after `arrange`. It grows with their number.
        store_host: of the store that all replicas share; empty if not known.
        interface: of the network, which `arrange` has chosen for gloo; empty where it has not.
        say: prints a line about a long wait.
    """

    placement: Placement
    replica_store: dist.Store
    shared_store: dist.Store
    timeout: timedelta
    registry: LaunchRegistry | None = None
    is_alone: bool = False
    layout: str = ""
    arrangement: Arrangement | None = None
    store_host: str = ""
    interface: str = ""
    say: Callable[[str], None] = _be_silent
    _launch_rank: int | None = None
    _saved_environment: dict[str, str | None] = field(default_factory=dict)

    @property
    def scope(self) -> Placement:
        """Placement of this process among those that share `shared_store`."""
        return replace(self.placement, num_replicas=1) if self.is_alone else self.placement

    @property
    def is_first(self) -> bool:
        """Whether this is the first process of all as they were launched.

        It may host the store, and reports errors. It is global rank 0 unless the ranks of a launch
        were arranged in another order.
        """
        return self.launch_rank == 0

    @property
    def launch_rank(self) -> int:
        """Rank of this process in its launch; with one launch per replica, the global rank."""
        return self.scope.global_rank if self._launch_rank is None else self._launch_rank

    def arrange(self, by: str) -> None:
        """Find the host of every rank; in a single launch, arrange the ranks in replicas by it.

        Where gloo's interface is not set and there are several hosts, choose it, too.

        Collective: all ranks of all replicas. *Mutates* the placement of this process. In a single
        launch nothing but `shared_store` may have been used before.

        Args:
            by: value of `--edit-placement`.

        Raises:
            UsageError: the file that it names cannot be used, or there are several hosts and the
                others cannot reach one of them; on all ranks.
            ReplicaLostError: a rank did not report its host.
        """
        place = self.scope
        by = by if place.is_single_launch else BY_RANKS  # launches cannot exchange their ranks
        self._launch_rank = place.global_rank

        def decide(facts: list[Any]) -> list[Any]:
            hosts, file = [each["host"] for each in facts], read_placement(by)
            names = choose_interfaces(facts)
            found = self.arrangement = arrange(hosts, place.num_replicas, by, file)
            self.shared_store.set(_HOSTS, json.dumps([found.counts(), found.sites]))
            return list(zip(self.arrangement.places(), names, strict=True))

        mine = host_facts(self.store_host)
        (replica, rank), self.interface = self.settle("hosts", mine, decide)
        if place.is_single_launch:
            self.placement = replace(self.placement, replica=replica, rank=rank)
            launch_store = self.replica_store.underlying_store
            self.replica_store = dist.PrefixStore(_replica_prefix(replica), launch_store)

    def host_counts(self) -> list[dict[str, int]] | None:
        """For each replica the number of its ranks on each host; None before `arrange`."""
        return None if self._launch_rank is None else self._hosts()[0]

    def sites(self) -> list[str]:
        """Site of each replica; empty if none is known."""
        return [] if self._launch_rank is None else self._hosts()[1]

    def _hosts(self) -> tuple[Any, Any]:
        return tuple(json.loads(self.shared_store.get(_HOSTS)))

    def settle(self, event: str, mine: Any, decide: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return what global rank 0 decides for this rank, from the values of all ranks.

        Every other rank sends and reads one value, however many ranks there are.

        Collective: all ranks of all replicas.

        Args:
            decide: returns a JSON value for each rank from those of all ranks, by global rank.
                Called on global rank 0.

        Raises:
            UsageError: `decide` has raised it; on all ranks.
            ReplicaLostError: a rank did not send its value.
        """
        place, store = self.scope, self.shared_store
        store.set(f"{event}/value {place.global_rank}", json.dumps(mine))
        if place.global_rank == 0:
            outcomes = _outcomes(decide, self._gather(event))
            keys = [f"{event}/outcome {rank}" for rank in range(len(outcomes))]
            store.multi_set(keys, [json.dumps(outcome) for outcome in outcomes])
        key = f"{event}/outcome {place.global_rank}"
        self.wait_for(key, JOIN_TIMEOUT, replica=0)
        refusal, outcome = json.loads(store.get(key))
        self.wait_for_all_readers(f"{event}/read", JOIN_TIMEOUT)  # before one may refuse and exit
        if refusal is not None:
            raise UsageError(*refusal)
        return outcome

    def _gather(self, event: str) -> list[Any]:
        place, values = self.scope, list[Any]()
        for replica in range(place.num_replicas):
            first = replica * place.ranks_per_replica
            ranks = range(first, first + place.ranks_per_replica)
            keys = [f"{event}/value {rank}" for rank in ranks]
            self.wait_for(event, JOIN_TIMEOUT, replica=replica, keys=keys)
            values += map(json.loads, self.shared_store.multi_get(keys))
        return values

    def announce(self, event: str) -> None:
        """Announce to all replicas that this one has reached `event`; only rank 0 acts."""
        if self.scope.rank == 0:
            self.shared_store.set(f"{event}/{self.scope.replica}", "1")

    def wait_for_first_replica(self, event: str) -> None:
        """Wait until replica 0 has announced `event`. Returns at once on replica 0.

        For work on shared files, which replica 0 does for all.

        Raises:
            ReplicaLostError: replica 0 did not announce it.
        """
        if self.scope.replica > 0:
            self.wait_for(f"{event}/0", SETUP_TIMEOUT)

    def shared_text(
        self, key: str, make: Callable[[], str], timeout: timedelta = SETUP_TIMEOUT
    ) -> str:
        """Share a text that global rank 0 creates with all ranks of all replicas.

        Raises:
            ReplicaLostError: rank 0 did not create it within `timeout`.
        """
        if self.scope.global_rank == 0:
            self.shared_store.set(key, make())
        self.wait_for(key, timeout, replica=0)
        return str(self.shared_store.get(key).decode())

    def wait_for_all_replicas(self, event: str) -> None:
        """Announce `event` and wait until all replicas have announced it.

        Raises:
            ReplicaLostError: one has not.
        """
        self.announce(event)
        self.text_of_replicas(event, SETUP_TIMEOUT, lambda _: "")

    def text_of_replicas(
        self, event: str, timeout: timedelta, combine: Callable[[list[str]], str]
    ) -> str:
        """Return the same text on all ranks, made from one of each replica.

        Rank 0 of a replica reads those of all replicas, its other ranks only the result.

        Args:
            event: replica r has set or will set `event/r`.
            timeout: longest wait for each.
            combine: makes one text of those of all replicas.

        Raises:
            ReplicaLostError: a replica has not set its text.
        """
        place, store = self.scope, self.shared_store
        if place.rank > 0:
            self.wait_for(f"{event}/all", timeout)
            return str(store.get(f"{event}/all").decode())
        texts = list[str]()
        for replica in range(place.num_replicas):
            self.wait_for(f"{event}/{replica}", timeout)
            texts.append(store.get(f"{event}/{replica}").decode())
        text = combine(texts)
        if place.replica == 0:
            store.set(f"{event}/all", text)
        return text

    def begin_training(self) -> None:
        """Begin training, when all replicas are set up. A launch that joins later is refused.

        Raises:
            UsageError: two launches have the same replica id; then on every rank.
        """
        if self.registry is not None:
            self.registry.begin(self.shared_store)

    def leave(self, error: BaseException | None) -> None:
        """Tell the other launches how this process ends. Blocks: some seconds, if it fails.

        Args:
            error: that ends it; None if there is none.
        """
        if self.registry is not None:
            self.registry.end(error)

    def watched[T](self, work: Callable[[], T]) -> T:
        """Return the result of work that waits for other launches, unless one of them ends.

        Raises:
            UsageError, ReplicaLostError: one has.
        """
        return work() if self.registry is None else in_thread(work, self.registry.check)

    def share_error(self, event: str, error: str | None) -> str | None:
        """Return one of the errors of all ranks of all replicas, the same on all; None if none.

        Blocks: the host, until every rank has reported its own and read the result.
        """
        if error is not None:
            self.shared_store.set(f"{event}/complaint", error)
        self._count_rank(f"{event}/said")
        self.wait_for(f"{event}/said/all", SETUP_TIMEOUT)
        key = f"{event}/complaint"
        found = self.shared_store.get(key).decode() if self.shared_store.check([key]) else None
        self.wait_for_all_readers(f"{event}/heard")
        return found

    def wait_for_all_readers(self, event: str, timeout: timedelta = SETUP_TIMEOUT) -> None:
        """Report that this rank has read a value; the first process waits until all ranks have.

        It may host the store, so it must not exit before.
        """
        self._count_rank(event)
        if self.is_first:
            try:
                self.wait_for(f"{event}/all", timeout)
            except (UsageError, ReplicaLostError) as error:
                # A launch that has ended needs no store, and the next wait names it.
                if isinstance(error, ReplicaLostError) and not error.lost:
                    raise

    def is_announced_by_first_rank(self, event: str) -> bool:
        """Whether the first process reaches `event`, too, now or soon after.

        For ranks that would otherwise repeat its message.
        """
        if self.is_first:
            with suppress(RuntimeError):  # the store may be gone: then no rank reads it
                self.shared_store.set(event, "1")
            return True
        try:
            self.shared_store.wait([event], SHORT_TIMEOUT)
        except dist.DistNetworkError:
            return True  # it hosted the store, and has exited
        except RuntimeError:
            return False
        return True

    def exit_barrier(self, timeout: timedelta = EXIT_TIMEOUT) -> None:
        """Wait at the end of training until all ranks of all replicas have finished, or `timeout`.

        Closing a connection discards data that the peer has not read yet, so that ranks of another
        replica could miss the last records. Once all ranks are here, all records have been read.

        Args:
            timeout: after which this rank exits alone, because failed ranks never join.
        """
        try:
            self._count_rank("leaving")
            self.shared_store.wait(["leaving/all"], timeout)
        except RuntimeError:
            return  # a rank failed; or the store's host has exited, after it had waited for all

    def _count_rank(self, event: str) -> None:
        num_ranks = self.scope.num_replicas * self.scope.ranks_per_replica
        if self.shared_store.add(f"{event}/count", 1) == num_ranks:
            self.shared_store.set(f"{event}/all", "1")

    def wait_for(
        self,
        key: str,
        timeout: timedelta,
        *,
        replica: int | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        """Wait until a key of the shared store is set.

        Args:
            key: of the store; `event/r` is announced by replica r, `event/all` after all of these.
            timeout: longest wait.
            replica: that sets the key, for the error message; None takes it from `event/r`.
            keys: to wait for, where there are several; `key` is then only for the message.

        Raises:
            ReplicaLostError: the key was not set within `timeout`, the store is gone, or a launch
                has ended.
            UsageError: before training the launches are refused, or one has ended with exit code 2.
        """
        event, _, last = key.rpartition("/")
        if replica is None and last.isdecimal():
            replica = int(last)
        else:
            event = key
        missing = "some rank of some replica" if replica is None else f"replica {replica}"
        try:
            self._wait(keys or [key], timeout, f"{missing} ({event})")
        except RuntimeError as error:
            if last == "all" and (found := self._unannounced(key)) is not None:
                event, replica, missing = key.removesuffix("/all"), found, f"replica {found}"
            raise ReplicaLostError(
                self._missing_message(event, replica, missing, timeout, error)
            ) from error

    def _unannounced(self, key: str) -> int | None:
        """Return the first replica that has not announced an event, if others have."""
        event, replicas = key.removesuffix("/all"), range(self.scope.num_replicas)
        try:
            missing = [r for r in replicas if not self.shared_store.check([f"{event}/{r}"])]
        except RuntimeError:
            return None  # the store is gone
        return missing[0] if 0 < len(missing) < len(replicas) else None

    def _wait(self, keys: Sequence[str], timeout: timedelta, what: str) -> None:
        if self.registry is None:
            self.shared_store.wait(keys, timeout)
            return
        say = self.say if timeout == JOIN_TIMEOUT else _be_silent
        wait = Wait(what, timeout.total_seconds(), say)
        while not self.shared_store.check(keys):
            self.registry.check()
            if not wait.pause():
                raise dist.DistStoreError("time-out")

    def _missing_message(
        self,
        event: str,
        replica: int | None,
        missing: str,
        timeout: timedelta,
        error: RuntimeError,
    ) -> str:
        """Error message for a key that was not set: the missing replica, and a remedy."""
        if isinstance(error, dist.DistNetworkError):
            reason = str(error).partition("\n")[0]
            return f"the store failed while waiting for {missing} ({event}): {reason}"
        is_joining = timeout == JOIN_TIMEOUT
        what = f"has not {'joined' if is_joining else 'arrived'} ({event})"
        remedy = "look at its last output"
        place = self.scope
        if is_joining and replica not in (None, place.replica) and not place.is_single_launch:
            remedy = f"is it started, with {flag('replica_id')} {replica}?"
        return f"{missing} {what} within {_in_words(timeout)}; {remedy}"

    def enter_environment(self, env: MutableMapping[str, str]) -> None:
        """Set `RANK` and `WORLD_SIZE` to those of the replica, and the interface that `arrange` has
        chosen, for Megatron's groups, too; `leave_environment` undoes it."""
        values = {
            "RANK": str(self.placement.rank),
            "WORLD_SIZE": str(self.placement.ranks_per_replica),
            **self.interface_variable,
        }
        for name, value in values.items():
            self._saved_environment.setdefault(name, env.get(name))
            env[name] = value

    @property
    def interface_variable(self) -> dict[str, str]:
        """The environment variable for the interface that `arrange` has chosen, if any."""
        return {GLOO_INTERFACE: self.interface} if self.interface else {}

    def leave_environment(self, env: MutableMapping[str, str]) -> None:
        """Restore what `enter_environment` changed."""
        for name, value in self._saved_environment.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        self._saved_environment.clear()


def _replica_prefix(replica: int) -> str:
    return f"edit/replica{replica}"


def _outcomes(decide: Callable[[list[Any]], Sequence[Any]], values: list[Any]) -> list[Any]:
    """Return for each rank a refusal, or None and its value."""
    try:
        return [(None, outcome) for outcome in decide(values)]
    except UsageError as error:
        return [((error.value, error.rule, error.remedy), None)] * len(values)


def _in_words(time: timedelta) -> str:
    seconds = time.total_seconds()
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


def join(
    placement: Placement,
    *,
    rendezvous: str | None,
    timeout_seconds: float | None,
    is_alone: bool = False,
    say: Callable[[str], None] = _be_silent,
) -> ReplicaWorld:
    """Open the stores. Blocks: the host, until the store's host has joined.

    Args:
        rendezvous: HOST:PORT of the shared store, where each replica has its own launch.
        timeout_seconds: longest wait at a sync; None is the lower bound of `auto`.
        is_alone, say: see `ReplicaWorld`.

    Raises:
        UsageError: the launch has no store, its store or the rendezvous cannot be reached, or
            another launch has the same replica id or another number of replicas.
    """
    if placement.rank > 0:
        say = _be_silent
    launch_store = _store_of_launch(placement, say)
    timeout = timedelta(seconds=timeout_seconds or MIN_TIMEOUT_SECONDS)
    if placement.is_single_launch or is_alone:
        is_alone = not placement.is_single_launch
        prefix = "edit/replica" if is_alone else _replica_prefix(placement.replica)
        return ReplicaWorld(
            placement,
            dist.PrefixStore(prefix, launch_store),
            dist.PrefixStore(_SHARED, launch_store),
            timeout,
            is_alone=is_alone,
            store_host=os.environ.get("MASTER_ADDR", "").strip("[]"),
        )
    host, port = parse_endpoint(rendezvous or "")
    shared_store = dist.PrefixStore(_SHARED, _rendezvous_store(host, port, placement, say))
    registry = LaunchRegistry(shared_store.clone(), launch_store, placement)
    if placement.global_rank == 0:
        registry.watch_launches()
    registry.register(JOIN_TIMEOUT)
    if placement.replica > 0 and placement.rank == 0:
        registry.be_watched(host)
    return ReplicaWorld(
        placement, launch_store, shared_store, timeout, registry, store_host=host, say=say
    )


def _store_of_launch(placement: Placement, say: Callable[[str], None]) -> dist.Store:
    """The store of torchrun or of the batch system, through the usual environment variables."""
    alone = placement.num_replicas * placement.ranks_per_replica == 1
    if "MASTER_ADDR" not in os.environ and (alone or placement.ranks_per_replica == 1):
        if placement.is_single_launch and not alone:
            raise _no_master()
        return dist.HashStore()  # a launch of one process needs no rendezvous
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise _no_master()
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    host, port = parse_endpoint(place, "environment MASTER_ADDR:MASTER_PORT")
    is_client = os.environ.get("RANK") != "0" or os.environ.get(_AGENT_STORE) == "True"
    wait = Wait(f"the launch's store at {place}", _JOIN_SECONDS, say)
    try:
        if is_client:  # `rendezvous` may wait for ever for one that does not answer
            reach(host, port, lambda: _client(host, port), wait, "the launch's store")
        # Rank and world as the launcher gave them: this runs before `enter_environment`. torch does
        # not understand the brackets of an IPv6 address in MASTER_ADDR.
        rank, world = (int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
        url = f"tcp://{endpoint_text(host, port)}"
        store, _, _ = next(iter(dist.rendezvous(url, rank, world, timeout=JOIN_TIMEOUT)))
    except (OSError, RuntimeError) as error:
        raise UsageError(
            f"environment MASTER_ADDR:MASTER_PORT {place}",
            f"rank {os.environ.get('RANK')} of the launch on {socket.gethostname()} cannot use it "
            f"({_reason(error)})",
            "give each launch a free port of its own, and check that its rank 0 was started",
            is_local=True,
        ) from error
    # torchrun keeps its store when it starts ranks again: they must not read what the former ones
    # have set. On several nodes it counts the starts of each node, which then differ.
    is_on_one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_on_one_node else "0"
    return dist.PrefixStore(f"edit/start {start}", store)


def _no_master() -> UsageError:
    return UsageError(
        "environment MASTER_ADDR, MASTER_PORT (not set)",
        "several ranks need a place to meet",
        "launch with torchrun, or set both in the batch script",
    )


def _client(host: str, port: int) -> dist.Store:
    return dist.TCPStore(host, port, None, False, JOIN_TIMEOUT, wait_for_workers=False)


def _server(host: str, port: int) -> dist.Store:
    """Start a store. Blocks: until it answers at this address, which may be another machine's."""
    return dist.TCPStore(host, port, None, True, JOIN_TIMEOUT, wait_for_workers=False)


def _reason(error: OSError | RuntimeError) -> str:
    return getattr(error, "strerror", None) or str(error).partition("\n")[0]


def _rendezvous_store(
    host: str, port: int, placement: Placement, say: Callable[[str], None]
) -> dist.Store:
    is_host, place = placement.global_rank == 0, endpoint_text(host, port)
    try:
        if is_host:
            why = "it does not answer at this address, which may be another machine's,"
            return answered(lambda: _server(host, port), lambda: why)
        wait = Wait(f"replica 0 at {place}", _JOIN_SECONDS, say)
        return reach(host, port, lambda: _client(host, port), wait, "replica 0")
    except (OSError, RuntimeError) as error:
        if is_host and (store := _other_launch(host, port)) is not None:
            return store
        action = "listen on it" if is_host else "reach replica 0 there"
        raise UsageError(
            f"{flag('rendezvous')} {place}",
            f"replica {placement.replica} on {socket.gethostname()} could not {action} "
            f"({_reason(error)})",
            "check the address, that the port is free and open, and that replica 0 was started",
            is_local=True,
        ) from error


def _other_launch(host: str, port: int) -> dist.Store | None:
    """The store of another launch of replica 0 on this machine, if that has the port."""
    try:
        wait = Wait("", 0.0, _be_silent)
        store = reach(host, port, lambda: _client(host, port), wait)
        store.wait([f"{_SHARED}/{launch_key(0)}"], SHORT_TIMEOUT)
    except (OSError, RuntimeError):
        return None
    return store
