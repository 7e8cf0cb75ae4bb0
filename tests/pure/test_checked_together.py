"""What one rank finds in a common check is heard by all."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.choosing import check_together


def cut_off() -> None:
    """As of a file that ends in its head."""
    struct.unpack("<Q", b"123")


def lost() -> None:
    """As of a disk that fails."""
    raise OSError(5, "Input/output error", "corpus.bin")


@pytest.mark.parametrize(
    ("check", "value", "rule"),
    [
        (cut_off, "the corpus", "cannot be checked (error: unpack requires a buffer"),
        (lambda: json.loads("{"), "the corpus", "cannot be checked (JSONDecodeError: "),
        (lost, "the corpus corpus.bin", "cannot be used (Input/output error)"),
    ],
)
def test_any_failure_is_heard_by_all(check: Callable[[], None], value: str, rule: str) -> None:
    """Catches a rank that leaves alone, for which the others wait for hours."""
    store = dist.HashStore()
    heard: list[UsageError] = []

    def rank(replica: int) -> None:
        place = Placement(2, replica, 1, 0, True)
        world = ReplicaWorld(place, store, store, timedelta(seconds=20))
        try:
            check_together(world, "x", check if replica else lambda: None, what="the corpus")
        except UsageError as error:
            heard.append(error)

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [error.value for error in heard] == [value] * 2
    assert all(error.rule.startswith(rule) for error in heard)
