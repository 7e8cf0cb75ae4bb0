"""The commands of docs/elastic.md, on this machine: the page's start, and its checks.

Would catch commands that do not work as the page shows them: a replica that is killed and does not
come back, and a run that `hub stop` does not end.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness.launch import REPOSITORY
from tests.harness.pages import blocks
from tests.harness.ports import free_ports
from tests.harness.torch_groups import HAS_GROUPS
from tests.system.test_docs import ELASTIC, ENVIRONMENT, as_check, commands_of_kind, run

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14"),
]
ADDRESS = "127.0.0.1:29600"  # of the page
PROGRAMS = {
    "torchrun": f"{shlex.quote(sys.executable)} -m torch.distributed.run",
    "megatron-edit": f"{shlex.quote(sys.executable)} -m megatron_edit",
}
# Flags at the end override earlier ones: a smaller model, and more steps than the test waits for.
SIZES = "--train-iters 100000 --num-layers 1 --hidden-size 64"


@dataclass
class Terminals:
    """Runs commands as in the terminals of a reader, each in a process group of its own.

    Attributes:
        folder: with what the commands name.
        port: of the hub.
    """

    folder: Path
    port: int
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def line(self, line: str) -> str:
        """A command of the page for this machine."""
        program, _, rest = line.partition(" ")
        rest = rest.replace(ADDRESS, f"127.0.0.1:{self.port}")
        return f"{PROGRAMS[program]} {rest}"

    def start(self, name: str, line: str) -> None:
        """Run a command in a terminal."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                ["bash", "-c", f"exec {self.line(line)}"], cwd=self.folder, env=ENVIRONMENT,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def close(self, name: str) -> None:
        """Kill what runs in a terminal, ranks included: torchrun gives each a group of its own."""
        process = self.started.pop(name)
        for pid in [process.pid, *ranks_of(process.pid)]:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        process.wait()

    def journal(self, event: str) -> list[dict[str, Any]]:
        """The lines of the journal for an event."""
        path = self.folder / "hub" / "journal.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]
        return [line for line in lines if line["event"] == event]

    def wait_for(self, condition: Callable[[], object], seconds: float = 240) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            logs = {path.name: path.read_text()[-1500:] for path in self.folder.glob("*.log")}
            assert time.monotonic() < end, logs
            time.sleep(0.1)

    def wait_for_members(self, *members: str) -> None:
        """Wait for another commit, by these members."""
        before = len(self.journal("commit"))
        self.wait_for(
            lambda: (
                [line["members"] for line in self.journal("commit")[before:]][-1:]
                == [list(members)]
            )
        )


def ranks_of(torchrun: int) -> list[int]:
    """The processes that a process has started."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    """Terminals in a folder with the corpus of the page."""
    for name in ("scripts", "configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (install,) = commands_of_kind("torch")
    run([sys.executable, "-m", *install.words, "--no-index"])  # it is there
    (command,) = (c for c in commands_of_kind("corpus") if c.words[-1] == "corpus")
    run([sys.executable, *command.words[1:], "--max-megabytes", "0.4"], cwd=tmp_path)
    terminals = Terminals(tmp_path, free_ports(1)[0])
    try:
        yield terminals
    finally:
        for name in list(terminals.started):
            terminals.close(name)


def test_all_commands_of_the_page_are_known() -> None:
    """Would catch a new command that no test runs. The kinds are run below."""
    kinds = [command.line for kind in ELASTIC for command in commands_of_kind(kind)]
    page = [x for b in blocks(REPOSITORY / "docs/elastic.md") for x in b.commands]
    assert sorted(set(kinds)) == sorted(set(page))


def hub_commands() -> dict[str, str]:
    """The page's commands of `megatron-edit hub` for one machine, by what they do."""
    lines = [c.line for c in commands_of_kind("hub") if ADDRESS in c.line]
    return {shlex.split(line)[2]: line for line in lines}


@pytest.mark.parametrize(
    ("is_clone", "ranks"),
    [
        pytest.param(False, 1, id="own script"),
        pytest.param(True, 2, id="Megatron-LM's script, two ranks", marks=pytest.mark.clone),
        pytest.param(False, 2, id="own script, two ranks", marks=pytest.mark.full),
        pytest.param(
            True, 1, id="Megatron-LM's script", marks=[pytest.mark.clone, pytest.mark.full]
        ),
    ],
)
def test_start_of_the_page(
    terminals: Terminals, request: pytest.FixtureRequest, is_clone: bool, ranks: int
) -> None:
    """A replica whose terminal is closed is lost, and returns with the same command, which loads a
    checkpoint; one whose ranks are killed is started again by torchrun; a third one joins; after
    the loss of all, they begin again with the checkpoint. Only names, sizes and addresses differ
    from the page."""
    hub = hub_commands()
    assert set(hub) == {"--state-dir", "status", "stop"}
    (replica,) = commands_of_kind("replica")
    command = replica.line.replace("--standalone", f"--standalone --nproc-per-node {ranks}")
    if is_clone:
        script = request.getfixturevalue("megatron_clone") / "pretrain_gpt.py"
        command = command.replace("scripts/pretrain_gpt.py", shlex.quote(str(script)))
    assert "--save checkpoints --load checkpoints --save-interval 40 " in command
    lines = {
        name: command.replace("--edit-replica-name a", f"--edit-replica-name {name} {SIZES}")
        for name in "abc"
    }

    def start(*names: str) -> None:
        for name in names:
            terminals.start(name, lines[name])

    terminals.start("hub", hub["--state-dir"])
    start("a", "b")
    tracker = terminals.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    terminals.wait_for(tracker.exists)
    terminals.close("b")
    terminals.wait_for_members("a")
    start("b")
    terminals.wait_for_members("a", "b")
    assert [line["reason"] for line in terminals.journal("leave")] == ["lost"]

    torchrun = terminals.started["b"].pid
    for pid in ranks_of(torchrun):
        os.kill(pid, signal.SIGKILL)
    terminals.wait_for_members("a")
    terminals.wait_for_members("a", "b")
    assert terminals.started["b"].pid == torchrun and terminals.started["b"].poll() is None

    start("c")
    terminals.wait_for_members("a", "b", "c")
    for name in "abc":
        terminals.close(name)
    terminals.wait_for(lambda: len(terminals.journal("leave")) == 5)
    start("a", "b", "c")
    terminals.wait_for_members("a", "b", "c")

    status = run(["bash", "-c", terminals.line(hub["status"])], cwd=terminals.folder)
    assert "members of the epoch: a, b, c; leader: " in status, status
    run(["bash", "-c", terminals.line(hub["stop"])], cwd=terminals.folder)
    assert [terminals.started[name].wait(120) for name in "abc"] == [0, 0, 0]
    (end,) = terminals.journal("end")
    assert end["exit_code"] == 0
    last = terminals.journal("commit")[-1]
    assert int(tracker.read_text()) == last["samples"] // 16 and last["is_over"]
    terminals.started["hub"].terminate()
    assert terminals.started["hub"].wait(30) == 0


def test_commands_for_several_machines_are_valid(tmp_path: Path) -> None:
    """The hub accepts its flags with the token that the page makes, and `check` those of a replica.
    Would catch a renamed flag."""
    (token,) = commands_of_kind("token")
    run(["bash", "-c", token.line], cwd=tmp_path)
    (command,) = (c for c in commands_of_kind("hub") if "--min-replicas" in c.words)
    words = command.words[1:]
    words[words.index("--listen") + 1] = "127.0.0.1:0"
    hub = subprocess.Popen(
        [sys.executable, "-m", "megatron_edit", *words], cwd=tmp_path, env=ENVIRONMENT,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert hub.stdout is not None
        assert hub.stdout.readline().startswith("hub: listening on 127.0.0.1:")
    finally:
        hub.terminate()
        hub.wait(30)
    argvs = [as_check(command) for command in commands_of_kind("elastic check")]
    code = (
        "import sys; from megatron_edit.tools.cli import main;"
        f"sys.exit(max(main(argv) for argv in {argvs!r}))"
    )
    output = run([sys.executable, "-c", code], cwd=tmp_path)
    assert output.count("ok: replica a of an elastic run, which begins with 4 replicas") == 2
