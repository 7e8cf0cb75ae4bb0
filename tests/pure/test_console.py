"""Output of replicas other than the first: moved to a file of their own, and given back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launch import REPOSITORY

SCRIPT = """
import os, sys
from pathlib import Path
from megatron_edit.errors import UsageError
from megatron_edit.observe.console import move_output_to, say
say("before")
moved = move_output_to(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
say("inside")
os.write(1, b"from C\\n")
os.write(2, b"error\\n")
moved.record(UsageError("--x 1", "rule", "remedy"))
moved.restore()
moved.restore()
say("after")
"""


@pytest.mark.parametrize("has_file", [True, False])
def test_output_is_moved_and_given_back(tmp_path: Path, has_file: bool) -> None:
    """Of C code, too; without a file errors stay where they were. Catches a process that goes on
    to write to the replica's file after the detachment."""
    log = tmp_path / "replica-1.log"
    argv = [sys.executable, "-c", SCRIPT, *([str(log)] if has_file else [])]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[edit] before\n[edit] after\n"
    if has_file:
        inside = "[edit] inside\nfrom C\nerror\n[edit] --x 1: rule; remedy\n"
        assert (log.read_text(), done.stderr) == (inside, "")
    else:
        assert done.stderr == "error\n"
