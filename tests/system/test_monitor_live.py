"""`megatron-edit report` and `watch` during a real training, and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_edit.tools.cli import main
from megatron_edit.tools.monitor.run import MonitoredRun
from tests.harness import Flags
from tests.harness.event_files import SyntheticRun
from tests.harness.launch import REPOSITORY
from tests.host.runs import run_edit

pytest.importorskip("rich")
CODE = "import sys; from megatron_edit.tools.cli import main; sys.exit(main(sys.argv[1:]))"


class Terminal:
    """A command that runs in a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        environment = os.environ | {
            "PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color", "COLUMNS": "110",
            "LINES": "60",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, *words], stdin=slave, stdout=slave, stderr=slave,
            env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def wait_for(self, text: str, seconds: float = 30) -> None:
        """Read until the text appears."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, self.text[-2000:]
            if not self._read():
                raise AssertionError(f"ended without {text!r}: {self.text[-2000:]}")

    def end(self, seconds: float = 30) -> int:
        """Read to the end and return the exit code."""
        end = time.monotonic() + seconds
        while self._read() and time.monotonic() < end:
            pass
        code = self.process.wait(max(0.1, end - time.monotonic()))
        os.close(self.master)
        return code

    def _read(self) -> bool:
        if not select.select([self.master], [], [], 0.2)[0]:
            return self.process.poll() is None
        try:
            piece = os.read(self.master, 65536)
        except OSError:  # the other side is closed
            return False
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", piece.decode(errors="replace"))
        return bool(piece)


def test_watch_in_a_terminal(tmp_path: Path) -> None:
    """It waits for the run, follows it, and ends with it. Would catch a crash before the first
    file, a frame that never changes, and an end that is not detected."""
    whole = SyntheticRun(rounds=6, train_iters=68).write(tmp_path / "whole")
    terminal = Terminal("watch", str(tmp_path / "log"), "--seconds", "0.2")
    terminal.wait_for("waiting for")
    (tmp_path / "log").mkdir()
    contents = {path.name: path.read_bytes() for path in whole.iterdir()}
    (tmp_path / "log" / "run.json").write_bytes(contents.pop("run.json"))
    terminal.wait_for("No sync yet")
    for part in (1, 2):
        for name, content in contents.items():
            (tmp_path / "log" / name).write_bytes(content[: len(content) * part // 2])
        terminal.wait_for("running" if part == 1 else "6 syncs")
    assert terminal.end() == 0
    assert "iteration 68 of 68" in terminal.text and "Traceback" not in terminal.text


def test_watch_ends_on_ctrl_c(tmp_path: Path) -> None:
    """The exit code is 0, without a traceback."""
    SyntheticRun(train_iters=1000).write(tmp_path)
    terminal = Terminal("watch", str(tmp_path), "--seconds", "0.2")
    terminal.wait_for("30 syncs")
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize(
    "flags",
    [
        {},
        pytest.param({"edit_strategy": "ddp", "edit_sync_interval": None}, marks=pytest.mark.full),
        pytest.param(
            {"edit_strategy": "streaming-diloco", "edit_sync_interval": 4, "edit_delay_steps": 2},
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"edit_strategy": "a-edit", "edit_sync_seconds": 0.3, "edit_min_round_steps": 2,
             "edit_sync_interval": None},
            marks=pytest.mark.full,
        ),
    ],
    ids=["edit", "ddp", "streaming-diloco", "a-edit"],
)  # fmt: skip
def test_report_and_watch_follow_real_training(
    tmp_path: Path, flags: Flags, capsys: pytest.CaptureFixture[str]
) -> None:
    """Event files are read repeatedly during the run and at its end. Would catch a renamed field of
    the event files, and progress that does not reach the end."""
    states: list[str] = []
    over = threading.Event()

    def poll() -> None:
        watched = MonitoredRun(tmp_path)
        while not over.wait(0.05):
            watched.poll()
            states.append(watched.state)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        run_edit(tmp_path, 2, 2, train_iters=20, timeout=200, **flags)
    finally:
        over.set()
        poller.join()
    assert {"waiting", "running"} <= set(states) and "silent" not in states
    run = MonitoredRun(tmp_path)
    run.poll()
    assert run.state == "finished" and run.num_damaged == {}
    assert main(["report", str(tmp_path)]) == 0 and main(["watch", str(tmp_path)]) == 0
    message = capsys.readouterr()
    assert message.err == "" and "finished" in message.out
    sizes = json.loads((tmp_path / "run.json").read_text())["training"]
    assert sizes["train_iters"] == 20 and sizes["inside_bytes_per_step"] == 0  # one rank each
    if flags.get("edit_strategy") != "ddp":
        assert run.syncs.count == len((tmp_path / "sync.jsonl").read_text().splitlines()) > 0


def test_second_training_moves_earlier_files(tmp_path: Path) -> None:
    """In the same folder, with warm-up steps only. Would catch replicas that number the earlier
    files differently, and values of the earlier run in the page."""
    run_edit(tmp_path, 2, 2, train_iters=6)
    names = {path.name for path in tmp_path.glob("*.json*")}
    assert {"run.json", "sync.jsonl", "loss.jsonl", "replica-1.jsonl"} <= names
    (tmp_path / "loss.3.jsonl").touch()
    run_edit(tmp_path, 2, 2, train_iters=2)
    renamed = {path.name for path in tmp_path.glob("*.4.json*")}
    assert renamed == {name.replace(".json", ".4.json") for name in names}
    run = MonitoredRun(tmp_path)
    run.poll()
    assert run.syncs.count == 0 and run.iteration == 2 and run.state == "finished"
    assert run.losses[0].tolist() == [1, 2]
