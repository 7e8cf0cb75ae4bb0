"""First contact with another process: bounded, and a line says what is waited for.

torch's store client ignores its time-out where something accepts its connection and never answers,
and logs warnings at each wait that times out.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from megatron_edit.flags import endpoint_text

ANSWER_SECONDS = 15.0  # for a store to answer, once something has accepted the connection
ATTEMPT_SECONDS = 3.0  # for a connection
FIRST_LINE_SECONDS, LINE_SECONDS = 10.0, 60.0
# Many ranks may poll the same store.
POLL_SECONDS, LONGEST_POLL_SECONDS, POLL_SHARE = 0.02, 1.0, 0.05
_THREAD_POLL_SECONDS = 0.1


class Wait:
    """A wait in polls, which says after ten seconds and each minute what it is for.

    Args:
        seconds: longest wait.
        say: prints a line.
    """

    def __init__(self, what: str, seconds: float, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._began = time.monotonic()
        self._seconds, self._next_line = seconds, FIRST_LINE_SECONDS

    def pause(self, why: str = "") -> bool:
        """Sleep until the next poll; return False where the time is over.

        Args:
            why: the wait has not ended, for the line.
        """
        waited = time.monotonic() - self._began
        if waited >= self._seconds:
            return False
        if waited >= self._next_line:
            self._next_line += LINE_SECONDS
            self._say(f"waiting for {self._what}{f' ({why})' if why else ''}")
        pause = min(max(POLL_SECONDS, POLL_SHARE * waited), LONGEST_POLL_SECONDS)
        time.sleep(min(pause, self._seconds - waited))
        return True


def in_thread[T](work: Callable[[], T], poll: Callable[[], None]) -> T:
    """Run work that may wait in C++ code in a thread of its own; return its result.

    Args:
        work: it is abandoned where `poll` raises.
        poll: called several times a second until the work is done; may raise.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="edit-contact", daemon=True)
    thread.start()
    thread.join(_THREAD_POLL_SECONDS)
    while thread.is_alive():
        poll()
        thread.join(_THREAD_POLL_SECONDS)
    if errors:
        raise errors[0]
    return results[0]


def reach[T](
    host: str, port: int, open_store: Callable[[], T], wait: Wait, what: str = "the store"
) -> T:
    """Wait until something accepts connections, then open its store.

    Args:
        host, port: of the store.
        open_store: connects to it.
        wait: the longest wait for something that accepts connections.

    Raises:
        OSError: nothing accepts connections within the time.
        TimeoutError: what does is no store, or has stopped.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=ATTEMPT_SECONDS).close()
            break
        except OSError as error:
            if not wait.pause(error.strerror or str(error)):
                raise
    return answered(
        open_store,
        lambda: f"{_listener(host, port)} accepts connections, and has not answered as {what}",
    )


def answered[T](open_store: Callable[[], T], why: Callable[[], str]) -> T:
    """Open a store, to which something accepts connections.

    Args:
        open_store: connects to it.
        why: says what does not answer.

    Raises:
        TimeoutError: it does not answer in time.
    """
    until = time.monotonic() + ANSWER_SECONDS

    def check() -> None:
        if time.monotonic() > until:
            raise TimeoutError(f"{why()} within {ANSWER_SECONDS:g} s")

    return in_thread(open_store, check)


def _listener(host: str, port: int) -> str:
    """Say what listens there, as far as it can be told."""
    try:
        with socket.create_connection((host, port), timeout=ATTEMPT_SECONDS) as connection:
            connection.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
            is_web = connection.makefile("rb").read(5) == b"HTTP/"
    except OSError:
        is_web = False
    place = endpoint_text(host, port)
    return f"a web server at {place}" if is_web else f"another program or a stopped one at {place}"
