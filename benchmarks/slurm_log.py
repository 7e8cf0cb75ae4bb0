"""Run the tests of the batch scripts on a real SLURM, and write a log of it to be kept.

    python benchmarks/slurm_log.py

The log, `benchmarks/results/slurm_<year><month>.log`, has versions, pytest's line for each test,
and what each job said. Exit code 1 where a test failed or was skipped. Takes ten minutes.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = "tests/system/test_slurm.py"
OUTCOME = re.compile(r"^tests/\S+::.* (PASSED|FAILED|ERROR|SKIPPED).*|^=+ .* in [\d.]+s.*=+$", re.M)


def versions() -> list[str]:
    """Of what took part."""
    programs = [("slurmd", "-V"), ("munged", "--version")]
    lines = []
    for argv in programs:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
        lines.append(done.stdout.splitlines()[0])
    lines += [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "megatron-core")]
    return [*lines, f"Python {platform.python_version()}, {os.cpu_count()} CPU cores"]


def run_tests(stories: Path) -> str:
    """What pytest says."""
    env = os.environ | {
        "MEGATRON_EDIT_SLURM_LOG": str(stories), "COLUMNS": "100",
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", TESTS, "--full", "-v", "--color=no"],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, timeout=3000, check=False,
    )  # fmt: skip
    return done.stdout


def without_paths(text: str) -> str:
    """The log says what happened, not on whose machine."""
    for path, name in ((str(ROOT), "<repository>"), (sys.prefix, "<venv>")):
        text = text.replace(path, name)
    text = re.sub(
        r"/\S*/(?:pytest-of-\w+|slurm-\w+)/\S*?(?=[\s;:,)]|$)", "<folder>", text, flags=re.M
    )
    return re.sub(r"/(?:opt|usr|tmp|home|root)/\S*/(?=\w)", "<path>/", text)


def main() -> int:
    """Run, write, tell."""
    today = datetime.date.today()
    with tempfile.TemporaryDirectory() as folder:
        stories = Path(folder) / "stories"
        stories.touch()
        output = run_tests(stories)
        told = stories.read_text(encoding="utf-8")
    outcomes = [found.group() for found in OUTCOME.finditer(output)]
    text = "\n".join(
        [f"{TESTS} --full, {today}", "", *versions(), "", *outcomes, "", "Jobs:", "", told]
    )
    log = ROOT / "benchmarks" / "results" / f"slurm_{today:%Y%m}.log"
    log.write_text(without_paths(text), encoding="utf-8")
    print(f"{log.relative_to(ROOT)}: {outcomes[-1] if outcomes else output[-2000:]}")
    return 0 if outcomes and re.fullmatch(r"=+ \d+ passed in .*", outcomes[-1]) else 1


if __name__ == "__main__":
    sys.exit(main())
