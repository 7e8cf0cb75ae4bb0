"""Checkpoints of earlier versions still load, and training continues as with these versions.

`00d2a33` has format version 2, and `0_2_0`, release 0.2.0, version 3. The README of a fixture
describes how it was made. Numbers are compared to `CLOSE`, and digests are not compared, as other
processors round differently; on the processor that made 00d2a33, event lines and digests are the
same digit by digit.
"""

from __future__ import annotations

import json
import math
import platform
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.behaviour.event_runs import entries, first_difference
from tests.harness import train

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
FIXTURE = FIXTURES / "checkpoint_00d2a33"
EVENTS = ("sync.jsonl", "replica-0.jsonl", "replica-1.jsonl", "loss.jsonl")
# Relative; other instruction sets differ by 2e-7, today's order of additions from that of 0.2.0 by
# 7e-6 (uninterrupted runs by 7e-5), a lost momentum or residual by 4e-3 or more.
CLOSE = {"00d2a33": 1e-5, "0_2_0": 1e-4}


def machine() -> dict[str, str]:
    """Return the properties of this machine that decide how torch rounds."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values of a line but digests, each with its path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{place}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{place}[{index}]")
    elif not place.endswith(".digest"):
        yield place, value


def in_old_format(lines: list[dict[str, Any]], version: str) -> list[dict[str, Any]]:
    """Remove what was added to the event files later: the loss check; and before 0.2.0 end records,
    the samples of a loss, and A-EDiT's own counts."""
    is_oldest = version == "00d2a33"
    kept = [line for line in lines if not (is_oldest and "end" in line)]
    for line in kept:
        if is_oldest and "loss" in line and "seconds" not in line and "tokens" not in line:
            del line["samples"]
        if "wire_bytes" in line:
            # The control record now also has the round's loss, and the time of the last sync.
            line["wire_bytes"] -= 16
        for name in ("why", "round_loss", "loss_z"):
            line.pop(name, None)
        for name in ("replica_step", "samples_all") if is_oldest else ():
            line.pop(name, None)
    return kept


def assert_close(got: list[Any], want: list[Any], close: float) -> None:
    """Check that all fields agree; floats to a relative difference, all other values exactly."""
    mine, others = list(leaves(got)), list(leaves(want))
    assert [place for place, _ in mine] == [place for place, _ in others]
    for (place, value), (_, wanted) in zip(mine, others, strict=True):
        if isinstance(wanted, float) and isinstance(value, float):
            assert math.isclose(value, wanted, rel_tol=close), (place, value, wanted)
        else:
            assert value == wanted, place


@pytest.mark.parametrize("version", ["00d2a33", "0_2_0"])
def test_checkpoint_of_earlier_version_resumes_identically(tmp_path: Path, version: str) -> None:
    """Within a round, with a pending encoded exchange, residuals, momentum and armed detectors; of
    0.2.0 with fragments and a mix."""
    fixture = FIXTURES / f"checkpoint_{version}"
    with tarfile.open(fixture / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    flags = json.loads((fixture / "flags.json").read_text())
    flags += ["--edit-outer-lr", "0.8", "--edit-outer-momentum", "0.85"]  # presets of that version
    folders = ["--load", str(tmp_path / "checkpoint"), "--edit-log-dir", str(tmp_path / "events")]
    train(
        [*flags, *folders], 2, before="tests.harness.ranks:use_full_mock_data",
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    made_on = fixture / "machine.json"
    is_same_machine = made_on.exists() and machine() == json.loads(made_on.read_text())
    found = {name: in_old_format(entries(tmp_path / "events" / name), version) for name in EVENTS}
    for name, got in found.items():
        want = entries(fixture / "events" / name)
        assert_close(got, want, CLOSE[version])
        if is_same_machine:
            assert first_difference(got, want) is None, name
    digests = [
        [line["digest"] for line in found[f"replica-{replica}.jsonl"] if "digest" in line]
        for replica in (0, 1)
    ]
    assert digests[0] == digests[1] and None not in digests[0]
