"""A resumed run equals the uninterrupted one bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint.manifest import Manifest, read_manifest
from tests.harness import Flags
from tests.host.layouts import GATHER, LAYOUTS
from tests.host.runs import EditRun, cached_run, run_edit

HOOK = "tests.host.spy_state:record_all"
ITERATIONS = 12
# Two steps of warm-up, a sync every three: 1 is in warm-up, 2 the switch, 5 and 8 are syncs.
RESUME_STEPS = {"in-warm-up": 1, "at-the-switch": 2, "at-a-sync": 5, "in-mid-round": 7}
DROPOUT: Flags = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
SYSTEM = ("tp2-pp2",)


def facts(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Read the final state of all ranks: parameters, outer and inner state, progress."""
    found = []
    for rank in range(world_size):
        outer = json.loads((folder / f"outer-{rank}.json").read_text())
        found.append(
            outer | {"digest": json.loads((folder / f"rank-{rank}.json").read_text())["digest"]}
        )
    return found


def records(folder: Path, rank: int) -> dict[str, Any]:
    """Read what one rank recorded during training."""
    found: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    return found


def assert_continues(whole: Path, resumed: Path, step: int, world_size: int) -> None:
    """Check that the resumed run has the steps, data and final state of the whole one."""
    assert facts(resumed, world_size) == facts(whole, world_size)
    for rank in range(world_size):
        before, after = records(whole, rank), records(resumed, rank)
        for name in ("losses", "grad_norms"):
            expected: Flags = {i: v for i, v in before[name].items() if int(i) > step}
            assert after[name] == expected
        if after["batches"]:
            assert before["batches"][-len(after["batches"]) :] == after["batches"]


def assert_same_syncs(whole: EditRun, resumed: EditRun) -> None:
    """Check norms, scores, weights and digests of the syncs that both runs made."""
    after = {line["round"]: line for line in resumed.syncs}
    before = {line["round"]: line for line in whole.syncs if line["round"] in after}
    for number, line in after.items():
        for name in ("norms", "z", "weights", "clip", "inner_steps", "samples", "iteration",
                     "why", "round_loss", "loss_z"):  # fmt: skip
            assert line[name] == before[number][name], name
    assert resumed.digests(0) == whole.digests(0)[-len(after) :]


def resume_and_compare(
    folder: Path,
    step: int,
    ranks: int,
    replicas: int,
    *,
    is_shared: bool = False,
    has_syncs: bool = True,
    **flags: Any,
) -> Manifest:
    """Train with saves, train again from the checkpoint of `step`, and compare both runs.

    Args:
        is_shared: whether other tests resume the same run at other steps: saves at every step.
        has_syncs: whether syncs follow the checkpoint.

    Returns:
        Manifest of the checkpoint.
    """
    settings = {
        "train_iters": ITERATIONS, "lr_decay_style": "cosine", "lr_warmup_iters": 3, **flags,
    }  # fmt: skip
    if "edit_strategy" not in flags:  # the other strategies have no detectors
        settings["edit_anomaly_warmup_syncs"] = 1
    world = ranks * replicas
    first = cached_run(
        run_edit, world, replicas, before=HOOK, save_interval=1 if is_shared else step, **settings
    )
    saves = first.folder / "saves"
    second = run_edit(folder, world, replicas, before=HOOK, load=saves, ckpt_step=step, **settings)
    assert_continues(first.folder, folder, step, world)
    if has_syncs:
        assert_same_syncs(first, second)
    else:
        assert not (folder / "sync.jsonl").exists()
    return read_manifest(saves / f"iter_{step:07d}")


@pytest.mark.parametrize(
    "moment",
    [
        "at-the-switch",
        "in-mid-round",
        *(pytest.param(x, marks=pytest.mark.system) for x in ("in-warm-up", "at-a-sync")),
    ],
)
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, moment: str) -> None:
    """With dropout and a schedule. Would catch state that is not saved, at any point of
    training."""
    resume_and_compare(tmp_path, RESUME_STEPS[moment], 1, 2, is_shared=True, **DROPOUT)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(x, marks=pytest.mark.system if x in SYSTEM else pytest.mark.full)
        for x in LAYOUTS
    ],
)
def test_resume_on_every_layout(tmp_path: Path, layout: str) -> None:
    """Within a round, where all state is needed: shards, stages, experts, buffers."""
    ranks, flags = LAYOUTS[layout]
    resume_and_compare(tmp_path, RESUME_STEPS["in-mid-round"], ranks, 2, **flags)


@pytest.mark.system
@pytest.mark.parametrize("moment", ["at-a-sync", "in-mid-round"])
def test_resume_in_overlap_with_offload(tmp_path: Path, moment: str) -> None:
    """With units that have not landed when the save begins, and outer state in host memory."""
    resume_and_compare(
        tmp_path, RESUME_STEPS[moment], 2, 2, is_shared=True, edit_sync_mode="overlap",
        edit_offload=True, bf16=True, **DROPOUT, **GATHER,
    )  # fmt: skip


SAVING: dict[str, tuple[int, dict[str, Any]]] = {  # ranks of a replica, and flags
    "blocking": (1, {}),
    "overlap": (2, {"edit_sync_mode": "overlap", **GATHER}),
    "int4-delay": (2, {"edit_sync_dtype": "int4", "edit_delay_steps": 2, **GATHER}),
}


@pytest.mark.parametrize(
    "name",
    ["int4-delay", *(pytest.param(n, marks=pytest.mark.system) for n in ("blocking", "overlap"))],
)
def test_frequent_saves_and_evaluations_change_nothing(tmp_path: Path, name: str) -> None:
    """At every step, also within a round and during exchanges, the run is the same as without.
    Would catch a sync that lands early, or twice, because parameters are read."""
    ranks, flags = SAVING[name]
    world = 2 * ranks
    often: Flags = {
        "save": tmp_path / "saves",
        "save_interval": 1,
        "eval_interval": 1,
        "eval_iters": 1,
    }
    for folder, more in (("plain", {}), ("often", often)):
        run_edit(
            tmp_path / folder, world, 2, before=HOOK, train_iters=ITERATIONS, **DROPOUT, **flags,
            **more,
        )  # fmt: skip
    assert facts(tmp_path / "plain", world) == facts(tmp_path / "often", world)
    for rank in range(world):
        plain, often_ = (records(tmp_path / folder, rank) for folder in ("plain", "often"))
        assert plain["losses"] == often_["losses"]


# Step of the checkpoint: 6 is a step after a sync, 7 two; a delay of 2 lands after step 7.
PENDING: dict[str, tuple[int, dict[str, Any]]] = {
    "delay": (6, {"edit_delay_steps": 2}),
    "delay-mix-fragments": (7, {"edit_delay_steps": 2, "edit_mix": 0.5, "edit_fragments": 2}),
    "fragments": (6, {"edit_fragments": 3}),
    # The pending units belong to only one pipeline stage.
    "delay-of-a-stage": (
        5, {"edit_fragments": 4, "edit_delay_steps": 2, "edit_sync_interval": 8},
    ),
    "mix": (5, {"edit_mix": 0.5}),
    "streaming-diloco": (
        6, {"edit_strategy": "streaming-diloco", "edit_fragments": 2, "edit_delay_steps": 2},
    ),
    "co2": (7, {"edit_strategy": "co2"}),
    "slowmo": (7, {"edit_strategy": "slowmo"}),
    "int8": (7, {"edit_sync_dtype": "int8"}),
    "int4-delay": (6, {"edit_sync_dtype": "int4", "edit_delay_steps": 2}),
    "int2": (7, {"edit_sync_dtype": "int2"}),
    "ternary-delay": (6, {"edit_sync_dtype": "ternary", "edit_delay_steps": 2}),
    "sign": (7, {"edit_sync_dtype": "sign"}),
    "sparse-loco": (7, {"edit_strategy": "sparse-loco"}),
    "sparse-loco-delay": (6, {"edit_strategy": "sparse-loco", "edit_delay_steps": 2}),
    "co2-int8-fragments": (
        9, {"edit_strategy": "co2", "edit_sync_dtype": "int8", "edit_fragments": 2},
    ),
    "qsr": (7, {"edit_interval": "qsr", "edit_qsr_a": 0.0018}),
}  # fmt: skip
PENDING_CORE = {
    ("delay-mix-fragments", "m2"), ("co2-int8-fragments", "m2"), ("int4-delay", "pp2"),
    ("delay-of-a-stage", "pp2"), ("sparse-loco", "m2"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(n, x, marks=[] if (n, x) in PENDING_CORE else [pytest.mark.full])
        for n in PENDING
        for x in ("plain", "m2", "tp2", "pp2")
    ],
)
def test_resume_with_pending_sync(tmp_path: Path, name: str, layout: str) -> None:
    """Would catch a sync that lands twice, early or never, and a residual that is not saved."""
    step, flags = PENDING[name]
    ranks, more = LAYOUTS[layout]
    mode = "overlap" if layout == "m2" else "blocking"
    manifest = resume_and_compare(
        tmp_path, step, ranks, 2, edit_sync_mode=mode, **GATHER, **more, **flags, **DROPOUT
    )
    is_late = "edit_delay_steps" in flags or flags.get("edit_strategy") == "co2"
    assert all(bool(replica.pending) == is_late for replica in manifest.replicas)
    own_wire = "top64" if flags.get("edit_strategy") == "sparse-loco" else "fp32"
    assert manifest.wire == flags.get("edit_sync_dtype", own_wire)
