"""A thread that advances exchanges while the main thread computes.

Over sockets the next exchange should begin when the one before completes, and not at the next poll
in the forward pass: otherwise replicas of unequal speed would all wait for the forward pass of the
slowest. NCCL needs no such thread, as its collectives queue on the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_edit.comm.collectives import Work
from megatron_edit.comm.polling import poll_interval
from megatron_edit.errors import ReplicaLostError

LONGEST_POLL_SECONDS = 0.005
CLOSE_SECONDS = 5.0


class ProgressThread:
    """Calls `drive` whenever the collective in flight completes, and after each `paused` block.

    One lock guards the state that both threads use. The main thread holds it in `paused`, this
    thread during a pass, which is one call of `drive`. It polls collectives without the lock, and
    never blocks in the transport, so that a failing process can exit at once.

    Args:
        drive: does all work that does not block; returns the collective to wait for, or None.
        explain: converts the error that ends the thread. It may take a while.

    Attributes:
        failure: the error that has ended the thread; None if it has not failed.
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
        self._needs_pass = False
        self._is_closed = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the thread inside the block; afterwards it makes a pass.

        Raises:
            Exception: the error that has ended the thread.
        """
        with self._changed:
            self.raise_failure()
            if self._thread is None:
                self._start()
            try:
                yield
            except Exception as error:
                self.failure = error  # the thread must not continue half-finished work
                raise
            finally:
                self._needs_pass = True
                self._changed.notify()

    def raise_failure(self) -> None:
        """Raise the error that has ended the thread, if there is one."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """End the thread. Idempotent; `paused` must not be used afterwards.

        Blocks: the host, for at most some seconds. A thread that still waits for other ranks of the
        replica is abandoned.
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
                self._poll_wire(self._do_pass())
        except Exception as error:
            self.failure = error  # at once, for `paused` to raise: `explain` may take a while
            self.failure = self._explain(error)

    def _do_pass(self) -> Work | None:
        """Wait for work to do, then make one pass."""
        with self._changed:
            while not (self._needs_pass or self._is_closed):
                self._changed.wait()
            if self._is_closed or self.failure is not None:
                return None
            self._needs_pass = False
            try:
                return self._drive()
            except Exception as error:
                self.failure = error  # before `paused` can run on half-finished work
                raise

    def _poll_wire(self, work: Work | None) -> None:
        """Poll a collective until it is done, which requests the next pass."""
        if work is None:
            return
        began = time.monotonic()
        while not (self._is_closed or self._needs_pass or _is_over(work)):
            time.sleep(poll_interval(time.monotonic() - began, LONGEST_POLL_SECONDS))
        self._needs_pass = True


def _is_over(work: Work) -> bool:
    """Whether a collective is done or has failed; the next pass finds out, if it still matters."""
    try:
        return work.is_completed
    except ReplicaLostError:
        return True
