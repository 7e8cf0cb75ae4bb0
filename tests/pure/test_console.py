"""Output of replicas other than the first is redirected to a file and restored; output that cannot
be written does not stop training."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import pytest

from tests.harness.disk import fill_disk
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
def test_output_is_redirected_and_restored(tmp_path: Path, has_file: bool) -> None:
    """Also output of C code; without a file, stderr is not redirected. Catches a process that still
    writes to the replica's file after the restore."""
    log = tmp_path / "replica-1.log"
    argv = [sys.executable, "-c", SCRIPT, *([str(log)] if has_file else [])]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[edit] before\n[edit] after\n"
    if has_file:
        inside = "[edit] inside\nfrom C\nerror\n[edit] --x 1: rule; remedy\n"
        assert (log.read_text(), done.stderr) == (inside, "")
    else:
        assert done.stderr == "error\n"


TOLERANT = """
import os, sys
from pathlib import Path
from megatron_edit.observe.console import move_output_to, say, tolerate_broken_output
undo = tolerate_broken_output()
say("before")
moved = move_output_to(Path(sys.argv[1])) if len(sys.argv) > 1 else None
sys.stdin.readline()
for number in range(100):
    print("x" * 100, flush=True)
sys.stdin.readline()
print("there is room again", flush=True)
if moved:
    moved.restore()
undo()
sys.stderr.write("finished\\n")
"""


def start(*argv: str, stdout: int | TextIO) -> subprocess.Popen[str]:
    """Start the script `TOLERANT`."""
    return subprocess.Popen(
        [sys.executable, "-c", TOLERANT, *argv],
        cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_closed_console_pipe_does_not_stop_training() -> None:
    """Would catch a BrokenPipeError that reaches training, and the exit code 120 of an interpreter
    that cannot flush."""
    with start(stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[edit] before\n"
        process.stdout.close()
        process.stdout = None
        _, errors = process.communicate("\n\n", timeout=60)
    assert process.returncode == 0
    assert errors == "[edit] 10120 bytes of stdout could not be written, and are lost\nfinished\n"


def test_log_on_full_disk_does_not_stop_training(small_disk: Path) -> None:
    """Log and console are files on the disk; once there is room, output begins on a new line."""
    log, console = small_disk / "replica-1.log", small_disk / "console"
    with console.open("w") as output, start(str(log), stdout=output) as process:
        assert process.stdin is not None
        while not log.exists():
            time.sleep(0.01)
        filler = fill_disk(small_disk)
        process.stdin.write("\n")
        process.stdin.flush()
        wait_until_full(log)
        filler.unlink()
        _, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 0, errors
    lines = log.read_text().splitlines()
    assert lines[-1] == "there is room again"
    assert set(lines[:-2]) <= {"x" * 100}
    assert "bytes of stdout could not be written" in errors


def wait_until_full(log: Path) -> None:
    """Wait until a file on a full disk stops growing."""
    size = -1
    while size != (size := log.stat().st_size):
        time.sleep(0.5)


def test_log_that_cannot_be_opened_does_not_stop_training(tmp_path: Path) -> None:
    """Its folder was removed after the start: output is dropped with a warning."""
    path = tmp_path / "gone" / "replica-1.log"
    argv = [sys.executable, "-c", SCRIPT, str(path)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "[edit] before\n[edit] after\n"
    assert done.stderr.startswith(f"[edit] {path} cannot be opened (No such file or directory)")
