"""`megatron-edit plan` as people type it: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_edit.cli import main
from megatron_edit.compare.flags import read_flags
from megatron_edit.errors import UsageError
from megatron_edit.plan.job import read_job
from megatron_edit.plan.quantities import parse_bytes, parse_rate, parse_seconds

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10Gbit", 1e10),
        ("100Mbit/s", 1e8),
        ("1.25GB", 1e10),
        ("1e9bps", 1e9),
        ("25 Gbit/s", 2.5e10),
    ],
)
def test_rates(text: str, value: float) -> None:
    """As people write them."""
    assert parse_rate("--link", text) == pytest.approx(value)


def test_sizes_and_durations() -> None:
    """Decimal and binary prefixes; seconds where nothing is said."""
    assert parse_bytes("--device-memory", "80GB") == 80e9
    assert parse_bytes("--device-memory", "80GiB") == 80 * 2**30
    assert parse_seconds("--step-time", "350ms") == pytest.approx(0.35)
    assert parse_seconds("--latency", "0", least=-1) == 0.0


GOOD = [str(CONFIGS / "llama_350m.args"), "--replicas", "8", "--link", "10Gbit", "--step-time", "2"]


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Text and JSON say the same."""
    assert main(["plan", *GOOD]) == 0
    text = capsys.readouterr().out
    assert main(["plan", *GOOD, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parameters"] == 367_969_280 and data["replicas"] == 8
    share = data["strategies"]["edit"]["share_of_ideal"]
    assert f"{share:.1%}" in text and "published-diloco" in text
    assert all(len(line) < 140 for line in text.splitlines())


BAD = {
    "link": ("--link fast", "--link fast: must be a rate above 0"),
    "no-link-speed": ("--link 0Gbit", "--link 0Gbit: must be a rate above 0"),
    "step": ("--step-time -1", "--step-time"),
    "step-nan": ("--step-time nan", "--step-time nan: must be a duration"),
    "both": ("--gpu-tflops 312", "--step-time, --gpu-tflops: must be one of them"),
    "mfu": ("--mfu 1.5", "--mfu 1.5: must be above 0, and at most 1"),
    "memory": ("--device-memory 80", "--device-memory 80: must be a size"),
    "replicas": ("--replicas 0", "--replicas 0: must be at least 1"),
    "world": ("--world-size 12", "--world-size 12: must be a multiple of 8"),
    "hosts": ("--ranks-per-host 3", "--ranks-per-host 3: must divide the 8 ranks"),
    "parallel": ("--tensor-model-parallel-size 3", "must be a multiple of 3 (TP x PP x CP)"),
    "stages": ("--pipeline-model-parallel-size 8 --num-layers 25", "must divide the 25 layers"),
    "batch": ("--global-batch-size 1000", "--global-batch-size 1000: must be a multiple of 512"),
    "experts": ("--num-experts 8", "--num-experts: the planner counts dense GPTs only"),
    "layers": ("--num-layers many", "--num-layers many: must be a whole number"),
    "ours": ("--edit-sync-interval 0 --use-edit", "--edit-sync-interval 0: must be at least 1"),
    "unused": ("--edit-sync-interval 64", "has no effect without --use-edit"),
    "strategy": ("--strategies edit,best", "--strategies best: must be of"),
    "empty": ("--strategies ,", "--strategies (an empty entry)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2; value, rule, remedy."""
    flags, wanted = BAD[case]
    try:
        code = main(["plan", *GOOD, *flags.split()])
    except SystemExit as stop:  # argparse's own complaints
        code = int(str(stop.code))
    error = capsys.readouterr().err
    assert code == 2 and wanted in error and error.count("\n") == 1, error


@pytest.mark.parametrize("missing", ["--vocab-size", "--num-layers", "--micro-batch-size"])
def test_a_missing_flag_is_named(missing: str) -> None:
    """There is no guessing."""
    argv = read_flags(CONFIGS / "llama_350m.args")
    place = argv.index(missing)
    del argv[place : place + 2]
    with pytest.raises(UsageError, match=missing):
        read_job(argv, num_replicas=8, world_size=None, ranks_per_host=None)


def test_a_file_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, a folder, not text, an open quote."""
    (tmp_path / "binary.args").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "quote.args").write_text("--num-layers '2\n")
    for name in ("missing.args", "", "binary.args", "quote.args"):
        assert main(["plan", str(tmp_path / name), *GOOD[1:]]) == 2
        error = capsys.readouterr().err
        assert "cannot be read" in error and error.count("\n") == 1, error
