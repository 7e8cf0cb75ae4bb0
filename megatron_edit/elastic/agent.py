"""A replica's connection to the hub: a thread that keeps it up while the ranks train.

The main thread reports what the ranks have done (`report`) and takes orders (`next_order`). It
never waits for the network. A lost connection is made again, with what the hub may have missed.
Where the main thread does not take the last order, the thread ends the process.
"""

from __future__ import annotations

import math
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from megatron_edit.elastic.channel import (
    CONNECT_SECONDS,
    MAX_MESSAGE_BYTES,
    QUERY,
    REPLICA,
    STANDING,
    ChannelError,
    HubAddress,
    Session,
    TooLongError,
    open_session,
)
from megatron_edit.elastic.deadlines import SILENT_SECONDS
from megatron_edit.elastic.hub_state import Standing
from megatron_edit.elastic.messages import (
    AliveMessage,
    End,
    FromHub,
    FromReplica,
    Hello,
    MessageError,
    Refused,
    decode,
    encode,
)
from megatron_edit.elastic.replica import (
    Connected,
    LastOrder,
    Order,
    Outcome,
    ReplicaState,
    Report,
    Task,
    exit_of,
    receive,
    report,
)
from megatron_edit.errors import ReplicaLostError
from megatron_edit.flags import endpoint_text

HEARTBEAT_SECONDS = 1.0
MAX_WORKING_SECONDS = 1800.0  # for which heartbeats count as progress in work without steps
READ_SECONDS = 0.05
UNTAKEN_SECONDS = 20.0  # after which a main thread that does not take the last order hangs
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 1.0


def query(address: HubAddress, what: bytes, timeout: float = CONNECT_SECONDS) -> bytes:
    """Ask a hub `status` or `stop`; its status as JSON.

    Raises:
        OSError, ChannelError: see `open_session`.
    """
    with open_session(address, timeout, QUERY) as session:
        session.send(what)
        return session.receive(time.monotonic() + timeout)


class Agent:
    """Speaks with the hub for one replica; rank 0 of the replica has it.

    Args:
        hello: what the replica reports at its start.
        timeout: seconds without a hub after which the replica gives up.
        clock: monotonic seconds.
        end_process: called with an exit code where the main thread does not take the last order.

    Attributes:
        state: where the replica stands.
    """

    def __init__(
        self, address: HubAddress, hello: Hello, timeout: float,
        clock: Callable[[], float] = time.monotonic,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:  # fmt: skip
        self._address, self._timeout, self._clock = address, timeout, clock
        self._end_process = end_process
        self.state = ReplicaState.fresh(hello)
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._session: Session | None = None
        self._progress = (0, 0, 0)
        self._working_until, self._num_beats = -math.inf, 0  # beats until then
        self._wakes, self._wake = socket.socketpair()  # a byte for each report
        self._wakes.setblocking(False)
        self._wake.setblocking(False)
        self._last_heard, self._run_id = 0.0, b""
        self._last_order: LastOrder | None = None
        self._is_taken = threading.Event()  # the last order, or nobody waits for orders any more
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edit-hub", daemon=True)

    @property
    def admitted_from(self) -> int:
        """The round that the replica waits for before it joins; 0: none."""
        return self.state.admitted_from

    def start(self) -> None:
        """Connect, now or when there is a hub."""
        self._thread.start()

    def report(self, what: Report) -> None:
        """Report what the ranks have done. Returns at once."""
        self._reports.put(what)
        with suppress(BlockingIOError):  # the thread has been woken often enough
            self._wake.send(b".")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let heartbeats count as progress inside the context, for work that takes no steps, as a
        save; for `MAX_WORKING_SECONDS`, as it may hang."""
        self._working_until = self._clock() + MAX_WORKING_SECONDS
        try:
            yield
        finally:
            self._working_until = -math.inf

    def ask_standing(self) -> Standing:
        """What this replica is to the hub, which answers after this call: what the agent's thread
        has heard may be out of date in a process that was frozen. In any thread; waits for a hub.

        Raises:
            ReplicaLostError: no hub answers within the agent's time-out.
        """
        hello, until = self.state.hello, self._clock() + self._timeout
        question = b" ".join((STANDING, hello.name.encode(), hello.incarnation.encode()))
        while True:
            began = self._clock()
            try:
                standing = Standing(query(self._address, question).decode())
                if self._clock() - began <= CONNECT_SECONDS:  # else frozen meanwhile: ask again
                    return standing
            except (OSError, ChannelError, ValueError) as error:
                if self._clock() > until:
                    raise ReplicaLostError(f"no hub answers: {error}") from error
                time.sleep(LAST_RETRY_SECONDS)

    def progressed(self, step: int, batches: int, exchanged: int = 0) -> None:
        """Set what heartbeats count. The hub takes out a replica that others wait for while none
        of these numbers changes for too long.

        Args:
            step: attempted steps.
            exchanged: bytes or units that have arrived in exchanges, since the start.
        """
        self._progress = (step, batches, exchanged)

    def next_order(self, timeout: float = 0.0) -> Order | None:
        """The next order for the ranks; None where there is none within `timeout` seconds.

        `Fenced`, `Refused` and `End` must be taken within `UNTAKEN_SECONDS`: a main thread that
        does not is taken to hang in a collective, and the process ends (`exit_of`).
        """
        try:
            order = self._orders.get(timeout=timeout) if timeout else self._orders.get_nowait()
        except queue.Empty:
            return None
        if isinstance(order, LastOrder):
            self._is_taken.set()
        return order

    def close(self, timeout: float = CONNECT_SECONDS) -> None:
        """Send what is left to send, and end."""
        self._is_taken.set()
        self._closing.set()
        self._thread.join(timeout)

    # ---- the thread

    def _run(self) -> None:
        try:
            self._keep_connected()
        except Exception as error:  # the ranks wait for orders of this thread
            self._put(End(f"the connection to the hub has failed: {error!r}", 4))
        if self._last_order is not None and not self._is_taken.wait(UNTAKEN_SECONDS):
            code, reason = exit_of(self._last_order)
            if code:
                sys.stderr.write(f"megatron_edit: {reason}\n")
                sys.stderr.flush()
                self._end_process(code)

    def _put(self, order: Order) -> None:
        if isinstance(order, LastOrder):
            self._last_order = order
        self._orders.put(order)

    def _keep_connected(self) -> None:
        retry, self._last_heard = FIRST_RETRY_SECONDS, self._clock()
        while not (self._closing.is_set() and self._reports.empty()):
            began = self._clock()
            try:
                self._open()
                self._apply(report(self.state, Connected()))
                with selectors.DefaultSelector() as selector:
                    self._exchange(selector)
            except TooLongError as error:  # again in every session
                self._drop()
                self._put(End(f"this replica cannot report to the hub: {error}", 4))
                return
            except (OSError, ChannelError, MessageError) as error:
                if self._session is None and (order := self._after_failure(error)) is not None:
                    self._put(order)
                    return
            is_connected = self._session is not None
            self._drop()
            is_done = self.state.task is Task.ENDED if is_connected else self._closing.is_set()
            if is_done:
                return
            self._take_reports()
            if is_connected and self._clock() - began > LAST_RETRY_SECONDS:
                retry = FIRST_RETRY_SECONDS
            else:  # there is no hub, or it does not keep the connection
                time.sleep(retry)
                retry = min(2 * retry, LAST_RETRY_SECONDS)

    def _open(self) -> None:
        """Open a session.

        Raises:
            OSError, ChannelError: see `open_session`.
            ChannelError: the hub has the journal of another run.
        """
        session = open_session(self._address, CONNECT_SECONDS, REPLICA)
        run = session.run
        if self._has_hub and self._run_id != run:
            session.close()
            raise ChannelError("it has the journal of another run")
        self._session, self._run_id, self._last_heard = session, run, self._clock()

    @property
    def _has_hub(self) -> bool:
        """Whether the ranks train in the run of a hub: another program that answers in its place
        is taken for a hub that is down."""
        return self.state.has_begun and bool(self._run_id)

    def _after_failure(self, error: Exception) -> LastOrder | None:
        """The last order where a hub cannot be used; None where it may be later."""
        place = f"hub {endpoint_text(self._address.host, self._address.port)}"
        if isinstance(error, ChannelError) and not self._has_hub:
            return Refused(place, str(error), "check its address, token and --state-dir")
        if self._clock() - self._last_heard > self._timeout:
            return End(f"no {place}: {error}", 4)
        return None

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _exchange(self, selector: selectors.BaseSelector) -> None:
        """Send and receive until the connection ends, or the hub is silent."""
        assert self._session is not None, "no connection"
        session = self._session
        selector.register(session.connection, selectors.EVENT_READ)
        selector.register(self._wakes, selectors.EVENT_READ)
        next_beat = self._clock()
        while self.state.task is not Task.ENDED:
            self._take_reports()
            if self._clock() >= next_beat:
                next_beat = self._clock() + HEARTBEAT_SECONDS
                self._num_beats += self._clock() < self._working_until
                step, batches, exchanged = self._progress
                self._send(AliveMessage(step, batches, exchanged + self._num_beats))
            if self._closing.is_set() and self._reports.empty():
                return
            ready = [key.fileobj for key, _ in selector.select(READ_SECONDS)]
            if self._wakes in ready:
                self._wakes.recv(1 << 12)
            if session.connection not in ready:
                if self._clock() - self._last_heard > SILENT_SECONDS:
                    return
                continue
            payloads = session.poll()
            self._last_heard = self._clock()
            for payload in payloads:
                self._apply(receive(self.state, decode(payload, FromHub)))

    def _take_reports(self) -> None:
        while not self._reports.empty():
            self._apply(report(self.state, self._reports.get()))

    def _apply(self, outcome: Outcome) -> None:
        self.state = outcome.state
        for message in outcome.messages:
            self._send(message)
        for order in outcome.orders:
            self._put(order)

    def _send(self, message: FromReplica) -> None:
        """Without a connection nothing is sent: the next `Hello` says it again."""
        if self._session is not None:
            self._session.send(encode(message))
            self._session.max_bytes = MAX_MESSAGE_BYTES  # after `Hello`
