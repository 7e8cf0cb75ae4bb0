"""scripts/gpu_check.sh on a machine without a GPU.

Would catch: no message, or a traceback, without a GPU; a failing case that prevents the others or
the JSON; a small run that differs from the one with the committed CPU losses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from frame.study import read_one

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
# Makes this process believe in a GPU, which torch does not find in the ranks.
FAKE = """
import sys
import gpu_check
from gpu_parts.device import Devices
gpu_check.look = lambda device: Devices("A GPU", 1, {"cuda": "13.0", "nccl": "2.27"})
if __name__ == "__main__":
    sys.exit(gpu_check.main(sys.argv[1:]))
"""


def run(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the script with this interpreter."""
    argv = ["bash", str(SCRIPT), "--python", sys.executable, *words]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=env)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "gpu_check: --device cuda: torch finds no GPU"),
        (
            ("--device", "cpu", "--cases", "overlop"),
            "gpu_check: --cases overlop: must be of group-calls",
        ),
        (("--device", "cpu", "--devices", "0"), "gpu_check: --devices 0: must be at least 1"),
        (("--device", "cpu", "--jobs", "0"), "gpu_check: --jobs 0: must be at least 1"),
        (("--device", "cpu", "--repeats", "2"), "gpu_check: --repeats 2: must be 1"),
        (("--device", "cpu", "--reference", "none"), "gpu_check: --reference none: does not exist"),
        (("--device", "cpu", "--nccl", "none"), "gpu_check: --nccl none: no such file"),
        (("--device", "tpu"), "gpu_check: argument --device: invalid choice: 'tpu'"),
    ],
)
def test_wrong_inputs_are_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    """One line and exit code 2, before any run."""
    done = run("--output", str(tmp_path / "check.json"), *words)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(message), line
    assert not (tmp_path / "check.json").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", ["1", "8"])
def test_cases_are_listed_without_a_gpu(tmp_path: Path, count: str) -> None:
    """In their order, with what each needs; nothing is written."""
    done = run("--list", "--devices", count, "--output", str(tmp_path / "check.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("group-calls") < done.stdout.index("large-overlap")
    assert ("| NCCL 2.30 |" in done.stdout) == (count == "1")
    assert ("| vpp | small | 2 x 2 | 30 |" in done.stdout) == (count == "8")
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(300)
def test_cases_without_time_are_named(tmp_path: Path) -> None:
    """They are no failure. Catches a run that is cut off by the machine's end instead."""
    output = tmp_path / "check.json"
    done = run("--device", "cpu", "--budget", "1", "--cases", "group-calls,stock", "--output",
               str(output))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_one(output)
    assert [each["case"] for each in found["left_out"]] == ["group-calls", "stock"]
    assert found["failures"] == [] and "more time (--budget)" in done.stdout


@pytest.mark.timeout(300)
def test_harmed_and_elastic_runs_end_as_they_should(tmp_path: Path) -> None:
    """A replica stopped in an exchange, one killed in it, and a hub's rounds, on the CPU; with the
    calls of `Group`."""
    output = tmp_path / "check.json"
    cases = "group-calls,overlap,stopped,killed,elastic"
    done = run("--device", "cpu", "--devices", "2", "--cases", cases, "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_one(output)
    assert [each["case"] for each in found["outcomes"]] == ["group-calls", "killed", "elastic"]
    assert [row["case"] for row in found["rows"]] == ["overlap", "stopped"]
    assert found["left_out"] == [] and found["are_forked"]


@pytest.mark.timeout(300)
def test_cpu_run_matches_committed_losses(tmp_path: Path) -> None:
    """Two complete cases on the CPU have the committed losses."""
    output = tmp_path / "check.json"
    done = run("--device", "cpu", "--cases", "stock,overlap", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_one(output)
    rows = {row["case"]: row for row in found["rows"]}
    assert rows["overlap"]["are_equal"] and rows["overlap"]["syncs"] == 5
    assert rows["overlap"]["backend"] == "gloo"
    assert all(row["distance"] is not None and row["distance"] < 1e-3 for row in rows.values())
    assert "All checks passed." in output.with_suffix(".md").read_text()


@pytest.mark.timeout(300)
def test_failing_cases_are_all_reported(tmp_path: Path) -> None:
    """Ranks report that they cannot use the GPU; every case is tried and recorded in the JSON."""
    script, output = tmp_path / "fake.py", tmp_path / "check.json"
    script.write_text(FAKE)
    argv = [sys.executable, str(script), "--cases", "stock,overlap", "--output", str(output)]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=240, cwd=ROOT, env=paths | {"HOME": "/tmp"}
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = read_one(output)
    assert found["device"] == "A GPU" and found["rows"] == []
    assert [line.partition(":")[0] for line in found["failures"]] == ["stock", "overlap"]
    assert "--edit-device cuda" in done.stderr
    page = output.with_suffix(".md").read_text()
    assert "A GPU x 1" in page and page.count("FAILED") == 2
