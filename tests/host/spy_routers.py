"""Hooks that record the biases of MoE routers around each sync."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.harness.ranks import shuffle_as_megatron
from tests.host.spy import out_dir


def record_biases() -> None:
    """Write this rank's router biases, by step: as each sync and each optimizer step left them."""
    from megatron_edit.engine import EditEngine
    from megatron_edit.engine.rounds.meeting import Meetings, shared_values

    shuffle_as_megatron()  # steps are few and biases coarse: with other samples they may meet
    rank, log = os.environ["RANK"], dict[str, dict[int, list[float]]](before={}, after={})
    exchange, after_step = Meetings.exchange_records, EditEngine.after_step

    def exchanged(self: Meetings, *args: Any, **kwargs: Any) -> Any:
        log["before"][self.state.step] = shared_values(self.host)
        return exchange(self, *args, **kwargs)

    def stepped(self: EditEngine, *args: Any) -> Any:
        result = after_step(self, *args)
        log["after"][self.status.step] = shared_values(self.host)
        (out_dir() / f"biases-{rank}.json").write_text(json.dumps(log))
        return result

    Meetings.exchange_records = exchanged  # type: ignore[method-assign]
    EditEngine.after_step = stepped  # type: ignore[method-assign]
