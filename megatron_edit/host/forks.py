"""Forked processes end with the one that forked them, however that ends.

Megatron writes checkpoints in processes of their own. Killed by a signal, a rank cannot end them:
they would keep its memory and its ports.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing import util

_LOOK_SECONDS = 2.0


class ForkWatch:
    """While it exists, what `multiprocessing` forks looks for its parent, and ends without it."""

    def __init__(self) -> None:
        util.register_after_fork(self, _watch_parent)  # for as long as this object lives


def _watch_parent(_: ForkWatch) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.pid,), daemon=True).start()


def _end_with(parent: int | None) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)  # nobody is left to be told
