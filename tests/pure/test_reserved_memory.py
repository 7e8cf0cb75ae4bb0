"""The memory of the rounds is taken before the warm-up, and its lack is an error there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
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
from megatron_edit.host.checkpoint.loading import reserve_memory
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


def reserved_sizes(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each tensor that a second reservation allocates."""
    sizes: list[int] = []
    rank.engine.syncs.reserve()
    empty = torch.empty

    def noting(size: int, **_: Any) -> torch.Tensor:
        sizes.append(size)
        return empty(size)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", noting)
        rank.engine.syncs.reserve()
    return sizes


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
    with built(**settings) as rank:
        sizes = reserved_sizes(rank, monkeypatch)
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


@pytest.mark.parametrize("code", [0, 712])
def test_page_locked_state_is_one_buffer(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered, because torch rounds page-locked allocations up to powers of two; allocated one
    by one where CUDA refuses that. Catches up to twice the host memory."""
    registered, allocated = list[int](), list[Any]()
    empty = torch.empty

    def register(place: int, nbytes: int, flags: int) -> int:
        registered.append(nbytes)
        return code

    def allocate(size: int, **rest: Any) -> torch.Tensor:
        allocated.append((size, rest.pop("pin_memory", False)))
        return empty(size, **rest)

    runtime = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "empty", allocate)
    tensors = outer_state._resident_tensors([3, 0, 5], CPU, is_pinned=True)
    assert registered == [32] and [len(tensor) for tensor in tensors] == [3, 0, 5]
    each = [(3, True), (0, True), (5, True)] if code else []
    assert allocated == [(8, False), *each]
    assert (tensors[2].data_ptr() - tensors[0].data_ptr() == 12) is (code == 0)


def test_only_the_largest_fragment_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the buffers of all fragments, of which one is in flight at a time."""
    with built(fragments=2, delay_steps=2, sync_interval=8) as rank:
        sizes = reserved_sizes(rank, monkeypatch)
    assert sizes == [40, 40, 2, 2] or sizes == [41, 41]
    assert sum(sizes) == 84
