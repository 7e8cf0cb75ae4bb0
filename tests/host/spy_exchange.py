"""Hooks that harm a replica inside an exchange, or a save, once a file tells them to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.host.spy import out_dir, record


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


def flip_in_exchange() -> None:
    """Flip a bit of what rank 1 sends, once the file `flip` is there: as all replicas add it, all
    get the same wrong average. Also record what `spy.record` records."""
    from megatron_edit.engine.sync.manager import SyncManager

    record()
    start = SyncManager.start

    def spied(self: SyncManager, sync: Any) -> None:
        wanted = out_dir() / "flip"
        if os.environ["RANK"] == "1" and wanted.exists():
            wanted.rename(out_dir() / "flipped")
            unit = sync.inflight_units[-1]
            assert not unit.is_excluded
            unit.average.view(torch.int32)[-1] ^= 1 << 30
        start(self, sync)

    SyncManager.start = spied  # type: ignore[method-assign]


def end_in_save() -> None:
    """Send itself a signal in the completion of a checkpoint, before the tracker names it.

    The file `save` has the number of the signal, and text that the path of the checkpoint contains;
    it is renamed to `saving` before.
    """
    from megatron_edit.checkpoint import folder

    sync = folder._sync_folder

    def synced(path: Path) -> None:
        sync(path)
        if (wanted := out_dir() / "save").exists():
            number, _, text = wanted.read_text().partition(" ")
            if text in str(path):
                wanted.rename(out_dir() / "saving")
                os.kill(os.getpid(), int(number))

    folder._sync_folder = synced


SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
