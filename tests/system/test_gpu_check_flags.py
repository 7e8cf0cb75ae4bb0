"""The command lines of the cases of scripts/gpu_check.sh, for machines that are not there yet.

Would catch flags that Megatron or EDiT refuses, when the minutes of a lent GPU are running.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_parts.cases import ELASTIC, TE, Case, cases_for

from tests.harness.command_lines import Outcome, outcomes_of
from tests.harness.launch import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "pretrain_gpt.py"
HUB = ("--edit-hub", "127.0.0.1:29600", "--edit-replica-name", "a")
CASES = {case.name: case for count in (1, 8) for case in cases_for("cuda", count)}
TRAININGS = {name: case for name, case in CASES.items() if case.is_training}
pytestmark = pytest.mark.timeout(900)  # the first test checks all lines


def line_of(case: Case, folder: Path) -> list[str]:
    """The command line that checks a case as a training on the CPU."""
    words = [*case.flags("cpu", str(folder / "logs")), *(HUB if case.special == ELASTIC else ())]
    world_size = 1 if case.special == ELASTIC else case.num_ranks
    return ["check", str(SCRIPT), *words, "--world-size", str(world_size)]


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Check all lines in one process."""
    folder = tmp_path_factory.mktemp("flags")
    lines = {name: line_of(case, folder) for name, case in TRAININGS.items()}
    return outcomes_of(lines, folder, seconds=800)


@pytest.mark.parametrize("name", TRAININGS)
def test_flags_of_each_case_are_accepted(name: str, checks: dict[str, Outcome]) -> None:
    """Those that need Transformer Engine fail for the lack of it alone, if it is missing."""
    code, message = checks[name]
    if TE in TRAININGS[name].packages and code:
        assert "ransformer" in message and "ngine" in message, message
    else:
        assert code == 0, message
