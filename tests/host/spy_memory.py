"""A spy that measures the memory of the outer state from the live tensors."""

from __future__ import annotations

import gc
import json
import os
from contextlib import nullcontext
from typing import Any

import torch

from megatron_edit.engine import EditEngine
from tests.host.spy import out_dir


def _storages() -> dict[int, int]:
    """Return the bytes of every live tensor storage, by address."""
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def measure() -> None:
    """Compare the live tensors before the switch and after a sync."""
    rank = os.environ["RANK"]
    switch, sync = EditEngine._switch, EditEngine._meet
    before: dict[int, int] = {}

    def spied_switch(self: EditEngine) -> None:
        gc.collect()
        before.update(_storages())
        switch(self)

    def spied_sync(self: EditEngine, meeting: Any) -> None:
        sync(self, meeting)
        gc.collect()
        # A tuple that another thread makes of a generator must not be referred to meanwhile.
        thread = self.syncs._thread
        with thread.paused() if thread else nullcontext():
            now = _storages()
        (out_dir() / f"memory-{rank}.json").write_text(json.dumps(_facts(self, before, now)))

    EditEngine._switch = spied_switch  # type: ignore[method-assign]
    EditEngine._meet = spied_sync  # type: ignore[method-assign]


def measure_stock() -> None:
    """Record the gradients and optimizer state that Megatron itself keeps, at each sync."""
    sync = EditEngine._meet

    def spied_sync(self: EditEngine, meeting: Any) -> None:
        sync(self, meeting)
        host: Any = self.host
        ours = host.optimizers[0]
        optimizer = getattr(ours, "_optimizer", ours)  # without sharding, ours wraps Megatron's
        attributes = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
        main = [p for name in attributes for group in getattr(optimizer, name, ()) for p in group]
        state = [
            vector
            for each in optimizer.optimizer.state.values()
            for name, vector in each.items()
            if name != "step" and vector is not None  # torch's SGD keeps a None without momentum
        ]
        gradients = [buffer.grad_data for chunk in host._model for buffer in chunk.buffers]
        facts = {
            "model_numel": sum(p.numel() for chunk in host._model for p in chunk.parameters()),
            "gradient_bytes": sum(tensor.nbytes for tensor in gradients),
            "state_bytes": sum(tensor.nbytes for tensor in (*main, *state)),
        }
        (out_dir() / f"stock-{os.environ['RANK']}.json").write_text(json.dumps(facts))

    EditEngine._meet = spied_sync  # type: ignore[method-assign]


def _facts(engine: EditEngine, before: dict[int, int], now: dict[int, int]) -> dict[str, Any]:
    host: Any = engine.host
    optimizer = host.optimizers[0]
    inner = {
        moment.untyped_storage().data_ptr()
        for state in optimizer.optimizer.state.values()
        for moment in state.values()
        if isinstance(moment, torch.Tensor)
    }
    gradients = {
        p.grad.untyped_storage().data_ptr()
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    }
    fresh = sum(
        nbytes
        for address, nbytes in now.items()
        if address not in before and address not in inner | gradients
    )
    shards = list(optimizer.edit_outer.values())
    return {
        "model_numel": sum(p.numel() for chunk in host._model for p in chunk.parameters()),
        "outer_bytes": engine.syncs.outer.nbytes if engine.syncs.has_outer_state else 0,
        "new_tensor_bytes": fresh,
        "optimizer_class": type(optimizer).__name__,
        "aligned": all(
            s.main.shape == s.anchor.shape == s.momentum.shape and torch.equal(s.main, s.anchor)
            for s in shards
        )
        and len(shards) == sum(1 for _ in optimizer.main_shards()),
    }
