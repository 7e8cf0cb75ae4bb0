"""`megatron-edit check` accepts and refuses the same command lines as a launch.

Would catch an "ok" for a command that a launch refuses, and a refusal of one that trains.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import train
from tests.harness.command_lines import Outcome, outcomes_of
from tests.harness.launch import REPOSITORY
from tests.system.check_lines import RIGHT, WRONG, argv_of, make_files

OURS = REPOSITORY / "scripts" / "pretrain_gpt.py"
LINES = RIGHT | WRONG
pytestmark = pytest.mark.timeout(500)  # the first test makes the files and checks all lines
# Errors that Megatron finds when loading, which a launch reports in other words.
MEGATRONS_OWN = {"load-another-stock"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create a folder with corpora, checkpoints and invalid files, in which all commands run."""
    made = tmp_path_factory.mktemp("verdicts")
    before = Path.cwd()
    os.chdir(made)
    try:
        make_files(made)
        yield made
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def checks(folder: Path) -> dict[str, Outcome]:
    """Run `check` for all command lines in one process."""
    return _checked(OURS, folder)


def _checked(script: Path, folder: Path) -> dict[str, Outcome]:
    lines = {
        name: ["check", str(script), *argv_of(flags), "--world-size", "2"]
        for name, flags in LINES.items()
    }
    return outcomes_of(lines, folder, seconds=400)


def test_wrong_lines_are_distinct_and_many() -> None:
    """At least 40 wrong command lines, all different."""
    assert len({tuple(argv_of(flags)) for flags in WRONG.values()}) == len(WRONG) >= 40


@pytest.mark.parametrize("name", LINES)
def test_check_and_launch_agree(name: str, folder: Path, checks: dict[str, Outcome]) -> None:
    """Both accept, or both refuse with the same message; the launch trains at most one step."""
    _compare(name, OURS, folder, checks)


@pytest.mark.clone
@pytest.mark.full
@pytest.mark.parametrize("name", LINES)
def test_check_and_launch_agree_on_clone_script(
    name: str, folder: Path, megatron_clone: Path
) -> None:
    """With NVIDIA's pretrain_gpt.py. Would catch a script whose flags `check` does not see."""
    script = megatron_clone / "pretrain_gpt.py"
    _compare(name, script, folder, _checked_once(script, folder))


_CACHE: dict[Path, dict[str, Outcome]] = {}


def _checked_once(script: Path, folder: Path) -> dict[str, Outcome]:
    if script not in _CACHE:
        _CACHE[script] = _checked(script, folder)
    return _CACHE[script]


def _compare(name: str, script: Path, folder: Path, checks: dict[str, Outcome]) -> None:
    code, message = checks[name]
    start = time.monotonic()
    ranks = train(
        argv_of(LINES[name]), 2, script=script, check=False, timeout=100,
        before="tests.system.check_lines:stop_after_a_step", cwd=folder,
    ).ranks  # fmt: skip
    seconds = time.monotonic() - start
    codes = [rank.returncode for rank in ranks]
    has_trained = "A STEP IS DONE" in ranks[0].stdout  # the others print to files
    errors = "\n".join(rank.stderr[-1500:] for rank in ranks)
    print(f"{name}: check {code}, launch {codes} in {seconds:.1f} s: {message.strip() or 'ok'}")
    assert (code == 0) == (codes == [0, 0] and has_trained), (message, codes, errors)
    assert code == (0 if name in RIGHT else 2), (message, codes, errors)
    if name in RIGHT:
        return
    assert message.count("\n") == 1 and message.startswith("megatron-edit check: "), message
    if name not in MEGATRONS_OWN:
        assert codes == [2, 2], errors
        line = message.removeprefix("megatron-edit check: ")
        assert f"megatron_edit: {line}" in errors, (line, errors)
