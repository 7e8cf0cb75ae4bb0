"""Muon as inner optimizer: Megatron's plain form, and its layer-wise distributed optimizer."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import Flags, train
from tests.host.layouts import GATHER, LAYOUTS, PLAIN_DDP
from tests.host.runs import (
    PENALTY_OFF,
    EditRun,
    cached_run,
    edit_flags,
    recommended,
    run_edit,
    run_stock,
)
from tests.host.spy import read_records
from tests.host.test_degenerate import losses
from tests.host.test_resume import HOOK, RESUME_STEPS, facts, resume_and_compare

pytest.importorskip("emerging_optimizers", reason="needs the extra muon")

RECORD = "tests.host.spy:record"
DAMAGE = "tests.host.spy:damage_before_sync"
MUON: Flags = {"optimizer": "muon"}
PLAIN: Flags = MUON | PLAIN_DDP
LAYER_WISE: Flags = MUON | {"bf16": True}
FULL = pytest.mark.full
FORMS = pytest.mark.parametrize(
    ("form", "ranks"),
    [
        pytest.param(PLAIN, 1, id="plain"),
        pytest.param(LAYER_WISE, 2, id="layer-wise", marks=FULL),
    ],
)


def plain_bf16_run() -> EditRun:
    """Return a cached run of two replicas of two ranks that hold all parameters."""
    return cached_run(run_edit, 4, 2, before=RECORD, bf16=True, **PLAIN)


def test_layer_wise_equals_unsharded(tmp_path: Path) -> None:
    """Each rank steps and syncs its own matrices, with the results of ranks that step all of them.
    Would catch a parameter that is synced twice or never, or gathered before its sync, and a norm
    that counts it once per rank."""
    plain = plain_bf16_run()
    shared = run_edit(tmp_path, 4, 2, before=RECORD, **LAYER_WISE)
    for run in (plain, shared):
        digests = run.digests(0)
        assert digests == run.digests(1) and len(set(digests)) == 3 and None not in digests
        finals = [record["digest"] for record in read_records(run.folder, 4)]
        assert len(set(finals)) == 1  # the last sync ends the training
    for number, (ours, theirs) in enumerate(zip(shared.syncs, plain.syncs, strict=True)):
        # What bf16 rounds in another order grows from sync to sync, by the processor.
        close = 1e-4 if number == 0 else 1e-3
        for norms, expected in zip(ours["norms"], theirs["norms"], strict=True):
            assert norms == pytest.approx(expected, rel=close)
    assert losses(tmp_path, 4) == pytest.approx(losses(plain.folder, 4), rel=1e-4)
    assert losses(tmp_path, 4)[-1] < losses(tmp_path, 4)[0] - 0.5


def test_outer_presets_depend_on_inner_optimizer() -> None:
    """Would catch the outer momentum for Adam, with which Muon loses its advantage."""
    settings = json.loads((plain_bf16_run().folder / "run.json").read_text())["config"]
    assert (settings["outer_lr"], settings["outer_momentum"]) == (0.9, 0.6)


@pytest.mark.parametrize(
    "form",
    [PLAIN, pytest.param(LAYER_WISE, marks=FULL), pytest.param(LAYER_WISE | GATHER, marks=FULL)],
    ids=["plain", "layer-wise", "layer-wise-overlap"],
)
def test_one_replica_with_identity_outer_step_is_stock_muon(tmp_path: Path, form: Flags) -> None:
    """N = 1, nu = 1, mu_o = 0, no penalty. Would catch a sync that changes Muon's state."""
    run_stock(tmp_path / "stock", 2, **form)
    run_edit(
        tmp_path / "edit", 2, 1, before=RECORD, edit_outer_lr=1.0, edit_outer_momentum=0.0,
        **form, **PENALTY_OFF,
    )  # fmt: skip
    expected = losses(tmp_path / "stock", 2)
    tolerance = 2e-3 if "bf16" in form else 2e-5
    assert losses(tmp_path / "edit", 2) == pytest.approx(expected, rel=tolerance)


@FORMS
def test_resume_equals_the_uninterrupted_run(tmp_path: Path, form: Flags, ranks: int) -> None:
    """Within a round. Would catch momentum of Muon that is not saved, or loaded by another rank or
    replica."""
    resume_and_compare(tmp_path, RESUME_STEPS["in-mid-round"], ranks, 2, **form)


@FULL
@pytest.mark.parametrize(
    "form", [LAYER_WISE, PLAIN | {"bf16": True}], ids=["to-layer-wise", "to-plain"]
)
def test_checkpoint_loads_with_other_ranks_and_form(tmp_path: Path, form: Flags) -> None:
    """Saved with two ranks per replica and loaded with one: the momentum of matrices of other ranks
    is loaded, too. The reference uses the plain form only."""
    saves = [tmp_path / "from-plain", tmp_path / "from-layer-wise"]
    series = []
    for folder, saved in zip(saves, (PLAIN | {"bf16": True}, LAYER_WISE), strict=True):
        run_edit(
            tmp_path / f"{folder.name}-save", 4, 2, save=folder, save_interval=5, train_iters=8,
            **saved,
        )  # fmt: skip
        into = form if saved is LAYER_WISE else PLAIN | {"bf16": True}
        run = run_edit(
            tmp_path / f"{folder.name}-load", 2, 2, load=folder, ckpt_step=5, train_iters=8, **into
        )
        series.append([line["loss"] for line in run.lines("loss.jsonl") if line["iteration"] > 5])
    assert len(series[0]) == 3
    assert series[0] == pytest.approx(series[1], rel=1e-5)


@FORMS
def test_nonfinite_momentum_is_zeroed(tmp_path: Path, form: Flags, ranks: int) -> None:
    """Would catch momentum that stays NaN after the replica has taken the others' parameters."""
    run = run_edit(
        tmp_path, 2 * ranks, 2, before=DAMAGE, train_iters=12,
        env={"SPY_DAMAGE": json.dumps([[2, [1], "layer.1", "nan"]])},
        no_check_for_nan_in_loss_and_grad=True, **form,
    )  # fmt: skip
    out = [[units[1] for units in line["anomalous"]] for line in run.syncs]
    assert any(out[1]) and not any(any(units) for i, units in enumerate(out) if i != 1)
    assert run.digests(0) == run.digests(1)


@FULL
@pytest.mark.parametrize(
    "flags",
    [
        {"edit_strategy": "a-edit", "edit_sync_interval": 128, "edit_sync_seconds": 0.05,
         "edit_min_round_steps": 2},
        {"edit_strategy": "streaming-diloco", "edit_delay_steps": 1, "edit_fragments": 2},
        {"edit_strategy": "co2"},
        {"edit_strategy": "slowmo"},
        {"edit_delay_steps": 2, "edit_sync_dtype": "int8", "edit_offload": True},
    ],
    ids=["a-edit", "streaming-diloco", "co2", "slowmo", "delay-int8-offload"],
)  # fmt: skip
@pytest.mark.parametrize("form", [PLAIN, LAYER_WISE], ids=["plain", "layer-wise"])
def test_replicas_agree_with_every_strategy(tmp_path: Path, form: Flags, flags: Flags) -> None:
    """Would catch state of a delayed or compressed sync that a rank without parameters lacks."""
    run = run_edit(tmp_path, 4, 2, train_iters=17, **form, **flags)
    assert run.digests(0) == run.digests(1) and len(run.syncs) >= 3
    series = [line["loss"] for line in run.lines("loss.jsonl")]
    assert series[-1] < series[0] - 0.3


@FULL
@pytest.mark.parametrize(
    ("layout", "form"),
    [("tp2", PLAIN), ("tp2", LAYER_WISE), ("pp2", LAYER_WISE), ("ep2", PLAIN), ("ep2", LAYER_WISE)],
    ids=["tp2-plain", "tp2-layer-wise", "pp2-layer-wise", "ep2-plain", "ep2-layer-wise"],
)
def test_replicas_agree_on_layouts(tmp_path: Path, layout: str, form: Flags) -> None:
    """Would catch copies of a parameter inside a replica that differ, or are counted twice."""
    ranks, flags = LAYOUTS[layout]
    flags = {k: v for k, v in flags.items() if k not in ("overlap_param_gather",)}
    run = run_edit(tmp_path, 2 * ranks, 2, before=RECORD, **{**flags, **form})
    assert run.digests(0) == run.digests(1) and len(set(run.digests(0))) == 3
    finals = [record["digest"] for record in read_records(tmp_path, 2 * ranks)]
    assert finals[:ranks] == finals[ranks:]


def test_layer_wise_in_fp32_is_refused() -> None:
    """Exit code 2 and one line at the start; Megatron itself would fail in the first step."""
    done = train(edit_flags(2, **MUON), 2, before="tests.host.spy:shorten_grace", check=False)
    assert [rank.returncode for rank in done.ranks] == [2, 2]
    lines = [x for rank in done.ranks for x in rank.stderr.splitlines() if "megatron_edit: " in x]
    assert len(lines) == 1 and "trains in bf16 only" in lines[0]


@FORMS
def test_recommended_settings_average_momentum(tmp_path: Path, form: Flags, ranks: int) -> None:
    """At the end of the last round and after a resume in the final phase, every replica has the
    same momentum. Would catch momentum of matrices that is not averaged as a moment."""
    resume_and_compare(tmp_path, 10, ranks, 2, has_syncs=False, **recommended(), **form)
    ends = facts(tmp_path, 2 * ranks)
    assert [end["moments"] for end in ends[:ranks]] == [end["moments"] for end in ends[ranks:]]
    flags = recommended() | {"edit_final_sync_fraction": 0}
    runs = [
        run_edit(tmp_path / name, 2 * ranks, 2, before=HOOK, train_iters=8, **flags, **form)
        for name, flags in (("averaged", flags), ("own", flags | {"edit_average_moments": "none"}))
    ]
    ends, own = (facts(run.folder, 2 * ranks) for run in runs)
    assert [end["moments"] for end in ends[:ranks]] == [end["moments"] for end in ends[ranks:]]
    assert own[0]["moments"] != own[ranks]["moments"]


def test_emerging_optimizers_keeps_megatron_logging() -> None:
    """Importing the package must not hide Megatron's lines of level INFO, such as timers."""
    program = (
        "import logging, torch\n"
        "from megatron_edit.config import EditConfig\n"
        "from megatron_edit.host.attach import Attachment\n"
        "with Attachment(EditConfig(), torch.device('cpu')):\n"
        "    import megatron.training.training\n"
        "root = logging.getLogger()\n"
        "print(root.level, [type(handler).__name__ for handler in root.handlers])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == f"{logging.INFO} ['CustomHandler']"
