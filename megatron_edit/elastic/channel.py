"""Sessions between hub, replicas and their ranks: frames of messages over TLS 1.3.

All programs of a run have the same certificate, whose key is made from the token that they share,
and each side of a connection must have it. So a session is encrypted, both sides know that the
other has the token, and no certificate has to be copied between machines.

A frame is 4 bytes of length and the payload. The first frame says what the session is for; the
answer to it names the run that a hub serves.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from megatron_edit.constants import KEEPALIVE
from megatron_edit.errors import UsageError

LENGTH = struct.Struct(">I")
RUN_BYTES = 16  # identifier of a hub's run
MAX_PAYLOAD_BYTES = 1 << 20  # but of a replica that the hub knows:
MAX_MESSAGE_BYTES = 64 << 20  # the blocks of a round can be many
VERSION = b"megatron-edit-hub-3"
# What a session with a hub is for; `PEER`: with any other program.
PEER, REPLICA, STORE, QUERY = b"peer", b"replica", b"store", b"query"
HUB_ROLES = (REPLICA, STORE, QUERY)
STANDING = b"standing"  # a query; followed by name and incarnation of a replica
CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.05  # for the rest of a record that has begun to arrive
CANCEL_SECONDS = 0.1  # between two looks at `is_cancelled`
SCRYPT_COST = 1 << 14  # 50 ms: a weak token cannot be guessed fast from the certificate


class ChannelError(Exception):
    """A frame that is too long, or another side without the token: the connection must end."""


class TooLongError(ChannelError):
    """A message that cannot be sent."""


def configure_socket(connection: socket.socket) -> None:
    """Send at once, and notice a machine that is gone although nothing is sent to it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        with suppress(AttributeError, OSError):  # not on all systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def frame(payload: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> bytes:
    """A payload with its length before it.

    Raises:
        TooLongError: too long.
    """
    if len(payload) > max_bytes:
        raise TooLongError(f"a message of {len(payload)} bytes; at most {max_bytes}")
    return LENGTH.pack(len(payload)) + payload


def payload_bytes(head: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> int:
    """The length of a payload, from the 4 bytes before it.

    Raises:
        ChannelError: more than `max_bytes`.
    """
    (length,) = LENGTH.unpack(head)
    if length > max_bytes:
        raise ChannelError(f"a frame of {length} bytes; at most {max_bytes}")
    return int(length)


# ---- The certificate


@cache
def _certificate(token: bytes) -> tuple[str, str]:
    """Private key and certificate in PEM, the same wherever the token is known."""
    seed = hashlib.scrypt(token, salt=VERSION, n=SCRYPT_COST, r=8, p=1, dklen=32)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "megatron-edit")])
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=datetime.datetime(1970, 1, 1),  # clocks may be wrong
        not_valid_after=datetime.datetime(9999, 12, 31),
    ).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(key, None).public_bytes(serialization.Encoding.PEM)
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return text.decode(), certificate.decode()


@cache
def tls_context(token: bytes, *, is_server: bool) -> ssl.SSLContext:
    """The context of one side. Both require the certificate that is made from the token.

    Raises:
        UsageError: this machine cannot make it.
    """
    try:
        return _context(token, is_server=is_server)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(
            "TLS 1.3 with Ed25519 and scrypt", f"is needed for a hub, and fails here ({error})",
            "use another build of OpenSSL and Python",
        ) from error  # fmt: skip


def _context(token: bytes, *, is_server: bool) -> ssl.SSLContext:
    key, certificate = _certificate(token)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is no machine's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    descriptor = os.memfd_create("megatron-edit")  # only files can be loaded; this has no name
    try:
        os.write(descriptor, (key + certificate).encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    if is_server:
        context.num_tickets = 0  # no session is resumed
    return context


# ---- Sessions of threads


@dataclass(frozen=True)
class HubAddress:
    """Where the hub listens, and the token that it shares."""

    host: str
    port: int
    token: bytes = b""


def never() -> bool:
    """Do not cancel."""
    return False


@dataclass
class Session(AbstractContextManager["Session"]):
    """Frames over a connection, used by one thread at a time.

    Attributes:
        connection: after the handshake, or before it on the side that was connected to.
        run: identifier of the hub's run.
        max_bytes: of a payload.
        send_seconds: for sending one.
        is_cancelled: whether to end; asked often while a frame is awaited.
    """

    connection: ssl.SSLSocket
    run: bytes = b""
    max_bytes: int = MAX_PAYLOAD_BYTES
    send_seconds: float = CONNECT_SECONDS
    is_cancelled: Callable[[], bool] = never
    _rest: bytearray = field(default_factory=bytearray, init=False)

    def send(self, payload: bytes) -> None:
        """Send a frame.

        Raises:
            OSError: it cannot be sent in time.
            TooLongError: too long.
        """
        until = time.monotonic() + self.send_seconds
        rest = memoryview(frame(payload, self.max_bytes))
        while rest:  # one record at a time
            self.connection.settimeout(_left(until))
            rest = rest[self.connection.send(rest) :]

    def receive(self, until: float, *, seconds: float | None = None) -> bytes:
        """The payload of the next frame.

        Args:
            until: when it must be there, in monotonic seconds; with `seconds`, when it must begin.
            seconds: for the payload after its length.

        Raises:
            OSError: the connection has ended, or the frame is late.
            InterruptedError: cancelled.
            ChannelError: too long.
        """
        size = payload_bytes(self._read(LENGTH.size, until), self.max_bytes)
        return self._read(size, until if seconds is None else time.monotonic() + seconds)

    def poll(self) -> list[bytes]:
        """The payloads that have arrived, after `select` has named the connection.

        Raises:
            OSError: the connection has ended.
            ChannelError: a payload is too long.
        """
        self.connection.settimeout(POLL_SECONDS)
        with suppress(TimeoutError):
            while True:
                if not (chunk := self.connection.recv(1 << 16)):
                    raise ConnectionError("the other side has closed the connection")
                self._rest += chunk
                if not self.connection.pending():
                    break
        payloads = []
        while len(self._rest) >= LENGTH.size:
            end = LENGTH.size + payload_bytes(bytes(self._rest[: LENGTH.size]), self.max_bytes)
            if len(self._rest) < end:
                break
            payloads.append(bytes(self._rest[LENGTH.size : end]))
            del self._rest[:end]
        return payloads

    def close(self) -> None:
        """End the connection, also where a forked process has inherited it."""
        shut_down(self.connection)
        self.connection.close()

    def __exit__(self, *given: object) -> None:
        self.close()

    def _read(self, size: int, until: float) -> bytes:
        """Exactly `size` bytes."""
        buffer, num_received = bytearray(size), 0
        view = memoryview(buffer)
        while num_received < size:
            if self.is_cancelled():
                raise InterruptedError("cancelled")
            self.connection.settimeout(min(_left(until), CANCEL_SECONDS))
            try:
                num = self.connection.recv_into(view[num_received:])
            except TimeoutError:
                continue
            if not num:
                raise ConnectionError("the other side has closed the connection")
            num_received += num
        return bytes(buffer)


def shut_down(connection: socket.socket) -> None:
    """End a connection that another thread may be using: its call returns."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # that of TLS is for one thread


def open_session(address: HubAddress, timeout: float, role: bytes = PEER) -> Session:
    """Connect to a hub, or to another program of the run.

    Args:
        timeout: seconds for all of it.
        role: what the session is for.

    Raises:
        OSError: it cannot be reached within `timeout` seconds.
        ChannelError: it does not have the token, or there is none and it is on another machine.
    """
    until = time.monotonic() + timeout
    plain = _connect(address, until)
    try:
        configure_socket(plain)
        plain.settimeout(_left(until))
        connection = tls_context(address.token, is_server=False).wrap_socket(plain)
        session = Session(connection, send_seconds=timeout)
    except BaseException as error:
        plain.close()
        raise _explained(error) from None
    try:
        session.send(role)
        session.run = session.receive(until)
    except BaseException as error:
        session.close()
        raise _explained(error) from None
    return session


def _explained(error: BaseException) -> BaseException:
    """The error of a session that could not be opened."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ChannelError("it does not have this token")
    if isinstance(error, ssl.SSLEOFError | ConnectionError):
        return ConnectionError("it has closed the connection")
    if isinstance(error, ssl.SSLError):
        return ChannelError(f"it is another program ({error.reason})")
    if isinstance(error, TimeoutError):
        return TimeoutError(
            "it accepts connections, and does not answer: another program, or a stopped one"
        )
    return error


def accept_session(session: Session, until: float) -> None:
    """Begin a session as the side that has been connected to, other than a hub.

    Args:
        until: when the other side must have begun it, in monotonic seconds.

    Raises:
        OSError: the other side is gone, too slow, or without the token.
        ChannelError: it does not want such a session.
    """
    session.connection.settimeout(_left(until))
    session.connection.do_handshake()
    if session.receive(until) != PEER:
        raise ChannelError("a session for something else")
    session.send(b"")


def _connect(address: HubAddress, until: float) -> socket.socket:
    """Connect to the first address of a host that answers."""
    failure: OSError = OSError(f"{address.host} has no address")
    for family, kind, protocol, _, place in _resolve(address, until):
        if not address.token and not ipaddress.ip_address(place[0].partition("%")[0]).is_loopback:
            raise ChannelError("without a token only a hub on this machine is used")
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_left(until))
            connection.connect(place)
        except OSError as error:
            failure = error
            connection.close()
        else:
            return connection
    raise failure


def _resolve(address: HubAddress, until: float) -> list[Any]:
    """What `socket.getaddrinfo` finds; as that has no time-out, a thread calls it."""
    found: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.put(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=look_up, name="edit-hub-name", daemon=True).start()
    try:
        addresses = found.get(timeout=_left(until))
    except queue.Empty:
        raise TimeoutError(f"the name {address.host} is not resolved in time") from None
    if isinstance(addresses, OSError):
        raise addresses
    return addresses


def _left(until: float) -> float:
    """Seconds until a time.

    Raises:
        TimeoutError: none.
    """
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError("the other side does not answer in time")
    return left


# ---- The secret that hub and replicas share


TOKEN_VARIABLE = "EDIT_HUB_TOKEN"
LEAST_TOKEN_BYTES = 16


def read_token(flag: str, file: str | None) -> bytes:
    """The shared token; empty where none is given.

    Args:
        flag: that names the file, for errors.
        file: its file; None takes the environment variable.

    Raises:
        UsageError: the file cannot be read, or the token is too short.
    """
    if file is None:
        token, source = os.environ.get(TOKEN_VARIABLE, "").strip().encode(), TOKEN_VARIABLE
        if not token:
            return b""
    else:
        source = f"{flag} {file}"
        try:
            token = Path(file).read_bytes().strip()
        except OSError as error:
            raise UsageError(
                source, f"cannot be read ({error.strerror})", "name another file"
            ) from None
    if len(token) < LEAST_TOKEN_BYTES:
        raise UsageError(
            source, f"has {len(token)} bytes, needs at least {LEAST_TOKEN_BYTES}",
            "make one, for example with: openssl rand -hex 32",
        )  # fmt: skip
    return token
