"""benchmarks/overlap.py: runs of torchft for comparison with EDiT.

Would catch: a run without torchft, or with another torch than the ideal; a torchft run counted as
EDiT; a schedule that torchft refuses; parts of the model that are not synced; and, if torchft is
installed and a lab can be created, a torchft run that exchanges less than its model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from frame.gpt import Link, Model, Window
from frame.study import read_one
from overlap_parts.kinds import (
    IDEAL,
    RIVALS,
    TORCHFT_DILOCO,
    TORCHFT_STREAMING,
    Job,
    RivalError,
    num_fragments,
    rival_versions,
    split_evenly,
)
from overlap_parts.report import Analysis
from overlap_parts.runs import Measurement

from tests.harness.network_lab import skip_without_lab

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmarks" / "overlap.py"


def fake_python(folder: Path, **versions: str | None) -> str:
    """Write a fake interpreter that reports package versions; None: not installed."""
    mine = {name: metadata.version(name) for name in ("torch", "megatron-core")}
    found: dict[str, Any] = mine | {"torchft": "1.0"} | versions
    answer = json.dumps({name: version for name, version in found.items() if version})
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho a line that an import prints\necho '{answer}'\n")
    path.chmod(0o755)
    return str(path)


def job(kind: str, **changes: Any) -> Job:
    """Make a job like the benchmark's."""
    values: dict[str, Any] = {"model": Model(), "num_hosts": 2, "tau": 40, "rounds": 1,
                              "stock_seconds": 3.0}  # fmt: skip
    return Job(kind, **values | changes)


def measurement(kind: str, speed: float, syncs: list[dict[str, Any]]) -> Measurement:
    """Make a run at 100 Mbit/s."""
    return Measurement(
        kind, 100e6, 0, Window(60, 100, 10, 110), speed, [0.1], [], [1, 1], syncs, [], [0.0], [0]
    )


def test_missing_torchft_is_refused_in_one_line(tmp_path: Path) -> None:
    """Before any run, if the interpreter lacks torchft or cannot be run."""
    bare = tmp_path / "bare"
    bare.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torchft'\" >&2\nexit 1\n"
    )
    bare.chmod(0o755)
    for python, reason in ((bare, "has no torchft"), (tmp_path / "none", "cannot be run")):
        output = tmp_path / "overlap.json"
        argv = [str(BENCHMARK), "--output", str(output), "--quick", "--modes", TORCHFT_STREAMING]
        found = subprocess.run(
            [sys.executable, *argv, "--torchft-python", str(python)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert found.returncode == 1 and found.stdout == ""
        (line,) = found.stderr.splitlines()
        assert line.startswith(f"overlap: {python} {reason}") and '".[rival]"' in line
        assert not output.exists()


def test_torchft_run_requires_same_torch(tmp_path: Path) -> None:
    """The ideal is measured with the torch of this environment."""
    assert rival_versions(fake_python(tmp_path))["torchft"] == "1.0"
    with pytest.raises(RivalError, match=r"has torch 2\.7\.0, .* must be the same$"):
        rival_versions(fake_python(tmp_path, torch="2.7.0"))
    with pytest.raises(RivalError, match="has megatron-core None"):
        rival_versions(fake_python(tmp_path, **{"megatron-core": None}))


def test_torchft_run_has_flags_of_ideal() -> None:
    """It has the flags and iterations of the ideal, and its own flags in addition."""
    ideal, window = job(IDEAL), job(IDEAL).window(1e8)
    for kind in RIVALS:
        assert job(kind).window(1e8) == window and job(kind).is_apart
        flags = job(kind).flags(window, "logs")
        base = ideal.flags(window, "logs")
        assert flags[: len(base)] == base
        assert [word.startswith("--torchft-") for word in flags[len(base) :: 2]] == [True] * 3


@pytest.mark.parametrize(
    ("tau", "layers", "expected"),
    [(40, 4, 4), (8, 2, 2), (7, 4, 1), (2, 4, 1), (40, 1, 2), (12, 2, 3)],
)
def test_fragments_fit_torchft_schedule(tau: int, layers: int, expected: int) -> None:
    """Fragments divide the interval, and each lands before the next one is sent."""
    assert num_fragments(TORCHFT_STREAMING, tau=tau, num_layers=layers) == expected
    assert num_fragments(TORCHFT_DILOCO, tau=tau, num_layers=layers) == 1
    flags = job(TORCHFT_STREAMING, tau=tau, model=Model(num_layers=layers)).flags(
        Window(0, 1, 1, 1), "logs"
    )
    values = dict(zip(flags[-6::2], map(int, flags[-5::2]), strict=True))
    assert values["--torchft-sync-every"] == tau
    assert 0 <= values["--torchft-sync-delay"] < tau // values["--torchft-fragments"]


def test_even_cuts_minimize_largest_part() -> None:
    """Parts are in order and complete, and no other division has a smaller largest part."""
    sizes = [8, 3, 3, 3, 4]
    for parts in range(1, 6):
        cuts = split_evenly(sizes, parts)
        assert [x for cut in cuts for x in cut] == list(range(5)) and len(cuts) == parts
        others = combinations(range(1, 5), parts - 1)
        worst = [
            max(sum(sizes[a:b]) for a, b in zip((0, *c), (*c, 5), strict=True)) for c in others
        ]
        assert max(sum(sizes[i] for i in cut) for cut in cuts) == min(worst)
    with pytest.raises(ValueError, match="6 parts of 5 items"):
        split_evenly(sizes, 6)


def test_torchft_run_has_no_edit_limit() -> None:
    """It has a share of the ideal, but no limit, which applies to the exact method only."""
    sync = {"wire_bytes": 20e6, "seconds": {"exposed": 1.0, "wait": 0.0}}
    runs = [measurement(IDEAL, 1000, []), measurement("overlap", 700, [sync]),
            measurement(TORCHFT_STREAMING, 500, [])]  # fmt: skip
    analysis = Analysis(
        runs, [Link(100e6, 0, 95e6)], tau=40, tokens_per_iteration=200, forward_share=0.3
    )
    _, edit, rival = analysis.rows()
    assert edit.of_limit is not None and rival.of_limit is None
    assert rival.of_ideal is not None and rival.of_ideal.median == 0.5
    assert rival.lost is not None and rival.lost.median == pytest.approx(40 * 0.2)


def test_limit_uses_complete_fp32_syncs_only() -> None:
    """Other runs, with int8 or fragments that sync one by one, do not change the limit."""

    def limit(*others: Measurement) -> float:
        syncs = [{"wire_bytes": 20e6, "seconds": {"exposed": 1.0, "wait": 0.0}}]
        runs = [measurement(IDEAL, 1000, []), measurement("overlap", 700, syncs), *others]
        analysis = Analysis(
            runs, [Link(100e6, 0, 95e6)], tau=40, tokens_per_iteration=200, forward_share=0.3
        )
        found = analysis.rows()[1].limit
        assert found is not None
        return found.median

    small = [{"wire_bytes": 5e6, "seconds": {"exposed": 0.1, "wait": 0.0}}] * 4
    alone = limit()
    assert alone == pytest.approx(8.0 / (8.0 + 8 * 20 / 95 - 0.06))
    assert alone == limit(
        measurement("delayed-int8", 900, small), measurement("staggered", 900, small)
    )
    only = Analysis(
        [measurement(IDEAL, 1000, []), measurement("delayed-int8", 900, small)],
        [Link(100e6, 0, 95e6)], tau=40, tokens_per_iteration=200, forward_share=0.3,
    )  # fmt: skip
    assert only.rows()[1].limit is None  # without an fp32 run


@pytest.mark.full
@pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed")
def test_torchft_sends_model_once_per_round(tmp_path: Path) -> None:
    """With both kinds in a lab and a tiny model, a host sends as many bytes as the model has."""
    skip_without_lab()
    output = tmp_path / "overlap.json"
    flags = ["--quick", "--links", "none", "--without-stock", "--modes", ",".join(RIVALS)]
    subprocess.run(
        [sys.executable, str(BENCHMARK), "--output", str(output), *flags],
        timeout=500,
        check=True,
    )
    found = {m["kind"]: m for m in read_one(output)["runs"]}
    assert max(found[IDEAL]["window_bytes"]) < 1000  # occasional packets of the kernel
    # 8192 x 128 tokens, 128 x 128 positions, two layers of 12 x 128^2 weights and 13 x 128 others,
    # and the last norm; two replicas send each of it once per all-reduce.
    model_bytes = 4 * (8192 * 128 + 128 * 128 + 2 * (12 * 128**2 + 13 * 128) + 2 * 128)
    for kind in RIVALS:
        for sent in found[kind]["window_bytes"]:
            assert model_bytes < sent < 1.05 * model_bytes
