"""benchmarks/codec_speed.py: its page on made-up speeds, and a small real run.

Would catch: a speed in the wrong cell, a target that looks at another operation or the fastest
repeat, a wire type that is not measured, bytes counted once for several calls.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import codec_speed
import pytest
from frame.page import Spread
from frame.study import read_one

from megatron_edit.constants import FP32, SYNC_DTYPES

ROOT = Path(__file__).resolve().parents[2]


def test_targets_compare_medians_with_residual() -> None:
    """Only of the wire types that have one."""
    speeds = [
        codec_speed.Speed(9, name, operation, Spread(0.1, median, 9.0))
        for name, operation, median in (
            ("ternary", codec_speed.ENCODE, 2.0),
            ("ternary", codec_speed.FEEDBACK, 0.9),
            ("int8", codec_speed.FEEDBACK, 1.1),
            ("sign", codec_speed.FEEDBACK, 0.5),
        )
    ]
    lines = codec_speed.check_targets(speeds)
    assert [line.rpartition(": ")[2] for line in lines] == ["MISS", "pass"]
    assert lines[0].startswith("- ternary, 9 values")
    rows = codec_speed.speed_table(speeds).splitlines()[2:]
    assert rows[0] == "| ternary | 2.00 (0.10 to 9.00) | 0.90 (0.10 to 9.00) |  |  |"
    assert len(rows) == 3


def test_speed_counts_bytes_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 1000 fp32 values that takes 1 microsecond: 4 GB/s."""
    now = [0.0]

    def call() -> None:
        now[0] += 1e-6

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    case = codec_speed.Case(1000, "int8", codec_speed.ENCODE, call)
    assert codec_speed.measure(case, 5000) == pytest.approx(4.0)
    assert now[0] == pytest.approx(6e-6)  # 5 calls, after one that is not timed


def test_quick_run_measures_all_wire_types(tmp_path: Path) -> None:
    """Exit code 1 means a missed target, which a smoke test on a busy machine may have."""
    output = tmp_path / "speed.json"
    argv = [sys.executable, "benchmarks/codec_speed.py", "--quick", "--output", str(output)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    assert done.stdout == output.with_suffix(".md").read_text()
    found: dict[str, set[str]] = {}
    for row in read_one(output)["speeds"]:
        found.setdefault(row["what"], set()).add(row["operation"])
        assert 0 < row["speed"]["min"] <= row["speed"]["median"] <= row["speed"]["max"]
    coded = {name: found[name] for name in SYNC_DTYPES if name != FP32}
    assert all(codec_speed.FEEDBACK in operations for name, operations in coded.items()
               if name != "bf16")  # fmt: skip
    assert codec_speed.COPY in found
