"""An error that one rank finds in a common check is raised on all ranks."""

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
from megatron_edit.host.checkpoint.choosing import check_on_all_ranks


def read_truncated() -> None:
    """Fail as for a file that ends within its header."""
    struct.unpack("<Q", b"123")


def read_from_failed_disk() -> None:
    """Fail as for a disk with I/O errors."""
    raise OSError(5, "Input/output error", "corpus.bin")


@pytest.mark.parametrize(
    ("check", "value", "rule"),
    [
        (read_truncated, "the corpus", "cannot be checked (error: unpack requires a buffer"),
        (lambda: json.loads("{"), "the corpus", "cannot be checked (JSONDecodeError: "),
        (read_from_failed_disk, "the corpus corpus.bin", "cannot be used (Input/output error)"),
    ],
)
def test_check_failure_is_raised_on_all_replicas(
    check: Callable[[], None], value: str, rule: str
) -> None:
    """Catches a rank that exits alone, so that the others wait for hours."""
    store = dist.HashStore()
    errors: list[UsageError] = []

    def rank(replica: int) -> None:
        place = Placement(2, replica, 1, 0, True)
        world = ReplicaWorld(place, store, store, timedelta(seconds=20))
        try:
            check_on_all_ranks(world, "x", check if replica else lambda: None, what="the corpus")
        except UsageError as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [error.value for error in errors] == [value] * 2
    assert all(error.rule.startswith(rule) for error in errors)
