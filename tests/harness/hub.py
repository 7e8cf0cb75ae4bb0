"""A hub in a thread, and replicas that only pretend to train, over real sockets. Also the hub's
decisions alone, for single inputs."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_edit.elastic.agent import Agent
from megatron_edit.elastic.channel import HubAddress, shut_down
from megatron_edit.elastic.hub_state import HubState, Record, Send, replay
from megatron_edit.elastic.journal import FILE_NAME, Journal, JournalEntry
from megatron_edit.elastic.machine import step
from megatron_edit.elastic.messages import (
    Abandon,
    Arrive,
    Blocks,
    Commit,
    End,
    Fenced,
    Formed,
    FormEpoch,
    Go,
    Heal,
    Healed,
    Hello,
    Ready,
    Refused,
)
from megatron_edit.elastic.replica import (
    Exchanged,
    GroupsFormed,
    Order,
    Quit,
    RoundDue,
    StateCopied,
)
from megatron_edit.elastic.server import Hub

TIMEOUT = 60.0


@contextmanager
def running_hub(
    folder: Path, minimum: int = 1, token: bytes = b"", port: int = 0
) -> Iterator[tuple[Hub, HubAddress]]:
    """A hub that listens on loopback until the context ends."""
    journal = Journal.open(folder)
    hub = Hub.start(journal, minimum, token, say=lambda line: None)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    found: list[int] = []

    def on_ready(host: str, port: int) -> None:
        found.append(port)
        ready.set()

    thread = threading.Thread(
        target=lambda: loop.run_until_complete(hub.serve("127.0.0.1", port, on_ready=on_ready))
    )
    thread.start()
    assert ready.wait(TIMEOUT)
    try:
        yield hub, HubAddress("127.0.0.1", found[0], token)
    finally:
        loop.call_soon_threadsafe(hub.close)
        thread.join(TIMEOUT)
        loop.close()
        journal.close()


def read_journal(folder: Path) -> list[JournalEntry]:
    """The complete lines of a journal, which a hub may have open."""
    lines = (folder / FILE_NAME).read_bytes().splitlines(keepends=True)
    return [JournalEntry.parse(line) for line in lines if line.endswith(b"\n")]


class PretendingReplica:
    """A replica whose ranks are a thread: it trains by sleeping, and its state is a text.

    Args:
        address: of the hub.
        name: of the replica.
        nominal: replicas that the run begins with.
        rounds: commits after which training is over.
        step_seconds: of a round's training.
        minimum: `--edit-min-replicas`.
        steps: inner steps of a round that it reports, as one that trains on during the exchange.
        states: state after each commit that any replica has applied, for those that copy it.
    """

    def __init__(
        self, address: HubAddress, name: str, nominal: int, rounds: int, *,
        step_seconds: float = 0.02, minimum: int = 1, states: dict[int, str] | None = None,
        steps: int | None = None, incarnation: str = "1",
        layout: str = "layout",
    ) -> None:  # fmt: skip
        hello = Hello(name, incarnation, layout, nominal, minimum, (name,), True, 0)
        self.exit_codes: list[int] = []  # with which the agent would have ended the process
        self.agent = Agent(address, hello, TIMEOUT, end_process=self.exit_codes.append)
        self.name, self._rounds, self._step_seconds = name, rounds, step_seconds
        self.states = {} if states is None else states
        self.digest, self.orders, self._steps = "", list[Order](), steps
        self.corrupts_round: int | None = None
        self.blocks: Blocks = ()  # that each replica reports in each round, instead of one
        self._members: tuple[str, ...] = ()
        self._is_last = False
        self._killed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> PretendingReplica:
        """Begin."""
        self.agent.start()
        self._thread.start()
        return self

    def kill(self) -> None:
        """End without a word, as after SIGKILL: the connection closes."""
        self._killed.set()
        self.agent._closing.set()
        self.agent._is_taken.set()
        self.agent._reports = queue.SimpleQueue()
        if (session := self.agent._session) is not None:
            shut_down(session.connection)
        self._thread.join(TIMEOUT)

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), f"{self.name}: {self.agent.state}"
        self.agent.close()

    def _run(self) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not self._killed.is_set() and time.monotonic() < deadline:
            order = self.agent.next_order(0.02)
            if order is None:
                continue
            self.orders.append(order)
            if isinstance(order, Fenced | Refused | End):
                return
            if self._execute(order):
                return

    def _execute(self, order: Order) -> bool:
        """Do what an order says; whether training is over."""
        match order:
            case FormEpoch(_, epoch, members):
                is_first = not self.agent.state.has_begun
                self._members = members
                self.agent.report(GroupsFormed(epoch))
                if is_first:
                    self._train()
            case Go(epoch, count, is_last):
                self._is_last = is_last
                digest = f"{self.digest}/{count}:{','.join(self._members)}"
                if count == self.corrupts_round:
                    digest += "!"
                blocks = tuple((name, self.blocks or ((count, 1),)) for name in self._members)
                ready = Ready(
                    epoch, count, f"plan {count}", (digest,), 4 * (count + 1), blocks,
                    units=("layer.1",),
                )  # fmt: skip
                self.agent.report(Exchanged(ready))
            case Commit(round=count):
                self.digest = self.agent.state.digest
                self.states[count + 1] = self.digest
                if self._is_last or count + 1 >= self._rounds:
                    self.agent.report(Quit("finished"))
                    return True
                self._train()
            case Heal(count, digest):
                while count not in self.states and not self._killed.is_set():
                    time.sleep(0.005)
                if self._killed.is_set():
                    return True
                self.digest = self.states[count]
                assert self.digest == digest
                copied = None if self._steps is None else 0
                self.agent.report(StateCopied(count, self.digest, (self.name,), copied))
            case Abandon():
                self.agent.report(RoundDue((self.name,), self._steps))
        return False

    def _train(self) -> None:
        self._killed.wait(self._step_seconds)
        if not self._killed.is_set():
            self.agent.report(RoundDue((self.name,), self._steps))


class HubDecisions:
    """A hub that takes inputs, and what it has sent since the last one."""

    def __init__(self, *names: str, rounds: int = 0) -> None:
        self.state, self.sent, self.records = HubState(), dict[str, list[Any]](), list[str]()
        self.journal: list[JournalEntry] = []
        for name in names:
            self.take(name, self.hello(name, len(names)))
        for name in names:
            self.take(name, Formed(1))
        for _ in range(rounds):
            self.exchange(*names)

    @staticmethod
    def hello(name: str, nominal: int, incarnation: str = "1", **more: Any) -> Hello:
        given = {"is_fresh": True, "applied": 0} | more
        return Hello(name, incarnation, "layout", nominal, 1, (name,), **given)

    def take(self, name: str, given: Any) -> None:
        self.state, outputs = step(self.state, name, given)
        self.sent, self.records = {}, []
        for output in outputs:
            if isinstance(output, Send):
                self.sent.setdefault(output.name, []).append(output.message)
            elif isinstance(output, Record):
                self.records.append(output.event)
                self.journal.append(
                    JournalEntry(0, 0.0, 1, output.epoch, output.event, output.fields, "")
                )

    def restart(self) -> None:
        """The hub is started again."""
        self.state = replay(self.journal, 1)

    def arrive(self, *names: str, steps: int | None = None) -> None:
        for name in names:
            self.take(name, Arrive(self.state.round, (name,), steps))

    def ready(self, name: str, *, digest: str = "", corrupt: Sequence[str] = ()) -> None:
        state, units = self.state, ("layer.1",)
        self.take(name, Ready(
            state.epoch, state.round, "plan", (digest or f"d{state.round}",), 0, (), units=units,
            corrupt=tuple(corrupt),
        ))  # fmt: skip

    def exchange(self, *names: str) -> None:
        self.arrive(*names)
        for name in names:
            self.ready(name)
        commit = Commit(self.state.epoch, self.state.round - 1, self.state.digest)
        assert all(self.sent[name] == [commit] for name in names)

    def join(self, name: str, nominal: int) -> None:
        """A replica joins, and holds the state."""
        self.take(name, self.hello(name, nominal, "2"))
        assert isinstance(self.sent[name][-1], Heal)
        self.take(name, Healed(self.state.round, self.state.digest))
