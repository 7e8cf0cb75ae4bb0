"""`megatron-edit check` says of a command line what the launch says of it.

Would catch: an "ok" for a command that a launch refuses, after it has taken the machines; and a
refusal of one that trains.
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
# Found by Megatron as it loads: the launch quotes it.
MEGATRONS_OWN = {"load-another-stock"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Corpora, checkpoints and what looks like them; where all commands run."""
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
    """What `check` says, of all lines in one process."""
    return _checked(OURS, folder)


def _checked(script: Path, folder: Path) -> dict[str, Outcome]:
    lines = {
        name: ["check", str(script), *argv_of(flags), "--world-size", "2"]
        for name, flags in LINES.items()
    }
    return outcomes_of(lines, folder, seconds=400)


def test_there_are_enough() -> None:
    """As many as were asked for, without a line twice."""
    assert len({tuple(argv_of(flags)) for flags in WRONG.values()}) == len(WRONG) >= 40


@pytest.mark.parametrize("name", LINES)
def test_check_refuses_what_the_launch_refuses(
    name: str, folder: Path, checks: dict[str, Outcome]
) -> None:
    """The same verdict, and the same line where it is ours; the launch trains a step or none."""
    _compare(name, OURS, folder, checks)


@pytest.mark.clone
@pytest.mark.full
@pytest.mark.parametrize("name", LINES)
def test_with_the_script_of_a_clone(name: str, folder: Path, megatron_clone: Path) -> None:
    """NVIDIA's own pretrain_gpt.py. Would catch: a script whose arguments `check` does not see."""
    script = megatron_clone / "pretrain_gpt.py"
    _compare(name, script, folder, _checked_once(script, folder))


_KEPT: dict[Path, dict[str, Outcome]] = {}


def _checked_once(script: Path, folder: Path) -> dict[str, Outcome]:
    if script not in _KEPT:
        _KEPT[script] = _checked(script, folder)
    return _KEPT[script]


def _compare(name: str, script: Path, folder: Path, checks: dict[str, Outcome]) -> None:
    code, said = checks[name]
    start = time.monotonic()
    ranks = train(
        argv_of(LINES[name]), 2, script=script, check=False, timeout=100,
        before="tests.system.check_lines:stop_after_a_step", cwd=folder,
    ).ranks  # fmt: skip
    seconds = time.monotonic() - start
    codes = [rank.returncode for rank in ranks]
    has_trained = "A STEP IS DONE" in ranks[0].stdout  # others have no console
    errors = "\n".join(rank.stderr[-1500:] for rank in ranks)
    print(f"{name}: check {code}, launch {codes} in {seconds:.1f} s: {said.strip() or 'ok'}")
    assert (code == 0) == (codes == [0, 0] and has_trained), (said, codes, errors)
    assert code == (0 if name in RIGHT else 2), (said, codes, errors)
    if name in RIGHT:
        return
    assert said.count("\n") == 1 and said.startswith("megatron-edit check: "), said
    if name not in MEGATRONS_OWN:
        assert codes == [2, 2], errors
        line = said.removeprefix("megatron-edit check: ")
        assert f"megatron_edit: {line}" in errors, (line, errors)
