"""Run the tests of the batch scripts on a real SLURM, and write down how they and their jobs ended.

    python benchmarks/slurm_log.py

Writes the page `benchmarks/results/slurm_<year><month>.md` and the same as JSON beside it; the log,
with what each job said, goes to `benchmarks/out/`, which git ignores. Exit code 1 where a test
failed or was skipped. Takes ten minutes.
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

from frame.launch import BENCHMARKS
from frame.launch import REPOSITORY as ROOT
from frame.page import table
from frame.study import write_series

TESTS = "tests/system/test_slurm.py"
TEST = re.compile(r"^tests/\S+::(\S+) (PASSED|FAILED|ERROR|SKIPPED)")
JOB = re.compile(
    r"^tests/\S+::(\S+) \(\w+\)\njob (.*)$", re.M
)  # as tests/harness/slurm_jobs.py tells
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


def rows_of(outcomes: list[str], told: str) -> list[dict[str, str]]:
    """Each test, how it ended, and how its jobs did."""
    jobs: dict[str, list[str]] = {}
    for test, job in JOB.findall(told):
        jobs.setdefault(test, []).append(job)
    found = (TEST.match(line) for line in outcomes)
    return [{"test": one[1], "outcome": one[2].lower(), "jobs": "; ".join(jobs.get(one[1], []))}
            for one in found if one]  # fmt: skip


def page(date: str, on: list[str], rows: list[dict[str, str]], summary: str) -> str:
    """For people."""
    lines = table(("test", "outcome", "jobs"), [list(row.values()) for row in rows])
    head = f"# The batch scripts on a real SLURM, {date}"
    how = "    python benchmarks/slurm_log.py"
    return "\n\n".join([head, how, f"{', '.join(on)}. {summary.strip(' =')}.", lines]) + "\n"


def main() -> int:
    """Run, write, tell."""
    today = datetime.date.today()
    with tempfile.TemporaryDirectory() as folder:
        stories = Path(folder) / "stories"
        stories.touch()
        output = run_tests(stories)
        told = without_paths(stories.read_text(encoding="utf-8"))
    outcomes = [found.group() for found in OUTCOME.finditer(without_paths(output))]
    on, summary = versions(), outcomes[-1] if outcomes else "no test ran"
    log = BENCHMARKS / "out" / f"slurm_{today:%Y%m}.log"
    log.parent.mkdir(exist_ok=True)
    lines = [f"{TESTS} --full, {today}", "", *on, "", *outcomes, "", "Jobs:", "", told]
    log.write_text("\n".join(lines), encoding="utf-8")
    write(today, on, rows_of(outcomes, told), summary)
    print(f"{log.relative_to(ROOT)}: {summary}")
    return 0 if re.fullmatch(r"=+ \d+ passed in .*", summary) else 1


def write(date: datetime.date, on: list[str], rows: list[dict[str, str]], summary: str) -> None:
    """The page and its JSON file."""
    output = BENCHMARKS / "results" / f"slurm_{date:%Y%m}.json"
    series = {"date": f"{date}", "versions": on, "tests": rows, "summary": summary.strip(" =")}
    write_series(output, "slurm", {"all": series})
    output.with_suffix(".md").write_text(page(f"{date}", on, rows, summary), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
