"""benchmarks/gpu_check.py without a GPU: its cases, its sums on made-up numbers and traces.

Would catch: replicas that differ, or train something else than the CPU does, and pass; launches
that are counted twice, or under the wrong mark; a collective's waiting that counts as the cost of a
sync; a case that hangs and takes the time of the others.
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
from gpu_parts.device import DeviceError, find, look
from gpu_parts.pretrain_measured import traced
from gpu_parts.report import LEAST_BYTES, Analysis, draw, markdown
from gpu_parts.runs import Bench, MarkReading, Reading, backend, read_trace, readings
from torch.profiler import record_function

CASES = {case.name: case for case in cases_for("cuda", 4)}
NUM_SYNCS = 5
SYNCED = ["a"] * NUM_SYNCS


def reading(case: str, **changed: Any) -> Reading:
    """Of a case that passes."""
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
    """With losses of the CPU for `overlap`."""
    return Analysis(CASES, readings_, {"overlap": [[1.0, 2.0, 3.0], [7.0, 6.0, 5.0]]}, rate)


def test_cases_of_machines() -> None:
    """One GPU measures; several add transports and layouts; a CPU has no large model."""
    one, two, four = ([case.name for case in cases_for("cuda", count)] for count in (1, 2, 4))
    assert set(two) - set(one) == {"overlap-gloo"}
    assert set(four) - set(two) == {"overlap-pp2-tied", "overlap-tp2", "overlap-two-ranks"}
    assert four.index("overlap-pp2-tied") < four.index("large-stock")  # what is right comes first
    assert not any(case.size == "large" for case in cases_for("cpu", 4))
    with pytest.raises(ValueError, match="overlop: must be of stock, "):
        chosen(cases_for("cuda", 1), ["overlop"])


def test_number_of_syncs() -> None:
    """Training ends with one, of however short a round."""
    assert [CASES[name].num_syncs for name in ("stock", "overlap", "a-edit")] == [0, 5, None]
    assert [Case("x", steps=steps).num_syncs for steps in (45, 50, 51)] == [4, 4, 5]


def test_flags() -> None:
    """Stock Megatron trains without EDiT; parameters are drawn on the CPU everywhere."""
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
def test_what_is_wrong(changed: dict[str, Any], complaint: str | None) -> None:
    """One line for it, and none where all is right."""
    found = analysis(reading("overlap", **changed)).complaints()
    if complaint is None:
        assert found == []
    else:
        assert any(complaint in line for line in found), found
        assert all(line.startswith("overlap: ") for line in found)


def test_rounds_of_a_clock() -> None:
    """Their number is not given, but there are some; losses are compared with nothing."""
    few, enough = (reading("a-edit", digests=[["a"] * count] * 2) for count in (1, 2))
    assert analysis(few).complaints() == ["a-edit: 1 syncs, fewer than 2"]
    assert not analysis(enough).complaints() and analysis(enough).distance(enough) is None


def test_times_and_memory() -> None:
    """Time beyond the median step; bytes per parameter beyond stock Megatron's of that size."""
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


def test_a_profiler_is_left_out() -> None:
    """It slows steps down, and writes its file in one: catches seconds that a sync did not take."""
    first, last = TRACED
    steps = [900.0 if first <= step <= last else 10.0 for step in range(1, 51)]
    slowed = reading(
        "large-overlap", step_ms=steps, sync_steps=[20, 30, 40, 50], digests=[["a"] * 4] * 2,
        exposed_ms=[90.0, 3.0, 80.0, 70.0],
    )  # fmt: skip
    (row,) = analysis(slowed).rows()
    assert row["share_beyond_median_step"] == 0 and row["exposed_ms"] == 3.0


def test_memory_of_the_same_precision() -> None:
    """Beyond stock Megatron in bf16 says nothing of fp32."""
    fp32 = analysis(reading("stock", digests=[[]]), reading("overlap-fp32")).rows()[1]
    assert fp32["bytes_per_parameter"] == 30.0 and fp32["bytes_beyond_stock"] is None


def test_cost_of_a_sync() -> None:
    """In bytes per element at the rate of a copy: 1 ms at 1 GB/s over 100 elements is 10 000."""
    marks = [MarkReading("edit/norms", 10, 1.0, 40, 1.0, 0.5), MarkReading("edit/meeting", 1, 1.0, 0, 0.0, 0.0)]  # fmt: skip  # noqa: E501
    found = analysis(reading("large-blocking", marks=marks), rate=1e9)
    assert found.marks()[0]["bytes_per_element"] == pytest.approx(1e4)
    (cost,) = found.sync_costs()
    assert cost["launches"] == 40 and cost["launches_per_unit"] == 4
    assert cost["least_ms"] == pytest.approx(LEAST_BYTES * 100 / 1e9 * 1e3)
    on_cpu = replace(marks[0], device_ms=None, transfer_ms=None)
    (cost,) = analysis(reading("large-blocking", marks=[on_cpu])).sync_costs()
    assert cost["device_ms"] is None and cost["bytes_per_element"] is None


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, correlation: int = -1) -> Any:
    """Of a trace."""
    args = {"correlation": correlation} if correlation >= 0 else {}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_trace_of_a_device() -> None:
    """Launches belong to the innermost mark of their thread; collectives are counted apart."""
    found = readings([
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


def test_trace_without_a_device() -> None:
    """Operators count, and those that they call do not."""
    found = readings([
        event("user_annotation", "edit/landing", 0, 100),
        event("cpu_op", "aten::to", 5, 20),
        event("cpu_op", "aten::copy_", 6, 10),
        event("cpu_op", "aten::mul", 30, 5),
        event("cpu_op", "aten::mul", 300, 5),
    ])  # fmt: skip
    assert found == [MarkReading("edit/landing", 1, 0.1, 2, None, None)]


def test_report(tmp_path: Path) -> None:
    """A page with all cases, what failed first, and a picture."""
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


def test_a_trace_of_threads(tmp_path: Path) -> None:
    """The engine's thread has marks of its own: catches outer steps that nobody counts."""

    def forward() -> None:
        thread = threading.Thread(target=marked, args=("edit/outer-step",))
        thread.start()
        marked("edit/landing")
        thread.join()

    watched = traced(forward, tmp_path / "trace.json.gz", 2, 4)
    for _ in range(4):
        watched()
    found = {each.mark: each for each in read_trace(tmp_path / "trace.json.gz")}
    assert set(found) == {"edit/landing", "edit/outer-step"}
    assert [each.count for each in found.values()] == [2, 2]
    assert all(each.launches == 4 for each in found.values())


def marked(name: str) -> None:
    """One operation under a mark."""
    with record_function(name):
        torch.ones(3).neg_()  # two operators, of which the first calls others


def test_a_case_that_leaves_too_little(tmp_path: Path) -> None:
    """Is one failed case, with its logs kept, and no traceback that ends the others."""
    bench = Bench.__new__(Bench)
    bench._device, bench._count, bench._output = "cpu", 1, tmp_path / "check.json"
    bench._port = 28500
    bench._forks = SilentForks()  # type: ignore[assignment]
    with pytest.raises(RunFailedError, match="left no whole readings"):
        bench.measure(CASES["stock"], 5.0)
    assert (tmp_path / "check.stock.console0.log").read_text() == "nothing"


class SilentForks:
    """Trainings that end well and say nothing."""

    @contextmanager
    def training(self, name: str, folder: Path, ranks: Any, **_: Any) -> Iterator[Any]:
        """As that of `Forks`."""
        (folder / "console0.log").write_text("nothing")
        yield SimpleNamespace(to_end=lambda *args, **kwargs: [0])


def test_devices() -> None:
    """In a process of its own; where there is none, the last line of what torch says."""
    with pytest.raises(DeviceError, match="torch finds no GPU"):
        look("cuda")
    found = find("cpu")
    assert (found.name, found.count) == ("CPU", 1) and 1e8 < found.copy_rate < 1e13


def test_backend() -> None:
    """What is read from a console line."""
    assert backend(["x", "megatron_edit: exchanges over gloo (--edit-sync-backend auto)"]) == "gloo"
    assert backend(["x"]) is None


def test_case_of_stock() -> None:
    """One replica is no EDiT."""
    assert Case("x", num_replicas=1).is_stock and Case("x", ranks=2).num_ranks == 4
