"""The command `megatron-edit plan`: its output, and input that it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_edit.errors import UsageError
from megatron_edit.method.auto import AutoChoice, SyncSettings
from megatron_edit.tools.cli import main
from megatron_edit.tools.compare.flags import read_flags
from megatron_edit.tools.plan.job import NAMES, read_job
from megatron_edit.tools.plan.values import parse_bytes, parse_rate, parse_seconds

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10Gbit", 1e10),
        ("100Mbit/s", 1e8),
        ("1.25GB", 1e10),
        ("1e9bps", 1e9),
        ("25 Gbit/s", 2.5e10),
        ("1gbit", 1e9),
        ("1 GBIT", 1e9),
        ("1gb", 1e9),
        ("1gB", 8e9),
        ("1GBps", 8e9),
        ("1 mbyte/S", 8e6),
    ],
)
def test_link_rates_are_parsed(text: str, value: float) -> None:
    """The usual notations; the case of letters matters in B and b only."""
    assert parse_rate("--link", text) == pytest.approx(value)


def test_sizes_and_durations_are_parsed() -> None:
    """Decimal and binary prefixes, of any case; the time of a step may be a number of seconds."""
    assert parse_bytes("--device-memory", "80GB") == 80e9
    assert parse_bytes("--device-memory", "80GiB") == 80 * 2**30
    assert parse_bytes("--device-memory", "80gIB") == 80 * 2**30
    assert parse_seconds("--step-time", "350ms") == pytest.approx(0.35)
    assert parse_seconds("--step-time", "2 MIN") == 120 and parse_seconds("--step-time", "2") == 2
    assert parse_seconds("--latency", "0", least=-1) == 0.0


GOOD = [str(CONFIGS / "llama_350m.args"), "--replicas", "8", "--link", "10Gbit", "--step-time", "2"]


def test_plan_command_prints_the_same_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Shares are equal in text and JSON."""
    assert main(["plan", *GOOD]) == 0
    text = capsys.readouterr().out
    assert main(["plan", *GOOD, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parameters"] == 367_969_280 and data["replicas"] == 8
    share = data["strategies"]["edit"]["share_of_ideal"]
    assert f"{share:.1%}" in text and "diloco" in text
    sentences = ("chosen", "expected", "predicted")  # long lines of the console
    assert all(len(line) < 140 or line.startswith(sentences) for line in text.splitlines())


AUTO = [*GOOD, "--use-edit", "--edit-auto"]
FIXED = [*GOOD, "--use-edit", "--edit-preset", "paper"]


def test_plan_predicts_choice_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of `edit` are those of the chosen settings, which text and JSON name with their
    reasons; strategies without a choice are as without the flag."""
    assert main(["plan", *AUTO]) == 0
    text = capsys.readouterr().out
    assert main(["plan", *AUTO, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    choice = AutoChoice.from_json(rows["edit"]["choice"])
    assert all(line in text.splitlines() for line in choice.lines("predicted from --link"))
    assert rows["edit"]["steps_between_exchanges"] == choice.settings.sync_interval
    assert rows["edit"]["share_of_ideal"] == pytest.approx(choice.share, abs=0.01)
    assert choice.share >= 0.97
    assert choice.since == 2400 and choice.measured.step == 2.0
    assert choice.measured.rate == pytest.approx(1e10 / 8 / 8)  # eight ranks share a host's link
    assert main(["plan", *FIXED, "--json"]) == 0
    usual = json.loads(capsys.readouterr().out)["strategies"]
    assert {name: row for name, row in rows.items() if name != "edit"} == {
        name: row for name, row in usual.items() if name != "edit"
    }
    assert usual["edit"]["choice"] is None


def test_advice_leaves_chosen_settings_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a suggestion against the choice."""
    line = [*AUTO, "--link", "20Mbit", "--strategies", "edit"]
    found = []
    for words in (line, [*FIXED, "--link", "20Mbit", "--strategies", "edit"]):
        assert main(["plan", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        found.append([text.split(":")[0] for text in lines if text.startswith("- ")])
    rest = ["- timeout-seconds", "- distributed-timeout", "- signal-lead"]
    assert found == [["- warm-up", *rest], ["- warm-up", "- settings", *rest]]


def test_planned_choice_follows_link_length_and_given_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A slow link needs more; a training of 100 local steps has no room for tau 32; what is given
    stays."""

    def chosen(*more: str) -> SyncSettings:
        assert main(["plan", *AUTO, "--strategies", "edit", *more, "--json"]) == 0
        row = json.loads(capsys.readouterr().out)["strategies"]["edit"]
        return AutoChoice.from_json(row["choice"]).settings

    slow = chosen("--link", "1Mbit")
    assert slow.sync_interval > chosen().sync_interval
    short = ("--link", "1Mbit", "--edit-warmup-steps", "50", "--train-iters", "150")
    assert chosen(*short).sync_interval <= 25
    assert chosen("--link", "1Mbit", "--edit-sync-dtype", "bf16").sync_dtype == "bf16"


BAD = {
    "auto": ("--use-edit --edit-auto --edit-warmup-steps 5", "--edit-warmup-steps 5: measures in "
             "at least 20 steps"),
    "link": ("--link fast", "--link fast: must be a rate above 0"),
    "no-link-speed": ("--link 0Gbit", "--link 0Gbit: must be a rate above 0"),
    "step": ("--step-time -1", "--step-time"),
    "step-nan": ("--step-time nan", "--step-time nan: must be a duration"),
    "both": ("--gpu-tflops 312", "--step-time, --gpu-tflops: must be one of them"),
    "mfu": ("--mfu 1.5", "--mfu 1.5: must be from 1e-12 to 1;"),
    "latency-unit": ("--latency 30", "--latency 30: must be a duration of 0 or more, from 1e-12 to "
                     "1e+18 s, with its unit; give for example 30ms"),
    "latency-rate": ("--latency 30ms/s", "--latency 30ms/s: must be a duration"),
    "memory-bits": ("--device-memory 80Gb", "--device-memory 80Gb: must be a size"),
    "memory-rate": ("--device-memory 80GB/s", "--device-memory 80GB/s: must be a size"),
    "memory": ("--device-memory 80", "--device-memory 80: must be a size"),
    "replicas": ("--replicas 0", "--replicas 0: must be at least 1"),
    "world": ("--world-size 12", "--world-size 12: must be a multiple of 8"),
    "hosts": ("--ranks-per-host 3", "--ranks-per-host 3: must divide the 8 ranks"),
    "no ranks on a host": ("--ranks-per-host 0", "--ranks-per-host 0: must be at least 1"),
    "removed option": ("--machine cpu", "--machine: is no option of plan any more"),
    "parallel": ("--tensor-model-parallel-size 3", "must be a multiple of 3 (TP x PP x CP)"),
    "stages": ("--pipeline-model-parallel-size 8 --num-layers 25", "must divide the 25 layers"),
    "batch": ("--global-batch-size 1000", "--global-batch-size 1000: must be a multiple of 512"),
    "experts": ("--num-experts 8", "--num-experts: the planner counts dense GPTs only"),
    "layers": ("--num-layers many", "--num-layers many: must be a whole number"),
    "ours": ("--edit-sync-interval 0 --use-edit", "--edit-sync-interval 0: must be at least 1"),
    "unused": ("--edit-sync-interval 64", "has no effect without --use-edit"),
    "strategy": ("--strategies edit,best", "--strategies best: must be of"),
    "empty": ("--strategies ,", "--strategies (an empty entry)"),
    # Each of these would end in an OverflowError, a division by 0, or never.
    "link-tiny": ("--link 1e-320bit", "--link 1e-320bit: must be a rate above 0 with its unit, "
                  "from 1e-12 to 1e+18"),
    "link-huge": ("--link 1e30bit", "to 1e+18"),
    "step-tiny": ("--step-time 1e-320", "--step-time 1e-320: must be a duration above 0, from "),
    "latency-huge": ("--latency 1e308", "--latency 1e308: must be a duration of 0 or more, "
                     "from 1e-12 to 1e+18"),
    "memory-huge": ("--device-memory 1e300B", "from 1e-12 to 1e+18"),
    "mfu-tiny": ("--mfu 1e-320", "--mfu 9.99989e-321: must be from 1e-12 to 1"),
    "layers-digits": (f"--num-layers {'9' * 5000}", "...: must be a whole number from 1 to 10000"),
    "hidden-digits": (f"--hidden-size {'9' * 400}", "a whole number from 1 to 1000000000000"),
    "vocabulary-digits": (f"--vocab-size {'9' * 5000}", "--vocab-size 9999"),
    "replicas-many": (f"--replicas {'9' * 400}", "must be at most 1000000"),
    "world-many": (f"--world-size {8 * 10**9}", "--world-size 8000000000: must be at most 1000000"),
    "tau-digits": (f"--use-edit --edit-sync-interval {'9' * 400}",
                   "must be at least 1 and at most 1e20"),
    "delay-digits": ("--use-edit --edit-strategy a-edit --strategies a-edit "
                     f"--edit-delay-steps {'9' * 200}", "must be at least 0 and at most 1e20"),
}  # fmt: skip
TFLOPS = {
    "1e300": "--gpu-tflops 1e+300: must be from 1e-12 to 1e+18",
    "1e-320": "--gpu-tflops 9.99989e-321: must be from 1e-12 to 1e+18",
    "nan": "--gpu-tflops nan: must be from 1e-12 to 1e+18",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and a line with value, rule and remedy."""
    flags, wanted = BAD[case]
    try:
        code = main(["plan", *GOOD, *flags.split()])
    except SystemExit as stop:  # argparse's own complaints
        code = int(str(stop.code))
    error = capsys.readouterr().err
    assert code == 2 and wanted in error and error.count("\n") == 1, error
    assert len(error) < 700, error


@pytest.mark.parametrize("value", TFLOPS)
def test_gpu_speed_out_of_range_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch: a step of zero or infinite seconds."""
    assert main(["plan", *GOOD[:-2], "--gpu-tflops", value, "--mfu", "1e-9"]) == 2
    error = capsys.readouterr().err
    assert TFLOPS[value] in error and error.count("\n") == 1, error


@pytest.mark.parametrize("strategy", NAMES)
def test_plan_works_at_the_ends_of_all_ranges(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch: a number in range that overflows in the arithmetic."""
    command = ["plan", *GOOD, "--strategies", strategy, "--device-memory", "1e-12B"]
    for link in ("1e-12bit", "1e18bit"):
        for step in ("1e-12", "1e18"):
            for latency in ("1e-12s", "1e18s"):
                words = ["--link", link, "--step-time", step, "--latency", latency]
                assert main([*command, *words]) == 0
                assert capsys.readouterr().out


@pytest.mark.parametrize("missing", ["--vocab-size", "--num-layers", "--micro-batch-size"])
def test_missing_flag_of_the_model_is_named(missing: str) -> None:
    """No value is assumed for it."""
    argv = read_flags(CONFIGS / "llama_350m.args")
    place = argv.index(missing)
    del argv[place : place + 2]
    with pytest.raises(UsageError, match=missing):
        read_job(argv, num_replicas=8, world_size=None, ranks_per_host=None)


def test_unreadable_flag_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing file, a folder, a binary file, an unbalanced quote."""
    (tmp_path / "binary.args").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "quote.args").write_text("--num-layers '2\n")
    for name in ("missing.args", "", "binary.args", "quote.args"):
        assert main(["plan", str(tmp_path / name), *GOOD[1:]]) == 2
        error = capsys.readouterr().err
        assert "cannot be read" in error and error.count("\n") == 1, error
