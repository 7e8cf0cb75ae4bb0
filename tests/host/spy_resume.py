"""A hook that records, when training ends, all state that a checkpoint must restore."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch

from tests.host.spy import out_dir, record


def record_all() -> None:
    """Record losses, norms, batches and parameters, momentum, anchor, detectors, moments, schedule.

    Also runs the hooks of `spy_speeds` that `SPY_HOOKS` names.
    """
    from megatron_edit.engine import EditEngine

    record()
    record_fetched()
    if os.environ.get("SPY_HOOKS"):
        from tests.host.spy_speeds import hooks

        hooks()
    rank = os.environ["RANK"]
    finish = EditEngine.finish

    def spied(self: EditEngine) -> None:
        finish(self)
        (out_dir() / f"outer-{rank}.json").write_text(json.dumps(_state_of(self)))

    EditEngine.finish = spied  # type: ignore[method-assign]


def _state_of(engine: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"step": engine.status.step, "round": engine.state.rounds.count}
    if engine.syncs.has_outer_state:
        shards = engine.host.plan.shards
        counted = {s.name for s in shards if any(f.is_counted for f in s.params)}
        for name, unit in engine.syncs.outer.units.items():
            state[f"anchor {name}"] = _digest([unit.anchor])
            state[f"momentum {name}"] = _digest([unit.momentum])
            # A tied copy takes the bits of the first copy: its own residual has no effect.
            if unit.residual is not None and name in counted:
                state[f"residual {name}"] = _digest([unit.residual.sent, unit.residual.summed])
        state["unit steps"] = engine.state.rounds.unit_steps.tolist()
        state["detectors"] = _digest(vars(engine.state.rounds.detectors).values())
    state["gradients"] = [
        _digest([residual.sent, residual.summed]) for residual in engine._gradients._residuals
    ]
    state["moments"] = [_moments(inner) for inner in engine.host._inner]
    state["copies"] = _copies(engine.host)
    state["schedule"] = engine.host.progress().schedule_position
    state["samples"] = engine.host.progress().samples
    return state


def _copies(host: Any) -> dict[str, str]:
    """Return digests of the moments of parameters of which other ranks hold copies."""
    found = {}
    for shard in host.plan.shards:
        for kind in ("first", "second"):
            values = torch.zeros(shard.numel)
            host.read_moments(shard, kind, values)
            for tie in {param.tie for param in shard.params} - {None}:
                params = zip(shard.params, shard.slices, strict=True)
                copies = [values[where] for param, where in params if param.tie == tie]
                found[f"{tie} {shard.name} {kind}"] = _digest(copies)
    return found


def _moments(inner: Any) -> str:
    values = [] if inner.optimizer is None else list(inner.optimizer.state.values())
    # By name: a load may restore them in another order.
    return _digest(v for s in values for _, v in sorted(s.items()) if isinstance(v, torch.Tensor))


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def record_fetched() -> None:
    """Write the samples that this rank fetches, at each fetch, as a run may end at any point."""
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    fetched: list[list[int]] = []
    fetch = _MapDatasetFetcher.fetch
    file = out_dir() / f"fetched-{os.environ['RANK']}.json"

    def spied(self: Any, indices: Any) -> Any:
        fetched.append(list(indices))
        file.write_text(json.dumps(fetched))
        return fetch(self, indices)

    _MapDatasetFetcher.fetch = spied
