"""Whether all ranks see one folder, and how soon they see what another writes."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.comm.collectives import Group

PATIENCE_SECONDS = 10.0
POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Sight:
    """What one rank saw of the file that the first rank wrote.

    Attributes:
        error: why there is no delay; None where there is one.
        delay_seconds: from hearing of the file to reading all of it.
    """

    delay_seconds: float = 0.0
    error: str | None = None


def watch(folder: Path, everybody: Group) -> list[Sight]:
    """Let the first rank write a file, and all look for it.

    Collective: all ranks of the group.

    Returns:
        What each rank saw, in rank order.
    """
    content = uuid.uuid4().hex
    written = _write(folder / f".doctor-{content}", content) if everybody.rank == 0 else None
    content, error = everybody.all_gather_objects((content, written))[0]
    path = folder / f".doctor-{content}"
    sight = Sight(error=error) if error else _poll(path, content)
    sights: list[Sight] = everybody.all_gather_objects(sight)
    if everybody.rank == 0:
        path.unlink(missing_ok=True)
    return sights


def _write(path: Path, content: str) -> str | None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        return f"the first rank cannot write to it ({error.strerror})"
    return None


def _poll(path: Path, content: str) -> Sight:
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_SECONDS:
        try:
            if path.read_text(encoding="utf-8") == content:
                return Sight(time.monotonic() - began)
        except OSError:
            pass  # not there yet
        time.sleep(POLL_SECONDS)
    return Sight(error=f"not seen within {PATIENCE_SECONDS:.0f} s")
