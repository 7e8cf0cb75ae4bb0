"""The share of the full tier that CI runs: every case is in one share; the commit chooses it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.launch import REPOSITORY
from tests.harness.shares import Share, share_of_each

pytestmark = pytest.mark.timeout(300)  # collecting all tests imports Megatron
SECONDS = 280
COUNT = 8
FULL_CASES = """
import pytest

@pytest.mark.full
@pytest.mark.parametrize("case", range({cases}))
def test_full(case): ...

def test_core(): ...
"""
# In place of the environment's interpreter: records its command lines.
STUB = '#!/bin/bash\necho "$*" >>"$CALLS"\n'


def run(argv: list[str], folder: Path, **env: str) -> str:
    """Run a command that must succeed; returns its standard output and error."""
    done = subprocess.run(
        argv, cwd=folder, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.full
def test_each_full_case_is_in_one_of_equal_shares() -> None:
    """Would catch: a case in no share, and a share that is much larger than another."""
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--full", "-m", "full"]
    names = [line for line in run(argv, REPOSITORY).splitlines() if "::" in line]
    shares = share_of_each(names, COUNT)
    assert len(names) > 400 and shares.keys() == set(names)
    sizes = Counter(shares.values())
    assert sorted(sizes) == list(range(1, COUNT + 1))
    assert max(sizes.values()) < 1.3 * len(names) / COUNT


def test_shares_run_each_full_case_once(tmp_path: Path) -> None:
    """Real runs of pytest with our conftest.py. Would catch: an option that selects nothing."""
    for name in ("pyproject.toml", "tests/conftest.py", "tests/harness/shares.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((REPOSITORY / name).read_bytes())
    (tmp_path / "tests/harness/__init__.py").write_text("def shut_down() -> None: ...\n")
    for name, cases in (("a", 5), ("b", 3), ("c", 1)):
        (tmp_path / "tests" / f"test_{name}.py").write_text(FULL_CASES.format(cases=cases))
    ran: Counter[str] = Counter()
    for number in range(1, 4):
        output = run(
            [sys.executable, "-m", "pytest", "-v", "--full-share", f"{number}/3"],
            tmp_path,
            PYTHONPATH=str(tmp_path),
        )
        passed = [line.split()[0] for line in output.splitlines() if " PASSED" in line]
        full = [name for name in passed if "test_full" in name]
        assert len(passed) == len(full) + 3, output
        assert f"full tier: share {number} of 3, {len(full)} of its cases in this part" in output
        ran.update(full)
    assert len(ran) == 9 and set(ran.values()) == {1}


def script(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Copy scripts/test.sh next to a stub of the environment; returns its command and variables."""
    scripts = folder / "scripts"
    scripts.mkdir()
    (scripts / "test.sh").write_bytes((REPOSITORY / "scripts" / "test.sh").read_bytes())
    stub = folder / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    (scripts / "setup.sh").write_text(f"echo {stub}\n")
    return ["bash", "scripts/test.sh", "--rotating"], {"CALLS": str(folder / "calls")}


def test_commit_chooses_the_share(tmp_path: Path) -> None:
    """The first eight hexadecimal digits of the commit modulo 8, plus 1; in both tiers."""
    argv, env = script(tmp_path)
    user = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    run(["git", "init", "-q"], tmp_path)
    run(["git", *user, "commit", "-q", "--allow-empty", "-m", "first"], tmp_path)
    commit = run(["git", "rev-parse", "HEAD"], tmp_path).strip()
    number = int(commit[:8], 16) % COUNT + 1
    for tier, num_parts in (([], 1), (["--system"], 3)):
        (tmp_path / "calls").unlink(missing_ok=True)
        output = run([*argv, *tier], tmp_path, **env)
        assert f"full tier: share {number} of 8, chosen by commit {commit[:7]}" in output
        calls = (tmp_path / "calls").read_text().splitlines()
        pytests = [call for call in calls if "-m pytest" in call]
        assert len(pytests) == num_parts
        assert all(f"--full-share {number}/8" in call for call in pytests)
        assert all("--system" in call for call in pytests) == bool(tier)


@pytest.mark.parametrize("text", ["", "3", "0/8", "9/8", "a/8", "1/0", "-1/8"])
def test_share_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="must be K/N with 1 <= K <= N"):
        Share.parse(text)
