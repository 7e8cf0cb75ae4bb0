"""The doctor with several ranks: links, clocks, the shared folder. (Rates: the network lab.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.doctor_scenarios import AHEAD_SECONDS
from tests.harness import run_ranks

SCENARIOS = "tests.distributed.doctor_scenarios:"


def examine(world_size: int, *words: str, target: str = "doctor") -> tuple[int, dict[str, Any]]:
    """Exit code and JSON report of the first rank; the others must print nothing."""
    args: tuple[Any, ...] = ("--json", *words)
    if target != "doctor":
        args = ([*args],)
    first, *others = run_ranks(SCENARIOS + target, world_size, args, timeout=60)
    assert [(x.stdout, x.stderr, x.returncode) for x in others] == [("", "", 0)] * len(others)
    assert first.stdout, first.stderr
    return first.returncode, json.loads(first.stdout)


def levels(report: dict[str, Any]) -> dict[str, str]:
    """The level of each finding by name."""
    return {finding["name"]: finding["level"] for finding in report["findings"]}


def test_doctor_measures_two_replicas_of_two_ranks(tmp_path: Path) -> None:
    """Would catch: a rank that waits in a measurement of others, a file that is not removed."""
    words = ("--edit-num-replicas", "2", "--shared-dir", str(tmp_path))
    code, report = examine(4, *words)
    (link,) = report["links"]
    assert (link["source"], link["target"]) == (0, 1)
    assert 0 < link["round_trip_seconds"] < 1
    assert min(link["forward_bytes_per_second"], link["backward_bytes_per_second"]) > 1e6
    assert abs(link["clock_offset_seconds"]) <= link["clock_error_seconds"] + 1e-3
    assert report["all_reduce"]["bytes_per_second"] > 1e6
    assert [sight["error"] for sight in report["shared_dir"]] == [None] * 4
    assert list(tmp_path.iterdir()) == []
    assert code == 0 and "bad" not in levels(report).values(), levels(report)


def test_doctor_takes_every_rank_for_a_replica_by_default() -> None:
    """Would catch: a link that is not measured."""
    code, report = examine(3)
    assert [(x["source"], x["target"]) for x in report["links"]] == [(0, 1), (1, 2), (2, 0)]
    assert code == 0 and "shared_dir" not in report


def test_doctor_finds_clock_skew_and_unshared_folder(tmp_path: Path) -> None:
    """A clock that is ahead, measured from both sides; a rank that does not see the folder."""
    code, report = examine(4, "--shared-dir", str(tmp_path), target="with_faults")
    skew = {(x["source"], x["target"]): x["clock_offset_seconds"] for x in report["links"]}
    assert skew[0, 1] == pytest.approx(AHEAD_SECONDS, abs=0.2)
    assert skew[1, 2] == pytest.approx(-AHEAD_SECONDS, abs=0.2)
    assert skew[2, 3] == pytest.approx(0, abs=0.2)
    assert levels(report)["clock of replica 1 against 0"] == "hint"
    assert report["shared_dir"][3]["error"].startswith("not seen")
    assert levels(report)[f"shared folder {tmp_path}"] == "bad" and code == 1


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_doctor_reports_missing_interface(ranks: list[int]) -> None:
    """Would catch: ranks that fail or hang before the first has reported the cause; a cause on
    another machine than the first rank's that is not reported."""
    args = (["--json"], "ib7", ranks)
    first, other = run_ranks(SCENARIOS + "with_interface", 2, args, timeout=60)
    assert (first.returncode, first.stderr) == (1, "")
    assert (other.returncode, other.stdout, other.stderr) == (0, "", "")
    report = json.loads(first.stdout)
    bad = [x for x in report["findings"] if x["level"] == "bad"]
    lines = [x["value"] for x in bad if x["name"] == "GLOO_SOCKET_IFNAME"]
    assert len(lines) == len(ranks) and "links" not in report
    assert all("no ib7 on " in line and "nothing is measured" in line for line in lines)


def test_doctor_prints_the_table_if_ranks_cannot_connect() -> None:
    """Would catch: a table that is not printed because the last lines cannot be measured."""
    args = (["--edit-num-replicas", "3"], 2)
    first, other, _ = run_ranks(SCENARIOS + "with_exited_rank", 3, args, timeout=60)
    assert first.returncode == 1 and "megatron-edit doctor:" not in first.stderr, first.stderr
    assert "torch " in first.stdout and "interfaces" in first.stdout
    assert "bad   between the ranks" in first.stdout and "open all ports" in first.stdout
    assert (other.returncode, other.stdout) == (4, "")
    assert "megatron-edit doctor: " in other.stderr  # after what torch says


def test_doctor_with_a_single_replica(tmp_path: Path) -> None:
    """Would catch: a division by the zero bytes that one replica sends."""
    code, report = examine(2, "--edit-num-replicas", "1", "--shared-dir", str(tmp_path))
    assert code == 0 and "links" not in report
    assert [sight["error"] for sight in report["shared_dir"]] == [None] * 2


def test_doctor_reports_invalid_input_once() -> None:
    results = run_ranks(SCENARIOS + "doctor", 3, ("--edit-num-replicas", "2"), timeout=60)
    assert [x.returncode for x in results] == [2] * 3
    assert "must divide the 3 ranks" in results[0].stderr
    assert [x.stderr for x in results[1:]] == ["", ""]
