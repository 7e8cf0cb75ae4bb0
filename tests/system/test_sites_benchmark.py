"""The benchmark of syncs between two sites, as a small run in a network lab."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from frame.study import read_one

from tests.harness.launch import REPOSITORY
from tests.harness.network_lab import skip_without_lab

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def test_encoded_sums_of_sites_cross_the_link_once(tmp_path: Path) -> None:
    """The bytes that leave a site are those of the plan, and half of a flat exchange for two
    replicas a site. Catches replicas that send to each one of the other site."""
    skip_without_lab()
    output = tmp_path / "sites.json"
    words = ["--repeats", "1", "--syncs", "1", "--layers", "2", "--hidden-size", "64"]
    done = subprocess.run(
        [sys.executable, REPOSITORY / "benchmarks/sites.py", "--output", output, *words],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = {run["kind"]: run for run in read_one(output)["runs"]}
    for run in runs.values():
        assert run["sent"] == pytest.approx(run["planned"], rel=0.15), run  # headers and records
    assert runs["int8 of sites"]["sent"] < 0.6 * runs["int8 flat"]["sent"]
    assert done.stdout in output.with_suffix(".md").read_text()
