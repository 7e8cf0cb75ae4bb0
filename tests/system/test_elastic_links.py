"""benchmarks/elastic_links.py: its kinds and shares, and a small run in a lab.

Would catch: a share of the ideal of another repeat, kinds that are refused at their start, and a
run whose commits are not counted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import elastic_links
import pytest
from elastic_links import Measurement
from frame.study import read_one

from tests.harness.network_lab import skip_without_lab
from tests.harness.torch_groups import HAS_GROUPS

OUTPUT = ["--output", "unused.json"]


def test_share_is_of_the_ideal_of_the_same_repeat(tmp_path: Path) -> None:
    args = elastic_links.parse(["--output", str(tmp_path / "out.json")])
    results = elastic_links.Results(args)
    speeds = ((0, 100.0, 90.0), (1, 200.0, 100.0), (2, 100.0, 70.0))
    for repeat, ideal, int8 in speeds:
        for kind, speed in (("ideal", ideal), ("int8", int8)):
            results.found.append(Measurement(kind, repeat, speed, [], 0.0))
    of_ideal = {row["kind"]: row["of_ideal"] for row in results.rows()}["int8"]
    assert (of_ideal.min, of_ideal.median, of_ideal.max) == (0.5, 0.7, 0.9)


def test_kinds_that_are_given_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*OUTPUT, "--kinds", "int8", "--earlier", "folder"]
    assert elastic_links.parse(given).kinds == ["ideal", "int8", "earlier"]
    wrong = (["--kinds", "int9"], ["--tau", "6", "--torchft", "python"])
    for words in wrong:
        with pytest.raises(SystemExit) as stop:
            elastic_links.parse([*OUTPUT, *words])
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and words[0] in line


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
def test_small_run_has_shares(tmp_path: Path) -> None:
    """With the settings that differ most, and blocking."""
    skip_without_lab()
    output = tmp_path / "links.json"
    argv = [sys.executable, elastic_links.__file__, "--quick", "--output", str(output), "--kinds",
            "int8,recommended"]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["kind"]: row for row in read_one(output)["summary"]}
    assert set(rows) == {"ideal", "int8", "recommended"}
    assert all(0 < rows[kind]["of_ideal"]["median"] < 1.2 for kind in rows)
