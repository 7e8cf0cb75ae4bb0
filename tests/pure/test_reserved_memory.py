"""The memory of the rounds is taken before the warm-up, and its lack is an error there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.engine.sync import outer_state
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.memory import reserve_memory
from tests.harness.races import RaceDetector
from tests.harness.traced_streams import CPU, Rank, plan_of

UNITS = {"layer.1": (40,), "layer.2": (41,), "final": (2,)}


@contextmanager
def built(**settings: Any) -> Iterator[Rank]:
    """A rank that has not started."""
    usual: dict[str, Any] = {"num_replicas": 2, "warmup_steps": 3, "digest_interval": 100}
    with torch.no_grad(), RaceDetector() as detector:
        config = EditConfig(**{**usual, **settings})
        rank = Rank.build(detector.streams, config, plan_of(UNITS), is_overlapped=False)
        yield rank
        rank.engine.close()


def places_of(state: OuterState) -> list[int]:
    """Where the tensors are in memory."""
    tensors: list[Any] = [t for unit in state.units.values() for t in unit.tensors().values()]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize(
    "settings", [{}, {"sync_dtype": "int8"}, {"offload": True}], ids=["fp32", "int8", "offload"]
)
def test_outer_state_exists_in_the_warm_up(settings: dict[str, Any]) -> None:
    """Catches a lack of memory that shows only when 1000 steps have been made."""
    with built(**settings) as rank:
        engine = rank.engine
        engine.syncs.reserve()
        reserved = engine.syncs._reserved
        assert reserved is not None
        places = places_of(reserved)
        engine.start()
        for _ in range(3):
            engine.before_step()
            engine.after_step()
        found = places_of(engine.syncs.outer)
        assert found == places and len(places) == len(UNITS) * (
            4 if "sync_dtype" in settings else 2
        )
        anchors = [unit.anchor for unit in engine.syncs.outer.units.values()]
        assert all(bool((anchor == 1.0).all()) for anchor in anchors)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 0),
        ({"delay_steps": 2}, 2),
        ({"delay_steps": 2, "average_moments": "both"}, 4),
        ({"strategy": "co2"}, 1),
    ],
    ids=["immediate", "delayed", "moments", "co2"],
)
def test_buffers_of_delayed_syncs_are_allocated_once(
    settings: dict[str, Any], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Average, snapshot and moments of all units at once, then freed: torch keeps the memory."""
    sizes: list[int] = []
    with built(**settings) as rank:
        rank.engine.syncs.reserve()
        empty = torch.empty

        def noting(size: int, **_: Any) -> torch.Tensor:
            sizes.append(size)
            return empty(size)

        monkeypatch.setattr(torch, "empty", noting)
        rank.engine.syncs.reserve()
        monkeypatch.undo()
    numels = [shard.numel for shard in rank.host.plan.shards]
    assert sorted(sizes) == sorted(numels * kept)


def test_lack_of_memory_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2, with the bytes. Catches a traceback of the allocator."""

    def allocate(*_: Any, **__: Any) -> OuterState:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
        )

    monkeypatch.setattr(OuterState, "allocate", allocate)
    store = dist.HashStore()
    world = ReplicaWorld(Placement(1, 0, 1, 0, True), store, store, timedelta(seconds=20))
    with built() as rank, pytest.raises(UsageError) as refusal:
        reserve_memory(rank.engine, world)
    text = str(refusal.value)
    assert text.startswith("about 6.64e-07 GB per rank for anchor, outer momentum and syncs: must")
    assert "(CUDA out of memory); use more ranks per replica, or --edit-offload" in text


def test_no_memory_is_kept_for_the_final_phase() -> None:
    """Catches 8 bytes for each parameter that nothing uses."""
    with built() as rank:
        rank.engine.syncs.reserve()
        rank.engine.start()
        rank.engine._enter_final_phase()
        assert rank.engine.syncs._reserved is None


def test_page_locked_state_is_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an allocation for each tensor: each would be rounded up to a power of two."""
    calls: list[Any] = []
    empty = torch.empty

    def allocate(size: int, **rest: Any) -> torch.Tensor:
        calls.append((size, rest.pop("pin_memory", False)))
        return empty(size, **rest)

    monkeypatch.setattr(torch, "empty", allocate)
    tensors = outer_state._resident_tensors([3, 0, 5], CPU, is_pinned=True)
    assert calls == [(8, True)] and [len(tensor) for tensor in tensors] == [3, 0, 5]
    calls.clear()
    outer_state._resident_tensors([3, 0, 5], CPU, is_pinned=False)
    assert calls == [(3, False), (0, False), (5, False)]
