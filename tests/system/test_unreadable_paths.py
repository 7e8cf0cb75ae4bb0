"""Unreadable and too long paths: exit code 2 and one line, as for other wrong input.

Since Python 3.12 `Path.is_file` and similar methods raise for them; they returned False before.
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
    "doctor --shared-dir {}/shared",
    f"compare {{}}/train.py {TRAIN}",
    "plan {}/flags.args --link 10Gbit --step-time 1",
    "patch {}",
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Create a readable folder with an unreadable folder and an unreadable file."""
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
    """Return exit code and stderr by command line, all run in one process."""
    paths = ("secret", LONG)
    lines = [line.format(path) for line in LINES for path in paths]
    lines += ["launch unreadable.py", "check unreadable.py", f"compare unreadable.py {TRAIN}"]
    words = {line: shlex.split(line) for line in lines}
    return outcomes_of(words, folder, file_modes_apply=True, env={"RANK": "0"})


def test_unreadable_path_is_refused_in_one_line(outcomes: dict[str, Outcome]) -> None:
    """Would catch a subcommand, or the launcher, that prints a traceback for such a path."""
    for line, (code, message) in outcomes.items():
        assert code == 2, (line, code, message)
        assert message.count("\n") == 1 and message.startswith(
            ("megatron-edit ", "megatron_edit:")
        ), message
        assert any(name in message for name in ("secret", "unreadable.py", LONG)), message
        assert "; " in message, message


def test_message_names_reason(outcomes: dict[str, Outcome]) -> None:
    """Would catch `no such script` for one that exists."""
    for line in ("launch secret/train.py", "launch unreadable.py", "check unreadable.py"):
        assert "Permission denied" in outcomes[line][1], outcomes[line]
    assert "File name too long" in outcomes[f"inspect {LONG}"][1]


# Root may run the tests of another user's clone.
@pytest.mark.parametrize("owner", [os.geteuid(), *([1000] if os.geteuid() == 0 else [])])
def test_paths_are_refused_in_private_clone(owner: int, tmp_path: Path) -> None:
    """Only the clone's owner may read it. Would catch a test that switches to another user."""
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
