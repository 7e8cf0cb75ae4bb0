"""A replica whose parameters are all NaN recovers when units sync in fragments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import Flags
from tests.host.layouts import GATHER, LAYOUTS
from tests.host.runs import run_edit

DAMAGE = "tests.host.spy:damage_before_sync"
UNITS = ("embedding", "layer.1", "layer.2", "final")
ROUND = 3
FULL = pytest.mark.full


@pytest.mark.parametrize("mode", [pytest.param("blocking", marks=pytest.mark.system), "overlap"])
@pytest.mark.parametrize(
    ("layout", "flags", "late"),
    [
        pytest.param("m2", {}, 0, id="at-once"),
        pytest.param("pp2", {"edit_mix": 0.25}, 0, id="mix", marks=FULL),
        pytest.param("pp2", {"edit_delay_steps": 1}, 1, id="delay"),
        pytest.param("m2", {"edit_offload": True}, 0, id="offload", marks=FULL),
        pytest.param(
            "m2", {"edit_strategy": "streaming-diloco", "edit_delay_steps": 1}, 1, id="diloco",
            marks=FULL,
        ),
        pytest.param("tp2", {"edit_strategy": "co2"}, 0, id="co2", marks=FULL),
        pytest.param("m2", {"edit_strategy": "sparse-loco"}, 0, id="sparse-loco", marks=FULL),
        pytest.param("m2", {"edit_strategy": "co2", "first": 1}, 0, id="co2-first", marks=FULL),
    ],
)  # fmt: skip
def test_nan_units_return_to_anchor_at_first_fragment_sync(
    tmp_path: Path, layout: str, flags: Flags, late: int, mode: str
) -> None:
    """Would catch units that stay NaN until their own fragment syncs: in the next forward pass they
    would spread NaN to the units that were just reset, and so on forever."""
    ranks, given = LAYOUTS[layout]
    flags = dict(flags)
    bad_round = flags.pop("first", ROUND)
    run = run_edit(
        tmp_path, 2 * ranks, 2, before=DAMAGE,
        env={"SPY_DAMAGE": json.dumps([[bad_round, [1], unit, "nan"] for unit in UNITS])},
        no_check_for_nan_in_loss_and_grad=True, train_iters=22, edit_sync_interval=4,
        edit_fragments=2, edit_sync_mode=mode, **{**GATHER, **given, **flags},
    )  # fmt: skip
    damaged = run.syncs[bad_round - 1]["iteration"]
    lines = [line for line in run.lines("replica-1.jsonl") if "loss" in line]
    lost = [line["iteration"] for line in lines if line["loss"] is None]
    assert lost == list(range(damaged + 1, damaged + 1 + late))
    for line in run.syncs:
        out = [units[1] for units in line["anomalous"]]
        assert all(out) if line["round"] == bad_round else not any(out), line["round"]
    assert run.digests(0) == run.digests(1)
    losses = [line["loss"] for line in run.lines("loss.jsonl")]
    assert losses[-1] < losses[0]
