"""Ranks of the tests of elastic rounds: toy replicas whose membership follows a script, no hub.

Each process is one replica of one rank. Files in the working directory, which all share, stand in
for the hub's memory. Each replica follows the script on its own; as at the hub, nobody goes on
before all members of an exchange have come as far.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.wire import Wire
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.elastic.agent import Agent
from megatron_edit.elastic.copies import CopyServer
from megatron_edit.elastic.messages import Abandon, Commit, Deal, Fenced, FormEpoch, Go, Heal
from megatron_edit.elastic.replica import (
    Exchanged,
    ExchangeFailed,
    GroupsFormed,
    Order,
    Report,
    RoundDue,
    StateCopied,
)
from megatron_edit.engine import (
    EditEngine,
    ElasticParts,
    EngineGroups,
    EngineSettings,
    Membership,
    SharedState,
    Transports,
)
from megatron_edit.engine.plan import RoundState
from megatron_edit.errors import FencedError, ReplicaLostError
from tests.distributed.toy import CPU, TIMEOUT, Collector, ToyHost, with_outer

POLL_SECONDS = 0.002
BOARD = Path("board")  # in the directory of the ranks


@dataclass(frozen=True)
class Exchange:
    """One attempt to commit a round.

    Attributes:
        members: names, sorted.
        joined: those of them that copy the state first.
        lost: those of them that are lost before the commit, so that the others try again.
        is_complete: whether they are lost after the exchange, not in it.
    """

    members: tuple[str, ...]
    joined: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    is_complete: bool = True


@dataclass(frozen=True)
class Script:
    """A run.

    Attributes:
        founders: the members of the first epoch, sorted.
        rounds: the exchanges of each round; the last one of each is committed.
    """

    founders: tuple[str, ...]
    rounds: tuple[tuple[Exchange, ...], ...]

    @property
    def exchanges(self) -> list[tuple[int, Exchange]]:
        """All exchanges, with the number of their round."""
        return [(number, each) for number, tries in enumerate(self.rounds) for each in tries]


class ScriptedAgent:
    """A connection to a hub that follows a script (stands in for `Agent`).

    Args:
        name: of the replica.
        script: of the run.
        place: of the first exchange that the replica takes part in, among all; -1: it is one of
            those that begin the run.
    """

    admitted_from = 0

    def __init__(self, name: str, script: Script, place: int) -> None:
        self._name, self._exchanges, self._place = name, script.exchanges, place
        self._founders = script.founders
        self._orders: deque[Order] = deque()
        self._next: Callable[[], bool] = self._begin_run if place < 0 else self._heal
        self._handles: tuple[str, ...] = ()

    def progressed(self, *counts: int) -> None:
        """Ignore progress."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Ignore work."""
        yield

    def close(self, seconds: float) -> None:
        """Do nothing: there is no connection."""

    def next_order(self, timeout: float = 0.0) -> Order | None:
        """The next order, once all others have come as far."""
        if not self._orders and not self._next():
            time.sleep(POLL_SECONDS if timeout else 0.0)
        return self._orders.popleft() if self._orders else None

    def report(self, what: Report) -> None:
        """Tell the others what this replica has done, and wait for them in `next_order`."""
        match what:
            case RoundDue(handles, steps) | StateCopied(_, _, handles, steps):
                self._tell("steps", steps)
                self._tell("arrived", handles)
                self._next = self._begin
            case GroupsFormed():
                self._tell("formed", "")
                self._next = self._train if self._place < 0 else self._go
            case Exchanged(ready):
                _write(f"digest {ready.round + 1}", ready.digest)
                self._tell("ready", ready)
                self._next = self._decide
            case ExchangeFailed():
                self._next = self._abandon

    # ---- what is next; each returns whether it is decided

    def _train(self) -> bool:
        return False

    def _begin_run(self) -> bool:
        self._orders.append(self._epoch_of(self._founders, ('["nowhere"]',)))
        self._next = lambda: False  # until they have formed the groups
        return True

    def _heal(self) -> bool:
        number, exchange = self._exchanges[self._place]
        donors = [name for name in exchange.members if name not in exchange.joined]
        if (handles := self._told("arrived", donors)) is None:
            return False
        addresses = itertools.chain.from_iterable(handles)
        self._orders.append(Heal(number, _read(f"digest {number}"), tuple(addresses)))
        self._next = self._train
        return True

    def _begin(self) -> bool:
        """Form the groups anew, unless these members have them since the last commit."""
        self._place = max(self._place, 0)
        exchange = self._exchange
        if self._told("arrived", exchange.members) is None:
            return False
        before = Exchange(self._founders)
        if self._place > 0:
            before = self._exchanges[self._place - 1][1]
        if before.members == exchange.members and not (before.lost or exchange.joined):
            return self._go()
        self._orders.append(self._epoch_of(exchange.members, ('["nowhere"]',)))
        self._next = self._train
        return True

    def _go(self) -> bool:
        number, exchange = self._exchanges[self._place]
        self._next = self._train
        if exchange.lost and not exchange.is_complete:
            if self._name in exchange.lost:
                self._tell("lost", "")
                self._orders.append(Fenced("lost in the exchange"))
                return True
            self._next = self._abandon  # while the exchange waits for the lost replica
        self._orders.append(Go(self._place, number, dealt=self._deal()))
        return True

    def _deal(self) -> Deal:
        """The steps that the first members of the round have made in it, if they train on."""
        number = self._exchanges[self._place][0]
        first = [count for count, _ in self._exchanges].index(number)
        members = self._exchanges[first][1].members
        steps = [_read(f"steps {first} {name}") for name in members]
        return () if None in steps else tuple(zip(members, steps, strict=True))

    def _decide(self) -> bool:
        """Commit, or end the replicas that are lost."""
        number, exchange = self._exchanges[self._place]
        if (found := self._told("ready", exchange.members)) is None:
            return False
        assert all(each == found[0] and not each.corrupt for each in found), found
        if self._name in exchange.lost:
            self._orders.append(Fenced("lost before the commit"))
        elif exchange.lost:
            self._orders.append(Abandon(self._place))
            self._place += 1
        else:
            _write(f"blocks {number}", found[0].blocks)
            self._orders.append(Commit(self._place, number, found[0].digest))
            self._place += 1
        self._next = self._train
        return True

    def _abandon(self) -> bool:
        """Abandon an exchange in which members were lost."""
        lost = self._exchange.lost
        assert lost, "an exchange has failed that the script commits"
        if self._told("lost", lost) is None:
            return False
        self._orders.append(Abandon(self._place))
        self._place += 1
        self._next = self._train
        return True

    # ---- files

    @property
    def _exchange(self) -> Exchange:
        return self._exchanges[self._place][1]

    def _epoch_of(self, members: Sequence[str], handles: tuple[str, ...]) -> FormEpoch:
        return FormEpoch(1, self._place + 1, tuple(members), (handles,) * len(members), members[0])

    def _tell(self, what: str, value: Any) -> None:
        _write(f"{what} {max(self._place, 0)} {self._name}", value)

    def _told(self, what: str, names: Sequence[str]) -> list[Any] | None:
        keys = [f"{what} {self._place} {name}" for name in names]
        return [_read(key) for key in keys] if all(_path(key).exists() for key in keys) else None


def _path(key: str) -> Path:
    return BOARD / key


def _write(key: str, value: Any) -> None:
    draft = BOARD / f"draft {os.getpid()}"
    draft.write_bytes(pickle.dumps(value))
    draft.replace(_path(key))


def _read(key: str) -> Any:
    return pickle.loads(_path(key).read_bytes())


@dataclass
class ScriptedTransports(Transports):
    """Ordinary gloo groups in place of those that torch 2.14 forms again.

    Attributes:
        num_groups: of each epoch; more than one for encoded exchanges.
    """

    num_groups: int = 1
    kept: list[Any] = field(default_factory=list)  # dropping a group may block

    def form(
        self, parts: Sequence[Any], unique: int, rank: int, handles: Sequence[Sequence[str]]
    ) -> list[Any]:
        """Form new groups for each epoch."""
        size, made = len(handles), [None] * self.num_groups
        for number in range(self.num_groups if size > 1 else 0):
            try:
                store = dist.FileStore(str(BOARD / f"store {unique} {number}"), size)
                made[number] = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
            except RuntimeError as error:
                raise ReplicaLostError(str(error)) from error
        self.kept += made
        return made


ANY: Any = None


@dataclass
class RecordingState(SharedState):
    """Calls a function when a round has been committed."""

    on_commit: Callable[[], None] = lambda: None

    def publish(self, rounds: RoundState, *rest: Any) -> None:
        """See `SharedState`."""
        super().publish(rounds, *rest)
        self.on_commit()


@dataclass
class Replica:
    """One life of a replica: from its start or return until it is lost.

    Attributes:
        engine, host: of this life.
        commits: what it has applied.
        blocks: that it has trained since the last commit.
    """

    engine: EditEngine
    host: ToyHost
    reporter: Collector
    commits: list[dict[str, Any]]
    blocks: list[int] = field(default_factory=list)

    @classmethod
    def begin(
        cls, name: str, script: Script, place: int, settings: dict[str, Any], start: dict[str, Any],
        target: int, last_local_step: int,
    ) -> Replica:  # fmt: skip
        """Begin the run, or become ready to join the others' next meeting."""

        def group(what: str) -> Group:
            return Group(None, 0, 1, CPU, TIMEOUT, what, is_own=True)

        shared, control = RecordingState(), group("control")
        server = CopyServer(shared, b"", "127.0.0.1")
        num_groups = 1 + 2 * Wire.of(settings.get("sync_dtype", "fp32")).num_phases
        transports = ScriptedTransports(
            group("sync"), group("meeting"), lambda: ANY, 0, num_groups=num_groups
        )
        agent = cast(Agent, ScriptedAgent(name, script, place))
        address = f"127.0.0.1:{server.port}"
        membership = Membership(name, agent, control, transports, address)
        is_joining = membership.join()
        parts = ElasticParts(membership, b"", shared, is_joining, copies_moments=False)
        groups = EngineGroups(
            transports.sync, transports.meeting, group("replica"), group("stage"), control, {}
        )
        config = EditConfig(
            use_edit=True, strategy="edit", hub="127.0.0.1:1", replica_name=name,
            nominal_replicas=len(script.founders), **with_outer({"warmup_steps": 0} | settings),
        )  # fmt: skip
        sizes = {unit: len(values) for unit, values in start.items()}
        host = ToyHost.build(sizes, 0, 1, start)
        store = dist.HashStore()
        world = ReplicaWorld(
            Placement(len(script.founders), 0, 1, 0, False), store, store, TIMEOUT, is_alone=True
        )
        reporter = Collector()
        engine = EditEngine(
            EngineSettings(config, False, target, last_local_step), host, groups, world, reporter,
            elastic=parts,
        )  # fmt: skip
        self = cls(engine, host, reporter, [])
        shared.on_commit = self.record
        if not is_joining:
            engine.start()
        return self

    @property
    def num_commits(self) -> int:
        """Rounds of the run that are committed."""
        return self.engine.state.rounds.count

    def record(self) -> None:
        """Record what a commit has left behind."""
        rounds, units = self.engine.state.rounds, self.engine.syncs.outer.units
        assert rounds.assignment is not None and self.engine.elastic is not None
        if (attempt := self.engine.elastic._attempt) is None or attempt.plan is None:
            return  # before the first commit of this life
        plan, decision = attempt.plan, attempt.plan.decision
        assert decision is not None
        self.commits.append(
            {
                "round": rounds.count - 1,
                "members": rounds.members,
                "weights": decision.weights.numpy().copy(),
                "anomalous": decision.verdict.anomalous.numpy().copy(),
                "inner_steps": tuple(record.inner_steps for record in plan.records),
                "samples": self.engine._outcomes.samples_after(plan),
                "committed": _read(f"blocks {rounds.count - 1}"),
                "told": self.host.ended_rounds[-1],
                "blocks": tuple(self.blocks),
                "theta": {n: values.numpy().copy() for n, values in self.host.full.items()},
                "anchor": {n: u.anchor.numpy().copy() for n, u in units.items()},
                "momentum": {n: u.momentum.numpy().copy() for n, u in units.items()},
            }
        )
        self.blocks = []

    def train(self, moves: Sequence[dict[str, Any]], *, most: int | None = None) -> None:
        """Make the steps of a round, and meet; with `most`, be lost after so many steps."""
        before = self.num_commits
        for number, move in enumerate(moves):
            if number == most:
                return
            block = self.engine.status.block(number)
            assert block is not None, "a step without a block"
            self.blocks.append(block)
            self.engine.before_step()
            self.host.move(move)
            self.engine.after_step()
            if self.num_commits > before:
                return
        raise AssertionError("there are too few moves")


def run_script(
    names: tuple[str, ...],
    script: Script,
    settings: dict[str, Any],
    start: dict[str, Any],
    moves: list[dict[str, list[dict[str, Any]]]],
    target: int,
    last_local_step: int,
) -> list[dict[str, Any]]:
    """Be the replica names[RANK] in all its lives.

    Args:
        names: of all processes.
        script: of the run.
        settings: of `EditConfig`.
        start: values by unit at the switch.
        moves: moves[round][name], one for each step of that round.
        target: blocks of the run.
        last_local_step: before the final phase, of the nominal number of replicas.

    Returns:
        What this replica has applied in all its lives; see `Replica.record`.
    """
    BOARD.mkdir(exist_ok=True)
    name = names[int(os.environ["RANK"])]
    nothing = {unit: 0.0 * values for unit, values in start.items()}
    lives: list[Replica] = []
    current: Replica | None = None
    if name in script.founders:
        current = Replica.begin(name, script, -1, settings, start, target, last_local_step)
        lives.append(current)
    for place, (number, exchange) in enumerate(script.exchanges):
        is_due = current is not None and current.num_commits == number
        is_first = exchange is script.rounds[number][0]
        try:
            if name in exchange.joined:
                current = Replica.begin(
                    name, script, place, settings, nothing, target, last_local_step
                )
                lives.append(current)
                current.engine.join_pending_meeting()
            elif name not in exchange.members:
                if current is not None and current.engine.elastic is not None:
                    current.engine.elastic.settle()  # lost after the meeting
                if current is not None and is_due and is_first:  # or in the middle of the round
                    engine = current.engine
                    has_one_step = engine.state.rounds.is_synchronous(engine.settings)
                    is_short = has_one_step or settings.get("fragments", 1) > 1
                    current.train(moves[number][name], most=0 if is_short else 1)
                current = None
            elif current is not None and is_due and is_first:
                current.train(moves[number][name])
        except FencedError:
            current = None
    if current is not None and current.engine.elastic is not None:
        current.engine.elastic.settle()
    for life in lives:
        life.engine.close()
    return [commit for life in lives for commit in life.commits]
