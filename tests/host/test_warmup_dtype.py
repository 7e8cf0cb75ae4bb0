"""Gradients that are averaged in fewer bits, in the warm-up and in the final phase, on Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_edit.constants import BF16, FP32, INT8
from tests.harness import Flags
from tests.host.layouts import LAYOUTS, PLAIN_DDP
from tests.host.runs import EditRun, cached_run, run_edit
from tests.host.spy import read_records
from tests.host.test_degenerate import losses
from tests.host.test_elastic import consumed
from tests.host.test_final_phase import LAST_LOCAL, PHASE, assert_replicas_equal
from tests.host.test_resume import DROPOUT, HOOK, facts, resume_and_compare

pytestmark = pytest.mark.timeout(300)
WARMUP: Flags = {"edit_warmup_steps": 6, "edit_warmup_dtype": INT8}
SAVED = 4
# Layouts in which all ranks of a replica that hold copies hold all of their elements.
WITHOUT_SHARDS = ("tp2-sp", "pp2", "vpp", "plain-ddp", "plain-ddp-pp2")
# Layouts with copies of parameters: on tensor-parallel ranks, on stages, on optimizer instances, on
# data-parallel ranks without a distributed optimizer; with gradients in half precision; scaled.
COPIES = {
    **{name: LAYOUTS[name] for name in ("tp2-sp", "pp2", "two-instances", "tp2-ep2", "vpp")},
    "tp2-pp2": LAYOUTS["tp2-pp2"],
    "tp2-ep2-etp2": LAYOUTS["tp2-ep2-etp2"],
    "plain-ddp": (2, PLAIN_DDP),
    "plain-ddp-pp2": (2, {**PLAIN_DDP, **LAYOUTS["pp2"].flags}),
    "grads-in-bf16": LAYOUTS["grads-in-bf16"],
    "fp16": LAYOUTS["fp16"],
    "many-buckets": LAYOUTS["many-buckets"],
    "m2": LAYOUTS["m2"],
}
CORE = ("tp2-sp", "plain-ddp-pp2")


def shown(name: str) -> object:
    """Return a layout as a parameter; most belong to the full tier."""
    return name if name in CORE else pytest.param(name, marks=pytest.mark.full)


@pytest.mark.parametrize("layout", [shown(name) for name in COPIES])
def test_replicas_and_copies_stay_equal_and_resume_is_exact(tmp_path: Path, layout: str) -> None:
    """Parameters, moments and residuals at the end of `ddp`, and after a resume. Catches copies of
    a parameter whose blocks had other scales, residuals that are not saved or are given to another
    copy, and replicas that decode different bits."""
    ranks, flags = COPIES[layout]
    manifest = resume_and_compare(
        tmp_path, SAVED, ranks, 2, has_syncs=False, train_iters=8, edit_strategy="ddp",
        edit_warmup_dtype=INT8, **DROPOUT, **flags,
    )  # fmt: skip
    assert (manifest.is_warmup, manifest.gradient_wire, manifest.form) == (True, INT8, "leader")
    own = {name.split("/")[1] for name in manifest.files if "own_" in name}
    assert own == {"own_0", "own_1"}
    assert_replicas_equal(EditRun(None, tmp_path), ranks, 2)  # type: ignore[arg-type]
    ends = facts(tmp_path, 2 * ranks)
    assert all(end["gradients"] for end in ends)
    if layout in WITHOUT_SHARDS:
        names = {name for end in ends for name in end["copies"]}
        found = {n: {end["copies"][n] for end in ends if n in end["copies"]} for n in names}
        assert found and all(len(digests) == 1 for digests in found.values())


def test_switch_finds_equal_replicas(tmp_path: Path) -> None:
    """A resume in the warm-up is exact; after it nothing has to be made equal, and the residuals
    are freed."""
    flags: Flags = {"train_iters": 10, "edit_sync_interval": 4, **WARMUP, **DROPOUT}
    resume_and_compare(tmp_path, SAVED, 1, 2, **flags)
    run = run_edit(tmp_path, 2, 2, before=HOOK, **flags)
    console = run.result.ranks[0].stdout
    assert "warm-up is over after step 6" in console and "rounded differently" not in console
    assert not any(end["gradients"] for end in facts(tmp_path, 2))


@pytest.mark.parametrize("dtype", [BF16, pytest.param(INT8, marks=pytest.mark.full)])
@pytest.mark.parametrize("is_sharded", [True, pytest.param(False, marks=pytest.mark.full)])
def test_tied_embeddings_stay_equal_in_the_warmup(
    tmp_path: Path, dtype: str, is_sharded: bool
) -> None:
    """The copies on both stages, after every step, with two replicas. Catches copies that only
    three replicas tie."""
    run_edit(
        tmp_path, 4, 2, pipeline_model_parallel_size=2, vocab_size=1021, edit_warmup_steps=5,
        use_distributed_optimizer=is_sharded, train_iters=5, edit_warmup_dtype=dtype,
        before="tests.host.spy:record_embeddings",
    )  # fmt: skip
    digests = [(tmp_path / f"embedding-{rank}").read_text().splitlines() for rank in range(4)]
    assert digests[0] == digests[1] == digests[2] == digests[3] and len(digests[0]) == 5


@pytest.mark.parametrize("dtype", [INT8, pytest.param(BF16, marks=pytest.mark.full)])
def test_losses_stay_close_to_fp32(tmp_path: Path, dtype: str) -> None:
    """With `ddp`, whose warm-up never ends. Catches a wrong scale and a missing share, and a flag
    that changes nothing."""
    flags: Flags = {"edit_strategy": "ddp", "train_iters": 12}
    before = "tests.host.spy:record"
    full = cached_run(run_edit, 2, 2, before=before, **flags).folder
    run_edit(tmp_path, 2, 2, before=before, edit_warmup_dtype=dtype, **flags)
    expected, found = losses(full, 2), losses(tmp_path, 2)
    assert found != expected and found == pytest.approx(expected, rel=5e-3)
    assert expected[-1] < expected[0] - 0.1
    assert len({record["digest"] for record in read_records(tmp_path, 2)}) == 1


def test_overflow_is_skipped_by_all_replicas(tmp_path: Path) -> None:
    """fp16: infinities in the gradients of replica 1 at step 3, after its own reduction. All skip
    that step, halve the scale, and are equal to the end. Catches an infinity that is decoded as a
    number on one replica."""
    run_edit(
        tmp_path, 2, 2, before="tests.host.spy_faults:overflow_and_record", fp16=True,
        initial_loss_scale=1024, hysteresis=1, train_iters=6, edit_warmup_steps=6,
        edit_warmup_dtype=INT8, env={"SPY_STEP": "3"},
    )  # fmt: skip
    records = read_records(tmp_path, 2)
    assert [i for i, norm in records[0]["grad_norms"].items() if norm is None] == ["3"]
    assert records[0]["grad_norms"] == records[1]["grad_norms"]
    assert records[0]["digest"] == records[1]["digest"]


@pytest.mark.parametrize("step", [10, pytest.param(LAST_LOCAL, marks=pytest.mark.full)])
def test_final_phase_has_error_feedback(tmp_path: Path, step: int) -> None:
    """After rounds in fp32, replicas are equal, and a resume in the phase is exact. Catches
    residuals of the warm-up that are used again, and ones that are not saved in the phase."""
    manifest = resume_and_compare(
        tmp_path, step, 1, 2, has_syncs=False, edit_warmup_dtype=INT8, **PHASE, **DROPOUT
    )
    assert manifest.is_final_phase and manifest.gradient_wire == INT8
    whole = EditRun(None, tmp_path)  # type: ignore[arg-type]
    assert_replicas_equal(whole, 1, 2)


def test_other_number_of_replicas_begins_without_residuals(tmp_path: Path) -> None:
    """One replica resumes the warm-up of two, says so, and consumes each sample once."""
    first, second = tmp_path / "first", tmp_path / "second"
    flags: Flags = {**WARMUP, "train_iters": 8}
    run_edit(first, 2, 2, before=HOOK, save=tmp_path / "saves", save_interval=4, exit_interval=4,
             **flags)  # fmt: skip
    run = run_edit(second, 1, 1, before=HOOK, load=tmp_path / "saves", **flags)
    line = "another number of replicas: error feedback of averaged gradients begins at zero"
    assert line in run.result.ranks[0].stdout
    assert sorted(consumed(first) + consumed(second)) == list(range(8 * 8))


@pytest.mark.full
@pytest.mark.parametrize("change", ["other-layout", "other-type"])
def test_warmup_resumes_with_other_settings(tmp_path: Path, change: str) -> None:
    """With another data-parallel size, whose shards are others, and with another data type."""
    first, second = tmp_path / "first", tmp_path / "second"
    flags: Flags = {"edit_strategy": "ddp", "edit_warmup_dtype": INT8, "train_iters": 8}
    run_edit(first, 2, 2, before=HOOK, save=tmp_path / "saves", save_interval=4, exit_interval=4,
             **flags)  # fmt: skip
    ranks = 2 if change == "other-layout" else 1
    if change == "other-type":
        flags["edit_warmup_dtype"] = FP32
    run = run_edit(second, 2 * ranks, 2, before=HOOK, load=tmp_path / "saves", **flags)
    assert "error feedback" not in run.result.ranks[0].stdout
    assert_replicas_equal(run, ranks, 2)
