"""Hooks that overflow or count gradients of synchronous steps."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.host.spy import out_dir, overflow_one_replica, record


def overflow_and_record() -> None:
    """Call `overflow_one_replica` and `record`."""
    overflow_one_replica()
    record()


def record_gradient_bytes() -> None:
    """Write the sizes of the gradient shards, and the bytes that each average of them sends."""
    from megatron_edit.engine.rounds.synchronous import GradientAverager

    rank, sent = os.environ["RANK"], list[int]()
    average = GradientAverager.average

    def spied(self: Any, num_tokens: Any) -> None:
        group = self._groups.sync
        before = group.payload_bytes
        average(self, num_tokens)
        sent.append(group.payload_bytes - before)
        numels = [shard.numel() for shard in self._host.gradient_shards()]
        text = json.dumps({"numels": numels, "bytes": sent})
        (out_dir() / f"gradients-{rank}.json").write_text(text)

    GradientAverager.average = spied  # type: ignore[method-assign]
