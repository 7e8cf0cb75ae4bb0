"""Small values through the hub, with which ranks of different replicas form their groups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_edit.elastic.channel import (
    CONNECT_SECONDS,
    STORE,
    ChannelError,
    HubAddress,
    Session,
    open_session,
)
from megatron_edit.elastic.messages import MessageError, StoreReply, StoreRequest, decode, encode

MAX_KEYS = 100_000
MAX_KEY_CHARACTERS = 256
MAX_VALUE_BYTES = 4096
MAX_TOTAL_BYTES = 64 << 20
MAX_WAIT_SECONDS = 3600.0
SET, GET, WAIT, COMPARE_SET = "set", "get", "wait", "compare_set"


@dataclass
class StoreTable:
    """The hub's side: the values, and those who wait for one."""

    _values: dict[str, bytes] = field(default_factory=dict)
    _num_bytes: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def answer(self, request: StoreRequest) -> StoreReply:
        """Carry out a request. A `wait` takes until all its keys are set, or its time is over.

        Raises:
            MessageError: the request is too large, or of no kind.
        """
        keys = request.keys
        if not keys or any(len(key) > MAX_KEY_CHARACTERS for key in keys):
            raise MessageError("a request without a key, or with one that is too long")
        key, value = keys[0], request.value
        if not 0.0 <= request.seconds <= MAX_WAIT_SECONDS:  # nor is NaN in between
            raise MessageError(f"a wait that is not of 0 to {MAX_WAIT_SECONDS:g} s")
        if request.operation == WAIT:
            return await self._wait(keys, request.seconds)
        if request.operation == SET:
            await self._set(key, value)
        elif request.operation == COMPARE_SET:
            # As torch's stores: a key that is not set is set where nothing is expected.
            expected, current = request.expected, self._values.get(key)
            if current is None and expected:
                return StoreReply(True, request.expected)
            if (current or b"") == expected:
                await self._set(key, value)
        elif request.operation != GET:
            raise MessageError(f"no operation of a store: {request.operation[:40]}")
        found = self._values.get(key)
        return StoreReply(found is not None, found or b"")

    def forget(self) -> None:
        """Drop all values."""
        self._values.clear()
        self._num_bytes = 0

    async def _set(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        num_bytes = self._num_bytes + len(value) - len(old or b"")
        num_bytes += len(key) if old is None else 0
        is_full = old is None and len(self._values) >= MAX_KEYS
        if len(value) > MAX_VALUE_BYTES or is_full or num_bytes > MAX_TOTAL_BYTES:
            raise MessageError("a value that is too long, or one too many")
        self._values[key], self._num_bytes = value, num_bytes
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, keys: Sequence[str], seconds: float) -> StoreReply:
        def is_set() -> bool:
            return all(key in self._values for key in keys)

        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(is_set)
        except TimeoutError:
            return StoreReply(False)
        return StoreReply(True)


class StoreClient:
    """A rank's side. Calls block the host. Several threads may share it: each request has a
    connection for itself, so that none waits for another one's `wait`.

    The hub drops all values whenever it opens an epoch.
    """

    def __init__(self, address: HubAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._idle: list[Session] = []  # connections that no request uses

    def set(self, key: str, value: bytes) -> None:
        """Set a value.

        Raises:
            OSError: the hub cannot be reached.
        """
        self._ask(StoreRequest(SET, (key,), value))

    def get(self, key: str) -> bytes | None:
        """A value; None where it is not set.

        Raises:
            OSError: the hub cannot be reached.
        """
        reply = self._ask(StoreRequest(GET, (key,)))
        return reply.value if reply.is_found else None

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a value where it is `expected`, or not set and nothing is expected; the value then.

        Raises:
            OSError: the hub cannot be reached.
        """
        request = StoreRequest(COMPARE_SET, (key,), desired, expected)
        return self._ask(request).value

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until all keys are set; whether they are.

        Args:
            keys: to wait for.
            seconds: longest wait, at most an hour.

        Raises:
            ValueError: `seconds` is negative, too large or not a number.
            OSError: the hub cannot be reached.
        """
        if not 0.0 <= seconds <= MAX_WAIT_SECONDS:
            raise ValueError(f"cannot wait for {seconds} s; at most {MAX_WAIT_SECONDS:g} s")
        return self._ask(StoreRequest(WAIT, tuple(keys), seconds=float(seconds))).is_found

    def close(self) -> None:
        """End the connections that no request uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()

    def _ask(self, request: StoreRequest) -> StoreReply:
        """One request and its reply. All operations may be repeated, so a request whose connection
        is lost is made again once, over a new one."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        try:
            return self._ask_over(idle, request)
        except (OSError, ChannelError, MessageError):
            pass
        try:
            return self._ask_over(None, request)
        except (OSError, ChannelError, MessageError) as error:
            raise OSError(f"the hub's store cannot be used: {error}") from error

    def _ask_over(self, session: Session | None, request: StoreRequest) -> StoreReply:
        session = session or open_session(self._address, CONNECT_SECONDS, STORE)
        try:
            session.send(encode(request))
            until = time.monotonic() + request.seconds + CONNECT_SECONDS
            reply: StoreReply = decode(session.receive(until), StoreReply)
        except BaseException:
            session.close()
            raise
        with self._lock:
            self._idle.append(session)
        return reply
