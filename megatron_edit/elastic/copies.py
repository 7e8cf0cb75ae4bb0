"""Copies of a replica's state: a replica that joins reads it from those that have it.

Each rank copies from the same rank of other replicas, over a connection of its own and in the
background. The joining side asks for spans of tensors and has several requests on the way, so that
latency does not bound the throughput. The answers come in the order of the requests. Where a donor
is lost, or goes on to the next round, another one that has the same state continues the copy.

Requests and the header are JSON. An answer is one byte that says what it is, and its content.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple, NoReturn, Protocol

from megatron_edit.elastic.agent import CONNECT_SECONDS, HubAddress, open_session
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
from megatron_edit.elastic.messages import MessageError, to_json
from megatron_edit.flags import endpoint_text

CHUNK_BYTES = 512 << 10  # of one answer, at most
MAX_REQUEST_BYTES = 4 << 10
MAX_HEADER_BYTES = 16 << 20
MAX_TENSOR_NAME = 256  # characters
MAX_ERROR_CHARACTERS = 200
MAX_PEERS = 8  # that copy from one server at once
MAX_UNPROVEN = 32  # connections that have not proved the token yet
NUM_OUTSTANDING = 8  # requests on the way to a donor
TRANSFER_SECONDS = 30.0  # for one frame; a donor may wait for its trainer before it answers
IDLE_SECONDS = 60.0  # between two requests
SILENCE_SECONDS = 30.0  # without a byte of the state from any donor
PAUSE_SECONDS = 0.5  # before all donors are tried again
CANCEL_SECONDS = 0.1  # between two looks at `is_cancelled`
ACCEPT_SECONDS = 1.0
CHUNK, HEADER, HEADER_PART, MOVED, ERROR = b"c", b"h", b"p", b"m", b"e"  # kinds of answers


@dataclass(frozen=True, slots=True)
class CopyHeader:
    """What a donor has.

    Attributes:
        round: commits whose result it is.
        digest: of anchor and momentum.
        about: JSON text with all that is no tensor.
        sizes: name and bytes of each tensor, in the order of the copy.
    """

    round: int
    digest: str
    about: str
    sizes: tuple[tuple[str, int], ...]


class CopySource(Protocol):
    """A donor's state. Its methods are called in the server's threads, several at once."""

    def header(self) -> CopyHeader | None:
        """What there is to copy; None where the donor has no state yet."""

    def read(self, round: int, name: str, start: int, size: int) -> bytes | None:
        """Bytes of a tensor that the last header names; None where they are of another round.

        Args:
            round: that the state must be of, before and after the reading.
            start: of the first byte.
            size: bytes to read, all inside the tensor.
        """


class CopyMovedError(Exception):
    """The donors have gone on to another round, or do not have the one that is asked for."""


# ---- both sides


def _never() -> bool:
    return False


def _receive(
    connection: socket.socket, size: int, until: float, is_cancelled: Callable[[], bool] = _never
) -> bytes:
    """Exactly `size` bytes.

    Raises:
        InterruptedError: cancelled.
        OSError: the connection has ended, or the bytes are not there at the time `until`.
    """
    buffer, num_received = bytearray(size), 0
    view = memoryview(buffer)
    while num_received < size:
        if is_cancelled():
            raise InterruptedError("the copy has been cancelled")
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError("the other side is silent, or too slow")
        connection.settimeout(min(left, CANCEL_SECONDS))
        try:
            num = connection.recv_into(view[num_received:])
        except TimeoutError:
            continue
        if not num:
            raise ConnectionError("the other side has closed the connection")
        num_received += num
    return bytes(buffer)


class _Session:
    """Frames over a connection, each within a time."""

    def __init__(
        self, connection: socket.socket, codec: FrameCodec,
        is_cancelled: Callable[[], bool] = _never,
    ) -> None:  # fmt: skip
        self._connection, self._codec, self._is_cancelled = connection, codec, is_cancelled

    def send(self, payload: bytes) -> None:
        self._connection.settimeout(TRANSFER_SECONDS)
        self._connection.sendall(self._codec.encode(payload))

    def receive(self, max_bytes: int, until: float) -> bytes:
        """The payload of the next frame, which must begin before `until`."""
        head = _receive(self._connection, LENGTH.size, until, self._is_cancelled)
        if (size := FrameCodec.frame_bytes(head)) > max_bytes + MAC_BYTES:
            raise ChannelError(f"a frame of {size} bytes; at most {max_bytes} are expected here")
        until = time.monotonic() + TRANSFER_SECONDS
        return self._codec.decode(_receive(self._connection, size, until, self._is_cancelled))


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _end(connection: socket.socket) -> None:
    """Close a connection, also where a forked process has inherited it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class _Span(NamedTuple):
    """A part of a tensor."""

    name: str
    start: int
    size: int


def _spans(sizes: Sequence[tuple[str, int]]) -> Iterator[_Span]:
    for name, total in sizes:
        for start in range(0, total, CHUNK_BYTES):
            yield _Span(name, start, min(CHUNK_BYTES, total - start))


def _fields(payload: bytes, **kinds: type) -> list[Any]:
    """The fields of a JSON object, whose names and types are given.

    Raises:
        MessageError: other fields, or a field of another type.
    """
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise MessageError("not a JSON text") from error
    if not isinstance(record, dict) or set(record) != set(kinds):
        raise MessageError("not a JSON object with the fields that are expected")
    for name, kind in kinds.items():
        if type(record[name]) is not kind:
            raise MessageError(f"{name}: not of type {kind.__name__}")
    return [record[name] for name in kinds]


def _header_of(payload: bytes) -> CopyHeader:
    """The header in an answer.

    Raises:
        MessageError: not a header.
    """
    round, digest, about, sizes = _fields(payload, round=int, digest=str, about=str, sizes=list)
    for each in sizes:
        if not isinstance(each, list) or [type(value) for value in each] != [str, int]:
            raise MessageError("sizes: not pairs of name and bytes")
        if not 0 < len(each[0]) <= MAX_TENSOR_NAME or each[1] < 0:
            raise MessageError("sizes: a name that is too long or empty, or a negative size")
    if len({name for name, _ in sizes}) < len(sizes):
        raise MessageError("sizes: a name that occurs twice")
    return CopyHeader(round, digest, about, tuple((name, size) for name, size in sizes))


# ---- the donor


class CopyServer:
    """Serves copies to peers that prove the token, each in a daemon thread.

    Args:
        token: shared with the peers; where it and `host` are empty, only this machine is served.
        host: to listen on; empty: all addresses.

    Attributes:
        port: where it listens.

    Raises:
        OSError: cannot listen there.
    """

    def __init__(self, source: CopySource, token: bytes, host: str = "") -> None:
        self._source, self._token = source, token
        self._listener = _listen(host or ("" if token else "127.0.0.1"))
        self.port: int = self._listener.getsockname()[1]
        self._unproven = threading.BoundedSemaphore(MAX_UNPROVEN)
        self._peers = threading.BoundedSemaphore(MAX_PEERS)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="edit-copies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections. A thread inside of the source's methods ends after them."""
        with self._lock:
            self._is_closed = True
            # Closed by their threads: a number of a closed socket may be given to another one.
            for each in (self._listener, *self._connections):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * ACCEPT_SECONDS)

    def _accept(self) -> None:
        with self._listener:
            self._listener.settimeout(ACCEPT_SECONDS)
            while not self._is_closed:
                try:
                    connection = self._listener.accept()[0]
                except TimeoutError:
                    continue
                except OSError:  # closed; or no descriptor is left, and one may be later
                    time.sleep(CANCEL_SECONDS)
                    continue
                self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        """Serve a connection in a thread; where there are too many of them, close it."""
        if not self._unproven.acquire(blocking=False):
            _end(connection)
            return
        try:
            threading.Thread(
                target=self._serve, args=(connection,), name="edit-copy", daemon=True
            ).start()
        except RuntimeError:  # the system allows no further thread
            self._unproven.release()
            _end(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            try:
                with self._lock:
                    if self._is_closed:
                        return
                    self._connections.add(connection)
                session, first = self._authenticate(connection)
            finally:
                self._unproven.release()
            if not self._peers.acquire(blocking=False):
                session.send(ERROR + b"others copy from this donor, as many as it serves at once")
                return
            try:
                _Peer(session, self._source).serve(first)
            finally:
                self._peers.release()
        except (OSError, ChannelError, MessageError):
            pass  # a peer that keeps to no protocol, or is gone: only its connection ends
        finally:
            with self._lock:
                self._connections.discard(connection)
            _end(connection)

    def _authenticate(self, connection: socket.socket) -> tuple[_Session, bytes]:
        """The session with a peer, and its first request."""
        _prepare(connection)
        until = time.monotonic() + CONNECT_SECONDS
        session = _Session(connection, accept_session(connection, self._token, until))
        return session, session.receive(MAX_REQUEST_BYTES, until)


def _listen(host: str) -> socket.socket:
    if host:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def accept_session(connection: socket.socket, token: bytes, until: float) -> FrameCodec:
    """Prove the token both ways, as the side that has been connected to.

    Args:
        connection: of a peer that uses `open_session`.
        until: when the proof must be there, in monotonic seconds.

    Raises:
        OSError: the peer is gone, or too slow.
        ChannelError: it does not have the token.
    """
    own = new_nonce()
    connection.settimeout(CONNECT_SECONDS)
    connection.sendall(own)
    answer = _receive(connection, NONCE_BYTES + MAC_BYTES, until)
    nonce, given = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not is_proof(given, proof(token, b"peer", own, nonce)):
        raise ChannelError("a wrong token")
    connection.sendall(proof(token, b"hub", own, nonce))
    return FrameCodec.session(token, own, nonce, is_hub=True)


class _Peer:
    """Answers the requests of one peer, one after another. One answer is in memory at a time."""

    def __init__(self, session: _Session, source: CopySource) -> None:
        self._session, self._source = session, source
        self._sizes: dict[str, int] = {}  # of the header that the peer has been sent

    def serve(self, request: bytes) -> NoReturn:
        """Answer a first request and further ones, until the peer ends the connection.

        Raises:
            OSError, ChannelError, MessageError: the peer is gone, silent, or not of this protocol.
        """
        while True:
            span, round = self._checked(request)
            try:
                answers = self._chunk(round, span) if span.name else self._header()
            except Exception as error:  # of the source; the peer asks another donor
                text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
                answers = [ERROR + text.encode(errors="replace")]
            for each in answers:
                self._session.send(each)
            until = time.monotonic() + IDLE_SECONDS
            request = self._session.receive(MAX_REQUEST_BYTES, until)

    def _checked(self, request: bytes) -> tuple[_Span, int]:
        """What is asked for, and of which round; without a name it is the header."""
        round, name, start, size = _fields(request, round=int, name=str, start=int, size=int)
        if name:
            left = self._sizes.get(name, 0) - start
            if start < 0 or not 0 < size <= min(CHUNK_BYTES, left):
                raise MessageError("a request for what the header does not have")
        return _Span(name, start, size), round

    def _header(self) -> list[bytes]:
        if (header := self._source.header()) is None:
            return [MOVED]
        payload = to_json(asdict(header))
        if len(payload) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(payload)} bytes; at most {MAX_HEADER_BYTES}")
        self._sizes = dict(header.sizes)
        starts = range(0, len(payload), CHUNK_BYTES)
        return [
            (HEADER if start == starts[-1] else HEADER_PART) + payload[start : start + CHUNK_BYTES]
            for start in starts
        ]

    def _chunk(self, round: int, span: _Span) -> list[bytes]:
        chunk = self._source.read(round, *span)
        if chunk is None:
            return [MOVED]
        if len(chunk) != span.size:
            raise ValueError(f"{len(chunk)} bytes of {span.name} in place of {span.size}")
        return [CHUNK + chunk]


# ---- the joining side


class _Failure(Enum):
    """Why a donor does not serve."""

    UNREACHABLE = "cannot be reached"
    LOST = "has been lost"
    MOVED = "has another state"


class _DonorError(Exception):
    """A donor does not serve (any more)."""

    def __init__(self, failure: _Failure, text: str) -> None:
        super().__init__(f"{failure.value}: {text}" if text else failure.value)
        self.failure = failure


@contextmanager
def _as_donor_error(failure: _Failure) -> Iterator[None]:
    """Errors of a connection as errors of its donor; those of the caller's functions stay."""
    try:
        yield
    except InterruptedError:
        raise
    except (OSError, ChannelError, MessageError, OverflowError, UnicodeError) as error:
        raise _DonorError(failure, str(error)) from error


class _Donor:
    """A connection to one donor. All its methods raise `_DonorError` where the donor is lost."""

    def __init__(
        self, address: tuple[str, int], token: bytes, is_cancelled: Callable[[], bool]
    ) -> None:
        with _as_donor_error(_Failure.UNREACHABLE):
            self._connection, codec = open_session(HubAddress(*address, token), CONNECT_SECONDS)
            self._session = _Session(self._connection, codec, is_cancelled)
            _prepare(self._connection)

    def __enter__(self) -> _Donor:
        return self

    def __exit__(self, *given: object) -> None:
        _end(self._connection)

    def header(self) -> CopyHeader:
        """What the donor has."""
        self.ask(0, _Span("", 0, 0))
        text, kind = bytearray(), HEADER_PART
        with _as_donor_error(_Failure.LOST):
            while kind == HEADER_PART:
                kind, part = self._answer((HEADER, HEADER_PART))
                text += part
                if len(text) > MAX_HEADER_BYTES:
                    raise ChannelError(f"a header of more than {MAX_HEADER_BYTES} bytes")
            return _header_of(bytes(text))

    def ask(self, round: int, span: _Span) -> None:
        """Send a request; its answer comes after those of earlier ones."""
        with _as_donor_error(_Failure.LOST):
            self._session.send(to_json({"round": round} | span._asdict()))

    def chunk(self, size: int) -> bytes:
        """The answer to the oldest request."""
        with _as_donor_error(_Failure.LOST):
            chunk = self._answer((CHUNK,))[1]
            if len(chunk) != size:
                raise ChannelError(f"{len(chunk)} bytes in place of {size}")
            return chunk

    def _answer(self, kinds: Sequence[bytes]) -> tuple[bytes, bytes]:
        until = time.monotonic() + TRANSFER_SECONDS
        payload = self._session.receive(CHUNK_BYTES + 1, until)
        kind, content = payload[:1], payload[1:]
        if kind == MOVED:
            raise _DonorError(_Failure.MOVED, "")
        if kind == ERROR:
            raise ChannelError(content[: 4 * MAX_ERROR_CHARACTERS].decode(errors="replace"))
        if kind not in kinds:
            raise ChannelError("an answer to another request")
        return kind, content


OpenCopy = Callable[[CopyHeader], Callable[[str, int, bytes], None]]


class _Copy:
    """How far a copy has come; it outlives its donors."""

    def __init__(self, round: int, digest: str, open_copy: OpenCopy) -> None:
        self._round, self._digest, self._open_copy = round, digest, open_copy
        self._header: CopyHeader | None = None
        self._ahead: deque[_Span] = deque()  # asked for, and not received yet
        self.last_progress = time.monotonic()

    def take_from(self, donor: _Donor) -> CopyHeader:
        """Go on until all is copied.

        Raises:
            _DonorError: the donor cannot go on; another one may.
        """
        header = donor.header()
        self._check(header)
        if self._header is None:
            self._header, self._rest = header, _spans(header.sizes)
            self._deliver = self._open_copy(header)
            self.last_progress = time.monotonic()
        num_asked = 0  # of those ahead; a new donor has to be asked again
        while True:
            self._ahead.extend(islice(self._rest, NUM_OUTSTANDING - len(self._ahead)))
            for span in islice(self._ahead, num_asked, None):
                donor.ask(self._round, span)
            if not self._ahead:
                return self._header
            chunk = donor.chunk(self._ahead[0].size)
            span = self._ahead.popleft()
            num_asked = len(self._ahead)
            self._deliver(span.name, span.start, chunk)
            self.last_progress = time.monotonic()

    def _check(self, header: CopyHeader) -> None:
        if (header.round, header.digest) != (self._round, self._digest):
            text = f"of {header.round} commits, digest {header.digest[:MAX_ERROR_CHARACTERS]}"
            raise _DonorError(_Failure.MOVED, text)
        if self._header is not None and header.sizes != self._header.sizes:
            raise _DonorError(_Failure.MOVED, "with other tensors")


def fetch(
    addresses: Sequence[tuple[str, int]], token: bytes, round: int, digest: str,
    open_copy: OpenCopy, *, is_cancelled: Callable[[], bool] = _never,
) -> CopyHeader:  # fmt: skip
    """Copy the state of a round from the first of several donors that has it.

    Where a donor is lost, the next one continues: each byte is delivered once, in order.

    Args:
        addresses: host and port of each donor.
        token: shared with them.
        round: commits whose result is copied.
        digest: that the donors must name. That the copied state has it is for the caller to check.
        open_copy: called once, with the first header of the round and the digest. It returns the
            function that receives name, start and bytes of each chunk; an empty tensor has none.
        is_cancelled: whether to end; asked often, but not while a connection is being made.

    Returns:
        The header that `open_copy` was called with.

    Raises:
        CopyMovedError: every donor that can be reached has another round or digest.
        InterruptedError: cancelled (an `OSError`, too).
        OSError: all donors have been tried, twice and for 30 seconds at least, without a byte.
    """
    copy = _Copy(round, digest, open_copy)
    num_tries, last_progress = 0, copy.last_progress
    while True:
        failures: dict[tuple[str, int], _DonorError] = {}
        for address in addresses:
            if is_cancelled():
                raise InterruptedError("the copy has been cancelled")
            try:
                with _Donor(address, token, is_cancelled) as donor:
                    return copy.take_from(donor)
            except _DonorError as error:
                failures[address] = error
        num_tries = num_tries + 1 if copy.last_progress == last_progress else 1
        last_progress = copy.last_progress
        is_silent = num_tries > 1 and time.monotonic() - last_progress > SILENCE_SECONDS
        _raise_if_hopeless(failures, is_silent or not addresses)
        pause_ends = time.monotonic() + PAUSE_SECONDS
        while time.monotonic() < pause_ends and not is_cancelled():
            time.sleep(CANCEL_SECONDS)


def _raise_if_hopeless(failures: dict[tuple[str, int], _DonorError], is_silent: bool) -> None:
    """Give up where no donor will serve: all that can be reached have another state, or silence."""
    found = {error.failure for error in failures.values()}
    text = "; ".join(
        f"{endpoint_text(host, port)} {error}" for (host, port), error in failures.items()
    )
    if _Failure.MOVED in found and (is_silent or _Failure.LOST not in found):
        raise CopyMovedError(text)
    if is_silent:
        raise OSError(f"no donor to copy from: {text or 'there is none'}")
