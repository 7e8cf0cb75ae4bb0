"""Overlap mode: the same bits as blocking mode, on every layout; and it does overlap."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.host.layouts import GATHER, LAYOUTS
from tests.host.runs import run_edit
from tests.host.spy import read_records

CORE = {"bf16", "pp2"}


def layouts(core: set[str]) -> list[object]:
    """All layouts; those outside `core` only in the full tier."""
    return [
        name if name in core else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS
    ]


def train_in_mode(
    folder: Path, layout: str, mode: str, *, num_replicas: int = 2, **more: object
) -> tuple[list[str], list[str], list[dict[str, object]]]:
    """Digests by sync, digests of the final parameters by rank, and the sync lines."""
    folder.mkdir()
    ranks, flags = LAYOUTS[layout]
    flags = {"global_batch_size": 4 * num_replicas, **GATHER, **flags, **more}
    run = run_edit(
        folder, num_replicas * ranks, num_replicas, before="tests.host.spy:record",
        edit_sync_mode=mode, timeout=300, **flags,
    )  # fmt: skip
    assert run.digests(0) == run.digests(1)
    finals = [record["digest"] for record in read_records(folder, num_replicas * ranks)]
    if run.syncs[-1]["iteration"] == more["train_iters"]:
        # The model's own parameters, in its own precision, are the same on all replicas, too.
        assert all(finals[i] == finals[i % ranks] for i in range(len(finals)))
    return run.digests(0), finals, run.syncs


@pytest.mark.parametrize("layout", layouts(CORE))
def test_overlap_equals_blocking_bit_for_bit(tmp_path: Path, layout: str) -> None:
    """Catches a unit that lands late, twice or not at all, and a gather of old parameters."""
    seen = {
        mode: train_in_mode(tmp_path / mode, layout, mode, train_iters=17)
        for mode in ("blocking", "overlap")
    }
    assert len(seen["overlap"][0]) == 5 and None not in seen["overlap"][0]
    assert seen["overlap"][0] == seen["blocking"][0]
    assert seen["overlap"][1] == seen["blocking"][1]
    for ours, theirs in zip(seen["overlap"][2], seen["blocking"][2], strict=True):
        for key in ("norms", "weights", "clip", "update_norm", "wire_bytes", "units"):
            assert ours[key] == theirs[key]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["plain", "tp2", "pp2", "ep2"])
def test_overlap_equals_blocking_over_100_iterations(tmp_path: Path, layout: str) -> None:
    """Three replicas: beyond two addends every order of a sum matters."""
    seen = [
        train_in_mode(
            tmp_path / mode, layout, mode, num_replicas=3, train_iters=100,
            edit_warmup_steps=10, edit_sync_interval=6, hidden_dropout=0.1,
        )[:2]
        for mode in ("blocking", "overlap")
    ]  # fmt: skip
    assert seen[0] == seen[1] and len(seen[0][0]) == 15


@pytest.mark.parametrize("mode", ["blocking", "overlap"])
@pytest.mark.parametrize("layout", layouts({"m2"}))
def test_offload_changes_no_bit(tmp_path: Path, layout: str, mode: str) -> None:
    """Anchor and momentum in host memory: the same numbers."""
    near = train_in_mode(tmp_path / "near", layout, mode, train_iters=17)
    far = train_in_mode(tmp_path / "far", layout, mode, train_iters=17, edit_offload=True)
    assert near[:2] == far[:2]


@pytest.mark.parametrize(
    "layout",
    [
        "m2",
        pytest.param("accumulation", marks=pytest.mark.full),
        pytest.param("recompute-full", marks=pytest.mark.full),
        pytest.param("vpp", marks=pytest.mark.full),
        pytest.param("many-buckets", marks=pytest.mark.full),
    ],
)
def test_units_land_before_their_layer_and_fly_behind_the_one_before(
    tmp_path: Path, layout: str
) -> None:
    """sync(l) ends before forward(l); unit l + 1 is in flight before forward(l) ends; each unit
    starts and lands once per sync, whatever the schedule repeats. Catches a silent blocking
    mode."""
    ranks, flags = LAYOUTS[layout]
    run_edit(
        tmp_path, 2 * ranks, 2, before="tests.host.order:record_order", edit_sync_mode="overlap",
        train_iters=14, **{**GATHER, "num_layers": 4, **flags},
    )  # fmt: skip
    for rank in range(2 * ranks):
        log = [tuple(event) for event in json.loads((tmp_path / f"order-{rank}.json").read_text())]
        for round_ in (1, 2, 3):
            # An interleaved chunk is one bucket: it needs all its units at once, and hides nothing.
            _check_order(log, round_, is_hidden=layout != "vpp")


def _check_order(log: list[tuple[str, str, int, int]], round_: int, *, is_hidden: bool) -> None:
    first = {
        (kind, unit): place
        for place, (kind, unit, in_round, _) in reversed(list(enumerate(log)))
        if in_round == round_
    }
    counts = Counter((kind, unit) for kind, unit, in_round, _ in log if in_round == round_)
    units = [unit for kind, unit in sorted(first, key=lambda key: first[key]) if kind == "land"]
    assert all(counts[kind, unit] == 1 for kind in ("start", "land") for unit in units)
    layers = [unit for unit in units if unit.startswith("layer")]
    assert layers == sorted(layers)
    for layer in layers:
        assert first["land", layer] < first["forward", layer]
    for layer, following in itertools.pairwise(layers):
        assert first["start", following] < first["forward-end", layer]
    # Not everything has landed when the first layer runs.
    assert not is_hidden or first["land", units[-1]] > first["forward", layers[0]]


@pytest.mark.parametrize("offload", [False, True], ids=["near", "offload"])
@pytest.mark.parametrize("prefetch_units", [1, 3])
def test_staging_is_bounded(tmp_path: Path, prefetch_units: int, offload: bool) -> None:
    """At most D + 1 units are staged: 4 bytes an element, 12 with offload. Catches flights that
    are kept after landing, and a staging of everything at once."""
    run_edit(
        tmp_path, 4, 2, before="tests.host.order:measure_staging", edit_sync_mode="overlap",
        edit_prefetch_units=prefetch_units, edit_offload=offload,
        **{**GATHER, "num_layers": 6, "train_iters": 11},
    )  # fmt: skip
    for rank in range(4):
        facts = json.loads((tmp_path / f"staging-{rank}.json").read_text())
        bound = (prefetch_units + 1) * facts["largest_shard"] * (12 if offload else 4)
        assert 0 < facts["peak"] <= bound
        assert facts["live_after"] == 0


def test_a_failure_in_an_overlapped_sync_ends_all_ranks(tmp_path: Path) -> None:
    """One rank raises in the middle of a forward pass: it says in which unit and round, its
    counterparts in which round they lost it, and nobody hangs."""
    run = run_edit(
        tmp_path, 4, 2, before="tests.host.order:fail_while_landing", env={"SPY_VICTIM": "2"},
        edit_sync_mode="overlap", edit_timeout_seconds=5, train_iters=20, check=False,
        timeout=60, **GATHER,
    )  # fmt: skip
    codes = [rank.returncode for rank in run.result.ranks]
    assert codes[2] == 1 and all(codes)
    failed, counterpart = run.result.ranks[2].stderr, run.result.ranks[0].stderr
    assert "in the exchange of unit layer.2" in failed and "in round 2 of EDiT" in failed
    assert codes[0] == 4 and "the sync of round 2" in counterpart
