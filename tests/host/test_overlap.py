"""Overlap mode has the bits of blocking mode on every layout, and exchanges do overlap."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Flags
from tests.host.layouts import GATHER, LAYOUTS
from tests.host.runs import run_edit
from tests.host.spy import read_records
from tests.host.spy_places import read_blocked, read_landings

CORE = {"bf16", "pp2"}
TIMEOUT_SECONDS = 5
SCALARS_BYTES = 4096  # norms, clips and gathered scalars
LOST = {  # at a landing all exchanges may be over, so that no unit is named
    "launch": re.compile(r"the sync of round 2 \(step 8\): unit (embedding|layer\.\d|final): "),
    "land": re.compile(r"the sync of round 2 \(step 8\): "),
}


def layouts(core: set[str]) -> list[object]:
    """Return all layouts; those outside `core` run only in the full tier."""
    return [
        name if name in core else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS
    ]


def train_in_mode(
    folder: Path, layout: str, mode: str, *, num_replicas: int = 2, **more: Any
) -> tuple[list[str | None], list[str], list[dict[str, Any]]]:
    """Train; return digests by sync, digests of the final parameters by rank, and sync lines."""
    ranks, flags = LAYOUTS[layout]
    flags = {"global_batch_size": 4 * num_replicas, **GATHER, **flags, **more}
    run = run_edit(
        folder, num_replicas * ranks, num_replicas, edit_sync_mode=mode,
        before="tests.host.spy_places:record_landings", timeout=300, **flags,
    )  # fmt: skip
    assert all(run.digests(r) == run.digests(0) for r in range(num_replicas))
    for rank in range(num_replicas * ranks):
        _check_places(folder, rank, layout, mode)
    finals = [record["digest"] for record in read_records(folder, num_replicas * ranks)]
    if run.syncs[-1]["iteration"] == more["train_iters"]:
        # The model's own parameters, in its own precision, are the same on all replicas, too.
        assert all(finals[i] == finals[i % ranks] for i in range(len(finals)))
    return run.digests(0), finals, run.syncs


def _check_places(folder: Path, rank: int, layout: str, mode: str) -> None:
    """Check that in overlap mode units land in the forward pass, when Megatron gathers their
    buckets, and not all at once where there are several buckets, which is on the first stage. Would
    catch a fall-back to blocking, and synchronous sends between stages, which prevent overlap on
    GPUs."""
    stage, num_groups, landings, sends = read_landings(folder, rank)
    assert sends == (["cpu"] if mode == "overlap" else [])
    if stage == 0:
        assert (num_groups == 1) == (layout == "one-bucket")
    last = max(landing.round for landing in landings)
    assert last >= 5
    for round_ in range(1, last):  # training ends with the last round, or soon after
        ours = [landing for landing in landings if landing.round == round_]
        where = {landing.where for landing in ours}
        if mode == "blocking":
            assert where == {"elsewhere"}
            continue
        # Megatron gathers interleaved chunks in the schedule, before their forward pass.
        assert where == {"schedule" if layout == "vpp" else "forward"}
        gathers = {landing.gather for landing in ours}
        assert len(gathers) > 1 or stage > 0 or num_groups == 1


@pytest.mark.parametrize("layout", layouts(CORE))
def test_overlap_equals_blocking_bit_for_bit(tmp_path: Path, layout: str) -> None:
    """Would catch a unit that lands late, twice or never, and a gather of old parameters."""
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


def test_layer_wise_muon_overlap_equals_blocking(tmp_path: Path) -> None:
    """Each rank gathers other matrices, of other sizes. Would catch a matrix that its rank sends
    before its unit has landed."""
    pytest.importorskip("emerging_optimizers", reason="needs the extra muon")
    seen = [
        train_in_mode(
            tmp_path / mode, "bf16", mode, train_iters=17, optimizer="muon",
            no_use_layer_wise_param_layout=True,
        )
        for mode in ("blocking", "overlap")
    ]  # fmt: skip
    assert len(seen[1][0]) == 5 and None not in seen[1][0]
    assert seen[0][:2] == seen[1][:2]


@pytest.mark.parametrize("mode", [pytest.param("blocking", marks=pytest.mark.system), "overlap"])
@pytest.mark.parametrize("layout", layouts({"m2"}))
def test_offload_changes_no_bit(tmp_path: Path, layout: str, mode: str) -> None:
    """Anchor and momentum in host memory give the same bits."""
    resident = train_in_mode(tmp_path / "resident", layout, mode, train_iters=17)
    offloaded = train_in_mode(
        tmp_path / "offloaded", layout, mode, train_iters=17, edit_offload=True
    )
    assert resident[:2] == offloaded[:2]


@pytest.mark.parametrize(
    "layout",
    [
        "m2",
        pytest.param("accumulation", marks=pytest.mark.full),
        pytest.param("recompute-full", marks=pytest.mark.full),
        pytest.param("vpp", marks=pytest.mark.full),
        pytest.param("many-buckets", marks=pytest.mark.full),
        pytest.param("pp2", marks=pytest.mark.full),
        pytest.param("ep2", marks=pytest.mark.full),
    ],
)
def test_units_land_before_their_layer_and_overlap_previous(tmp_path: Path, layout: str) -> None:
    """Unit l lands before forward(l). The exchange of unit l + 1 starts before forward(l) ends, and
    lands after it began. Each unit starts and lands once per sync, even if the schedule repeats
    layers. Would catch a silent blocking mode, and landing all units at the first gather."""
    ranks, flags = LAYOUTS[layout]
    more: Flags = {"ddp_bucket_size": 3000} if layout == "ep2" else {}  # its dense layers are small
    run_edit(
        tmp_path, 2 * ranks, 2, before="tests.host.spy_places:record_order",
        edit_sync_mode="overlap", train_iters=14, **{**GATHER, "num_layers": 4, **flags, **more},
    )  # fmt: skip
    logs = [json.loads((tmp_path / f"order-{rank}.json").read_text()) for rank in range(2 * ranks)]
    passed = {unit for log in logs[:ranks] for kind, unit, *_ in log if kind == "forward"}
    assert passed == {"embedding", "layer.1", "layer.2", "layer.3", "layer.4", "final"}
    for rank, log in enumerate(logs):
        # Each chunk of an interleaved schedule, and of a later stage, is one bucket (or two, where
        # it has a copy of the embedding): it needs all its units at once, without overlap.
        is_lazy = layout != "vpp" and not (layout == "pp2" and rank % ranks > 0)
        for round_ in (1, 2, 3):
            _check_order([tuple(event) for event in log], round_, is_lazy=is_lazy)


def _check_order(log: list[tuple[str, str, int, int]], round_: int, *, is_lazy: bool) -> None:
    first = {
        (kind, unit): position
        for position, (kind, unit, in_round, _) in reversed(list(enumerate(log)))
        if in_round == round_
    }
    counts = Counter((kind, unit) for kind, unit, in_round, _ in log if in_round == round_)
    units = [unit for kind, unit in sorted(first, key=lambda key: first[key]) if kind == "land"]
    assert all(counts[kind, unit] == 1 for kind in ("start", "land") for unit in units)
    passed = {unit for kind, unit in first if kind == "forward"}
    assert passed <= set(units)
    for unit in passed:
        assert first["land", unit] < first["forward", unit]
    layers = [unit for unit in units if unit.startswith("layer")]
    assert len(layers) > 1 and layers == sorted(layers)
    for layer, following in itertools.pairwise(layers):
        assert first["start", following] < first["forward-end", layer]
    if is_lazy:
        for unit, following in itertools.pairwise(units[units.index(layers[0]) :]):
            assert first["land", following] > first["forward", unit]


@pytest.mark.parametrize(
    ("prefetch_units", "offload"),
    [
        pytest.param(1, False, id="1-resident"),
        pytest.param(3, True, id="3-offload"),
        pytest.param(1, True, id="1-offload", marks=pytest.mark.full),
        pytest.param(3, False, id="3-resident", marks=pytest.mark.full),
    ],
)
def test_staging_is_bounded(tmp_path: Path, prefetch_units: int, offload: bool) -> None:
    """At most `--edit-prefetch-units` + 1 units are staged, with 4 bytes per element, 12 with
    offload, measured by the engine's allocations. Would catch units that are kept after landing,
    and staging of all units at once. Digests, whose scratch memory has a bound of its own, are
    off."""
    run_edit(
        tmp_path, 4, 2, before="tests.host.spy_places:measure_staging", edit_sync_mode="overlap",
        edit_prefetch_units=prefetch_units, edit_offload=offload, edit_digest_interval=100,
        **{**GATHER, "num_layers": 6, "train_iters": 11},
    )  # fmt: skip
    for rank in range(4):
        facts = json.loads((tmp_path / f"staging-{rank}.json").read_text())
        bytes_each = 12 if offload else 4
        bound = (prefetch_units + 1) * facts["largest_shard"] * bytes_each + SCALARS_BYTES
        assert facts["largest_shard"] * bytes_each <= facts["peak"] <= bound
        assert facts["live_after"] == 0


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, {}, id="overlapped"),
        pytest.param(2, {"edit_sync_dtype": "int8", "edit_delay_steps": 3}, id="late-int8"),
        pytest.param(
            4, {"tensor_model_parallel_size": 2}, id="overlapped-tp2", marks=pytest.mark.system
        ),
    ],
)
def test_exchanges_progress_while_main_thread_waits(
    tmp_path: Path, ranks: int, flags: dict[str, Any]
) -> None:
    """The main threads of all ranks are blocked in a forward or backward pass. Would catch units
    and second phases that wait for the main thread, while a slow link is idle."""
    run_edit(
        tmp_path, ranks, 2, before="tests.host.spy_places:block_main_thread", train_iters=14,
        edit_warmup_steps=2, edit_sync_interval=4, edit_sync_mode="overlap",
        **{**GATHER, "num_layers": 4, **flags},
    )  # fmt: skip
    for rank in range(ranks):
        seen = read_blocked(tmp_path, rank)
        assert len(seen) >= 2 and all(seen)


@pytest.mark.parametrize("layout", ["m2", pytest.param("pp2", marks=pytest.mark.full)])
@pytest.mark.parametrize("moment", [pytest.param("launch", marks=pytest.mark.system), "land"])
def test_failure_in_overlapped_sync_ends_all_ranks(
    tmp_path: Path, layout: str, moment: str
) -> None:
    """One rank raises within a forward pass: it reports the unit and round, the others report the
    sync in which they lost it, and all soon exit by themselves. Would catch a rank that hangs until
    the launch is killed."""
    ranks, flags = LAYOUTS[layout]
    run = run_edit(
        tmp_path, 2 * ranks, 2, before="tests.host.spy_places:fail_in_unit",
        env={"SPY_VICTIM": str(ranks), "SPY_MOMENT": moment}, edit_sync_mode="overlap",
        train_iters=20, check=False, edit_timeout_seconds=TIMEOUT_SECONDS, timeout=60,
        **{**GATHER, "num_layers": 4, **flags},
    )  # fmt: skip
    codes = [rank.returncode for rank in run.result.ranks]
    assert codes[ranks] == 1 and all(code > 0 for code in codes)  # the harness kills with SIGKILL
    failed = float((tmp_path / "failed").read_text())
    ends = [float((tmp_path / f"ended-{rank}").read_text()) for rank in range(2 * ranks)]
    assert max(ends) - failed < 3 * TIMEOUT_SECONDS
    victim = run.result.ranks[ranks].stderr
    assert "in the exchange of unit layer.2" in victim and "in round 2 of EDiT" in victim
    # The others notice it in the sync, with later units in flight, or in Megatron's collectives.
    assert (layout, moment) != ("m2", "launch") or codes[0] == 4, run.result.ranks[0].stderr
    for rank in run.result.ranks:
        if rank.returncode == 4:
            assert LOST[moment].search(rank.stderr), rank.stderr
        else:
            assert rank.returncode == 1
