"""benchmarks/codec_speed.py: its page on made-up speeds, and a small real run.

Would catch: a speed in the wrong cell, a wire type that is not measured, bytes counted once for
several calls.
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


def test_speeds_are_in_the_cells_of_their_operations() -> None:
    speeds = {
        (9, "ternary", codec_speed.ENCODE): Spread(0.1, 2.0, 9.0),
        (9, "ternary", codec_speed.FEEDBACK): Spread(0.1, 0.9, 9.0),
        (9, "int8", codec_speed.FEEDBACK): Spread(0.1, 1.1, 9.0),
        (7, "sign", codec_speed.DECODE): Spread(0.1, 1.1, 9.0),
    }
    rows = codec_speed.speed_table(speeds, 9).splitlines()[2:]
    assert rows[0] == "| ternary | 2.00 (0.10 to 9.00) | 0.90 (0.10 to 9.00) |  |  |"
    assert len(rows) == 2


def test_speed_counts_bytes_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of 1000 fp32 values that takes 1 microsecond: 4 GB/s."""
    now = [0.0]

    def call() -> None:
        now[0] += 1e-6

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert codec_speed.measure(call, 1000, 5000) == pytest.approx(4.0)
    assert now[0] == pytest.approx(6e-6)  # 5 calls, after one that is not timed


def test_quick_run_measures_all_wire_types(tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    argv = [sys.executable, "benchmarks/codec_speed.py", "--quick", "--output", str(output)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout == output.with_suffix(".md").read_text()
    found: dict[str, set[str]] = {}
    for row in read_one(output)["speeds"]:
        found.setdefault(row["what"], set()).add(row["operation"])
        assert 0 < row["speed"]["min"] <= row["speed"]["median"] <= row["speed"]["max"]
    coded = {name: found[name] for name in SYNC_DTYPES if name != FP32}
    assert all(codec_speed.FEEDBACK in operations for name, operations in coded.items()
               if name != "bf16")  # fmt: skip
    assert codec_speed.COPY in found
