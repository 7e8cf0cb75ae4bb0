"""scripts/gpu_check.sh, as far as it goes without a GPU.

Would catch: a check that says nothing, or a traceback, where there is no GPU; a case that fails and
takes the others, or the JSON, with it; a small run that does not train what the committed losses of
the CPU belong to.
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
# A machine with one GPU, as far as this process can tell; torch knows better in the ranks.
FAKE = """
import sys
import gpu_check
from gpu_parts.device import Devices
gpu_check.look = lambda device: Devices("A GPU", 1, {"cuda": "13.0", "nccl": "2.27"}, 1e12)
if __name__ == "__main__":
    sys.exit(gpu_check.main(sys.argv[1:]))
"""


def run(*words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The script, with this interpreter."""
    argv = ["bash", str(SCRIPT), "--python", sys.executable, *words]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=env)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "gpu_check: --device cuda: torch finds no GPU"),
        (("--device", "cpu", "--cases", "overlop"), "gpu_check: --cases overlop: must be of stock"),
        (("--device", "cpu", "--devices", "0"), "gpu_check: --devices 0: must be at least 1"),
        (("--device", "cpu", "--repeats", "2"), "gpu_check: --repeats 2: must be 1"),
        (("--device", "cpu", "--reference", "none"), "gpu_check: --reference none: does not exist"),
        (("--device", "tpu"), "gpu_check: argument --device: invalid choice: 'tpu'"),
    ],
)
def test_wrong_inputs_are_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """One line and exit code 2, before anything is run."""
    done = run("--output", str(tmp_path / "check.json"), *words)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(said), line
    assert not (tmp_path / "check.json").exists()


@pytest.mark.timeout(300)
def test_cpu_run_matches_committed_losses(tmp_path: Path) -> None:
    """Two cases in full: their losses are the committed ones."""
    output = tmp_path / "check.json"
    done = run("--device", "cpu", "--cases", "stock,overlap", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_one(output)
    rows = {row["case"]: row for row in found["rows"]}
    assert rows["overlap"]["are_equal"] and rows["overlap"]["syncs"] == 5
    assert rows["overlap"]["backend"] == "gloo"
    assert all(row["distance"] is not None and row["distance"] < 1e-3 for row in rows.values())
    assert "All checks passed." in output.with_suffix(".md").read_text()
    assert output.with_suffix(".png").stat().st_size > 1000


@pytest.mark.timeout(300)
def test_failing_cases_are_all_reported(tmp_path: Path) -> None:
    """Ranks that cannot use the GPU say so; every case is tried, and the JSON has it all."""
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
