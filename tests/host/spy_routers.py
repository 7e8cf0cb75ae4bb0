"""A hook that records the biases of MoE routers before and after each sync."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.harness.ranks import use_full_mock_data
from tests.host.spy import out_dir, record


def record_biases() -> None:
    """Write this rank's router biases, by step: before each meeting and after each step."""
    from megatron_edit.engine import EditEngine
    from megatron_edit.engine.rounds.meeting import Meetings, shared_values

    use_full_mock_data()  # with other samples the coarse biases may agree by chance
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


def count_in_integers() -> None:
    """Record the run, with routers that count tokens in integers."""
    from megatron.core.transformer.moe.router import TopKRouter

    record()
    init = TopKRouter.__init__

    def made(self: TopKRouter, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.local_tokens_per_expert = self.local_tokens_per_expert.int()

    TopKRouter.__init__ = made
