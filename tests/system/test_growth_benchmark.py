"""benchmarks/growth.py: its calculations on made-up numbers, and a small run in a network lab.

Would catch: waiting counted as cost, bytes of a partial sync, a fit that mixes up its coefficients,
growing control traffic, and more traffic than a ring all-reduce has.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from frame.gpt import Link
from frame.study import read_one
from growth_parts.cases import Case, distinct_cases, make_sweeps
from growth_parts.report import Analysis, bound_seconds, markdown
from growth_parts.runs import Reading, Sample, bytes_per_sync
from netlab import burst_bytes

from megatron_edit.comm.control import record_bytes
from tests.harness.network_lab import skip_without_lab

ROOT = Path(__file__).resolve().parents[2]
TAU = 4
RATE, BANDWIDTH = 100e6, 80e6
PER_SYNC, PER_BYTE, PER_UNIT = 0.02, 1.5e-7, 0.003
SWEEPS = make_sweeps(layers=[4, 8, 64], replicas=[2, 8], hidden_sizes=[64, 128, 512])


def reading(case: Case, *, waits: tuple[float, ...]) -> Reading:
    """Make a run whose sync times follow the coefficients, plus waiting times."""
    parameters = 12 * case.num_layers * case.hidden_size**2
    units, n = case.num_layers + 2, case.num_replicas
    table = (n - 1) * record_bytes(TAU, units, 0)
    wire_bytes = 2 * (n - 1) * 4 * parameters // n + table
    seconds = PER_SYNC + PER_BYTE * wire_bytes + PER_UNIT * units
    return Reading(
        num_layers=case.num_layers,
        hidden_size=case.hidden_size,
        num_replicas=n,
        rate=RATE,
        repeat=0,
        units=units,
        parameters=parameters,
        wire_bytes=[wire_bytes] * len(waits),
        interface_bytes=[1.01 * wire_bytes] * n,
        seconds=[{"exposed": seconds + wait, "wait": wait} for wait in waits],
        load=[0.0, 0.0],
        exit_codes=[0] * n,
    )


def analysis() -> Analysis:
    """Analyse runs whose times follow the coefficients exactly."""
    readings = [reading(case, waits=(0.0, 0.5, 3.0)) for case in distinct_cases(SWEEPS)]
    return Analysis(readings, [Link(RATE, 0, BANDWIDTH)], tau=TAU)


def test_sweeps_change_one_size_only() -> None:
    """Cases that several sweeps share are run once."""
    for sweep, name in zip(SWEEPS, ("num_layers", "num_replicas", "hidden_size"), strict=True):
        for case in sweep.cases:
            changed = {key for key, x in vars(case).items() if x != vars(sweep.cases[0])[key]}
            assert changed <= {name}
    assert len(distinct_cases(SWEEPS)) == 6
    assert distinct_cases(SWEEPS)[0] == Case(4, 64, 2)


def test_rows_exclude_waiting() -> None:
    """Times exclude waiting; control bytes are one record per other replica."""
    for row in analysis().rows():
        n = row.case.num_replicas
        expected = PER_SYNC + PER_BYTE * row.wire_bytes + PER_UNIT * row.units
        assert [row.seconds.min, row.seconds.max] == pytest.approx([expected] * 2)
        assert row.control_bytes == (n - 1) * record_bytes(TAU, row.units, 0)
        assert row.ring_factor == pytest.approx(2 * (n - 1) / n, abs=1e-5)
        assert row.interface_bytes == pytest.approx(1.01 * row.wire_bytes)
        assert row.beyond_per_unit == pytest.approx((expected - row.bound) / row.units)


def test_bound_includes_token_bucket() -> None:
    """An idle link first carries a burst in addition to its rate."""
    assert bound_seconds(1e6, None, 8e6) == pytest.approx(1.0)
    assert bound_seconds(1e6 + burst_bytes(RATE), RATE, 8e6) == pytest.approx(1.0)
    assert bound_seconds(1000, RATE, 8e6) == 0.0


def test_fits_recover_coefficients() -> None:
    """Fits use the cases with two replicas; on exact numbers residuals are zero."""
    found = analysis().fits()
    assert [fit.statistic for fit in found] == ["median", "min"]
    for fit in found:
        coefficients = (fit.per_sync, fit.per_byte, fit.per_unit)
        assert coefficients == pytest.approx((PER_SYNC, PER_BYTE, PER_UNIT))
        assert fit.link_per_byte == pytest.approx(8 / BANDWIDTH)
        assert fit.r_squared == pytest.approx(1.0)
        assert max(map(abs, fit.residuals.values())) < 1e-6
        assert len(fit.residuals) == 5


def test_tables_have_expected_rows() -> None:
    """There is a row per case of every sweep, and a row per fit."""
    text = markdown(SWEEPS, analysis().rows(), analysis().fits())
    tables = [table.splitlines() for table in text.split("\n\n")]
    assert [len(table) - 2 for table in tables] == [8, 8, 2]
    for table in tables:
        assert len({line.count("|") for line in table}) == 1


def test_bytes_per_sync_use_samples_between_syncs() -> None:
    """Samples taken during a sync, or before the first, must not count."""
    syncs: list[dict[str, Any]] = [
        {"time": end, "seconds": {"total": 0.4}} for end in (1.0, 2.0, 3.0, 4.0)
    ]
    sent_at = {0.3: 7, 1.3: 100, 1.8: 150, 2.3: 200, 2.9: 290, 3.1: 299, 3.31: 300, 3.58: 301}
    samples = [Sample(time, (sent, 2 * sent)) for time, sent in sent_at.items()]
    assert bytes_per_sync(samples, syncs) == [100.0, 200.0]
    assert bytes_per_sync(samples[:3], syncs) is None


@pytest.mark.full
def test_small_real_run(tmp_path: Path) -> None:
    """In a real training, bytes at the interfaces agree with those that EDiT reports."""
    skip_without_lab()
    output = tmp_path / "growth.json"
    argv = [sys.executable, str(ROOT / "benchmarks/growth.py"), "--quick", "--output", str(output)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n|") > 12 and output.with_suffix(".png").stat().st_size > 10_000
    rows = read_one(output)["rows"]
    assert len(rows) == 4
    for row in rows:
        n = row["case"]["num_replicas"]
        assert row["ring_factor"] == pytest.approx(2 * (n - 1) / n, rel=1e-3)
        assert row["control_bytes"] <= 0.01 * row["wire_bytes"]
        # Headers are counted once per offloaded packet; acknowledgements are additional.
        assert 1.0 < row["interface_bytes"] / row["wire_bytes"] < 1.06
        assert row["seconds"]["median"] > 0.9 * row["bound"] > 0.0
