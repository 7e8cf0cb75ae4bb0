"""Jobs of the batch scripts in scripts/slurm/, on a cluster of `tests.harness.slurm`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tests.harness.launch import REPOSITORY, RankResult
from tests.harness.slurm import Cluster, wait_until
from tests.harness.training import TrainResult, parse_console, tiny_gpt

SCRIPTS = REPOSITORY / "scripts" / "slurm"
PAUSED_SCRIPT = REPOSITORY / "tests" / "harness" / "pretrain_paused.py"
SECONDS = 300.0  # time-out for a job of about 10 s, on a busy machine
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@dataclass
class Run:
    """A folder from which jobs are submitted, with settings as environment variables.

    Attributes:
        settings: variables of settings.env by name.
    """

    cluster: Cluster
    folder: Path
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        edit = ["--use-edit", "--edit-warmup-steps", "2", "--edit-digest-interval", "1"]
        tiny = tiny_gpt(train_iters=12, edit_device="cpu")
        files = {
            "tiny.args": tiny,
            "edit.args": [*edit, "--edit-sync-interval", "3"],
            "a_edit.args": [*edit, "--edit-strategy", "a-edit", "--edit-sync-seconds", "0.2",
                            "--edit-min-round-steps", "2"],
            "elastic.args": [*edit, "--edit-sync-interval", "10"],
        }  # fmt: skip
        for name, words in files.items():
            (self.folder / name).write_text("# tiny\n" + "\n".join(words) + "\n")
        self.settings = {
            "EDIT_MODEL_FLAGS_FILE": "tiny.args", "EDIT_EDIT_FLAGS_FILE": "edit.args",
            "EDIT_A_EDIT_FLAGS_FILE": "a_edit.args", "EDIT_ELASTIC_FLAGS_FILE": "elastic.args",
            "EDIT_PYTHON": sys.executable,
            "EDIT_SCRIPT": str(PAUSED_SCRIPT), "EDIT_SAVE_INTERVAL": "4", "EDIT_DIR": "run",
            "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "PAUSE_DIR": str(self.folder),
        } | self.settings  # fmt: skip

    def sbatch(self, kind: str, *options: str) -> Job:
        """Submit a batch script with sbatch."""
        return self.submit_words("sbatch", "--parsable", *options, SCRIPTS / f"{kind}.sbatch")

    def submit(self, kind: str, *options: str) -> Job:
        """Submit with submit.sh."""
        return self.submit_words("bash", SCRIPTS / "submit.sh", kind, "--parsable", *options)

    def submit_words(self, *argv: str | Path) -> Job:
        """Run a command that prints the number of a job, and return the job."""
        output = self.cluster.call(*map(str, argv), cwd=self.folder, **self.settings)
        return Job(self.cluster, int(output), self.folder)

    def pause_at(self, step: int) -> None:
        """Make the ranks of the next job wait in a step (1-based) until `release`."""
        for note in self.folder.glob("paused-*"):
            note.unlink()
        (self.folder / "PAUSE").write_text(str(step))

    def wait_paused(self, ranks: int, job: Job) -> None:
        """Wait until `ranks` ranks have reached the step."""
        wait_until(lambda: len(list(self.folder.glob("paused-*"))) >= ranks, SECONDS, job.summary)

    def release(self) -> None:
        """Let the waiting ranks continue."""
        (self.folder / "PAUSE").unlink()

    def stops(self) -> list[Path]:
        """Return the marker files of job starts in which ranks were asked to stop."""
        return list((self.folder / "run" / "slurm").glob("*/stopped"))

    def journal(self, event: str) -> list[dict[str, Any]]:
        """The lines of the first journal of the hub for an event."""
        path = self.folder / "run" / "hub" / "1" / "journal.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]
        return [line for line in lines if line["event"] == event]

    def losses(self) -> dict[int, float]:
        """Read the mean losses over the replicas by iteration, of all job starts."""
        folder = self.folder / "run" / "log"
        before = sorted(folder.glob("loss.*.jsonl"), key=lambda path: int(path.suffixes[0][1:]))
        text = "".join(path.read_text() for path in [*before, folder / "loss.jsonl"])
        lines = map(json.loads, text.splitlines())
        return {x["iteration"]: x["loss"] for x in lines if "loss" in x}


@dataclass
class Job:
    """A submitted job; the id of a task of an array is ARRAY_TASK."""

    cluster: Cluster
    id: int | str
    folder: Path

    def fields(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`, of the first component if there are several."""
        text = self.cluster.call("scontrol", "show", "job", str(self.id), "--oneliner")
        return dict(word.partition("=")[::2] for word in text.splitlines()[0].split())

    def field(self, name: str) -> str:
        """Return one field of `scontrol show job`."""
        return self.fields()[name]

    @property
    def state(self) -> str:
        """State of the job as SLURM names it."""
        return self.field("JobState")

    @property
    def restarts(self) -> int:
        """Number of requeues."""
        return int(self.field("Restarts"))

    @property
    def exit_code(self) -> int:
        """Exit code of the batch script."""
        return int(self.field("ExitCode").partition(":")[0])

    @property
    def console(self) -> str:
        """Output of the job so far."""
        path = self.folder / f"slurm-{self.id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def parsed(self) -> TrainResult:
        """Parse Megatron's lines in the output."""
        return parse_console_text(self.console)

    def clear_begin_time(self) -> None:
        """Shorten the two minutes for which SLURM delays a requeued job to some seconds, not to
        none: a late message about the end of one start would end the next."""
        words = ("--noheader", f"--jobs={self.id}", "--format=%A", "--states=PENDING")
        components = self.cluster.call("squeue", *words).split()
        if isinstance(self.id, str):  # of a task; its number may be that of the whole array
            components = [self.id]
        for component in components:
            job = Job(self.cluster, component, self.folder)
            begin, soon = job.field("StartTime"), datetime.now() + timedelta(seconds=5)
            if begin != "Unknown" and begin > soon.isoformat():
                # where it waits for a node, this is an estimate: it may start before the update
                done = self.cluster.attempt(
                    "scontrol", "update", f"jobid={component}", "StartTime=now+3"
                )
                assert done.returncode == 0 or job.state != "PENDING", done.stderr

    def wait_for(self, *states: str, restarts: int = 0) -> None:
        """Wait for one of the states after `restarts` requeues; requeued jobs start at once."""

        def reached() -> bool:
            state = self.state
            if state == "PENDING" and self.field("Reason") == "BeginTime":
                self.clear_begin_time()
            return state in states and self.restarts >= restarts

        wait_until(reached, SECONDS, self.summary)

    def wait(self) -> str:
        """Wait for the end and return the state."""
        self.wait_for(*ENDED)
        return self.state

    def summary(self) -> str:
        """Return a summary for error messages."""
        lines = self.console.splitlines()
        lines = [x for x in lines[:-5] if not x.startswith("hub: commit")] + lines[-5:]
        head = (f"job {self.id}: {self.field('JobName')} {self.state}, exit code {self.exit_code}, "
                f"{self.restarts} restarts")  # fmt: skip
        return "\n".join([head, *(f"    {line[:160]}" for line in lines[-60:])])


def parse_console_text(text: str) -> TrainResult:
    """Parse one log like `parse_console`."""
    return parse_console([RankResult(0, 0, text, "", None)])
