"""Messages and frames between hub and replicas: what arrives is what was sent, or is refused.

Would catch: a field of a wrong type that reaches the hub, a frame that is accepted twice, in
another order, from another session, or from its own sender.
"""

from __future__ import annotations

import json
import random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.elastic.channel import (
    LENGTH,
    MAX_PAYLOAD_BYTES,
    ChannelError,
    FrameCodec,
    new_nonce,
    proof,
)
from megatron_edit.elastic.messages import (
    KINDS,
    AliveMessage,
    Commit,
    FormEpoch,
    FromHub,
    FromReplica,
    Hello,
    MessageError,
    Ready,
    decode,
    encode,
)

HELLO = Hello(
    "node-1", "ab", "layout", 4, 2, ("tcp://a", "tcp://b"), True, 3, "digest", 2, True, True
)  # fmt: skip
READY = Ready(
    2, 3, "plan", ("d0", "d1"), 96, (("a", ((0, 4), (9, 1))), ("b", ())), True, ((5, 2),)
)  # fmt: skip


@pytest.mark.parametrize("message", [HELLO, READY, AliveMessage(3, 4, 5)])
def test_message_arrives_as_it_was_sent(message: Any) -> None:
    assert decode(encode(message), FromReplica) == message


def test_all_kinds_have_names_of_their_own() -> None:
    assert len(KINDS) == len(get_args(FromReplica)) + len(get_args(FromHub)) + 2


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (b"", "JSON text"), (b"\xff", "JSON text"), (b"[" * 100_000, "JSON text"),
        (b"[]", "JSON object"), (b"{}", "this kind"), (b'{"kind": "Nothing"}', "this kind"),
        (b'{"kind": ["Commit"]}', "this kind"), (encode(Commit(1, 1, "d")), "this kind"),
        (b'{"kind": "AliveMessage", "step": 1}', "other fields"),
        (encode(AliveMessage(1)).replace(b"}", b',"x":3}'), "other fields"),
        (encode(AliveMessage(1)).replace(b"1", b"true"), r"\.step: not of type int"),
        (encode(AliveMessage(1)).replace(b"1", b'"1"'), r"\.step: not of type int"),
        (encode(AliveMessage(1)).replace(b"1", b"1.0"), "not of type int"),
        (encode(AliveMessage(1 << 64)), r"\.step: more than 63 bits"),
        (encode(HELLO).replace(b"node-1", b"node 1"), "letters, digits"),
        (encode(HELLO).replace(b"node-1", b""), "letters, digits"),
        (encode(HELLO).replace(b'"tcp://b"', b"5"), "Hello.handles: not of type str"),
        (encode(READY).replace(b"[9,1]", b"[9,1,1]"), "Ready.blocks: not a list of 2"),
        (encode(READY).replace(b"[9,1]", b"9"), "Ready.blocks: not a list"),
    ],
)  # fmt: skip
def test_other_bytes_are_refused(payload: bytes, rule: str) -> None:
    with pytest.raises(MessageError, match=rule):
        decode(payload, FromReplica)


@given(st.binary(max_size=200), st.integers(min_value=0))
def test_changed_bytes_are_refused_or_valid(noise: bytes, seed: int) -> None:
    """Whatever arrives, the answer is a message or `MessageError`."""
    text = bytearray(encode(READY))
    for byte in noise[:8]:
        text[random.Random(seed + byte).randrange(len(text))] = byte
    for payload in (noise, bytes(text), json.dumps(noise.decode("latin1")).encode()):
        try:
            message = decode(payload, FromReplica)
        except MessageError:
            continue
        assert decode(encode(message), FromReplica) == message


def codecs(token: bytes = b"secret") -> tuple[FrameCodec, FrameCodec]:
    """Both ends of a session."""
    hub, peer = new_nonce(), new_nonce()
    return (
        FrameCodec.session(token, hub, peer, is_hub=True),
        FrameCodec.session(token, hub, peer, is_hub=False),
    )


def body(frame: bytes) -> bytes:
    assert FrameCodec.frame_bytes(frame[: LENGTH.size]) == len(frame) - LENGTH.size
    return frame[LENGTH.size :]


def test_frames_arrive_in_order() -> None:
    hub, peer = codecs()
    for number in range(3):
        text = encode(FormEpoch(1, number, ("a",), (("h",),), "a"))
        assert peer.decode(body(hub.encode(text))) == text
        assert hub.decode(body(peer.encode(b"x"))) == b"x"


@pytest.mark.parametrize("attack", ["replay", "skip", "reflect", "other session", "bit", "token"])
def test_frame_that_is_not_the_next_one_is_refused(attack: str) -> None:
    hub, peer = codecs()
    first, second = body(hub.encode(b"first")), body(hub.encode(b"second"))
    if attack == "replay":
        peer.decode(first)
        bad = first
    elif attack == "skip":
        bad = second
    elif attack == "reflect":
        bad = body(peer.encode(b"x"))
    elif attack == "bit":
        bad = bytes([first[0] ^ 1]) + first[1:]
    else:
        other, _ = codecs(b"secret" if attack == "other session" else b"another")
        bad = body(other.encode(b"first"))
    with pytest.raises(ChannelError):
        peer.decode(bad)


def test_long_frames_are_refused() -> None:
    """Until the other side is known."""
    hub, peer = codecs()
    hub.max_bytes = peer.max_bytes = 2 * MAX_PAYLOAD_BYTES
    frame = hub.encode(bytes(2 * MAX_PAYLOAD_BYTES))
    assert len(peer.decode(frame[LENGTH.size :])) == 2 * MAX_PAYLOAD_BYTES
    with pytest.raises(ChannelError, match="at most"):
        FrameCodec.frame_bytes(frame[: LENGTH.size])
    hub, _ = codecs()
    with pytest.raises(ChannelError, match="at most"):
        hub.encode(bytes(MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(ChannelError, match="at most"):
        FrameCodec.frame_bytes(b"\xff\xff\xff\xff")


def test_proofs_differ_by_role_and_nonces() -> None:
    a, b = new_nonce(), new_nonce()
    given = {proof(b"t", role, x, y) for role in (b"hub", b"peer") for x, y in ((a, b), (b, a))}
    assert len(given) == 4


def test_hub_messages_are_not_accepted_by_the_hub() -> None:
    with pytest.raises(MessageError):
        decode(encode(HELLO), FromHub)
