"""Paths that the system does not let anybody look at: exit code 2 and one line, like other input.

Since Python 3.12 `Path.is_file` and its kin raise for them, where they said no before.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.command_lines import Outcome, outcomes_of
from tests.harness.launch import REPOSITORY

LONG = "x" * 300
TRAIN = "--strategies ddp --nproc-per-node 2 --edit-num-replicas 2"
LINES = [
    "launch {}",
    "launch {}/train.py",
    "launch {}/train.py --use-edit --edit-num-replicas 2",
    "check {}",
    "check {}/train.py",
    "inspect {}",
    "inspect {}/iter_0000005",
    "doctor --no-host --shared-dir {}/shared",
    "doctor --no-host --megatron {}/clone",
    f"compare {{}}/train.py {TRAIN}",
    "plan {}/flags.args --link 10Gbit --step-time 1",
    "patch {}",
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A place that everybody may look into, with a folder and a file that nobody may read."""
    made = Path(tempfile.mkdtemp(prefix="unreadable-"))
    made.chmod(0o755)
    secret = made / "secret"
    secret.mkdir()
    for name in ("train.py", "flags.args"):
        (secret / name).write_text("")
    unreadable = made / "unreadable.py"
    unreadable.write_text("")
    for path in (unreadable, secret):
        path.chmod(0o000)
    try:
        yield made
    finally:
        secret.chmod(0o700)
        shutil.rmtree(made)


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    """Exit code and stderr by command line; all in one process."""
    paths = ("secret", LONG)
    lines = [line.format(path) for line in LINES for path in paths]
    lines += ["launch unreadable.py", "check unreadable.py", f"compare unreadable.py {TRAIN}"]
    words = {line: shlex.split(line) for line in lines}
    return outcomes_of(words, folder, obeys_modes=True, env={"RANK": "0"})


def test_unreadable_path_is_refused_in_one_line(outcomes: dict[str, Outcome]) -> None:
    """Would catch: a subcommand, or the launcher, that meets such a path with a traceback."""
    for line, (code, said) in outcomes.items():
        assert code == 2, (line, code, said)
        assert said.count("\n") == 1 and said.startswith(("megatron-edit ", "megatron_edit:")), said
        assert any(name in said for name in ("secret", "unreadable.py", LONG)), said
        assert "; " in said, said


def test_message_names_reason(outcomes: dict[str, Outcome]) -> None:
    """Would catch: `no such script` about one that is there."""
    for line in ("launch secret/train.py", "launch unreadable.py", "check unreadable.py"):
        assert "Permission denied" in outcomes[line][1], outcomes[line]
    assert "File name too long" in outcomes[f"inspect {LONG}"][1]


# Root may run the tests of somebody else's clone.
@pytest.mark.parametrize("owner", [os.geteuid(), *([1000] if os.geteuid() == 0 else [])])
def test_paths_are_refused_in_private_clone(owner: int, tmp_path: Path) -> None:
    """Nobody but the clone's owner may look into it: catches a check that becomes another user."""
    home = tmp_path / "home"
    clone = home / "clone"
    for part in ("megatron_edit", "tests/harness", "tests/system/test_unreadable_paths.py"):
        copy = shutil.copytree if (REPOSITORY / part).is_dir() else shutil.copy
        (clone / part).parent.mkdir(parents=True, exist_ok=True)
        copy(REPOSITORY / part, clone / part)
    home.chmod(0o700)
    for path in (home, *home.rglob("*")):
        os.chown(path, owner, -1)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not private",
         str(clone / "tests" / "system")],
        cwd=clone, env=os.environ | {"PYTHONPATH": str(clone)},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
