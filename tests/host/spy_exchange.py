"""Hook that kills or freezes a replica inside an exchange, once a file tells it to."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.host.spy import out_dir


def end_in_exchange() -> None:
    """Send itself the signal whose number is in the file `signal`, with all units on their way."""
    from megatron_edit.engine.sync.manager import SyncManager

    start = SyncManager.start

    def spied(self: SyncManager, sync: Any) -> None:
        start(self, sync)
        wanted = out_dir() / "signal"
        if wanted.exists():
            number = int(wanted.read_text())
            wanted.unlink()
            os.kill(os.getpid(), number)

    SyncManager.start = spied  # type: ignore[method-assign]


SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
