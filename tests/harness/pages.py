"""The commands of the documents, and a shell in which those of a page run in their order."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness.launch import REPOSITORY

DOCUMENTS = [
    *(REPOSITORY / place / "README.md" for place in (".", "configs", "patches")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
SHELLS = ("sh", "bash", "shell", "console")
NOT_RUN = "Not run by the tests: "
_FENCE = re.compile(r"(?:^\*([^\n]*)\*\n+)?^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_END = "@@ end of the block"


@dataclass(frozen=True)
class Command:
    """A command of a document."""

    document: str
    line: str

    def __str__(self) -> str:
        return f"{self.document}: {self.line}"

    @property
    def words(self) -> list[str]:
        """Words of the command as the shell splits it, without leading variable assignments."""
        words = shlex.split(self.line)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return words


@dataclass(frozen=True)
class Block:
    """A fence of a document.

    Attributes:
        document: its path.
        language: named at the fence.
        text: its lines.
        not_run: why the tests do not run it, as the document says above it; else empty.
    """

    document: str
    language: str
    text: str
    not_run: str

    @property
    def commands(self) -> list[str]:
        """The commands, with continued lines joined, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def fences(path: Path) -> list[Block]:
    """Return all fences of a document."""
    name = path.relative_to(REPOSITORY).as_posix()
    return [
        Block(name, language, textwrap.dedent(text),
              above.removeprefix(NOT_RUN).rstrip(".") if above.startswith(NOT_RUN) else "")
        for above, _, language, text in _FENCE.findall(path.read_text(encoding="utf-8"))
    ]  # fmt: skip


def blocks(path: Path) -> list[Block]:
    """Return the blocks of commands of a document."""
    return [block for block in fences(path) if block.language in SHELLS]


def commands(*parts: str, document: str = "") -> list[Command]:
    """Return the distinct commands that contain one of these parts, of one document or all."""
    found = {line: Command(block.document, line) for path in DOCUMENTS for block in blocks(path)
             if document in ("", block.document) for line in block.commands
             if any(part in line for part in parts)}  # fmt: skip
    assert found, f"no command with {parts}: has the parser of documents lost them?"
    return list(found.values())


class Shell:
    """One bash in which blocks run one after the other; it keeps folder and variables.

    A command that fails ends it, as `set -e` says.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._log = folder.with_name(f"{folder.name}.log")
        with self._log.open("wb") as log:
            self._bash = subprocess.Popen(
                ["bash", "-e"], cwd=folder, env=dict(environment), stdin=subprocess.PIPE,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def run(self, text: str, seconds: float = 400) -> str:
        """Run the text of a block, which must succeed in time, and return what it printed.

        Launches of several replicas run at the same time, as on several machines.
        """
        if text.count("--edit-replica-id ") > 1:
            launches = Block("", "", text, "").commands
            waits = 'for job in $(jobs -p); do wait "$job"; done'
            text = "\n".join([*(f"{launch} &" for launch in launches), waits])
        assert self._bash.stdin is not None
        before = len(self._output())
        self._bash.stdin.write(f"{{ {text}\n}} </dev/null; echo '{_END}'\n".encode())
        self._bash.stdin.flush()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            has_ended = self._bash.poll() is not None
            shown, mark, _ = self._output()[before:].partition(_END)
            if mark:
                return shown
            assert not has_ended, f"exit code {self._bash.returncode} of\n{text}\n{shown[-8000:]}"
            time.sleep(0.1)
        raise AssertionError(f"not done after {seconds} s:\n{text}\n{self._output()[-8000:]}")

    def _output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the shell and all that it has started."""
        for process in list(_with_children(self._bash.pid)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._bash.wait()


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    with suppress(psutil.NoSuchProcess):
        yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
