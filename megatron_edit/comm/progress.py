"""A thread that goes on with exchanges while the main thread computes.

Over sockets an exchange is over when the sockets say so, and the next one should begin then, not
when the forward pass comes by: between replicas of unequal speed all would wait for the slowest
one's pass. NCCL needs no such thread, as its collectives queue on the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_edit.comm.collectives import Work
from megatron_edit.comm.polling import poll_interval

LONGEST_POLL_SECONDS = 0.005
CLOSE_SECONDS = 5.0


class ProgressThread:
    """Calls `drive` again and again: when what is on the wire is over, and after each turn.

    One lock guards what both threads touch. The main thread holds it in a `turn`, this one while it
    drives. It polls the wire without the lock, and never blocks in the transport, so that a process
    which fails may end at once.

    Args:
        drive: does all that needs no waiting; tells what to wait for, None where there is nothing.
        explain: what is to be said of an error that ends the thread. It may take a while.

    Attributes:
        failure: what has ended the thread; None where it has not failed.
    """

    def __init__(
        self,
        drive: Callable[[], Work | None],
        explain: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self._drive, self._explain = drive, explain
        self._changed = threading.Condition(threading.RLock())
        self.failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._has_news = False
        self._is_closed = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the thread does nothing; afterwards it drives.

        Raises:
            Exception: what has ended the thread.
        """
        with self._changed:
            self.raise_failure()
            if self._thread is None:
                self._start()
            try:
                yield
            except Exception as error:
                self.failure = error  # the thread must not go on with what is half done
                raise
            finally:
                self._has_news = True
                self._changed.notify()

    def raise_failure(self) -> None:
        """Raise what has ended the thread, if anything has."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """End the thread. Idempotent; there is no turn afterwards.

        Blocks: the host, for a while at most, where ranks of the replica that do not answer keep
        the thread: then it is left behind.
        """
        self._is_closed = True
        if self._changed.acquire(timeout=CLOSE_SECONDS):
            self._changed.notify()
            self._changed.release()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="edit-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_closed and self.failure is None:
                self._poll_wire(self._do_turn())
        except Exception as error:
            self.failure = error  # at once, for the next turn to raise: `explain` may take a while
            self.failure = self._explain(error)

    def _do_turn(self) -> Work | None:
        """Drive, once there is something new."""
        with self._changed:
            while not (self._has_news or self._is_closed):
                self._changed.wait()
            if self._is_closed or self.failure is not None:
                return None
            self._has_news = False
            try:
                return self._drive()
            except Exception as error:
                self.failure = error  # before another turn can begin, on what is half done
                raise

    def _poll_wire(self, work: Work | None) -> None:
        """Poll what is on the wire until it is over: then there is something new."""
        if work is None:
            return
        began = time.monotonic()
        while not (work.is_completed or self._is_closed):
            time.sleep(poll_interval(time.monotonic() - began, LONGEST_POLL_SECONDS))
        self._has_news = True
