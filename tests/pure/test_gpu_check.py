"""benchmarks/gpu_check.py without a GPU: its cases, and its analysis of made-up data and traces.

Would catch: replicas that differ from each other or from the CPU and still pass; launches counted
twice or under the wrong mark; waiting in a collective counted as cost of a sync; a case that hangs
and uses up the time of the others.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frame.launch import RunFailedError
from gpu_parts.cases import TRACED, Case, cases_for, chosen
from gpu_parts.device import DeviceError, describe_devices, look
from gpu_parts.pretrain_measured import with_trace
from gpu_parts.report import MIN_BYTES, Analysis, draw, markdown
from gpu_parts.runs import Bench, MarkReading, Reading, backend, read_marks, read_trace
from torch.profiler import record_function

CASES = {case.name: case for case in cases_for("cuda", 4)}
NUM_SYNCS = 5
SYNCED = ["a"] * NUM_SYNCS


def reading(case: str, **changed: Any) -> Reading:
    """Return the reading of a case that passes."""
    found = Reading(
        case=case,
        losses=[7.0, 6.0, 5.0],
        iterations=[1, 2, 3],
        digests=[SYNCED, SYNCED],
        step_ms=[10.0] * 60,
        sync_steps=[20, 30, 40, 50, 60],
        exposed_ms=[5.0] * NUM_SYNCS,
        backend="nccl",
        peak_bytes=3000,
        num_parameters=100,
        marks=[],
        seconds=20.0,
    )
    return replace(found, **changed)


def analysis(*readings_: Reading, rate: float = 1e12) -> Analysis:
    """Return an analysis with CPU losses for `overlap`."""
    return Analysis(CASES, readings_, {"overlap": [[1.0, 2.0, 3.0], [7.0, 6.0, 5.0]]}, rate)


def test_cases_depend_on_number_of_gpus() -> None:
    """Several GPUs add transports and layouts; a CPU has no large model."""
    one, two, four = ([case.name for case in cases_for("cuda", count)] for count in (1, 2, 4))
    assert set(two) - set(one) == {"overlap-gloo"}
    assert set(four) - set(two) == {"overlap-pp2-tied", "overlap-tp2", "overlap-two-ranks"}
    assert four.index("overlap-pp2-tied") < four.index("large-stock")  # correctness before speed
    assert not any(case.size == "large" for case in cases_for("cpu", 4))
    with pytest.raises(ValueError, match="overlop: must be of stock, "):
        chosen(cases_for("cuda", 1), ["overlop"])


def test_number_of_syncs_includes_short_last_round() -> None:
    """Training ends with a sync, however short the last round."""
    assert [CASES[name].num_syncs for name in ("stock", "overlap", "a-edit")] == [0, 5, None]
    assert [Case("x", steps=steps).num_syncs for steps in (45, 50, 51)] == [4, 4, 5]


def test_case_flags_select_edit_and_device() -> None:
    """Stock Megatron trains without EDiT; parameters are always initialized on the CPU."""
    stock, overlap = (CASES[name].flags("cuda", "DIR") for name in ("stock", "overlap"))
    assert "--use-edit" not in stock and "--use-edit" in overlap
    for words in (stock, overlap):
        assert "--use-cpu-initialization" in words
        last = len(words) - 1 - words[::-1].index("--edit-device")
        assert words[last + 1] == "cuda"


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({}, None),
        ({"digests": [SYNCED, ["a"] * (NUM_SYNCS - 1) + ["b"]]}, "replicas differ"),
        ({"digests": [SYNCED[1:], SYNCED[1:]]}, f"{NUM_SYNCS - 1} syncs, not {NUM_SYNCS}"),
        ({"losses": [7.0, math.nan, 5.0]}, "not finite"),
        ({"losses": [7.0, 7.1, 7.2]}, "loss 7.000 -> 7.200"),
        ({"losses": [7.0, 6.2, 5.2]}, "from the CPU's, more than 0.002"),
        ({"iterations": [1, 2, 4]}, "losses inf from the CPU's"),
    ],
)
def test_each_failed_check_is_reported_in_one_line(
    changed: dict[str, Any], complaint: str | None
) -> None:
    """There is no complaint if all checks pass."""
    found = analysis(reading("overlap", **changed)).complaints()
    if complaint is None:
        assert found == []
    else:
        assert any(complaint in line for line in found), found
        assert all(line.startswith("overlap: ") for line in found)


def test_a_edit_case_needs_at_least_two_syncs() -> None:
    """The number of its syncs varies, and its losses are not compared with the CPU."""
    few, enough = (reading("a-edit", digests=[["a"] * count] * 2) for count in (1, 2))
    assert analysis(few).complaints() == ["a-edit: 1 syncs, fewer than 2"]
    assert not analysis(enough).complaints() and analysis(enough).distance(enough) is None


def test_rows_compare_time_and_memory_with_stock() -> None:
    """Time beyond the median step; bytes per parameter beyond stock Megatron of the same size."""
    slow_syncs = [110.0 if step % 10 == 1 else 10.0 for step in range(1, 61)]
    rows = analysis(
        reading("stock", digests=[[]], peak_bytes=2000),
        reading("overlap", step_ms=slow_syncs),
        reading("large-stock", digests=[[]], peak_bytes=100),
    ).rows()
    assert [row["bytes_beyond_stock"] for row in rows] == [0.0, 10.0, 0.0]
    assert rows[1]["step_ms"] == 10.0
    # Steps 22 to 60 hold three syncs: 300 of 690 ms.
    assert rows[1]["share_beyond_median_step"] == pytest.approx(300 / 690)


def test_profiled_steps_are_excluded() -> None:
    """Catches time that the profiler took, counted as time of a sync."""
    first, last = TRACED
    steps = [900.0 if first <= step <= last else 10.0 for step in range(1, 51)]
    slowed = reading(
        "large-overlap", step_ms=steps, sync_steps=[20, 30, 40, 50], digests=[["a"] * 4] * 2,
        exposed_ms=[90.0, 3.0, 80.0, 70.0],
    )  # fmt: skip
    (row,) = analysis(slowed).rows()
    assert row["share_beyond_median_step"] == 0 and row["exposed_ms"] == 3.0


def test_memory_is_compared_at_same_precision_only() -> None:
    """Memory of stock Megatron in bf16 is no baseline for fp32."""
    fp32 = analysis(reading("stock", digests=[[]]), reading("overlap-fp32")).rows()[1]
    assert fp32["bytes_per_parameter"] == 30.0 and fp32["bytes_beyond_stock"] is None


def test_sync_cost_is_in_bytes_per_element() -> None:
    """In bytes per element at copy rate: 1 ms at 1 GB/s over 100 elements is 10 000."""
    marks = [MarkReading("edit/norms", 10, 1.0, 40, 1.0, 0.5), MarkReading("edit/meeting", 1, 1.0, 0, 0.0, 0.0)]  # fmt: skip  # noqa: E501
    found = analysis(reading("large-blocking", marks=marks), rate=1e9)
    assert found.marks()[0]["bytes_per_element"] == pytest.approx(1e4)
    (cost,) = found.sync_costs()
    assert cost["launches"] == 40 and cost["launches_per_unit"] == 4
    assert cost["least_ms"] == pytest.approx(MIN_BYTES * 100 / 1e9 * 1e3)
    on_cpu = replace(marks[0], device_ms=None, transfer_ms=None)
    (cost,) = analysis(reading("large-blocking", marks=[on_cpu])).sync_costs()
    assert cost["device_ms"] is None and cost["bytes_per_element"] is None


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, correlation: int = -1) -> Any:
    """Return an event of a trace."""
    args = {"correlation": correlation} if correlation >= 0 else {}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_device_trace_is_attributed_to_innermost_mark() -> None:
    """Launches count for the innermost mark of their thread; transfers are counted separately."""
    found = read_marks([
        {"ph": "M", "name": "edit/landing"},
        event("user_annotation", "edit/landing", 0, 100),
        event("user_annotation", "edit/outer-step", 10, 20),
        event("gpu_user_annotation", "edit/landing", 500, 100),
        event("user_annotation", "train", 0, 1000),
        event("cpu_op", "aten::add_", 12, 3),
        event("cuda_runtime", "cudaLaunchKernel", 13, 1, correlation=1),
        event("cuda_runtime", "cudaMemcpyAsync", 50, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernelExC", 60, 1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 13, 1, tid=2, correlation=4),
        event("cuda_runtime", "cudaLaunchKernel", 200, 1, correlation=5),
        event("cuda_runtime", "cudaEventRecord", 61, 1, correlation=6),
        event("kernel", "add", 300, 2000, correlation=1),
        event("gpu_memcpy", "Memcpy DtoD", 400, 1000, correlation=2),
        event("kernel", "ncclDevKernel_AllReduce", 500, 7000, correlation=3),
        event("cuda_runtime", "cudaMemcpyAsync", 62, 1, correlation=7),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 500, 4000, correlation=7),
        event("kernel", "other thread", 600, 9000, correlation=4),
        event("kernel", "no mark", 600, 9000, correlation=5),
    ])  # fmt: skip
    assert found == [
        MarkReading("edit/landing", 1, 0.1, 3, 1.0, 11.0),
        MarkReading("edit/outer-step", 1, 0.02, 1, 2.0, 0.0),
    ]


def test_cpu_trace_counts_top_level_operators() -> None:
    """Operators called by other operators do not count."""
    found = read_marks([
        event("user_annotation", "edit/landing", 0, 100),
        event("cpu_op", "aten::to", 5, 20),
        event("cpu_op", "aten::copy_", 6, 10),
        event("cpu_op", "aten::mul", 30, 5),
        event("cpu_op", "aten::mul", 300, 5),
    ])  # fmt: skip
    assert found == [MarkReading("edit/landing", 1, 0.1, 2, None, None)]


def test_report_lists_cases_and_failures(tmp_path: Path) -> None:
    """The page lists failures before the cases; a picture is drawn."""
    marks = [MarkReading("edit/norms", 10, 1.0, 40, 1.0, 0.5)]
    found = analysis(
        reading("stock", digests=[[]]), reading("large-blocking", marks=marks), reading("overlap")
    )
    summary = {
        "device": "A GPU", "num_devices": 1, "copy_rate": 1e12, "rows": found.rows(),
        "sync_costs": found.sync_costs(), "marks": found.marks(),
    }  # fmt: skip
    page = markdown(summary, ["overlap: replicas differ after a sync"])
    assert "A GPU x 1" in page and "- FAILED: overlap: replicas differ" in page
    assert "| edit/norms | 10 | 40 |" in page.replace("large-blocking | ", "")
    assert "All checks passed." in markdown(summary, [])
    draw(tmp_path / "picture.png", found.rows())
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_trace_includes_marks_of_other_threads(tmp_path: Path) -> None:
    """Catches outer steps in the engine's thread that are not counted."""

    def forward() -> None:
        thread = threading.Thread(target=marked, args=("edit/outer-step",))
        thread.start()
        marked("edit/landing")
        thread.join()

    watched = with_trace(forward, tmp_path / "trace.json.gz", 2, 4)
    for _ in range(4):
        watched()
    found = {each.mark: each for each in read_trace(tmp_path / "trace.json.gz")}
    assert set(found) == {"edit/landing", "edit/outer-step"}
    assert [each.count for each in found.values()] == [2, 2]
    assert all(each.launches == 4 for each in found.values())


def marked(name: str) -> None:
    """Run one operation under a mark."""
    with record_function(name):
        torch.ones(3).neg_()  # two operators; the first calls others


def test_case_without_readings_fails_alone(tmp_path: Path) -> None:
    """Its logs are kept, and no other exception ends the remaining cases."""
    bench = Bench.__new__(Bench)
    bench._device, bench._count, bench._output = "cpu", 1, tmp_path / "check.json"
    bench._port, bench._choice = 28500, threading.Lock()
    bench._forks = SilentForks()  # type: ignore[assignment]
    with pytest.raises(RunFailedError, match="output is incomplete"):
        bench.measure(CASES["stock"], 5.0)
    assert (tmp_path / "check.stock.console0.log").read_text() == "nothing"


class SilentForks:
    """Trainings that succeed without output."""

    @contextmanager
    def training(self, name: str, folder: Path, ranks: Any, **_: Any) -> Iterator[Any]:
        """Write an empty console log and return a finished training."""
        (folder / "console0.log").write_text("nothing")
        yield SimpleNamespace(to_end=lambda *args, **kwargs: [0])


def test_find_returns_device_or_reason() -> None:
    """The device is examined in a child process; without one, torch's last error line is raised."""
    with pytest.raises(DeviceError, match="torch finds no GPU"):
        look("cuda")
    found = describe_devices("cpu")
    assert (found.name, found.count) == ("CPU", 1) and 1e8 < found.copy_rate < 1e13


def test_backend_is_read_from_console() -> None:
    """The backend is named in one console line."""
    assert backend(["x", "megatron_edit: exchanges over gloo (--edit-sync-backend auto)"]) == "gloo"
    assert backend(["x"]) is None


def test_single_replica_case_is_stock() -> None:
    """A case of one replica is stock Megatron."""
    assert Case("x", num_replicas=1).is_stock and Case("x", ranks=2).num_ranks == 4
