"""A replica's connection to the hub: a thread that keeps it up while the ranks train.

The main thread reports what the ranks have done (`report`) and takes orders (`next_order`). It
never waits for the network. A lost connection is made again, with what the hub may have missed.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_edit.elastic.channel import (
    LENGTH,
    MAC_BYTES,
    NONCE_BYTES,
    ChannelError,
    FrameCodec,
    is_proof,
    new_nonce,
    proof,
)
from megatron_edit.elastic.messages import (
    AliveMessage,
    End,
    FromHub,
    FromReplica,
    Hello,
    MessageError,
    decode,
    encode,
)
from megatron_edit.elastic.replica import (
    Connected,
    Order,
    Outcome,
    ReplicaState,
    Report,
    Task,
    receive,
    report,
)

HEARTBEAT_SECONDS = 1.0
READ_SECONDS = 0.05
CONNECT_SECONDS = 5.0
MAX_CLOSED = 5  # connections that a hub closes in the handshake, before it is taken for a refusal
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 1.0


@dataclass(frozen=True)
class HubAddress:
    """Where the hub listens, and the token that it shares."""

    host: str
    port: int
    token: bytes = b""


def open_session(address: HubAddress, timeout: float) -> tuple[socket.socket, FrameCodec]:
    """Connect to a hub, and prove the token both ways.

    Raises:
        OSError: it cannot be reached within `timeout` seconds.
        ChannelError: it does not have the token, or is no hub.
    """
    connection = socket.create_connection((address.host, address.port), timeout)
    try:
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hub_nonce, nonce = _read(connection, NONCE_BYTES), new_nonce()
        connection.sendall(nonce + proof(address.token, b"peer", hub_nonce, nonce))
        if not is_proof(
            _read(connection, MAC_BYTES), proof(address.token, b"hub", hub_nonce, nonce)
        ):
            raise ChannelError("the hub does not have this token")
    except BaseException:
        connection.close()
        raise
    return connection, FrameCodec.session(address.token, hub_nonce, nonce, is_hub=False)


def query(address: HubAddress, what: bytes, timeout: float = CONNECT_SECONDS) -> bytes:
    """Ask a hub `status` or `stop`; its status as JSON.

    Raises:
        OSError, ChannelError: see `open_session`.
    """
    connection, codec = open_session(address, timeout)
    with connection:
        connection.sendall(codec.encode(what))
        return codec.decode(read_frame(connection))


class Agent:
    """Speaks with the hub for one replica; rank 0 of the replica has it.

    Args:
        address: of the hub.
        hello: what the replica reports at its start.
        timeout: seconds without a hub after which the replica gives up.
        clock: monotonic seconds.
    """

    def __init__(
        self, address: HubAddress, hello: Hello, timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._address, self._timeout, self._clock = address, timeout, clock
        self._state = ReplicaState.fresh(hello)
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._session: tuple[socket.socket, FrameCodec] | None = None
        self._progress = (0, 0)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edit-hub", daemon=True)

    @property
    def state(self) -> ReplicaState:
        """Where the replica stands."""
        return self._state

    def start(self) -> None:
        """Connect, now or when there is a hub."""
        self._thread.start()

    def report(self, what: Report) -> None:
        """Report what the ranks have done. Returns at once."""
        self._reports.put(what)

    def progressed(self, step: int, batches: int) -> None:
        """Set what heartbeats count."""
        self._progress = (step, batches)

    def next_order(self, timeout: float = 0.0) -> Order | None:
        """The next order for the ranks; None where there is none within `timeout` seconds."""
        try:
            return self._orders.get(timeout=timeout) if timeout else self._orders.get_nowait()
        except queue.Empty:
            return None

    def close(self, timeout: float = CONNECT_SECONDS) -> None:
        """Send what is left to send, and end."""
        self._closing.set()
        self._thread.join(timeout)

    # ---- the thread

    def _run(self) -> None:
        try:
            self._keep_connected()
        except Exception as error:  # the ranks wait for orders of this thread
            self._orders.put(End(f"the connection to the hub has failed: {error!r}", 4))

    def _keep_connected(self) -> None:
        retry, last_seen = FIRST_RETRY_SECONDS, self._clock()
        num_closed, has_connected = 0, False  # by the hub, before it has proved the token
        while not (self._closing.is_set() and self._reports.empty()):
            try:
                self._session = open_session(self._address, CONNECT_SECONDS)
            except ChannelError as error:
                self._orders.put(End(str(error), 2))
                return
            except OSError as error:
                is_closed = isinstance(error, ConnectionError) and not isinstance(
                    error, ConnectionRefusedError
                )
                num_closed += is_closed and not has_connected
                if num_closed > MAX_CLOSED:
                    self._orders.put(End("the hub closes the connection: another token?", 2))
                    return
                if self._clock() - last_seen > self._timeout:
                    self._orders.put(End(f"no hub at {self._address.host}: {error}", 4))
                    return
                if self._closing.is_set():
                    return
                self._take_reports()
                time.sleep(retry)
                retry = min(2 * retry, LAST_RETRY_SECONDS)
                continue
            began = self._clock()
            try:
                self._apply(report(self._state, Connected()))
                has_connected = True
                with selectors.DefaultSelector() as selector:
                    self._exchange(selector)
            except (OSError, ChannelError, MessageError):
                pass
            finally:
                self._session[0].close()
                self._session = None
                last_seen = self._clock()
            if self._state.task is Task.ENDED:
                return
            if last_seen - began > LAST_RETRY_SECONDS:
                retry = FIRST_RETRY_SECONDS
            else:  # the hub does not keep the connection
                time.sleep(retry)
                retry = min(2 * retry, LAST_RETRY_SECONDS)

    def _exchange(self, selector: selectors.BaseSelector) -> None:
        """Send and receive until the connection ends."""
        assert self._session is not None, "no connection"
        connection, codec = self._session
        selector.register(connection, selectors.EVENT_READ)
        reader, next_beat = _FrameReader(codec), self._clock()
        while self._state.task is not Task.ENDED:
            self._take_reports()
            if self._clock() >= next_beat:
                next_beat = self._clock() + HEARTBEAT_SECONDS
                self._send(AliveMessage(*self._progress))
            if self._closing.is_set() and self._reports.empty():
                return
            if not selector.select(READ_SECONDS):
                continue
            if not (chunk := connection.recv(1 << 16)):
                return
            for payload in reader.feed(chunk):
                self._apply(receive(self._state, decode(payload, FromHub)))

    def _take_reports(self) -> None:
        while not self._reports.empty():
            self._apply(report(self._state, self._reports.get()))

    def _apply(self, outcome: Outcome) -> None:
        self._state = outcome.state
        for message in outcome.messages:
            self._send(message)
        for order in outcome.orders:
            self._orders.put(order)

    def _send(self, message: FromReplica) -> None:
        """Without a connection nothing is sent: the next `Hello` says it again."""
        if self._session is not None:
            connection, codec = self._session
            connection.sendall(codec.encode(encode(message)))


class _FrameReader:
    """Frames out of chunks of bytes."""

    def __init__(self, codec: FrameCodec) -> None:
        self._codec, self._rest = codec, b""

    def feed(self, chunk: bytes) -> list[bytes]:
        self._rest += chunk
        payloads: list[bytes] = []
        while len(self._rest) >= LENGTH.size:
            end = LENGTH.size + FrameCodec.frame_bytes(self._rest[: LENGTH.size])
            if len(self._rest) < end:
                break
            payloads.append(self._codec.decode(self._rest[LENGTH.size : end]))
            self._rest = self._rest[end:]
        return payloads


def read_frame(connection: socket.socket) -> bytes:
    """The next frame, without its length.

    Raises:
        OSError, ChannelError: the connection has ended, or the frame is too long.
    """
    return _read(connection, FrameCodec.frame_bytes(_read(connection, LENGTH.size)))


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        chunk = connection.recv(size - len(parts))
        if not chunk:
            raise ConnectionError("the other side has closed the connection")
        parts += chunk
    return bytes(parts)
