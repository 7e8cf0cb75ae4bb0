"""Frames of messages between hub and replicas, and how both sides prove that they share a token.

A frame is 4 bytes of length, the payload, and 32 bytes of HMAC-SHA256 over the direction, the
frame's number in the session, and the payload, under the session's key. Both sides derive that key
from the token, a nonce of each and what the session is for, so a frame of another session, a
repeated or left-out frame, or one sent back to its sender is not accepted. The hub's nonce ends
with the identifier of its run. The payload is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_edit.constants import KEEPALIVE
from megatron_edit.errors import UsageError

LENGTH = struct.Struct(">I")
MAC_BYTES = 32
NONCE_BYTES = 32
RUN_BYTES = 16
MAX_PAYLOAD_BYTES = 1 << 20  # but of a replica that the hub knows:
MAX_MESSAGE_BYTES = 64 << 20  # the blocks of a round can be many
VERSION = b"megatron-edit-hub-2"
# What a session with a hub is for; `PEER`: with any other program.
PEER, REPLICA, STORE, QUERY = b"peer", b"replica", b"store", b"query"
HUB_ROLES = (REPLICA, STORE, QUERY)
STANDING = b"standing"  # a query; followed by name and incarnation of a replica


class ChannelError(Exception):
    """A frame that is malformed, too long, or not authentic: the connection must be closed."""


class TooLongError(ChannelError):
    """A message that cannot be sent."""


def new_nonce(run: bytes = b"") -> bytes:
    """32 bytes: random ones, then the identifier of a hub's run."""
    return secrets.token_bytes(NONCE_BYTES - len(run)) + run


def run_of(hub_nonce: bytes) -> bytes:
    """The identifier of the run that a hub's nonce names."""
    return hub_nonce[-RUN_BYTES:]


def configure_socket(connection: socket.socket) -> None:
    """Send at once, and notice a machine that is gone although nothing is sent to it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        with suppress(AttributeError, OSError):  # not on all systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def proof(token: bytes, role: bytes, hub_nonce: bytes, peer_nonce: bytes) -> bytes:
    """32 bytes that only a holder of the token can compute.

    Args:
        role: of the side that proves, so that a proof cannot be sent back: `b"hub"`, or what the
            other side wants.
        hub_nonce: 32 random bytes of the hub's.
        peer_nonce: 32 random bytes of the other side's.
    """
    text = b"|".join((VERSION, role, hub_nonce, peer_nonce))
    return hmac.digest(token, text, hashlib.sha256)


def is_proof(given: bytes, expected: bytes) -> bool:
    """Whether two proofs are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, expected)


@dataclass
class FrameCodec:
    """Encodes and decodes the frames of one session, in order.

    Args:
        key: of the session; see `session`.
        is_hub: whether this is the hub's side.
        run: identifier of the hub's run.
        max_bytes: of a payload.
    """

    key: bytes
    is_hub: bool
    run: bytes = b""
    max_bytes: int = MAX_PAYLOAD_BYTES
    _sent: int = field(default=0, init=False)
    _received: int = field(default=0, init=False)

    @classmethod
    def session(
        cls, token: bytes, hub_nonce: bytes, peer_nonce: bytes, *, is_hub: bool,
        role: bytes = PEER,
    ) -> FrameCodec:  # fmt: skip
        """The codec of a session whose nonces have been exchanged.

        Args:
            hub_nonce: 32 random bytes of the hub's.
            peer_nonce: 32 random bytes of the other side's.
            is_hub: whether this is the hub's side.
        """
        key = proof(token, b"session of " + role, hub_nonce, peer_nonce)
        return cls(key, is_hub, run_of(hub_nonce))

    def encode(self, payload: bytes) -> bytes:
        """The next frame.

        Raises:
            TooLongError: too long.
        """
        if len(payload) > self.max_bytes:
            raise TooLongError(f"a message of {len(payload)} bytes; at most {self.max_bytes}")
        mac = self._mac(self.is_hub, self._sent, payload)
        self._sent += 1
        return LENGTH.pack(len(payload)) + payload + mac

    @staticmethod
    def frame_bytes(head: bytes, max_bytes: int = MAX_PAYLOAD_BYTES) -> int:
        """Bytes that follow a frame's 4 bytes of length.

        Raises:
            ChannelError: more than `max_bytes` of payload.
        """
        (length,) = LENGTH.unpack(head)
        if length > max_bytes:
            raise ChannelError(f"a frame of {length} bytes; at most {max_bytes}")
        return int(length) + MAC_BYTES

    def decode(self, body: bytes) -> bytes:
        """The payload of a frame, given without its length.

        Raises:
            ChannelError: not the next frame of the other side.
        """
        payload, mac = body[:-MAC_BYTES], body[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(not self.is_hub, self._received, payload)):
            raise ChannelError("a frame that the other side has not sent, or not as the next one")
        self._received += 1
        return payload

    def _mac(self, from_hub: bool, number: int, payload: bytes) -> bytes:
        head = struct.pack(">?Q", from_hub, number)
        return hmac.digest(self.key, head + payload, hashlib.sha256)


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
