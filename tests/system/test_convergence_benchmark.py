"""benchmarks/convergence.py: its questions, and a small run of one of them.

Would catch: a question whose flags this version refuses, and one that compares an entry with
itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import convergence
import pytest

from megatron_edit.tools.cli import compare
from tests.harness.launch import REPOSITORY

QUESTIONS = list(convergence.questions())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a small corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    convergence.prepare(folder, megabytes=0.4)
    return folder


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_all_runs_of_a_question_are_accepted(
    question: convergence.Question, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By EDiT's and Megatron's own checks; each entry has a run for each seed."""
    words = ["--list", "--output", str(tmp_path), "--corpus", str(corpus)]
    given = convergence.compare_words(question, convergence.parse(words))[1:]
    parser = argparse.ArgumentParser()
    compare.configure(parser)
    options, rest = parser.parse_known_args(given)
    assert compare.run(options, rest) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 3 * len(question.entries)
    assert all(line.endswith(": to be run") for line in listed)


def test_unknown_questions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        convergence.parse(["--only", "wire,nonsense"])
    assert stop.value.code == 2 and "--only nonsense: must be of " in capsys.readouterr().err


@pytest.mark.full
def test_small_run_has_a_page(tmp_path: Path, corpus: Path) -> None:
    """The second command finds the finished runs."""
    argv = [sys.executable, str(REPOSITORY / "benchmarks" / "convergence.py"), "--quick",
            "--only", "warm-up", "--seeds", "1", "--output", str(tmp_path / "out"),
            "--corpus", str(corpus)]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| edit |" in (tmp_path / "out" / "warm-up" / "compare.md").read_text()
    again = subprocess.run([*argv, "--list"], capture_output=True, text=True, timeout=100)
    assert again.stdout.count(": finished") == 3, again.stdout + again.stderr
