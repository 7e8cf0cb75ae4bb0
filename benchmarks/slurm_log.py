"""Run the tests of the batch scripts on a real SLURM, and record the outcome of tests and jobs.

    python benchmarks/slurm_log.py

Writes the page `benchmarks/results/slurm_<year><month>.md` and a JSON file with the same content.
The log, with the output of each job, goes to `benchmarks/out/`, which git ignores. The exit code is
1 where a test failed or was skipped. Takes ten minutes.
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
)  # as tests/harness/slurm_jobs.py writes it
OUTCOME = re.compile(r"^tests/\S+::.* (PASSED|FAILED|ERROR|SKIPPED).*|^=+ .* in [\d.]+s.*=+$", re.M)


def versions() -> list[str]:
    """Return the versions of all components."""
    programs = [("slurmd", "-V"), ("munged", "--version")]
    lines = []
    for argv in programs:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
        lines.append(done.stdout.splitlines()[0])
    lines += [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "megatron-core")]
    return [*lines, f"Python {platform.python_version()}, {os.cpu_count()} CPU cores"]


def run_tests(job_log_file: Path) -> str:
    """Run the tests and return the output of pytest."""
    env = os.environ | {
        "MEGATRON_EDIT_SLURM_LOG": str(job_log_file), "COLUMNS": "100",
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", TESTS, "--full", "-v", "--color=no"],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, timeout=3000, check=False,
    )  # fmt: skip
    return done.stdout


def without_paths(text: str) -> str:
    """Replace the paths of this machine in a text."""
    for path, name in ((str(ROOT), "<repository>"), (sys.prefix, "<venv>")):
        text = text.replace(path, name)
    text = re.sub(
        r"/\S*/(?:pytest-of-\w+|slurm-\w+)/\S*?(?=[\s;:,)]|$)", "<folder>", text, flags=re.M
    )
    return re.sub(r"/(?:opt|usr|tmp|home|root)/\S*/(?=\w)", "<path>/", text)


def make_rows(outcomes: list[str], job_log: str) -> list[dict[str, str]]:
    """Return a row for each test: its outcome, and those of its jobs."""
    jobs: dict[str, list[str]] = {}
    for test, job in JOB.findall(job_log):
        jobs.setdefault(test, []).append(job)
    found = (TEST.match(line) for line in outcomes)
    return [{"test": one[1], "outcome": one[2].lower(), "jobs": "; ".join(jobs.get(one[1], []))}
            for one in found if one]  # fmt: skip


def page(date: str, on: list[str], rows: list[dict[str, str]], summary: str) -> str:
    """Return the Markdown page."""
    lines = table(("test", "outcome", "jobs"), [list(row.values()) for row in rows])
    head = f"# The batch scripts on a real SLURM, {date}"
    how = "    python benchmarks/slurm_log.py"
    return "\n\n".join([head, how, f"{', '.join(on)}. {summary.strip(' =')}.", lines]) + "\n"


def main() -> int:
    """Run the tests, and write the log and the page."""
    today = datetime.date.today()
    with tempfile.TemporaryDirectory() as folder:
        job_log_file = Path(folder) / "jobs"
        job_log_file.touch()
        output = run_tests(job_log_file)
        job_log = without_paths(job_log_file.read_text(encoding="utf-8"))
    outcomes = [found.group() for found in OUTCOME.finditer(without_paths(output))]
    on, summary = versions(), outcomes[-1] if outcomes else "no test ran"
    log = BENCHMARKS / "out" / f"slurm_{today:%Y%m}.log"
    log.parent.mkdir(exist_ok=True)
    lines = [f"{TESTS} --full, {today}", "", *on, "", *outcomes, "", "Jobs:", "", job_log]
    log.write_text("\n".join(lines), encoding="utf-8")
    write(today, on, make_rows(outcomes, job_log), summary)
    print(f"{log.relative_to(ROOT)}: {summary}")
    return 0 if re.fullmatch(r"=+ \d+ passed in .*", summary) else 1


def write(date: datetime.date, on: list[str], rows: list[dict[str, str]], summary: str) -> None:
    """Write the page and its JSON file."""
    output = BENCHMARKS / "results" / f"slurm_{date:%Y%m}.json"
    series = {"date": f"{date}", "versions": on, "tests": rows, "summary": summary.strip(" =")}
    write_series(output, "slurm", {"all": series})
    output.with_suffix(".md").write_text(page(f"{date}", on, rows, summary), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
