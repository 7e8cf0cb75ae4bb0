"""Averaging of Adam's moments and scaling of beta2 on real Megatron."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.event_runs import entries
from tests.harness import Flags, train
from tests.host.layouts import GATHER, LAYOUTS, PLAIN_DDP
from tests.host.runs import EditRun, cached_run, run_edit
from tests.host.test_old_checkpoint import FIXTURE
from tests.host.test_resume import HOOK, facts, resume_and_compare

BOTH: Flags = {"edit_average_moments": "both"}
STEPS: Flags = {"train_iters": 8}  # two of warm-up, and two rounds of three


def inner_state(run: EditRun, world: int) -> list[list[str]]:
    """Return the digests of the inner optimizers' state at the end, by rank."""
    states = (json.loads((run.folder / f"outer-{rank}.json").read_text()) for rank in range(world))
    return [state["moments"] for state in states]


def trained(world: int, replicas: int, **flags: Any) -> EditRun:
    """Return a cached run that other tests of this file may compare with."""
    return cached_run(run_edit, world, replicas, before=HOOK, **(STEPS | flags))


def test_moments_are_equal_after_a_sync(tmp_path: Path) -> None:
    """They have the same bits on all replicas; without the flag they differ. Their bytes are
    counted. An `--edit-average-moments-every` beyond the last sync changes nothing."""
    plain, both = trained(2, 2), trained(2, 2, **BOTH)
    first, second = inner_state(plain, 2)
    assert first != second
    first, second = inner_state(both, 2)
    assert first == second
    assert both.digests(0) == both.digests(1) != plain.digests(0)
    sent, more = (run.syncs[0]["wire_bytes"] for run in (plain, both))
    assert 1.45 < more / sent < 1.6  # two bytes for the moments in addition to four
    never = run_edit(tmp_path, 2, 2, before=HOOK, edit_average_moments_every=9, **(STEPS | BOTH))
    assert facts(never.folder, 2) == facts(plain.folder, 2)
    assert [line["wire_bytes"] for line in never.syncs] == [
        line["wire_bytes"] for line in plain.syncs
    ]


def test_moments_overlap_equals_blocking(tmp_path: Path) -> None:
    """Also with offload: moments land before the next step in both modes."""
    blocking = run_edit(tmp_path / "a", 2, 2, before=HOOK, edit_sync_mode="blocking",
                        **(STEPS | BOTH | GATHER))  # fmt: skip
    overlap = run_edit(tmp_path / "b", 2, 2, before=HOOK, edit_sync_mode="overlap",
                       edit_offload=True, **(STEPS | BOTH | GATHER))  # fmt: skip
    assert facts(blocking.folder, 2) == facts(overlap.folder, 2)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2", "ep2", "m2", "pp2", "bf16", "fp16", "two-instances"])
def test_moments_are_equal_on_every_layout(tmp_path: Path, layout: str) -> None:
    """Rank k of a replica holds the same moments as rank k of the others."""
    ranks, flags = LAYOUTS[layout]
    run = run_edit(tmp_path, 2 * ranks, 2, before=HOOK, **(STEPS | BOTH | flags))
    states = inner_state(run, 2 * ranks)
    assert states[:ranks] == states[ranks:]


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.full)])
@pytest.mark.parametrize("final", [0.0, pytest.param(0.25, marks=pytest.mark.full)])
def test_copies_of_a_parameter_keep_equal_moments(
    tmp_path: Path, layout: str, final: float
) -> None:
    """On TP ranks, and for the tied embedding on two stages, where the 8-bit blocks contain
    different neighbours. Would catch copies that differ after a sync."""
    ranks, flags = LAYOUTS[layout]
    run_edit(tmp_path, 3 * ranks, 3, before=HOOK, global_batch_size=12,
             edit_final_sync_fraction=final, **(STEPS | BOTH | flags))  # fmt: skip
    ends = facts(tmp_path, ranks)
    shared = ends[0]["copies"].keys() & ends[1]["copies"].keys()
    assert shared
    for name in shared:
        assert ends[0]["copies"][name] == ends[1]["copies"][name], name


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["local-sgd", "slowmo", "diloco", "co2", "a-edit"])
def test_moments_are_equal_with_every_strategy(tmp_path: Path, strategy: str) -> None:
    """With each strategy the last sync lands at the end of training."""
    flags: Flags = {"edit_strategy": strategy}
    if strategy == "a-edit":
        flags |= {"edit_sync_interval": None, "edit_sync_seconds": 0.1, "edit_min_round_steps": 0}
    run = run_edit(tmp_path, 2, 2, before=HOOK, **(STEPS | BOTH | flags))
    first, second = inner_state(run, 2)
    assert strategy == "a-edit" or first == second  # Adam's step count differs with A-EDiT
    assert run.digests(0) == run.digests(1)


@pytest.mark.full
def test_old_checkpoint_resumes_with_averaged_moments(tmp_path: Path) -> None:
    """The pending sync of the checkpoint has no moments; later syncs have."""
    with tarfile.open(FIXTURE / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    flags = json.loads((FIXTURE / "flags.json").read_text())
    more = ["--load", str(tmp_path / "checkpoint"), "--edit-log-dir", str(tmp_path / "events"),
            "--edit-average-moments", "both", "--edit-scale-beta2"]  # fmt: skip
    done = train([*flags, *more], 2)
    assert "beta2 of the inner optimizer, to the power of 1/2" in done.ranks[0].stdout
    then = entries(FIXTURE / "events" / "sync.jsonl")
    sent = [line["wire_bytes"] for line in entries(tmp_path / "events" / "sync.jsonl")]
    assert len(sent) == len(then)
    # With int8, each of two moments takes about as many bytes; a loss would add only 8.
    assert sent[-1] > 2 * then[-1]["wire_bytes"]


@pytest.mark.full
@pytest.mark.parametrize("bf16", [False, True])
def test_moments_are_equal_with_plain_ddp(tmp_path: Path, bf16: bool) -> None:
    """Without the distributed optimizer every rank holds all moments."""
    run = run_edit(tmp_path, 4, 2, before=HOOK, bf16=bf16, **(STEPS | BOTH | PLAIN_DDP))
    assert len({json.dumps(state) for state in inner_state(run, 4)}) == 1


@pytest.mark.parametrize(
    "flags",
    [
        {"edit_delay_steps": 2, "edit_mix": 0.5},
        *(
            pytest.param(flags, marks=pytest.mark.full)
            for flags in (
                {},
                {"edit_strategy": "co2"},
                {"edit_strategy": "streaming-diloco", "edit_delay_steps": 2, "edit_fragments": 2},
                {"edit_average_moments_every": 2, "edit_sync_dtype": "int8"},
            )
        ),
    ],
    ids=lambda flags: "-".join(str(value) for value in flags.values()) or "at-once",
)
def test_resume_with_moments(tmp_path: Path, flags: Flags) -> None:
    """Within a round, with pending moments where results land late. Would catch means that are not
    saved."""
    manifest = resume_and_compare(tmp_path, 6, 1, 2, edit_scale_beta2=True, **(BOTH | flags))
    is_late = any(entry.pending for entry in manifest.replicas)
    assert is_late == ("edit_delay_steps" in flags or flags.get("edit_strategy") == "co2")


def test_beta2_is_scaled_once_at_switch(tmp_path: Path) -> None:
    """The change is logged once, and losses differ only after the switch. The scaled value is not
    in the checkpoint: a resume scales it once (see `resume_and_compare` above)."""
    run = trained(2, 2, edit_scale_beta2=True, adam_beta2=0.95)
    message = re.findall(r"beta2 of the inner optimizer.*", run.result.ranks[0].stdout)
    assert message == ["beta2 of the inner optimizer, to the power of 1/2: 0.95 -> 0.974679"]
    plain = trained(2, 2, adam_beta2=0.95)
    whole, scaled = (json.loads((r.folder / "rank-0.json").read_text()) for r in (plain, run))
    same = {step: loss for step, loss in whole["losses"].items() if int(step) <= 3}
    assert {step: scaled["losses"][step] for step in same} == same  # step 3 is the first to differ
    assert scaled["losses"]["4"] != whole["losses"]["4"]


@pytest.mark.parametrize("flag", [BOTH, {"edit_scale_beta2": True}])
def test_moment_flags_are_refused_with_sgd(tmp_path: Path, flag: Flags) -> None:
    """SGD has no moments: the run is refused with one line before training."""
    run = run_edit(tmp_path, 2, 2, check=False, optimizer="sgd", **flag)
    for rank in run.result.ranks:
        assert rank.returncode == 2
    assert "--optimizer sgd has no such moments" in run.result.ranks[0].stderr
