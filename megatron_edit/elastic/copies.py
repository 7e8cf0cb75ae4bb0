"""Copies of a replica's state: a replica that joins reads it from those that have it.

Each rank copies from the same rank of other replicas, over a connection of its own and in the
background. The joining side asks for spans of tensors and has several requests on the way, so that
latency does not bound the throughput. The answers come in the order of the requests. Where a donor
is lost, or goes on to the next round, another one that has the same state continues the copy.

Requests and the header are JSON. An answer is one byte that says what it is, and its content.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import Enum
from itertools import islice
from typing import Annotated, NoReturn, Protocol

import msgspec

from megatron_edit.elastic.channel import (
    CANCEL_SECONDS,
    CONNECT_SECONDS,
    ChannelError,
    HubAddress,
    Session,
    accept_session,
    configure_socket,
    never,
    open_session,
    shut_down,
    tls_context,
)
from megatron_edit.elastic.messages import LARGEST, Integer, MessageError, from_json
from megatron_edit.flags import endpoint_text

CHUNK_BYTES = 512 << 10  # of one answer, at most
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
ACCEPT_SECONDS = 1.0
_TensorName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TENSOR_NAME)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
CHUNK, HEADER, HEADER_PART, MOVED, ERROR = b"c", b"h", b"p", b"m", b"e"  # kinds of answers


class CopyHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a donor has.

    Attributes:
        round: commits whose result it is.
        digest: of anchor and momentum.
        about: JSON text with all that is no tensor.
        sizes: name and bytes of each tensor, in the order of the copy.
    """

    round: Integer
    digest: str
    about: str
    sizes: tuple[tuple[_TensorName, _Size], ...]


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


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for a part of a tensor, or without a name for the header."""

    round: Integer
    name: str = ""
    start: Integer = 0
    size: Integer = 0


def _requests(header: CopyHeader) -> Iterator[_Request]:
    for name, total in header.sizes:
        for start in range(0, total, CHUNK_BYTES):
            yield _Request(header.round, name, start, min(CHUNK_BYTES, total - start))


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
                shut_down(each)
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
            connection.close()
            return
        try:
            threading.Thread(
                target=self._serve, args=(connection,), name="edit-copy", daemon=True
            ).start()
        except RuntimeError:  # the system allows no further thread
            self._unproven.release()
            connection.close()

    def _serve(self, plain: socket.socket) -> None:
        session = None
        try:
            try:
                session = self._session(plain)
                until = time.monotonic() + CONNECT_SECONDS
                accept_session(session, until)
                first = session.receive(until)
            finally:
                self._unproven.release()
            session.send_seconds = TRANSFER_SECONDS
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
            if session is not None:
                with self._lock:
                    self._connections.discard(session.connection)
                session.close()
            plain.close()

    def _session(self, plain: socket.socket) -> Session:
        """A session before its handshake, which `close` can end."""
        configure_socket(plain)
        context = tls_context(self._token, is_server=True)
        connection = context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            if self._is_closed:
                connection.close()
                raise ConnectionError("the server is closed")
            self._connections.add(connection)
        return Session(connection, max_bytes=CHUNK_BYTES + 1)


def _listen(host: str) -> socket.socket:
    if host:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class _Peer:
    """Answers the requests of one peer, one after another. One answer is in memory at a time."""

    def __init__(self, session: Session, source: CopySource) -> None:
        self._session, self._source = session, source
        self._sizes: dict[str, int] = {}  # of the header that the peer has been sent

    def serve(self, request: bytes) -> NoReturn:
        """Answer a first request and further ones, until the peer ends the connection.

        Raises:
            OSError, ChannelError, MessageError: the peer is gone, silent, or not of this protocol.
        """
        while True:
            asked = self._checked(request)
            try:
                answers = self._chunk(asked) if asked.name else self._header()
            except Exception as error:  # of the source; the peer asks another donor
                text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
                answers = [ERROR + text.encode(errors="replace")]
            for each in answers:
                self._session.send(each)
            until = time.monotonic() + IDLE_SECONDS
            request = self._session.receive(until, seconds=TRANSFER_SECONDS)

    def _checked(self, payload: bytes) -> _Request:
        request: _Request = from_json(payload, _Request)
        if request.name:
            left = self._sizes.get(request.name, 0) - request.start
            if request.start < 0 or not 0 < request.size <= min(CHUNK_BYTES, left):
                raise MessageError("a request for what the header does not have")
        return request

    def _header(self) -> list[bytes]:
        if (header := self._source.header()) is None:
            return [MOVED]
        payload = msgspec.json.encode(header)
        if len(payload) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(payload)} bytes; at most {MAX_HEADER_BYTES}")
        self._sizes = dict(header.sizes)
        starts = range(0, len(payload), CHUNK_BYTES)
        return [
            (HEADER if start == starts[-1] else HEADER_PART) + payload[start : start + CHUNK_BYTES]
            for start in starts
        ]

    def _chunk(self, asked: _Request) -> list[bytes]:
        chunk = self._source.read(asked.round, asked.name, asked.start, asked.size)
        if chunk is None:
            return [MOVED]
        if len(chunk) != asked.size:
            raise ValueError(f"{len(chunk)} bytes of {asked.name} in place of {asked.size}")
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


class _Donor(AbstractContextManager["_Donor"]):
    """A connection to one donor. All its methods raise `_DonorError` where the donor is lost."""

    def __init__(
        self, address: tuple[str, int], token: bytes, is_cancelled: Callable[[], bool]
    ) -> None:
        with _as_donor_error(_Failure.UNREACHABLE):
            self._session = open_session(HubAddress(*address, token), CONNECT_SECONDS)
            self._session.max_bytes, self._session.send_seconds = CHUNK_BYTES + 1, TRANSFER_SECONDS
            self._session.is_cancelled = is_cancelled

    def __exit__(self, *given: object) -> None:
        self._session.close()

    def header(self) -> CopyHeader:
        """What the donor has."""
        self.ask(_Request(0))
        text, kind = bytearray(), HEADER_PART
        with _as_donor_error(_Failure.LOST):
            while kind == HEADER_PART:
                kind, part = self._answer((HEADER, HEADER_PART))
                text += part
                if len(text) > MAX_HEADER_BYTES:
                    raise ChannelError(f"a header of more than {MAX_HEADER_BYTES} bytes")
            header: CopyHeader = from_json(bytes(text), CopyHeader)
            if len(dict(header.sizes)) < len(header.sizes):
                raise MessageError("a tensor's name that occurs twice")
            return header

    def ask(self, request: _Request) -> None:
        """Send a request; its answer comes after those of earlier ones."""
        with _as_donor_error(_Failure.LOST):
            self._session.send(msgspec.json.encode(request))

    def chunk(self, size: int) -> bytes:
        """The answer to the oldest request."""
        with _as_donor_error(_Failure.LOST):
            chunk = self._answer((CHUNK,))[1]
            if len(chunk) != size:
                raise ChannelError(f"{len(chunk)} bytes in place of {size}")
            return chunk

    def _answer(self, kinds: Sequence[bytes]) -> tuple[bytes, bytes]:
        until = time.monotonic() + TRANSFER_SECONDS
        payload = self._session.receive(until, seconds=TRANSFER_SECONDS)
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
        self._ahead: deque[_Request] = deque()  # asked for, and not received yet
        self.last_progress = time.monotonic()

    def take_from(self, donor: _Donor) -> CopyHeader:
        """Go on until all is copied.

        Raises:
            _DonorError: the donor cannot go on; another one may.
        """
        header = donor.header()
        self._check(header)
        if self._header is None:
            self._header, self._rest = header, _requests(header)
            self._deliver = self._open_copy(header)
            self.last_progress = time.monotonic()
        num_asked = 0  # of those ahead; a new donor has to be asked again
        while True:
            self._ahead.extend(islice(self._rest, NUM_OUTSTANDING - len(self._ahead)))
            for request in islice(self._ahead, num_asked, None):
                donor.ask(request)
            if not self._ahead:
                return self._header
            chunk = donor.chunk(self._ahead[0].size)
            request = self._ahead.popleft()
            num_asked = len(self._ahead)
            self._deliver(request.name, request.start, chunk)
            self.last_progress = time.monotonic()

    def _check(self, header: CopyHeader) -> None:
        if (header.round, header.digest) != (self._round, self._digest):
            text = f"of {header.round} commits, digest {header.digest[:MAX_ERROR_CHARACTERS]}"
            raise _DonorError(_Failure.MOVED, text)
        if self._header is not None and header.sizes != self._header.sizes:
            raise _DonorError(_Failure.MOVED, "with other tensors")


def fetch(
    addresses: Sequence[tuple[str, int]], token: bytes, round: int, digest: str,
    open_copy: OpenCopy, *, is_cancelled: Callable[[], bool] = never,
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
