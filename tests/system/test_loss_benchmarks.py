"""benchmarks/final_steps.py and elastic_loss.py: differences of paired seeds, and small runs.

Would catch: a difference to another seed, ways that train alike, a run with faults
that has none, and settings that a start refuses.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import elastic_loss
import final_steps
import pytest
from frame.study import read_one

from tests.harness.torch_groups import HAS_GROUPS


def test_final_steps_are_compared_in_pairs_of_seeds() -> None:
    found = [
        final_steps.Found(way, seed, loss + seed, loss)
        for seed in (1, 2)
        for way, loss in ((final_steps.AVERAGED, 3.0), ("rounds as before", 3.5 + seed))
    ]
    base, rounds = final_steps.rows_of(found)
    assert base["difference"].max == 0
    assert (rounds["difference"].min, rounds["difference"].max) == (1.5, 2.5)


def test_faults_are_compared_in_pairs_of_seeds() -> None:
    found = [
        elastic_loss.Found(seed, has_faults, 3.0 + seed + seed * has_faults, 3.0, 10)
        for seed in (1, 2)
        for has_faults in (False, True)
    ]
    calm, faults = elastic_loss.rows_of(found)
    assert calm["difference"].max == 0
    assert (faults["difference"].min, faults["difference"].max) == (1, 2)


@pytest.mark.parametrize("module", [final_steps, elastic_loss], ids=["final-steps", "elastic-loss"])
def test_existing_runs_are_not_overwritten(
    module: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.runs").mkdir()
    with pytest.raises(SystemExit) as stop:
        module.parse(["--output", str(tmp_path / "out.json")])  # type: ignore[attr-defined]
    assert stop.value.code == 2 and "must not exist yet" in capsys.readouterr().err


def small_run(script: str, output: Path, *words: str) -> None:
    """Run a benchmark with one seed on a small corpus."""
    argv = [sys.executable, script, "--output", str(output), "--seeds", "1", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_small_final_steps(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    words = ("--iterations", "80", "--tau", "4", "--samples", "1")
    small_run(final_steps.__file__, output, *words)
    rows = read_one(output)["summary"]
    assert [row["way"] for row in rows] == [way.name for way in final_steps.WAYS]
    assert len({row["validation"]["median"] for row in rows}) > 1


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
def test_small_run_with_faults(tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    words = (
        "--replicas",
        "3",
        "--iterations",
        "400",
        "--tau",
        "4",
        "--samples",
        "1",
        "--away",
        "2",
    )
    small_run(elastic_loss.__file__, output, *words)
    calm, faults = read_one(output)["runs"]
    assert calm["faults"] == [] and [each["name"] for each in faults["faults"]] == ["b", "c", "b"]
    assert all(each["killed_after_round"] < each["counts_from_round"] for each in faults["faults"])
    assert faults["rounds"] > calm["rounds"]
