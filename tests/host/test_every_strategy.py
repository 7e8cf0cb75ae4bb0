"""Every strategy on real Megatron: overlap equals blocking, every sync lands exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Flags
from tests.host.layouts import GATHER, LAYOUTS
from tests.host.runs import EditRun, run_edit
from tests.host.spy import read_records

# tau is 4 and the warm-up 2 steps in all of them, unless the strategy has no warm-up.
VARIANTS: dict[str, Flags] = {
    "local-sgd": {"edit_strategy": "local-sgd"},
    "post-local-sgd": {"edit_strategy": "post-local-sgd"},
    "slowmo": {"edit_strategy": "slowmo"},
    "diloco": {"edit_strategy": "diloco"},
    "co2": {"edit_strategy": "co2"},
    "co2-fragments": {"edit_strategy": "co2", "edit_fragments": 2},
    "streaming-diloco": {"edit_strategy": "streaming-diloco", "edit_delay_steps": 2},
    "sparse-loco": {"edit_strategy": "sparse-loco"},
    "sparse-loco-late": {
        "edit_strategy": "sparse-loco", "edit_fragments": 2, "edit_delay_steps": 2,
    },
    "edit-fragments": {"edit_fragments": 3},
    "edit-delay": {"edit_delay_steps": 3},
    "edit-mix": {"edit_mix": 0.25},
    "edit-all": {"edit_fragments": 2, "edit_delay_steps": 3, "edit_mix": 0.5},
    "edit-bf16": {"edit_sync_dtype": "bf16"},
    "edit-int8": {"edit_sync_dtype": "int8", "edit_delay_steps": 2},
    "edit-int4": {"edit_sync_dtype": "int4"},
    "edit-int2": {"edit_sync_dtype": "int2"},
    "edit-ternary": {"edit_sync_dtype": "ternary", "edit_delay_steps": 2},
    "edit-sign": {"edit_sync_dtype": "sign"},
    "diloco-int4": {
        "edit_strategy": "streaming-diloco", "edit_delay_steps": 3, "edit_sync_dtype": "int4",
    },
    "qsr": {"edit_strategy": "diloco", "edit_interval": "qsr", "edit_qsr_a": 0.002},
}  # fmt: skip
CORE = {"streaming-diloco": "m2"}
SYSTEM = {"co2": "m2", "sparse-loco": "m2", "edit-int8": "m2", "edit-all": "pp2"}
NUM_LAYERS = 4


def cases() -> list[object]:
    """Return all variants on three layouts; the core and the system tier run a few of them."""

    def marks(name: str, layout: str) -> list[pytest.MarkDecorator]:
        if CORE.get(name) == layout:
            return []
        return [pytest.mark.system if SYSTEM.get(name) == layout else pytest.mark.full]

    return [
        pytest.param(name, layout, marks=marks(name, layout))
        for name in VARIANTS
        for layout in ("m2", "pp2", "tp2")
    ]


def train_variant(
    folder: Path, name: str, layout: str, mode: str, num_replicas: int = 2, **more: Any
) -> tuple[EditRun, list[str]]:
    """Train a variant; return the run and the digests of the final parameters by rank."""
    ranks, flags = LAYOUTS[layout]
    flags = {"global_batch_size": 4 * num_replicas, **GATHER, **flags, "num_layers": NUM_LAYERS,
             "edit_sync_interval": 4, **VARIANTS[name], **more}  # fmt: skip
    if name == "local-sgd":
        flags["edit_warmup_steps"] = 0
    run = run_edit(
        folder, num_replicas * ranks, num_replicas, before="tests.host.spy:record",
        edit_sync_mode=mode, timeout=300, train_iters=17, **flags,
    )  # fmt: skip
    finals = [record["digest"] for record in read_records(folder, num_replicas * ranks)]
    assert all(finals[i] == finals[i % ranks] for i in range(len(finals)))
    return run, finals


@pytest.mark.parametrize(("name", "layout"), cases())
def test_strategy_trains_alike_in_blocking_and_overlap(
    tmp_path: Path, name: str, layout: str
) -> None:
    """Would catch a unit that lands twice or never, a landing that training overwrites, replicas
    that stay different, and an exchange whose result depends on when it is awaited."""
    blocking, overlap = (
        train_variant(tmp_path / mode, name, layout, mode) for mode in ("blocking", "overlap")
    )
    assert blocking[1] == overlap[1]
    for replica in (0, 1):
        assert blocking[0].digests(replica) == overlap[0].digests(0)
        assert None not in blocking[0].digests(replica)
    for mine, other in zip(blocking[0].syncs, overlap[0].syncs, strict=True):
        for key in ("round", "iteration", "norms", "weights", "clip", "units", "wire_bytes"):
            assert mine[key] == other[key]
    rounds = [sync["round"] for sync in blocking[0].syncs]
    assert sorted(rounds) == list(range(1, len(rounds) + 1))
    times = Counter(unit for sync in blocking[0].syncs for unit in sync["units"])
    assert len(times) == NUM_LAYERS + 2
    if name != "qsr":
        warmup = 0 if name == "local-sgd" else 2
        assert max(times.values()) <= -(-(17 - warmup) // 4) + 1
        assert min(times.values()) >= (17 - warmup) // 4


def test_stage_without_units_in_fragment_still_gathers(tmp_path: Path) -> None:
    """Four fragments over two stages of two data-parallel ranks: in some syncs a stage has no unit
    to land, and its ranks must still gather the parameters of their own step."""
    flags: Flags = {
        "pipeline_model_parallel_size": 2, "num_layers": NUM_LAYERS, "global_batch_size": 8,
        "edit_fragments": 4, "edit_sync_interval": 4, "train_iters": 9, **GATHER,
    }  # fmt: skip
    late: Flags = {"overlap_param_gather": None, "edit_sync_mode": "blocking"}
    finals = []
    for name, more in (("blocking", late), ("overlap", {"edit_sync_mode": "overlap"})):
        folder = tmp_path / name
        run = run_edit(
            folder, 8, 2, before="tests.host.spy:record", timeout=300, **{**flags, **more}
        )
        assert any(len(sync["units"]) == 1 for sync in run.syncs)
        finals.append([record["digest"] for record in read_records(folder, 8)])
    assert finals[0] == finals[1]
