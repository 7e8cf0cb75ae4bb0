"""Small values through the hub, with which ranks of different replicas form their groups."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_edit.elastic.agent import CONNECT_SECONDS, HubAddress, open_session, read_frame
from megatron_edit.elastic.channel import ChannelError, FrameCodec
from megatron_edit.elastic.messages import MessageError, StoreReply, StoreRequest, decode, encode

MAX_KEYS = 100_000
MAX_KEY_CHARACTERS = 256
MAX_VALUE_BYTES = 4096
SET, GET, WAIT, COMPARE_SET = "set", "get", "wait", "compare_set"


@dataclass
class StoreTable:
    """The hub's side: the values, and those who wait for one."""

    _values: dict[str, bytes] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def answer(self, request: StoreRequest) -> StoreReply:
        """Carry out a request. A `wait` takes until all its keys are set, or its time is over.

        Raises:
            MessageError: the request is too large, or of no kind.
        """
        keys = request.keys
        if not keys or any(len(key) > MAX_KEY_CHARACTERS for key in keys):
            raise MessageError("a request without a key, or with one that is too long")
        key, value = keys[0], _bytes(request.value)
        if request.operation == WAIT:
            return await self._wait(keys, request.seconds)
        if request.operation == SET:
            await self._set(key, value)
        elif request.operation == COMPARE_SET:
            # As torch's stores: a key that is not set is set where nothing is expected.
            expected, current = _bytes(request.expected), self._values.get(key)
            if current is None and expected:
                return StoreReply(True, request.expected)
            if (current or b"") == expected:
                await self._set(key, value)
        elif request.operation != GET:
            raise MessageError(f"no operation of a store: {request.operation[:40]}")
        found = self._values.get(key)
        return StoreReply(found is not None, _text(found or b""))

    def forget(self, prefix: str) -> None:
        """Drop all values whose keys begin with a prefix."""
        for key in [each for each in self._values if each.startswith(prefix)]:
            del self._values[key]

    async def _set(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES or len(self._values) >= MAX_KEYS:
            raise MessageError("a value that is too long, or one too many")
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def _wait(self, keys: Sequence[str], seconds: float) -> StoreReply:
        def is_set() -> bool:
            return all(key in self._values for key in keys)

        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(is_set)
        except TimeoutError:
            return StoreReply(False, "")
        return StoreReply(True, "")


class StoreClient:
    """A rank's side. Calls block the host; several threads may share it.

    Args:
        address: of the hub.
    """

    def __init__(self, address: HubAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._session: tuple[socket.socket, FrameCodec] | None = None

    def set(self, key: str, value: bytes) -> None:
        """Set a value.

        Raises:
            OSError: the hub cannot be reached.
        """
        self._ask(StoreRequest(SET, (key,), _text(value)))

    def get(self, key: str) -> bytes | None:
        """A value; None where it is not set.

        Raises:
            OSError: the hub cannot be reached.
        """
        reply = self._ask(StoreRequest(GET, (key,)))
        return _bytes(reply.value) if reply.is_found else None

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a value where it is `expected`, or not set and nothing is expected; the value then.

        Raises:
            OSError: the hub cannot be reached.
        """
        request = StoreRequest(COMPARE_SET, (key,), _text(desired), _text(expected))
        return _bytes(self._ask(request).value)

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all keys are set; whether they are.

        Raises:
            OSError: the hub cannot be reached.
        """
        return self._ask(StoreRequest(WAIT, tuple(keys), seconds=float(seconds))).is_found

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._drop()

    def _ask(self, request: StoreRequest) -> StoreReply:
        """One request and its reply. All operations may be repeated, so a lost connection is made
        again once."""
        with self._lock:
            for is_last in (False, True):
                try:
                    return self._try_to_ask(request)
                except (OSError, ChannelError, MessageError) as error:
                    self._drop()
                    if is_last:
                        raise OSError(f"the hub's store cannot be used: {error}") from error
        raise AssertionError("unreachable")

    def _try_to_ask(self, request: StoreRequest) -> StoreReply:
        if self._session is None:
            self._session = open_session(self._address, CONNECT_SECONDS)
        connection, codec = self._session
        connection.settimeout(request.seconds + CONNECT_SECONDS)
        connection.sendall(codec.encode(encode(request)))
        reply: StoreReply = decode(codec.decode(read_frame(connection)), StoreReply)
        return reply

    def _drop(self) -> None:
        if self._session is not None:
            self._session[0].close()
            self._session = None


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise MessageError("a value that is not base64") from error
