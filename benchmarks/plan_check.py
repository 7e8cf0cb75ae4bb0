"""Print the planner's predictions beside measurements, the committed results of two benchmarks.

    python benchmarks/plan_check.py

`tests/system/test_plan_check.py` checks the errors against the limits.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from frame.gpt import link_name
from frame.launch import BENCHMARKS
from frame.page import Column, table_of
from frame.study import read_one
from netlab import burst_bytes

from megatron_edit.tools.plan.costs import (
    CPU,
    Link,
    Machine,
    TimingSetting,
    stock_cost,
    sync_cost,
    sync_traffic,
)
from megatron_edit.tools.plan.job import Job, read_job

# The series of each study that the planner is compared with.
SERIES = {"overlap": "all links, three turns", "delayed": "delay 30", "growth": "all"}
MAX_SPEED_ERROR, MAX_BYTES_ERROR = 0.20, 0.10
CORES = 2
# The coefficients in megatron_edit/tools/plan/costs.py were fitted to these.
FITTED = {("stock", None), ("stock", 20e6)}
STEP_OF_GROWTH = 0.03  # seconds; blocking syncs do not depend on it


@dataclass(frozen=True)
class Prediction:
    """A predicted and a measured number.

    Attributes:
        what: name of the run.
        predicted: by the planner.
        measured: by the benchmark.
        is_fitted: whether a coefficient of the planner was fitted to it.
    """

    what: str
    predicted: float
    measured: float
    is_fitted: bool = False

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1

    @property
    def note(self) -> str:
        """Text in the table: whether it was fitted, and whether the limit was missed."""
        missed = "" if self.is_within(MAX_SPEED_ERROR) else "**missed**"
        return " ".join(filter(None, ("fitted" if self.is_fitted else "", missed)))

    def is_within(self, limit: float) -> bool:
        """Return whether the absolute error is at most a limit."""
        return abs(self.error) <= limit


def lab_link(rate: float | None, bandwidth: float) -> Link:
    """Return a link of the lab, with the burst that `tc tbf` passes at once."""
    return Link(bandwidth, burst_seconds=8 * burst_bytes(rate) / bandwidth)


def lab_job(flags: str, num_replicas: int) -> Job:
    """Return a training of the lab: one rank per replica, one replica per host."""
    return read_job(
        shlex.split(flags),
        num_replicas=num_replicas,
        world_size=num_replicas,
        ranks_per_host=None,
    )


def shares() -> list[Prediction]:
    """Predict the shares of the ideal speed, from the measured link and ideal step."""
    return [p for name in ("overlap", "delayed") for p in _shares_of(_results(name))]


def _shares_of(results: dict[str, Any]) -> Iterator[Prediction]:
    rows = {(row["rate"], row["kind"]): row for row in results["summary"]}
    for (rate, kind), row in rows.items():
        if kind == "ideal" or kind.startswith("torchft"):
            continue
        job = _job_of_kind(results, kind)
        setting = TimingSetting(
            link=lab_link(rate, row["bandwidth"]["median"]),
            machine=CPU,
            step=rows[rate, "ideal"]["step_seconds"]["median"],
            forward_share=results["forward_share"],
        )
        is_stock = kind == "stock"
        cost = stock_cost(job, setting) if is_stock else sync_cost(job, job.config("edit"), setting)
        measured = row["of_ideal"]["median"]
        name = f"{link_name(rate)}, {kind}"
        yield Prediction(name, cost.share_of_ideal, measured, (kind, rate) in FITTED)


def syncs() -> list[Prediction]:
    """Predict seconds of a blocking sync; measured is the minimum of 32, the least disturbed."""
    results = _results("growth")
    bandwidths: dict[float | None, list[float]] = {}
    for link in results["links"]:
        bandwidths.setdefault(link["rate"], []).append(link["bandwidth"])
    found = []
    for row in results["rows"]:
        case, rate = row["case"], row["rate"]
        job = _job_of(results, case)
        load = max(1.0, case["num_replicas"] / CORES)
        setting = TimingSetting(
            link=lab_link(rate, median(bandwidths[rate])),
            machine=_crowded(CPU, load),
            step=STEP_OF_GROWTH,
            forward_share=1 / 3,
        )
        seconds = sync_cost(job, job.config("edit"), setting).exposed
        is_fitted = rate is None and case["num_replicas"] == 2
        found.append(Prediction(_case_name(row), seconds, row["seconds"]["min"], is_fitted))
    return found


def _crowded(machine: Machine, factor: float) -> Machine:
    """Return the costs where `factor` ranks share a core."""
    return replace(
        machine,
        per_element=machine.per_element * factor,
        per_sent_byte=machine.per_sent_byte * factor,
        per_wire_byte=machine.per_wire_byte * factor,
    )


def sent_bytes() -> list[Prediction]:
    """Predict bytes per sync and replica; measured by EDiT, and at a host's interface."""
    results, found = _results("growth"), []
    for row in results["rows"]:
        job = _job_of(results, row["case"])
        config = job.config("edit")
        predicted = sync_traffic(job, config, config.sync_interval).per_host
        found.append(Prediction(f"{_case_name(row)}, counted", predicted, row["wire_bytes"]))
        if row["interface_bytes"]:
            measured = row["interface_bytes"]
            found.append(Prediction(f"{_case_name(row)}, interface", predicted, measured))
    for name in ("overlap", "delayed"):
        found += _sent_in_window(_results(name))
    return found


def _sent_in_window(results: dict[str, Any]) -> Iterator[Prediction]:
    """Predict the bytes of a host in the measured rounds, where only syncs use the link."""
    for run in results["runs"]:
        if not run["num_syncs"]:
            continue
        job = _job_of_kind(results, run["kind"])
        config = job.config("edit")
        predicted = sync_traffic(job, config, config.sync_interval).per_host * run["num_syncs"]
        name = f"{link_name(run['rate'])}, {run['kind']}, turn {run['repeat'] + 1}"
        yield Prediction(f"{name}, interface", predicted, max(run["window_bytes"]))


def _job_of_kind(results: dict[str, Any], kind: str) -> Job:
    flags = results["configuration"]["flags"]
    return lab_job(f"{flags['common']} {flags[kind]}", 2)


def _job_of(results: dict[str, Any], case: dict[str, int]) -> Job:
    size = case["num_replicas"]
    flags = (
        f"{results['configuration']['flags_of_the_first_case']} --num-layers {case['num_layers']} "
        f"--hidden-size {case['hidden_size']} --global-batch-size {size} "
        f"--edit-num-replicas {size}"
    )
    return lab_job(flags, size)


def _case_name(row: dict[str, Any]) -> str:
    case = row["case"]
    shape = f"{case['num_layers']} layers, hidden {case['hidden_size']}, N {case['num_replicas']}"
    return f"{link_name(row['rate'])}, {shape}"


def _results(name: str) -> dict[str, Any]:
    return read_one(BENCHMARKS / "results" / f"{name}_2cpu_202611.json", SERIES[name])


# ---- the tables


def tables() -> str:
    """Return the tables."""
    parts = [
        "Share of the ideal speed (`benchmarks/results/overlap_2cpu_202611.md`, the first of its "
        "two series; `delayed_2cpu_202611.md`), medians:",
        _predictions("link and mode", shares(), "{:.3f}", 1.0),
        "Milliseconds of a blocking sync (`benchmarks/results/growth_2cpu_202611.md`), the least "
        "of 32:",
        _predictions("link and model", syncs(), "{:.1f}", 1e3),
        _bytes_line(),
    ]
    return "\n\n".join(parts)


def _predictions(head: str, found: Sequence[Prediction], form: str, factor: float) -> str:
    columns = (
        Column(head, "what"),
        Column("predicted", "predicted", form, factor),
        Column("measured", "measured", form, factor),
        Column("difference", "error", "{:+.1%}"),
        Column("", "note"),
    )
    return table_of(columns, found)


def _bytes_line() -> str:
    found = sent_bytes()
    counted = [each.error for each in found if each.what.endswith("counted")]
    seen = [each.error for each in found if each.what.endswith("interface")]
    return (
        f"Bytes of a sync: {len(counted)} counted by EDiT, largest difference "
        f"{max(map(abs, counted)):.2%}; {len(seen)} counted at a host's interface with headers and "
        f"acknowledgements, {min(seen):+.1%} to {max(seen):+.1%}."
    )


def main() -> int:
    """Print the tables."""
    print(tables())
    return 0


if __name__ == "__main__":
    sys.exit(main())
