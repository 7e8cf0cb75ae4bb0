"""The final synchronous phase on real Megatron, which averages gradients at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint.manifest import read_manifest
from tests.harness import Flags
from tests.host.layouts import GATHER, LAYOUTS
from tests.host.runs import EditRun, cached_run, recommended, run_edit
from tests.host.spy import read_records
from tests.host.test_elastic import consumed
from tests.host.test_resume import DROPOUT, HOOK, facts, resume_and_compare

pytestmark = pytest.mark.timeout(300)
# Two steps of warm-up, syncs after 5 and 8; the last local step is 9, after a partial round.
LAST_LOCAL = 9
PHASE: Flags = {"train_iters": 12, "edit_final_sync_fraction": 0.25}
BLOCKING: Flags = {"edit_sync_mode": "blocking"}
DELAYED: Flags = {"edit_delay_steps": 2, "edit_fragments": 2, "edit_mix": 0.5}
SCHEDULE: Flags = {"lr_decay_style": "cosine", "lr_warmup_iters": 3}


def sync_steps(run: EditRun) -> list[int]:
    """Return the steps after which syncs began."""
    return [line["iteration"] for line in run.syncs]


def inner_state(folder: Path, rank: int) -> Any:
    """Return the digests of the inner moments of one rank at the end."""
    return facts(folder, rank + 1)[rank]["moments"]


def assert_replicas_equal(run: EditRun, ranks: int, replicas: int) -> None:
    """Check that parameters and inner moments of all replicas have the same bits at the end."""
    ends = facts(run.folder, ranks * replicas)
    for rank in range(ranks):
        found = {str((e["digest"], e["moments"])) for e in ends[rank::ranks]}
        assert len(found) == 1
    assert all("anchor" not in name for end in ends for name in end)


@pytest.mark.parametrize("warmup", [0, pytest.param(2, marks=pytest.mark.full)])
def test_phase_over_whole_training_equals_ddp(tmp_path: Path, warmup: int) -> None:
    """X = 1 equals strategy ddp bit for bit. Would catch an anchor being set, or a local step."""
    flags: Flags = {"train_iters": 4, **DROPOUT}
    expected = cached_run(run_edit, 2, 2, before=HOOK, edit_strategy="ddp", **flags)
    run = run_edit(
        tmp_path, 2, 2, before=HOOK, edit_warmup_steps=warmup, edit_final_sync_fraction=1, **flags
    )
    assert facts(tmp_path, 2) == facts(expected.folder, 2)
    assert (run.lines("loss.jsonl") and not (tmp_path / "sync.jsonl").exists()) or not run.syncs


def test_phase_ends_rounds_and_keeps_replicas_equal(tmp_path: Path) -> None:
    """The partial round syncs after step 9, and no sync follows; losses are in order, and replicas
    have the same bits. Would catch moments that are not averaged at the start of the phase."""
    run = cached_run(run_edit, 2, 2, before=HOOK, **SCHEDULE, **PHASE, **DROPOUT)
    assert sync_steps(run) == [5, 8, LAST_LOCAL]
    assert [line["iteration"] for line in run.lines("loss.jsonl")] == list(range(1, 13))
    assert_replicas_equal(run, 1, 2)
    norms = [record["grad_norms"] for record in read_records(run.folder, 2)]
    alike = [norms[0][str(i)] == norms[1][str(i)] for i in range(1, 13)]
    assert alike == [True] * 2 + [False] * 7 + [True] * 3
    assert run.result.ranks[0].stdout.count(f"final synchronous phase after step {LAST_LOCAL}") == 1


def test_fraction_zero_leaves_rounds_unchanged(tmp_path: Path) -> None:
    """X = 0 syncs the partial round at the end only, and equals a run with a phase up to the last
    full round of that run."""
    run = run_edit(tmp_path, 2, 2, before=HOOK, train_iters=12, edit_final_sync_fraction=0,
                   **SCHEDULE, **DROPOUT)  # fmt: skip
    assert sync_steps(run) == [5, 8, 11, 12]
    other = cached_run(run_edit, 2, 2, before=HOOK, **SCHEDULE, **PHASE, **DROPOUT)
    for before, after in zip(run.syncs[:2], other.syncs[:2], strict=True):
        assert before["norms"] == after["norms"]


@pytest.mark.parametrize("step", [10, pytest.param(9, marks=pytest.mark.full),
                                  pytest.param(7, marks=pytest.mark.full)])  # fmt: skip
def test_resume_around_phase_is_exact(tmp_path: Path, step: int) -> None:
    """In the phase, at its start, and before it. Would catch state of the phase that is not
    saved."""
    is_inside = step >= LAST_LOCAL
    manifest = resume_and_compare(
        tmp_path, step, 1, 2, has_syncs=not is_inside, **{**PHASE, **DROPOUT}
    )
    assert (manifest.is_final_phase, manifest.is_warmup) == (is_inside, is_inside)
    assert manifest.form == ("leader" if is_inside else "all")


@pytest.mark.parametrize(
    "layout", ["plain", *(pytest.param(x, marks=pytest.mark.full) for x in ("tp2", "m2", "ep2"))]
)
def test_recommended_settings_resume_in_the_phase(tmp_path: Path, layout: str) -> None:
    """`configs/edit_quality.args` with Adam. Would catch beta2 that stays scaled in the phase, as a
    resumed run starts with the unscaled value."""
    ranks, flags = LAYOUTS[layout]
    flags = {**PHASE, **flags, **recommended(), **DROPOUT}
    resume_and_compare(tmp_path, 10, ranks, 2, has_syncs=False, **flags)
    assert_replicas_equal(EditRun(None, tmp_path), ranks, 2)  # type: ignore[arg-type]


def test_stl_stages_cover_local_training_only(tmp_path: Path) -> None:
    """`stl` has two stages of the 12 local steps after the warm-up; the phase starts after step 14.
    Would catch stages of the complete training, for which a third round ends at step 11."""
    run = run_edit(tmp_path, 2, 2, train_iters=16, edit_interval="stl", edit_stl_stages=2,
                   edit_final_sync_fraction=0.125)  # fmt: skip
    assert sync_steps(run) == [5, 8, 14]


@pytest.mark.full
def test_adacomm_resume_keeps_first_loss(tmp_path: Path) -> None:
    """Would catch a first loss, which `adacomm` needs, that is not saved."""
    manifest = resume_and_compare(tmp_path, 7, 1, 2, edit_interval="adacomm", **DROPOUT)
    assert manifest.first_loss is not None


def test_replica_count_can_change_in_phase(tmp_path: Path) -> None:
    """Replicas are equal in the phase: 1 resumes from 2, and each sample is consumed once."""
    first, second = tmp_path / "first", tmp_path / "second"
    run_edit(first, 2, 2, before=HOOK, save=tmp_path / "saves", save_interval=10,
             exit_interval=10, **PHASE)  # fmt: skip
    run_edit(second, 1, 1, before=HOOK, load=tmp_path / "saves", **PHASE)
    assert sorted(consumed(first) + consumed(second)) == list(range(12 * 8))
    assert read_manifest(tmp_path / "saves" / "iter_0000010").is_final_phase


@pytest.mark.full
@pytest.mark.parametrize("strategy", [{}, DELAYED], ids=["edit", "delayed"])
def test_phase_overlap_equals_blocking(tmp_path: Path, strategy: Flags) -> None:
    """All pending syncs land at the start of the phase, in both modes with the same bits."""
    flags: Flags = {**PHASE, **GATHER, **SCHEDULE, **strategy}
    overlapped = cached_run(run_edit, 2, 2, before=HOOK, **flags)
    run_edit(tmp_path, 2, 2, before=HOOK, **flags, **BLOCKING)
    assert facts(tmp_path, 2) == facts(overlapped.folder, 2)
    assert_replicas_equal(overlapped, 1, 2)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2", "m2", "pp2", "ep2"])
def test_phase_on_other_layouts(tmp_path: Path, layout: str) -> None:
    """With shards, stages and experts, replicas are equal, and a resume in the phase is exact."""
    ranks, flags = LAYOUTS[layout]
    resume_and_compare(tmp_path, 10, ranks, 2, has_syncs=False, **{**PHASE, **flags})
    assert_replicas_equal(EditRun(None, tmp_path), ranks, 2)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["co2", "streaming-diloco", "slowmo", "diloco", "local-sgd"])
def test_phase_with_other_strategies(tmp_path: Path, strategy: str) -> None:
    """Pending syncs land before the phase. Would catch a result that lands within the phase."""
    more: Flags = {}
    if strategy == "streaming-diloco":
        more = {"edit_delay_steps": 2, "edit_fragments": 2}
    run = run_edit(tmp_path, 2, 2, before=HOOK, edit_strategy=strategy, edit_warmup_steps=2,
                   **PHASE, **more)  # fmt: skip
    assert_replicas_equal(run, 1, 2)
    assert sync_steps(run)[-1] == LAST_LOCAL


@pytest.mark.full
def test_fraction_applies_to_train_samples(tmp_path: Path) -> None:
    """With --train-samples the fraction is of samples: 12 batches of 8, of which 9 are local."""
    run = run_edit(tmp_path, 2, 2, before=HOOK, train_iters=None, train_samples=96,
                   lr_decay_samples=96, edit_final_sync_fraction=0.25)  # fmt: skip
    assert sync_steps(run) == [5, 8, LAST_LOCAL]
    assert_replicas_equal(run, 1, 2)
