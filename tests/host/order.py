"""A spy that records the order of landings, gathers and layers, and measures staging memory."""

from __future__ import annotations

import json
import os
from typing import Any

from megatron_edit.engine.engine import EditEngine
from megatron_edit.engine.flight import Flight
from tests.host.spy import out_dir

Event = list[Any]


def record_order() -> None:
    """Log ["start"|"land"|"forward"|"forward-end", unit, round] of rank 0 of each replica."""
    import megatron.training.training as training

    rank = os.environ["RANK"]
    log: list[Event] = []
    engines: list[EditEngine] = []
    start, land, build = Flight.start.__func__, Flight.land, EditEngine.__post_init__  # type: ignore[attr-defined]
    finish, setup = EditEngine.finish, training.setup_model_and_optimizer

    def note(kind: str, unit: str) -> None:
        log.append([kind, unit, engines[0].round if engines else 0, engines[0].step])

    def spied_start(cls: Any, shard: Any, *args: Any) -> Any:
        note("start", shard.name)
        return start(cls, shard, *args)

    def spied_land(self: Flight, *args: Any) -> Any:
        landing = land(self, *args)
        note("land", self.shard.name)
        return landing

    def spied_build(self: EditEngine) -> None:
        engines.append(self)
        build(self)

    def spied_finish(self: EditEngine) -> None:
        (out_dir() / f"order-{rank}.json").write_text(json.dumps(log))
        finish(self)

    def spied_setup(*args: Any, **kwargs: Any) -> Any:
        built = setup(*args, **kwargs)
        for chunk in built[0]:
            _watch_layers(chunk.module, note)
        return built

    Flight.start = classmethod(spied_start)  # type: ignore[method-assign, assignment]
    Flight.land = spied_land  # type: ignore[method-assign]
    EditEngine.__post_init__ = spied_build  # type: ignore[method-assign]
    EditEngine.finish = spied_finish  # type: ignore[method-assign]
    training.setup_model_and_optimizer = spied_setup


def _watch_layers(wrapped: Any, note: Any) -> None:
    model = getattr(wrapped, "module", wrapped)
    for layer in model.decoder.layers:
        name = f"layer.{layer.layer_number}"
        forward = layer.forward

        def watched(*args: Any, _name: str = name, _forward: Any = forward, **kwargs: Any) -> Any:
            note("forward", _name)
            result = _forward(*args, **kwargs)
            note("forward-end", _name)
            return result

        layer.forward = watched
