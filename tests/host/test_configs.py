"""The configurations in configs/: the models built from them, and Megatron's own checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_edit.tools.cli import main
from megatron_edit.tools.compare.flags import read_flags
from megatron_edit.tools.plan.job import Architecture
from megatron_edit.tools.plan.values import TrainingFlags
from tests.harness import run_ranks
from tests.harness.launch import REPOSITORY

CONFIGS = REPOSITORY / "configs"
NOMINAL = {"llama_350m": 350e6, "llama_1b": 1e9, "llama_3b": 3e9, "llama_7b": 7e9}
DATA = ["--mock-data", "--tokenizer-type", "NullTokenizer"]


def flags_of(name: str) -> list[str]:
    """Return the flags of a file, with a tokenizer and data that need no files."""
    return [*read_flags(CONFIGS / f"{name}.args"), *DATA]


def listed() -> dict[str, int]:
    """Return the parameter count of each file in the table of configs/README.md."""
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\.args` \|(?: \d+ \|){4} ([\d ]+) \|", text, re.MULTILINE)
    return {name: int(count.replace(" ", "")) for name, count in rows}


def test_parameter_counts_match_built_models() -> None:
    """Counts per unit of the built models, the planner, the README's table and the names agree.

    Would catch a flag that Megatron reads differently, and a wrong count in the planner.
    """
    names = [*NOMINAL, "tiny_cpu"]
    argvs = [flags_of(name) for name in names]
    (rank,) = run_ranks("tests.host.meta_models:unit_numels", 1, (argvs,), check=True)
    for name, argv, built in zip(names, argvs, rank.value, strict=True):
        assert built == Architecture.from_flags(TrainingFlags(argv)).unit_numels(), name
        if name in NOMINAL:
            assert sum(built.values()) == listed()[name]
            assert 0.89 < sum(built.values()) / NOMINAL[name] < 1.36  # as the README explains
    assert set(listed()) == set(NOMINAL)


@pytest.mark.parametrize("name", NOMINAL)
def test_megatron_accepts_config_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stock, and with EDiT on the 8 x 8 mesh. Would catch a flag that does not exist."""
    script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
    for more in ([], read_flags(CONFIGS / "edit_8x8.args")):
        argv = ["check", script, *flags_of(name), *more, "--world-size", "64"]
        assert main(argv) == 0
        output = capsys.readouterr().out
        assert "not checked" not in output, output
    assert "ok: 8 replicas x 8 ranks" in output


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.args")), ids=lambda path: path.name)
def test_config_file_contains_only_flags(path: Path) -> None:
    """Every line is a comment or a flag with its values, without characters that a shell
    expands."""
    for line in path.read_text(encoding="utf-8").splitlines():
        assert line.startswith(("#", "--")), line
        assert line.startswith("#") or not re.search(r"[$`*?\"'\\;|&<>]", line), line
