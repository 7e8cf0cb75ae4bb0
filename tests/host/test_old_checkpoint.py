"""A checkpoint written by commit 00d2a33 still loads, and training continues as with that commit.

The README of the fixture describes how it was made. On the processor that made it, event lines and
parameter digests are the same digit by digit; other processors round differently, so that numbers
are compared to `CLOSE` and digests are not compared.
"""

from __future__ import annotations

import json
import math
import platform
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.behaviour.event_runs import entries, first_difference
from tests.harness import train

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures/checkpoint_00d2a33"
EVENTS = ("sync.jsonl", "replica-0.jsonl", "replica-1.jsonl", "loss.jsonl")
# Relative; other instruction sets differ by 2e-7, a lost momentum or residual by 4e-3 or more.
CLOSE = 1e-5


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


def in_old_format(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove what was added to the event files later: end records, the samples of a loss, A-EDiT's
    own counts, and the loss check."""
    kept = [line for line in lines if "end" not in line]
    for line in kept:
        if "loss" in line and "seconds" not in line and "tokens" not in line:
            del line["samples"]
        if "wire_bytes" in line:
            # The control record now also has the round's loss, and the time of the last sync.
            line["wire_bytes"] -= 16
        for name in ("replica_step", "samples_all", "why", "round_loss", "loss_z"):
            line.pop(name, None)
    return kept


def assert_close(got: list[Any], want: list[Any]) -> None:
    """Check that all fields agree; floats to `CLOSE`, all other values exactly."""
    mine, others = list(leaves(got)), list(leaves(want))
    assert [place for place, _ in mine] == [place for place, _ in others]
    for (place, value), (_, wanted) in zip(mine, others, strict=True):
        if isinstance(wanted, float) and isinstance(value, float):
            assert math.isclose(value, wanted, rel_tol=CLOSE), (place, value, wanted)
        else:
            assert value == wanted, place


def test_checkpoint_of_00d2a33_resumes_identically(tmp_path: Path) -> None:
    """Within a round, with a pending int8 exchange, residuals, momentum and armed detectors."""
    with tarfile.open(FIXTURE / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    flags = json.loads((FIXTURE / "flags.json").read_text())
    flags += ["--edit-outer-lr", "0.8", "--edit-outer-momentum", "0.85"]  # presets of that version
    folders = ["--load", str(tmp_path / "checkpoint"), "--edit-log-dir", str(tmp_path / "events")]
    train(
        [*flags, *folders], 2, before="tests.harness.ranks:use_full_mock_data",
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    is_same_machine = machine() == json.loads((FIXTURE / "machine.json").read_text())
    found = {name: in_old_format(entries(tmp_path / "events" / name)) for name in EVENTS}
    for name, got in found.items():
        want = entries(FIXTURE / "events" / name)
        assert_close(got, want)
        if is_same_machine:
            assert first_difference(got, want) is None, name
    digests = [
        [line["digest"] for line in found[f"replica-{replica}.jsonl"] if "digest" in line]
        for replica in (0, 1)
    ]
    assert digests[0] == digests[1] and None not in digests[0]
