"""Copies of a replica's state over real sockets, with donors that fail in all ways.

Would catch: a byte that is delivered twice, not at all or of another round; a copy that waits for
a donor without end; a stranger that disturbs a copy or holds memory; a caller's error taken for a
donor's.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache

import pytest

from megatron_edit.elastic import channel, copies
from megatron_edit.elastic.channel import (
    ChannelError,
    HubAddress,
    Session,
    accept_session,
    frame,
    open_session,
    tls_context,
)
from megatron_edit.elastic.copies import (
    CHUNK_BYTES,
    MAX_PEERS,
    MAX_UNPROVEN,
    CopyHeader,
    CopyMovedError,
    CopyServer,
    fetch,
)

pytestmark = pytest.mark.timeout(60)
TOKEN, ROUND, DIGEST = b"secret", 7, "a1-b2"
LIMIT = 15.0  # of every wait
SIZES = {"empty": 0, "bias": 3, "exact": 2 * CHUNK_BYTES, "none": 0, "anchor": 9 * CHUNK_BYTES + 5}


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up soon."""
    monkeypatch.setattr(copies, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(copies, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(channel, "CANCEL_SECONDS", 0.02)


@cache
def tensors() -> dict[str, bytes]:
    source = random.Random(1)
    return {name: source.randbytes(size) for name, size in SIZES.items()}


@dataclass
class Source:
    """A state in memory. `on_read` is called with the number of the read, and may replace it."""

    tensors: dict[str, bytes] = field(default_factory=tensors)
    round: int = ROUND
    digest: str = DIGEST
    about: str = '{"step": 12}'
    on_read: Callable[[int], bytes | None] = lambda number: None
    has_state: bool = True
    num_reads: int = 0

    def header(self) -> CopyHeader | None:
        if not self.has_state:
            return None
        sizes = tuple((name, len(value)) for name, value in self.tensors.items())
        return CopyHeader(self.round, self.digest, self.about, sizes)

    def read(self, round: int, name: str, start: int, size: int) -> bytes | None:
        self.num_reads += 1
        replaced = self.on_read(self.num_reads)
        if round != self.round:
            return None
        return self.tensors[name][start : start + size] if replaced is None else replaced


@contextmanager
def serving(*sources: Source, token: bytes = TOKEN) -> Iterator[list[CopyServer]]:
    servers = [CopyServer(each, token, "127.0.0.1") for each in sources]
    try:
        yield servers
    finally:
        for each in servers:
            each.close()


def addresses(servers: list[CopyServer]) -> list[tuple[str, int]]:
    return [("127.0.0.1", each.port) for each in servers]


class Copying:
    """Runs `fetch` in a thread, and checks that each byte comes once and in order."""

    def __init__(self, donors: list[tuple[str, int]], token: bytes = TOKEN) -> None:
        self.copied: dict[str, bytearray] = {}
        self.headers: list[CopyHeader] = []
        self.outcome: CopyHeader | BaseException | None = None
        self.cancelled = threading.Event()
        self.on_chunk: Callable[[], object] = lambda: None
        self._donors, self._token = donors, token
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Copying:
        self._thread.start()
        return self

    def join(self) -> CopyHeader:
        """The header; raises what `fetch` has raised."""
        self._thread.join(LIMIT)
        assert self.outcome is not None, "the copy does not end"
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def _run(self) -> None:
        try:
            self.outcome = fetch(
                self._donors, self._token, ROUND, DIGEST, self._open,
                is_cancelled=self.cancelled.is_set,
            )  # fmt: skip
        except BaseException as error:
            self.outcome = error

    def _open(self, header: CopyHeader) -> Callable[[str, int, bytes], None]:
        self.headers.append(header)
        self.copied = {name: bytearray() for name, _ in header.sizes}
        names = [name for name, _ in header.sizes]

        def receive(name: str, start: int, chunk: bytes) -> None:
            assert type(chunk) is bytes and 0 < len(chunk) <= CHUNK_BYTES
            assert start == len(self.copied[name]), "not in order"
            assert not any(self.copied[later] for later in names[names.index(name) + 1 :])
            self.copied[name] += chunk
            self.on_chunk()

        return receive

    def assert_complete(self) -> None:
        header = self.join()
        assert self.headers == [header], "opened more than once"
        assert {name: bytes(value) for name, value in self.copied.items()} == tensors()


def wait_until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- copies


@pytest.mark.parametrize("token", [TOKEN, b""])
def test_tensors_arrive_as_they_are(token: bytes) -> None:
    """The header is longer than a frame."""
    source = Source(about=json.dumps({"ledger": "x" * (3 << 20)}))
    with closing(CopyServer(source, token)) as server:
        copying = Copying([("localhost", server.port)], token).start()
        copying.assert_complete()
        assert copying.join() == source.header()
        assert source.num_reads == 1 + 2 + 10  # none for empty tensors


def test_several_replicas_copy_at_once() -> None:
    with serving(Source()) as servers:
        for each in [Copying(addresses(servers)).start() for _ in range(MAX_PEERS)]:
            each.assert_complete()


def test_peers_beyond_the_limit_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "SILENCE_SECONDS", LIMIT)
    with serving(Source()) as servers:
        host, port = addresses(servers)[0]
        held = [open_session(HubAddress(host, port, TOKEN), LIMIT) for _ in range(MAX_PEERS)]
        for session in held:
            ask(session)
        copying = Copying(addresses(servers)).start()
        time.sleep(0.2)
        assert not copying.headers
        for session in held:
            session.close()
        copying.assert_complete()


# ---- donors that are lost


def fail(number: int) -> bytes:
    raise OSError("the source has failed")


@pytest.mark.parametrize("loss", ["closed", "fails", "short", "moves", "hangs"])
def test_another_donor_continues(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first donor is lost in the middle of the largest tensor."""
    first, other = Source(), Source()
    released = threading.Event()
    with serving(first, other) as servers:

        def on_read(number: int) -> bytes | None:
            if number != 6:
                return None
            wait_until(lambda: copying.copied.get("bias"))
            if loss == "closed":
                servers[0].close()
            elif loss == "fails":
                fail(number)
            elif loss == "moves":
                first.round += 1
            elif loss == "hangs":
                released.wait(LIMIT)
            return b"short" if loss == "short" else None

        if loss == "hangs":
            monkeypatch.setattr(copies, "TRANSFER_SECONDS", 0.3)
        first.on_read = on_read
        copying = Copying(addresses(servers))
        copying.start().assert_complete()
        released.set()
        assert first.num_reads >= 6 and 8 <= other.num_reads < 13


def test_same_donor_continues_after_a_pause() -> None:
    """One that fails now and then, and no other."""
    source = Source()
    source.on_read = lambda number: fail(number) if number in (3, 4, 9) else None
    with serving(source) as servers:
        Copying(addresses(servers)).start().assert_complete()


def test_unreachable_donors_are_left_out() -> None:
    with serving(Source(), Source()) as servers:
        servers[0].close()
        wrong = [("127.0.0.1", 99_999), ("a" * 80 + ".invalid", 1)]
        Copying(wrong + addresses(servers)).start().assert_complete()


def test_copy_without_donors_fails() -> None:
    with pytest.raises(OSError, match="no donor to copy from: there is none"):
        Copying([]).start().join()
    with serving(Source()) as servers:
        servers[0].close()
        began = time.monotonic()
        with pytest.raises(OSError, match=r"no donor to copy from: .* cannot be reached"):
            Copying(addresses(servers)).start().join()
        assert time.monotonic() - began > 0.5


def test_silent_donor_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single wait may last as long as the whole time without a byte."""
    monkeypatch.setattr(copies, "TRANSFER_SECONDS", 0.7)
    source, released = Source(), threading.Event()
    source.on_read = lambda number: (released.wait(LIMIT), None)[1] if number == 3 else None
    with serving(source) as servers:
        Copying(addresses(servers)).start().assert_complete()
        released.set()


# ---- donors with another state


@pytest.mark.parametrize("has_other", [False, True])
def test_donor_that_moves_ends_the_copy(has_other: bool) -> None:
    """Where no donor is left that has the round."""
    first, other = Source(), Source(round=ROUND + 1)

    def move(number: int) -> bytes | None:
        first.round += number == 6
        return None

    first.on_read = move
    with serving(*([first, other] if has_other else [first])) as servers:
        copying = Copying(addresses(servers)).start()
        with pytest.raises(CopyMovedError, match="has another state"):
            copying.join()
        assert len(copying.headers) == 1


@pytest.mark.parametrize(
    "wrong", [Source(digest="other"), Source(round=6), Source(has_state=False)]
)
def test_donor_without_the_round_is_not_copied(wrong: Source) -> None:
    with serving(wrong, Source()) as servers:
        donors = addresses(servers)
        copying = Copying(donors[:1]).start()
        with pytest.raises(CopyMovedError):
            copying.join()
        assert not copying.headers and not wrong.num_reads
        Copying(donors).start().assert_complete()
        servers[1].close()
        with pytest.raises(CopyMovedError, match="cannot be reached"):
            Copying(donors).start().join()


def test_later_donor_with_other_tensors_is_not_used() -> None:
    first, other = Source(), Source(tensors={"bias": b"abc"})
    first.on_read = lambda number: fail(number) if number == 6 else None
    with serving(first, other) as servers:
        Copying(addresses(servers)).start().assert_complete()
    assert first.num_reads > 6 and not other.num_reads


# ---- the caller


def test_cancelled_copy_ends() -> None:
    """While a donor is silent, and while none can be reached."""
    released, source = threading.Event(), Source()
    source.on_read = lambda number: (released.wait(LIMIT), None)[1]
    with serving(source) as servers:
        copying = Copying(addresses(servers)).start()
        wait_until(lambda: source.num_reads)
        copying.cancelled.set()
        began = time.monotonic()
        with pytest.raises(InterruptedError, match="cancelled"):
            copying.join()
        assert time.monotonic() - began < 2
        released.set()
        donors = addresses(servers)
    copying = Copying(donors).start()
    copying.cancelled.set()
    with pytest.raises(InterruptedError, match="cancelled"):
        copying.join()


def test_errors_of_the_caller_are_not_the_donors() -> None:
    with serving(Source(), Source()) as servers:
        copying = Copying(addresses(servers))
        copying.on_chunk = lambda: fail(0)
        with pytest.raises(OSError, match="the source has failed"):
            copying.start().join()
        assert len(copying.headers) == 1


# ---- strangers


def ask(session: Session, **changed: object) -> bytes:
    """Send a request for the header, or what is made of it; the answer."""
    request = {"round": ROUND, "name": "", "start": 0, "size": 0} | changed
    session.send(json.dumps(request).encode())
    return session.receive(time.monotonic() + LIMIT)


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(LIMIT)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def disturb(connection: socket.socket, sent: bytes) -> None:
    """Send bytes, and read until the other side closes the connection."""
    connection.settimeout(LIMIT)
    try:
        connection.sendall(sent)
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass


def session_of(connection: socket.socket, token: bytes) -> Session:
    """Of a side that has been connected to, before the handshake."""
    context = tls_context(token, is_server=True)
    return Session(context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False))


def test_wrong_token_is_not_served() -> None:
    source = Source()
    with serving(source) as servers:
        copying = Copying(addresses(servers), b"another").start()
        with pytest.raises(OSError, match="no donor to copy from"):
            copying.join()
        assert not copying.headers
        Copying(addresses(servers)).start().assert_complete()


def test_donor_without_the_token_is_not_copied() -> None:
    """A stranger that says what a donor says."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT)
        copying = Copying([("127.0.0.1", listener.getsockname()[1])]).start()
        connection, _ = listener.accept()
    with connection, suppress(OSError):
        session = session_of(connection, b"another secret")
        accept_session(session, time.monotonic() + LIMIT)
    with pytest.raises(OSError, match="no donor to copy from"):
        copying.join()
    assert not copying.headers


def test_random_bytes_end_their_own_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are too few for a proof."""
    monkeypatch.setattr(copies, "CONNECT_SECONDS", 0.3)
    noise = random.Random(2)
    with serving(Source()) as servers:
        copying = Copying(addresses(servers)).start()
        for size in (1, 63, 64, 65, 5000, 200_000):
            with socket.create_connection(addresses(servers)[0], LIMIT) as connection:
                disturb(connection, noise.randbytes(size))
        copying.assert_complete()


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "missing"}, {"name": "bias", "size": 4}, {"name": "bias", "start": -1, "size": 1},
        {"name": "bias", "start": 3, "size": 1}, {"name": "bias", "size": 0},
        {"name": "anchor", "size": CHUNK_BYTES + 1}, {"name": "bias", "size": True},
        {"name": "bias", "size": 1.0}, {"name": ["bias"], "size": 1}, {"more": 1},
        {"name": "x" * 5000}, {"round": None},
    ],
)  # fmt: skip
def test_malformed_requests_end_their_own_connection(changed: dict[str, object]) -> None:
    source = Source()
    with serving(source) as servers:
        with open_session(HubAddress("127.0.0.1", servers[0].port, TOKEN), LIMIT) as session:
            assert ask(session)[:1] == b"h"
            with pytest.raises((ConnectionError, ChannelError)):
                ask(session, **changed)
        assert not source.num_reads
        Copying(addresses(servers)).start().assert_complete()


@pytest.mark.parametrize(
    "sent", [b"\xff" * 8, frame(b"[" * 3000), frame(b"\xff")], ids=["long", "nested", "no JSON"]
)
def test_malformed_frames_end_their_own_connection(sent: bytes) -> None:
    with serving(Source()) as servers:
        with open_session(HubAddress("127.0.0.1", servers[0].port, TOKEN), LIMIT) as session:
            disturb(session.connection, sent)
        Copying(addresses(servers)).start().assert_complete()


def test_half_open_connections_do_not_disturb_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CONNECT_SECONDS", 0.6)
    monkeypatch.setattr(copies, "SILENCE_SECONDS", LIMIT)
    source = Source()
    source.on_read = lambda number: time.sleep(0.02)
    with serving(source) as servers:
        first = Copying(addresses(servers)).start()
        wait_until(lambda: source.num_reads)
        num_threads = threading.active_count()
        strangers = [socket.create_connection(addresses(servers)[0], LIMIT) for _ in range(64)]
        first.assert_complete()
        assert threading.active_count() <= num_threads + MAX_UNPROVEN
        Copying(addresses(servers)).start().assert_complete()  # after their time
        for each in strangers:
            with each:
                assert is_closed(each)


def test_silent_peers_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks for nothing more, and one that does not read what it has asked for."""
    monkeypatch.setattr(copies, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(copies, "TRANSFER_SECONDS", 0.3)
    with serving(Source(tensors={"large": bytes(64 << 20)})) as servers:
        address = HubAddress("127.0.0.1", servers[0].port, TOKEN)
        with open_session(address, LIMIT) as idle:
            ask(idle)
            assert is_closed(idle.connection)
        with open_session(address, LIMIT) as greedy:
            ask(greedy)
            request = {"round": ROUND, "name": "large", "start": 0, "size": CHUNK_BYTES}
            for _ in range(100):
                greedy.send(json.dumps(request).encode())
            wait_until(lambda: not any(t.name == "edit-copy" for t in threading.enumerate()))


# ---- donors that keep to no protocol


def header_with(**changed: object) -> bytes:
    record = {"round": ROUND, "digest": DIGEST, "about": "", "sizes": [["a", 4]]}
    return b"h" + json.dumps(record | changed).encode()


BAD_ANSWERS = {
    "nothing": [b""],
    "unknown kind": [b"?"],
    "chunk as header": [b"cabcd"],
    "no JSON": [b"h{"],
    "round of another type": [header_with(round="7")],
    "missing field": [b'h{"round": 7}'],
    "sizes of another type": [header_with(sizes=[["a", True]])],
    "negative size": [header_with(sizes=[["a", -1]])],
    "long name": [header_with(sizes=[["a" * 1000, 1]])],
    "repeated name": [header_with(sizes=[["a", 1], ["a", 1]])],
    "no pairs": [header_with(sizes=["ab"])],
    "endless header": [b"p" + bytes(CHUNK_BYTES)] * 40,
    "oversized frame": [b"h" + bytes(CHUNK_BYTES + 100)],
    "short chunk": [header_with(), b"cabc"],
    "long chunk": [header_with(), b"cabcde"],
    "header as chunk": [header_with(), header_with()],
    "error": [header_with(), b"e\xff\xfe"],
    "end": [header_with()],
}


@pytest.mark.parametrize("answers", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_malformed_answers_are_refused(answers: list[bytes]) -> None:
    """The donor is given up, and another one serves."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT)

        def answer() -> None:
            connection, _ = listener.accept()
            with session_of(connection, TOKEN) as session, suppress(OSError):
                accept_session(session, time.monotonic() + LIMIT)
                for each in answers:
                    session.send(each)
                while session.connection.recv(4096):
                    pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        good = Source(tensors={"a": b"good"})
        with serving(good) as servers:
            donors = [("127.0.0.1", listener.getsockname()[1]), *addresses(servers)]
            copying = Copying(donors).start()
            copying.join()
            assert copying.copied == {"a": b"good"} and len(copying.headers) == 1
        thread.join(LIMIT)
        assert not thread.is_alive()


# ---- the server


def test_closed_server_ends_its_threads() -> None:
    before = set(threading.enumerate())
    with serving(Source()) as servers:
        with open_session(HubAddress("127.0.0.1", servers[0].port, TOKEN), LIMIT) as session:
            ask(session)
            servers[0].close()
            assert is_closed(session.connection)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(addresses(servers)[0], LIMIT)
    wait_until(lambda: set(threading.enumerate()) <= before)
