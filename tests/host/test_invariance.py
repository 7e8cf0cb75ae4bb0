"""A replica in another parallel layout has the same penalty at the first sync (method 8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import Flags
from tests.host.layouts import GATHER, LAYOUTS, PLAIN_DDP, Layout
from tests.host.runs import EditRun, cached_run, run_edit

# A step moves a parameter by about lr, so that updates exceed this clip.
SETTINGS: Flags = {"edit_warmup_steps": 0, "edit_sync_interval": 4, "train_iters": 5,
                   "num_layers": 2, "edit_clip": 0.05, "init_method_std": 0.02}  # fmt: skip
SPLIT = {"m2", "ep2", "tp2-ep2-etp2", "two-instances", "two-instances-m2", "m2-plain-ddp"}


def train_until_first_sync(folder: Path, ranks: int, **flags: Any) -> EditRun:
    """Train two replicas from weights that are the same on every layout."""
    return run_edit(
        folder, 2 * ranks, 2, before="tests.host.spy:start_from_seeded_weights",
        **{**GATHER, **SETTINGS, **flags},
    )  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        "m2",
        "tp2",
        "tp2-sp",
        "pp2",
        pytest.param("cp2", marks=pytest.mark.full),
        pytest.param("tp2-pp2", marks=pytest.mark.full),
        pytest.param("two-instances", marks=pytest.mark.full),
        pytest.param("two-instances-m2", marks=pytest.mark.full),
        pytest.param("m2-plain-ddp", marks=pytest.mark.full),
    ],
)
def test_dense_layouts_agree_at_the_first_sync(tmp_path: Path, layout: str) -> None:
    """Norms, weights and clip factors agree to 1e-4. Would catch copies counted twice, lost
    shards."""
    _compare(tmp_path, "plain", layout, {})


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ep2", "tp2-ep2", "tp2-ep2-etp2"])
def test_expert_layouts_agree_at_the_first_sync(tmp_path: Path, layout: str) -> None:
    """EP 2, also with TP, compared with all experts on one rank: unlike experts, routers are copies
    of each other."""
    _compare(tmp_path, "moe", layout, {"moe_router_load_balancing_type": "none"})


def _compare(tmp_path: Path, one: str, other: str, more: Flags) -> None:
    # Megatron assigns micro-batches to data-parallel ranks: where one rank replaces two, or four,
    # a micro-batch two, or four, times as large gives the replica the same samples.
    whole: Flags = {**LAYOUTS[one].flags, **more, "micro_batch_size": 4 if other in SPLIT else 2}
    expected = cached_run(train_until_first_sync, LAYOUTS[one].ranks, **whole).syncs[0]
    ranks, flags = LAYOUTS[other] if other != "m2-plain-ddp" else Layout(2, PLAIN_DDP)
    ours = train_until_first_sync(tmp_path, ranks, **{**flags, **more}).syncs[0]
    assert ours["units"] == expected["units"]
    for key in ("norms", "weights", "clip", "update_norm"):
        np.testing.assert_allclose(ours[key], expected[key], rtol=1e-4, err_msg=key)
    assert min(ours["clip"]) < 1.0
