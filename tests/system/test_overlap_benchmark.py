"""benchmarks/overlap.py: stock Megatron with an optimizer instance on each host, beside stock.

Would catch: instances that are counted as EDiT, a run with other flags or iterations
than stock, a kind that cannot be left out, and, where a lab can be created, parameters that are
gathered across the link.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import overlap
import pytest
from frame.gpt import Link, Model, Window
from frame.study import read_one
from overlap_parts.kinds import IDEAL, OVERLAP, STOCK, STOCK_INSTANCES, Job
from overlap_parts.report import Analysis, markdown
from overlap_parts.runs import Measurement

from tests.harness.network_lab import skip_without_lab

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmarks" / "overlap.py"
OUTPUT = ["--output", "unused.json"]


def measurement(kind: str, speed: float, host_bytes: int) -> Measurement:
    """Return a run at 100 Mbit/s: 10 measured steps of 200 tokens."""
    return Measurement(
        kind, 100e6, 0, Window(10, 20, 5, 25), speed, [0.1], [host_bytes, 1], [], [0.0], [0]
    )


def test_instances_have_flags_and_steps_of_stock() -> None:
    """Only the number of instances is added: one on each host."""
    stock, instances = (Job(kind, Model(), 3, 40, 1, 3.0) for kind in (STOCK, STOCK_INSTANCES))
    for rate in (None, 1e8):
        assert instances.window(rate) == stock.window(rate)
    assert (instances.logging_host, instances.world_size) == (2, 3) and not instances.is_apart
    window = stock.window(1e8)
    more = ["--num-distributed-optimizer-instances", "3"]
    assert instances.flags(window, "logs") == stock.flags(window, "logs") + more


def test_stock_kinds_are_selected() -> None:
    """Both by default, or those of --stock, which may be none."""
    given = ["--modes", "overlap"]
    assert overlap.parse([*OUTPUT, *given]).kinds == [IDEAL, OVERLAP, STOCK, STOCK_INSTANCES]
    assert overlap.parse([*OUTPUT, *given, "--stock", STOCK]).kinds == [IDEAL, OVERLAP, STOCK]
    assert overlap.parse([*OUTPUT, *given, "--stock", ""]).kinds == [IDEAL, OVERLAP]


def test_unknown_stock_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        overlap.parse([*OUTPUT, "--stock", "stock,instances"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--stock instances: must be of stock, stock-instances" in line


def test_rows_compare_with_both_kinds_of_stock() -> None:
    """A step of 0.2 s, whose bytes need 0.4 s on the link, reaches half of the ideal at most."""
    numbers = {IDEAL: (1000, 0), OVERLAP: (800, 100), STOCK: (100, 100_000_000),
               STOCK_INSTANCES: (200, 50_000_000)}  # fmt: skip
    runs = [measurement(kind, speed, sent) for kind, (speed, sent) in numbers.items()]
    analysis = Analysis(runs, [Link(100e6, 0, 100e6)], tau=40, tokens_per_iteration=200)
    rows = {row["kind"]: row for row in analysis.rows()}
    edit, stock, instances = rows[OVERLAP], rows[STOCK], rows[STOCK_INSTANCES]
    assert (edit["of_stock"].median, edit["of_instances"].median) == (8, 4)
    assert instances["lost"] is None and edit["hidden_limit"] is None
    assert stock["step_bytes"].median == 10_000_000
    assert stock["hidden_limit"].median == pytest.approx(0.25)
    assert instances["hidden_limit"].median == pytest.approx(0.5)
    assert "| stock-instances |" in markdown(list(rows.values()))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_instances_send_each_gradient_once_per_step(tmp_path: Path) -> None:
    """In a lab of two hosts, with a tiny model: 2 (N - 1) / N of its gradients, in fp32."""
    skip_without_lab()
    output = tmp_path / "overlap.json"
    flags = ["--quick", "--links", "100e6", "--modes", "blocking", "--stock", STOCK_INSTANCES]
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--output", str(output), *flags],
        capture_output=True, text=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["kind"]: row for row in read_one(output)["summary"]}
    assert set(rows) == {IDEAL, "blocking", STOCK_INSTANCES}
    # 8192 x 128 tokens, 128 x 128 positions, two layers of 12 x 128^2 weights and 13 x 128 others,
    # and the last norm.
    model_bytes = 4 * (8192 * 128 + 128 * 128 + 2 * (12 * 128**2 + 13 * 128) + 2 * 128)
    sent = rows[STOCK_INSTANCES]["step_bytes"]["median"]
    assert sent == pytest.approx(model_bytes, rel=0.05)  # steps are counted by a poll
    assert rows["blocking"]["of_instances"]["median"] > 0
    assert json.loads(output.read_text())["study"] == "overlap"
