"""The hub process: connections of replicas, journal and clock around `machine.step`."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron_edit.elastic.channel import (
    HUB_ROLES,
    LENGTH,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    QUERY,
    STANDING,
    STORE,
    ChannelError,
    configure_socket,
    frame,
    payload_bytes,
    tls_context,
)
from megatron_edit.elastic.deadlines import REPLACED_SECONDS, Deadlines, Liveness
from megatron_edit.elastic.hub_state import (
    NO_STATE,
    Disconnected,
    HubState,
    Input,
    Late,
    Member,
    Output,
    Phase,
    Record,
    Send,
    Stop,
    failed_joins_text,
    replay,
)
from megatron_edit.elastic.journal import Journal
from megatron_edit.elastic.machine import step
from megatron_edit.elastic.messages import (
    Abandon,
    AliveMessage,
    End,
    Fenced,
    FromReplica,
    Heard,
    Hello,
    Leave,
    MessageError,
    Refused,
    StoreRequest,
    decode,
    encode,
)
from megatron_edit.elastic.refusals import name_in_use
from megatron_edit.elastic.store import StoreTable

HANDSHAKE_SECONDS = 5.0
FRAME_SECONDS = 10.0  # from the first byte of a frame to its last
TICK_SECONDS = 0.25
NAME_SECONDS = 0.1  # between two looks at whether a replica of the same name is silent
MAX_STRANGERS = 64  # connections in the handshake at once; others wait for their turn
MAX_BACKLOG_BYTES = 8 << 20  # unread by a replica: it does not read any more
QUERIES = (b"status", b"stop")  # and `STANDING`, with name and incarnation
NOT_SHOWN = ("blocks", "handles", "holes")  # long fields of the journal
WORDS = {  # for what the journal has, by event
    "open": "training begins again after {round} commits; {void} later ones are void",
    "join": "{name}",
    "copied": "{name} holds the state",
    "leave": "{name}: {reason}",
    "epoch": "{epoch}: {names}; leader: {leader}",
    "deal": "{number}: {names} train on",
    "commit": "{number}: {names} ({samples:,} samples)",
    "stop": "after the next commit",
    "end": "{reason} (exit code {exit_code})",
}


class Connection:
    """A connection to the hub: TLS in little memory, and frames.

    Attributes:
        name: of the replica that it is of; empty until it is known.
        max_bytes: of a payload.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name, self.max_bytes = "", MAX_PAYLOAD_BYTES
        self._reader, self._writer = reader, writer
        self._received, self._sent, self._rest = ssl.MemoryBIO(), ssl.MemoryBIO(), bytearray()
        self._tls: ssl.SSLObject

    async def open(self, token: bytes, run: bytes) -> bytes:
        """Begin the session; return what it is for.

        Args:
            run: identifier of the run, for the other side.

        Raises:
            OSError, EOFError: the other side lacks the certificate, or is gone.
            ChannelError: it wants something else.
        """
        context = tls_context(token, is_server=True)
        self._tls = context.wrap_bio(self._received, self._sent, server_side=True)
        await self._run(self._tls.do_handshake)
        if (role := await self.receive()) not in HUB_ROLES:
            raise ChannelError("a session for something else")
        self.send(run)
        return role

    def send(self, payload: bytes) -> None:
        """Queue a frame. A peer that does not read is disconnected."""
        too_long = len(payload) > self.max_bytes
        if too_long or self._writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            self.abort()
        elif not self._writer.is_closing():
            rest = memoryview(frame(payload, self.max_bytes))
            try:
                while rest:  # one record at a time
                    rest = rest[self._tls.write(rest) :]
            except ssl.SSLError:  # the other side has broken the session
                self.abort()
            else:
                self._flush()

    async def receive(self) -> bytes:
        """The payload of the next frame. Waits for its begin as long as it takes."""
        await self._fill(1)
        async with asyncio.timeout(FRAME_SECONDS):
            await self._fill(LENGTH.size)
            end = LENGTH.size + payload_bytes(bytes(self._rest[: LENGTH.size]), self.max_bytes)
            await self._fill(end)
        payload = bytes(self._rest[LENGTH.size : end])
        del self._rest[:end]
        return payload

    def close(self) -> None:
        """End the connection when all is sent."""
        self._writer.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()

    async def _fill(self, size: int) -> None:
        """Receive until there are `size` bytes."""
        while len(self._rest) < size:
            if not (chunk := await self._run(lambda: self._tls.read(1 << 16))):
                raise EOFError  # the other side has ended TLS
            self._rest += chunk

    async def _run[R](self, step: Callable[[], R]) -> R:
        """Carry out a step of TLS, which may need bytes from the other side."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                pass
            finally:
                self._flush()
            if not (chunk := await self._reader.read(1 << 16)):
                raise EOFError
            self._received.write(chunk)

    def _flush(self) -> None:
        if self._sent.pending:
            self._writer.write(self._sent.read())


@dataclass
class Hub:
    """Serves one run.

    Args:
        state: what the journal led to, with the term of this start.
        token: shared with the replicas; empty on loopback only.
        say: prints a line for people.
        clock: monotonic seconds.
    """

    journal: Journal
    state: HubState
    token: bytes
    say: Callable[[str], object]
    clock: Callable[[], float] = time.monotonic
    _connections: dict[str, Connection] = field(default_factory=dict, init=False)
    _liveness: Liveness = field(default_factory=Liveness, init=False)
    _deadlines: Deadlines = field(init=False)
    _places: asyncio.Semaphore = field(init=False)
    _store: StoreTable = field(default_factory=StoreTable, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _done: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._deadlines = Deadlines(self._liveness)
        self._places = asyncio.Semaphore(MAX_STRANGERS)

    @classmethod
    def start(cls, journal: Journal, minimum: int, token: bytes, **more: Any) -> Hub:
        """A hub that goes on where the journal ends."""
        state = replay(journal.entries(), minimum)
        journal.append(state.term, state.epoch, "open", **state.open_fields)
        return cls(journal, state, token, **more)

    async def serve(self, host: str, port: int, *, on_ready: Callable[[str, int], object]) -> None:
        """Serve until `close`, or until the journal fails.

        Args:
            host: to listen on.
            port: 0 takes a free one.
            on_ready: called with host and port.

        Raises:
            JournalError: a decision could not be made durable.
            OSError: cannot listen there.
        """
        server = await asyncio.start_server(self._connected, host, port)
        on_ready(*server.sockets[0].getsockname()[:2])
        ticks = asyncio.create_task(self._tick())
        try:
            await self._done.wait()
        finally:
            server.close()
            for task in (ticks, *self._tasks):
                task.cancel()
            await asyncio.gather(ticks, *self._tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Let `serve` return. What is recorded is on the disk already."""
        self._done.set()

    def status(self) -> dict[str, Any]:
        """What `megatron-edit hub status --json` prints."""
        state, now = self.state, self.clock()
        return {
            "term": state.term, "epoch": state.epoch, "round": state.round,
            "phase": state.phase.value, "samples": state.samples, "digest": state.digest,
            "leader": state.leader, "epoch_members": list(state.members),
            "stopping": state.is_stopping, "dealt": dict(state.dealt),
            "members": [
                {
                    "name": each.name, "state": _state_of(state, each),
                    "admitted_from": (
                        state.admitted_from(each.name) if state.is_barred(each) else None
                    ),
                    "connected": each.is_connected, "step": self._liveness.step_of(each.name),
                    "seconds_since_progress": round(
                        self._liveness.seconds_since_progress(each.name, now), 1
                    ),
                }
                for each in state.roster
            ],
            "failed_joins": {
                name: count for name, count in state.failed_joins
                if (member := state.member(name)) is None or member.applied == NO_STATE
            },
            "last_commit": self._last_commit(),
        }  # fmt: skip

    def _last_commit(self) -> dict[str, Any] | None:
        """The newest `commit` of the journal, without its blocks."""
        if (commit := self.journal.last_commit) is None:
            return None
        kept = {k: v for k, v in commit.fields.items() if k not in NOT_SHOWN}
        return {"seq": commit.seq, "time": commit.time, "epoch": commit.epoch} | kept

    # ---- inputs

    def _take(self, name: str, given: Input) -> None:
        """Decide, record, send; in this order, and without a pause in between."""
        if self._failure is not None:
            return
        try:
            self.state, outputs = step(self.state, name, given)
            for output in outputs:
                if isinstance(output, Record):
                    self._record(output)
                else:
                    self._send(output)
            self._say_again(outputs)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the hub: what it has said is in the journal, and nothing else is said."""
        self._failure = error
        self._done.set()

    def _record(self, record: Record) -> None:
        self.journal.append(self.state.term, record.epoch, record.event, **record.fields)
        if record.event == "leave":
            self._liveness.forget(record.fields["name"])
        elif record.event == "epoch":
            self._store.forget()  # what was set for groups of earlier epochs
        self._say(f"{record.event} {_in_words(record)}")

    def _say(self, line: str) -> None:
        with suppress(OSError):  # a full disk, or a closed pipe: the journal is what counts
            self.say(f"hub: {line}")

    def _send(self, send: Send) -> None:
        if (connection := self._connections.get(send.name)) is not None:
            connection.send(encode(send.message))
            if isinstance(send.message, Fenced | Refused | End):
                del self._connections[send.name]
                connection.close()
                if self.state.member(send.name) is None:
                    self._liveness.forget(send.name)

    def _say_again(self, outputs: Sequence[Output]) -> None:
        """Say why the results of a round were not good."""
        messages = [each.message for each in outputs if isinstance(each, Send)]
        reasons = {each.reason: None for each in messages if isinstance(each, Abandon)}
        for reason in filter(None, reasons):
            self._say(f"round {self.state.round} is exchanged again: {reason}")

    def _say_late(self, name: str, seconds: float) -> None:
        """Say that a meeting does not wait any more for a replica that copies the state."""
        member = self.state.member(name)
        if member is None or not self.state.is_late(member):
            return
        self._say(
            f"round {self.state.round} goes on without {name}, whose copy of the state was waited "
            f"for {seconds:.0f} s; it is waited for again in round {member.awaited_from}"
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                inputs = self._deadlines.tick(self.state, self.clock())
            except Exception as error:  # without deadlines the replicas could wait without end
                self._fail(error)
                return
            for name, given in inputs:
                self._take(name, given)
                if isinstance(given, Late):
                    self._say_late(name, given.seconds)

    # ---- connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, task = Connection(reader, writer), asyncio.current_task()
        assert task is not None, "a connection outside of a task"
        self._tasks.add(task)
        try:
            configure_socket(writer.get_extra_info("socket"))
            transport = writer.transport
            assert isinstance(transport, asyncio.Transport), "a transport that cannot be read from"
            transport.pause_reading()  # those that wait for a place use no memory
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._places.acquire()
            try:
                transport.resume_reading()
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    role = await connection.open(self.token, self.journal.run)
                    first = await connection.receive()
            finally:
                self._places.release()
            if role == QUERY:
                connection.send(self._answer(first))
            elif role == STORE:
                await self._serve_store(connection, decode(first, StoreRequest))
            else:
                await self._serve_replica(connection, decode(first, Hello))
        except (ChannelError, MessageError, OSError, EOFError, TimeoutError):
            pass  # a peer that keeps to no protocol, or is gone: only its connection ends
        except asyncio.CancelledError:
            pass  # by `serve`, at the end; asyncio would log a task that ends by it
        finally:
            if connection.name and not self._done.is_set():
                self._disconnected(connection)
            connection.abort() if self._done.is_set() else connection.close()
            self._tasks.discard(task)

    def _disconnected(self, connection: Connection) -> None:
        """A replica's connection has ended; one that has been replaced already does not count."""
        name = connection.name
        if self._connections.get(name) is connection:
            del self._connections[name]
            self._liveness.disconnected(name, self.clock())
            self._take(name, Disconnected())

    def _answer(self, query: bytes) -> bytes:
        what, *words = query.split(b" ")
        if what == STANDING and len(words) == 2:
            name, incarnation = (word.decode(errors="replace") for word in words)
            return self.state.standing(name, incarnation).encode()
        if query not in QUERIES:
            raise MessageError("no question that a hub answers")
        if query == b"stop":
            self._take("", Stop())
        return json.dumps(self.status()).encode()

    async def _serve_store(self, connection: Connection, request: StoreRequest) -> None:
        """Answer one rank's requests, one after another."""
        while True:
            connection.send(encode(await self._store.answer(request)))
            request = decode(await connection.receive(), StoreRequest)

    async def _serve_replica(self, connection: Connection, hello: Hello) -> None:
        known = self.state.member(hello.name)
        if known is not None and known.incarnation == hello.incarnation:
            if (old := self._connections.pop(hello.name, None)) is not None:
                old.abort()  # the peer has noticed the end of the connection first
        elif not await self._is_name_free(hello.name):
            connection.send(encode(name_in_use(hello.name)))
            return
        connection.name, connection.max_bytes = hello.name, MAX_MESSAGE_BYTES
        self._connections[hello.name] = connection
        self._liveness.heard(hello.name, self.clock())
        self._take(hello.name, hello)
        while True:
            message = decode(await connection.receive(), FromReplica)
            if self._connections.get(hello.name) is not connection:
                return  # replaced, or refused, while it was awaited
            self._liveness.heard(hello.name, self.clock())
            if isinstance(message, AliveMessage):
                progress = (message.step, message.batches, message.exchanged)
                self._liveness.progressed(hello.name, progress, self.clock())
                connection.send(encode(Heard()))
            elif isinstance(message, Hello):
                raise MessageError("a second Hello")
            else:
                self._take(hello.name, message)
                if isinstance(message, Leave):
                    return

    async def _is_name_free(self, name: str) -> bool:
        """Wait until it is clear whether another process of this name takes part: one that is
        silent, as after the loss of its machine, is replaced by its new incarnation."""
        began = self.clock()
        while (old := self._connections.get(name)) is not None:
            now = self.clock()
            if self._liveness.seconds_since_heard(name, now) < now - began:
                return False
            if now - began > REPLACED_SECONDS:
                self._disconnected(old)
                old.abort()
            else:
                await asyncio.sleep(NAME_SECONDS)
        return True


def _in_words(record: Record) -> str:
    """What is decided, for people; the journal has more."""
    has = record.fields
    names, number = ", ".join(has.get("members") or has.get("steps", ())), has.get("round", 0) + 1
    text = WORDS[record.event].format(names=names, number=number, epoch=record.epoch, **has)
    copies = ", which copies the state" if has.get("holds_state") is False else ""
    first = f" from round {has['admitted_from']} on" if "admitted_from" in has else ""
    units = f" in {', '.join(has['units'])}" if "units" in has else ""
    last = ", the last one" if has.get("is_over") else ""
    return f"{text}{copies}{first}{units}{last}{failed_joins_text(has.get('failed_joins', 0))}"


def _state_of(state: HubState, member: Member) -> str:
    """What `hub status` calls what a replica does."""
    if state.is_late(member):
        return "late"
    if state.phase is not Phase.OPENING and member.applied != state.round:
        return "joining"
    return "waiting" if member.is_arrived else "training"
