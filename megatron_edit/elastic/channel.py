"""Frames of messages between hub and replicas, and how both sides prove that they share a token.

A frame is 4 bytes of length, the payload, and 32 bytes of HMAC-SHA256 over the direction, the
frame's number in the session, and the payload, under the session's key. Both sides derive that key
from the token and a nonce of each, so a frame of another session, a repeated or left-out frame, or
one sent back to its sender is not accepted. The payload is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass, field

LENGTH = struct.Struct(">I")
MAC_BYTES = 32
NONCE_BYTES = 32
MAX_PAYLOAD_BYTES = 1 << 20
VERSION = b"megatron-edit-hub-1"


class ChannelError(Exception):
    """A frame that is malformed, too long, or not authentic: the connection must be closed."""


def new_nonce() -> bytes:
    """32 random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: bytes, role: bytes, hub_nonce: bytes, peer_nonce: bytes) -> bytes:
    """32 bytes that only a holder of the token can compute.

    Args:
        token: the shared secret.
        role: of the side that proves, `b"hub"` or `b"peer"`: a proof cannot be sent back.
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
        key: of the session; see `session_key`.
        is_hub: whether this is the hub's side.
    """

    key: bytes
    is_hub: bool
    _sent: int = field(default=0, init=False)
    _received: int = field(default=0, init=False)

    @classmethod
    def session(
        cls, token: bytes, hub_nonce: bytes, peer_nonce: bytes, *, is_hub: bool
    ) -> FrameCodec:
        """The codec of a session whose nonces have been exchanged."""
        return cls(proof(token, b"session", hub_nonce, peer_nonce), is_hub)

    def encode(self, payload: bytes) -> bytes:
        """The next frame.

        Raises:
            ChannelError: too long.
        """
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ChannelError(f"a message of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES}")
        mac = self._mac(self.is_hub, self._sent, payload)
        self._sent += 1
        return LENGTH.pack(len(payload)) + payload + mac

    @staticmethod
    def frame_bytes(head: bytes) -> int:
        """Bytes that follow a frame's 4 bytes of length.

        Raises:
            ChannelError: too long.
        """
        (length,) = LENGTH.unpack(head)
        if length > MAX_PAYLOAD_BYTES:
            raise ChannelError(f"a frame of {length} bytes; at most {MAX_PAYLOAD_BYTES}")
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
