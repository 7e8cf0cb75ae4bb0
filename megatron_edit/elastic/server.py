"""The hub process: connections of replicas, journal and clock around `machine.step`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megatron_edit.elastic.channel import (
    LENGTH,
    MAC_BYTES,
    MAX_PAYLOAD_BYTES,
    NONCE_BYTES,
    ChannelError,
    FrameCodec,
    is_proof,
    new_nonce,
    proof,
)
from megatron_edit.elastic.hub_state import HubState, Phase, replay
from megatron_edit.elastic.journal import Journal, JournalEntry
from megatron_edit.elastic.liveness import Liveness
from megatron_edit.elastic.machine import (
    Disconnected,
    Input,
    Late,
    Lost,
    Record,
    Send,
    Stop,
    step,
)
from megatron_edit.elastic.messages import (
    AliveMessage,
    End,
    Fenced,
    FromReplica,
    Hello,
    MessageError,
    Refused,
    StoreRequest,
    decode,
    encode,
)
from megatron_edit.elastic.store import StoreTable

HANDSHAKE_SECONDS = 5.0
FRAME_SECONDS = 10.0  # from the first byte of a frame to its last
TICK_SECONDS = 0.25
COPY_SECONDS = 60.0  # longest wait of a meeting for replicas that copy the state
MAX_STRANGERS = 64  # connections that have not proved the token yet
MAX_BACKLOG_BYTES = 8 << 20  # unread by a replica: it does not read any more
QUERIES = (b"status", b"stop")


@dataclass(slots=True)
class Connection:
    """An authenticated connection of a replica."""

    writer: asyncio.StreamWriter
    codec: FrameCodec
    name: str = ""

    def send(self, payload: bytes) -> None:
        """Queue a frame. A peer that does not read is disconnected."""
        too_long = len(payload) > MAX_PAYLOAD_BYTES
        if too_long or self.writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
            self.writer.transport.abort()
        elif not self.writer.is_closing():
            self.writer.write(self.codec.encode(payload))


@dataclass
class Hub:
    """Serves one run.

    Args:
        journal: open.
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
    _copies_since: float | None = field(default=None, init=False)
    _num_strangers: int = field(default=0, init=False)
    _store: StoreTable = field(default_factory=StoreTable, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _done: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @classmethod
    def start(cls, journal: Journal, minimum: int, token: bytes, **more: Any) -> Hub:
        """A hub that goes on where the journal ends."""
        state = replay(journal.entries, minimum)
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
        address = server.sockets[0].getsockname()
        on_ready(address[0], address[1])
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
        state = self.state
        return {
            "term": state.term, "epoch": state.epoch, "round": state.round,
            "phase": state.phase.value, "samples": state.samples, "digest": state.digest,
            "members": [
                {
                    "name": each.name, "state": _state_of(state, each.name),
                    "connected": each.is_connected, "step": self._liveness.step_of(each.name),
                }
                for each in state.roster
            ],
            "last_commit": _last_commit(self.journal.entries),
        }  # fmt: skip

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
        except BaseException as error:
            self._failure = error
            self._done.set()

    def _record(self, record: Record) -> None:
        self.journal.append(self.state.term, record.epoch, record.event, **record.fields)
        if record.event == "leave":
            self._liveness.forget(record.fields["name"])
        shown = {k: v for k, v in record.fields.items() if k not in ("blocks", "handles")}
        with suppress(OSError):  # a full disk, or a closed pipe: the journal is what counts
            self.say(f"hub: {record.event} {json.dumps(shown)}")

    def _send(self, send: Send) -> None:
        connection = self._connections.get(send.name)
        if connection is not None:
            connection.send(encode(send.message))
            if isinstance(send.message, Fenced | Refused | End):
                del self._connections[send.name]
                connection.writer.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self.state.phase is Phase.ENDED:
                continue
            state = self.state
            is_awaited = any(each.is_arrived for each in state.roster)
            awaited = [m.name for m in state.expected if is_awaited and not m.is_arrived]
            names = [each.name for each in state.roster]
            for name, reason in self._liveness.tick(self.clock(), names, awaited).items():
                self._take(name, Lost(reason))
            self._give_up_slow_copies()

    def _give_up_slow_copies(self) -> None:
        """Go on without joiners for whose copy all others have waited long enough."""
        state, now = self.state, self.clock()
        is_waiting = bool(state.copying) and all(each.is_arrived for each in state.expected)
        if not is_waiting or not state.expected:
            self._copies_since = None
        elif self._copies_since is None:
            self._copies_since = now
        elif now - self._copies_since > COPY_SECONDS:
            for each in state.copying:
                self._take(each.name, Late())

    # ---- connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, task = None, asyncio.current_task()
        assert task is not None, "a connection outside of a task"
        self._tasks.add(task)
        try:
            if self._num_strangers >= MAX_STRANGERS:
                return
            self._num_strangers += 1
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    codec = await self._handshake(reader, writer)
                    first = codec.decode(await _frame(reader))
            finally:
                self._num_strangers -= 1
            if first in QUERIES:
                writer.write(codec.encode(self._answer(first)))
                await writer.drain()
                return
            message = decode(first, Hello | StoreRequest)
            if isinstance(message, StoreRequest):
                await self._serve_store(reader, Connection(writer, codec), message)
            else:
                connection = Connection(writer, codec)
                await self._serve_replica(reader, connection, message)
        except (ChannelError, MessageError, OSError, EOFError, TimeoutError):
            pass  # a peer that keeps to no protocol, or is gone: only its connection ends
        except asyncio.CancelledError:
            pass  # by `serve`, at the end; asyncio would log a task that ends by it
        finally:
            if connection is not None and not self._done.is_set():
                self._disconnected(connection)
            writer.transport.abort() if self._done.is_set() else writer.close()
            self._tasks.discard(task)

    def _disconnected(self, connection: Connection) -> None:
        """A replica's connection has ended; one that has been replaced already does not count."""
        name = connection.name
        if self._connections.get(name) is connection:
            del self._connections[name]
            self._liveness.disconnected(name, self.clock())
            self._take(name, Disconnected())

    async def _handshake(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> FrameCodec:
        own = new_nonce()
        writer.write(own)
        answer = await reader.readexactly(NONCE_BYTES + MAC_BYTES)
        nonce, given = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not is_proof(given, proof(self.token, b"peer", own, nonce)):
            raise ChannelError("a wrong token")
        writer.write(proof(self.token, b"hub", own, nonce))
        return FrameCodec.session(self.token, own, nonce, is_hub=True)

    def _answer(self, query: bytes) -> bytes:
        if query == b"stop":
            self._take("", Stop())
        return json.dumps(self.status()).encode()

    async def _serve_store(
        self, reader: asyncio.StreamReader, connection: Connection, request: StoreRequest
    ) -> None:
        """Answer one rank's requests, one after another."""
        while True:
            connection.send(encode(await self._store.answer(request)))
            request = decode(connection.codec.decode(await _frame(reader)), StoreRequest)

    async def _serve_replica(
        self, reader: asyncio.StreamReader, connection: Connection, hello: Hello
    ) -> None:
        known = self.state.member(hello.name)
        if known is not None and known.incarnation == hello.incarnation:
            old = self._connections.pop(hello.name, None)
            if old is not None:  # the peer has noticed the end of the connection first
                old.writer.transport.abort()
        elif hello.name in self._connections:
            refused = Refused(
                f"another replica of the name {hello.name} takes part",
                "give each replica a name of its own",
            )
            connection.send(encode(refused))
            return
        connection.name = hello.name
        self._connections[hello.name] = connection
        self._liveness.heard(hello.name, self.clock())
        self._take(hello.name, hello)
        while True:
            message = decode(connection.codec.decode(await _frame(reader)), FromReplica)
            if self._connections.get(hello.name) is not connection:
                return  # replaced, or refused, while it was awaited
            self._liveness.heard(hello.name, self.clock())
            if isinstance(message, AliveMessage):
                progress = (message.step, message.batches)
                self._liveness.progressed(hello.name, progress, self.clock())
            elif isinstance(message, Hello):
                raise MessageError("a second Hello")
            else:
                self._take(hello.name, message)


def _state_of(state: HubState, name: str) -> str:
    """What `hub status` calls what a replica does."""
    member = state.member(name)
    assert member is not None, "a replica that is not in the roster"
    if member.is_late:
        return "late"
    if state.phase is not Phase.OPENING and member.applied != state.round:
        return "joining"
    return "waiting" if member.is_arrived else "training"


def _last_commit(entries: Sequence[JournalEntry]) -> dict[str, Any] | None:
    """The newest `commit` of a journal, without its blocks."""
    commit = next((each for each in reversed(entries) if each.event == "commit"), None)
    if commit is None:
        return None
    kept = {key: value for key, value in commit.fields.items() if key != "blocks"}
    return {"seq": commit.seq, "time": commit.time, "epoch": commit.epoch} | kept


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame without its length. Waits for its begin as long as it takes."""
    first = await reader.readexactly(1)
    async with asyncio.timeout(FRAME_SECONDS):
        size = FrameCodec.frame_bytes(first + await reader.readexactly(LENGTH.size - 1))
        return await reader.readexactly(size)
