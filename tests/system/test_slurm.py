"""The batch scripts on a real SLURM cluster of two nodes, which this file starts and stops.

Needs root and the programs of SLURM and munge (Debian: slurmctld slurmd slurm-client munge).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness.launch import REPOSITORY
from tests.harness.pages import commands
from tests.harness.slurm import Cluster, unavailable_reason, wait_until
from tests.harness.slurm_jobs import SCRIPTS, SECONDS, Job, Run
from tests.harness.torch_groups import HAS_GROUPS

UNAVAILABLE = unavailable_reason()
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE),
]
full = pytest.mark.full


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start a cluster of two nodes, in a folder with a short path for its socket."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with Cluster(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path) -> Run:
    """Make a run for one test."""
    return Run(cluster, tmp_path)


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run EDiT in a single launch on two nodes without interruption."""
    run = Run(cluster, tmp_path_factory.mktemp("whole"))
    assert_completed(run.sbatch("edit"))
    return run


def assert_completed(job: Job, restarts: int = 0) -> None:
    """Check that a job completed after the expected number of restarts."""
    assert job.wait() == "COMPLETED", job.summary()
    assert job.restarts == restarts, job.summary()


def assert_same(run: Run, whole: Run) -> None:
    """Check that all losses are equal and all samples are consumed."""
    assert run.losses() == whole.losses()
    assert len(run.losses()) == 12


# ---- completed jobs


def test_edit_in_single_launch_completes(whole: Run) -> None:
    """Two nodes with a replica each. Would catch a batch script that does not start."""
    assert len(whole.losses()) == 12
    assert (whole.folder / "run/checkpoints/iter_0000012/edit/edit.json").is_file()


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Job]]:
    """Submit a job of each other kind concurrently, as start-up takes most of their time."""
    names = ("ddp", "edit_per_replica", "a_edit_mixed", "in_one_job")
    runs = {name: Run(cluster, tmp_path_factory.mktemp(name)) for name in names}
    shutil.copytree(SCRIPTS, runs["in_one_job"].folder / "scripts/slurm")
    script = runs["in_one_job"].folder / "scripts/slurm/edit_per_replica.sbatch"
    before, _, after = script.read_text().partition("#SBATCH hetjob\n")
    script.write_text(before + after[after.index("set ") :])
    submitted = {
        "ddp": runs["ddp"].sbatch("ddp"),
        "edit_per_replica": runs["edit_per_replica"].submit("edit_per_replica"),
        "a_edit_mixed": runs["a_edit_mixed"].sbatch("a_edit_mixed"),
        "in_one_job": runs["in_one_job"].submit_words("sbatch", "--parsable", "--nodes=2", script),
    }
    return {name: (runs[name], job) for name, job in submitted.items()}


@full
def test_ddp_baseline_completes(jobs: dict[str, tuple[Run, Job]]) -> None:
    """Stock Megatron on two nodes."""
    run, job = jobs["ddp"]
    assert_completed(job)
    assert job.parsed().consumed_samples[12] == 96
    assert not (run.folder / "run/log").exists()


@full
@pytest.mark.parametrize("name", ["edit_per_replica", "in_one_job"])
def test_one_launch_per_replica_has_equal_losses(
    jobs: dict[str, tuple[Run, Job]], whole: Run, name: str
) -> None:
    """A heterogeneous job by submit.sh, and the alternative in docs/slurm.md for clusters without
    such jobs, both have the losses of a single launch."""
    run, job = jobs[name]
    assert_completed(job)
    assert ("HetJobId" in job.fields()) == (name == "edit_per_replica")
    assert_same(run, whole)


@full
def test_aedit_on_mixed_partitions_completes(jobs: dict[str, tuple[Run, Job]]) -> None:
    """One component per partition, and one replica per component."""
    run, job = jobs["a_edit_mixed"]
    assert_completed(job)
    assert (run.folder / "run/log/replica-1.jsonl").is_file()
    assert "2 replicas of 1 nodes, partitions fast slow" in job.console


# ---- interrupted jobs


@full
def test_preempted_job_resumes(run: Run, whole: Run) -> None:
    """An urgent job takes the nodes: SLURM stops the ranks, and the run resumes later."""
    run.pause_at(7)
    job = run.sbatch("edit")
    run.wait_paused(2, job)
    urgent = run.cluster.call("sbatch", "--parsable", "--partition=urgent", "--nodes=2",
                              "--exclusive", "--wrap=sleep 1", cwd=run.folder)  # fmt: skip
    wait_until(lambda: bool(run.stops()), 100, job.summary)
    run.release()
    job.wait_for("PENDING", "COMPLETED", restarts=1)
    assert_completed(Job(run.cluster, int(urgent), run.folder))
    assert_completed(job, restarts=1)
    assert "stopping after iteration 7" in job.console or "checkpoint of iteration 7" in job.console
    assert_same(run, whole)


@full
def test_job_near_time_limit_is_requeued(run: Run, whole: Run) -> None:
    """SLURM signals the batch script of a het job: all components save, are requeued and resume.

    On a busy machine the signal may come before training, and again after the first restart.
    """
    run.pause_at(7)
    run.settings |= {"EDIT_TIME_LIMIT": "3", "EDIT_SIGNAL_LEAD_SECONDS": "60"}
    job = run.submit("edit_per_replica")
    wait_until(lambda: bool(run.stops()), 200, job.summary)
    run.release()
    assert job.wait() == "COMPLETED" and job.restarts >= 1, job.summary()
    assert "USR1: the run was stopped; queued again" in job.console
    assert_same(run, whole)


@full
def test_stopped_ddp_baseline_resumes(run: Run) -> None:
    """Stopped by hand as in docs/slurm.md, stock Megatron consumes every sample once."""
    run.pause_at(7)
    job = run.sbatch("ddp")
    run.wait_paused(2, job)
    (command,) = commands("scancel")
    run.cluster.call(*(str(job.id) if word == "JOB" else word for word in command.words))
    wait_until(lambda: bool(run.stops()), 100, job.summary)
    run.release()
    assert_completed(job, restarts=1)
    samples = job.parsed().consumed_samples
    assert [samples[i] for i in range(1, 13)] == [8 * i for i in range(1, 13)]


@full
def test_job_resumes_after_node_failure(run: Run, whole: Run) -> None:
    """A node's ranks and slurmd are killed; the job resumes from the newest checkpoint.

    SLURM may allocate the node again before it is ready, which causes more restarts.
    """
    run.settings["EDIT_MAX_FAILURES"] = "9"
    run.pause_at(7)
    job = run.sbatch("edit")
    run.wait_paused(2, job)
    run.cluster.fail_node("n2")
    run.release()
    try:
        job.wait_for("PENDING", restarts=1)
    finally:
        run.cluster.start_node("n2")
    assert job.wait() == "COMPLETED", job.summary()
    assert_same(run, whole)


# ---- elastic runs


def ranks_of(run: Run, task: int) -> list[psutil.Process]:
    """The ranks of a task of an array, as torchrun has started them last."""
    return [
        process
        for process, env in run.cluster.processes()
        if env.get("SLURM_ARRAY_TASK_ID") == str(task) and "TORCHELASTIC_RUN_ID" in env
    ]


def wait_for_commit(run: Run, members: list[str], jobs: list[Job], *, more: int = 1) -> None:
    """Wait until so many more rounds are committed, the last of them by these members."""
    before = len(run.journal("commit"))

    def committed() -> bool:
        for job in jobs:  # which SLURM would otherwise start two minutes after a requeue
            if job.state == "PENDING":
                job.clear_begin_time()
        commits = run.journal("commit")
        return len(commits) >= before + more and commits[-1]["members"] == members

    wait_until(committed, SECONDS, lambda: "\n".join(job.summary() for job in jobs))


@full
@pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
def test_tasks_of_elastic_array_are_lost_and_return(run: Run) -> None:
    """A rank that was frozen ends with exit code 5, and torchrun starts it again; a task that is
    requeued comes back as well, and so does the hub. The other task trains on, and no sample is
    lost."""
    run.settings |= {
        "EDIT_SCRIPT": str(REPOSITORY / "scripts" / "pretrain_gpt.py"),
        "EDIT_EXTRA_FLAGS": "--train-iters 100000", "EDIT_SAVE_INTERVAL": "1000000",
    }  # fmt: skip
    hub, array = run.submit("hub"), run.submit("elastic")
    tasks = [Job(run.cluster, f"{array.id}_{task}", run.folder) for task in (0, 1)]
    jobs = [hub, *tasks]
    wait_for_commit(run, ["0", "1"], jobs)

    (rank,) = ranks_of(run, 1)
    rank.suspend()
    wait_for_commit(run, ["0"], jobs)
    rank.resume()
    wait_for_commit(run, ["0", "1"], jobs)
    assert "exitcode: 5" in tasks[1].console and tasks[1].restarts == 0, tasks[1].summary()

    run.cluster.call("scontrol", "requeue", str(tasks[1].id))
    wait_for_commit(run, ["0"], jobs)
    wait_for_commit(run, ["0", "1"], jobs)
    assert (tasks[0].restarts, tasks[1].restarts) == (0, 1)

    run.cluster.call("scontrol", "requeue", str(hub.id))
    wait_until(lambda: hub.restarts == 1, SECONDS, hub.summary)
    wait_for_commit(run, ["0", "1"], jobs)
    assert run.journal("open")[-1]["term"] == 2

    token = run.folder / "run/hub/token"
    assert token.stat().st_mode & 0o077 == 0
    address = (run.folder / "run/hub/address").read_text().strip()
    command = [sys.executable, "-m", "megatron_edit", "hub", "stop", address]
    run.cluster.call(*command, "--token-file", str(token), cwd=REPOSITORY)
    for job, restarts in zip(jobs, (1, 0, 1), strict=True):
        assert_completed(job, restarts)
    assert (run.folder / "run/checkpoints/latest_checkpointed_iteration.txt").exists()
    blocks = sorted(
        block
        for line in run.journal("commit")
        for runs in line["blocks"].values()
        for first, count in runs
        for block in range(first, first + count)
    )
    assert blocks == list(range(len(blocks)))  # the steps of the warm-up are rounds, too


# ---- jobs that are not requeued


@full
def test_cancelled_job_stays_cancelled(run: Run) -> None:
    """Would catch a job that takes the cancellation for a preemption and requeues itself."""
    run.pause_at(3)
    job = run.sbatch("edit")
    run.wait_paused(2, job)
    run.cluster.call("scancel", str(job.id))
    run.release()
    assert job.wait() == "CANCELLED"
    wait_until(
        lambda: "COMPLETING" not in run.cluster.call("squeue", "--format=%T"), 60, job.summary
    )
    assert (job.state, job.restarts) == ("CANCELLED", 0)


@full
def test_repeatedly_failing_run_is_given_up(run: Run) -> None:
    """It is requeued once, without a new checkpoint, and exits with the code of the rank."""
    script = run.folder / "fails.py"
    script.write_text("raise SystemExit(7)\n")
    run.settings |= {"EDIT_SCRIPT": str(script), "EDIT_MAX_FAILURES": "2"}
    job = run.sbatch("edit")
    assert job.wait() == "FAILED"
    assert (job.exit_code, job.restarts) == (7, 1), job.summary()
    assert "exit code 7, 2 times without a checkpoint newer than none; given up" in job.console


# ---- bad settings


BAD = {
    "EDIT_REPLICAS=two": "must be a whole number >= 1",
    "EDIT_REPLCAS=2": "no such setting",
    "EDIT_MODEL_FLAGS_FILE=tiny": "no such file",
    "EDIT_PYTHON=no-such-python": "no such program",
    "EDIT_PORT=80": "must be 0, or the first of 64 ports above 1023",
    "MEGATRON_EDIT_SETTINGS=nowhere.env": "no such file",
}


def test_bad_settings_end_job_at_once(run: Run) -> None:
    """Exit code 2 and one line with value, rule and remedy, before any rank."""
    jobs = {}
    for bad in BAD:
        name, _, value = bad.partition("=")
        jobs[bad] = Run(run.cluster, run.folder, {name: value}).sbatch("edit")
    for bad, job in jobs.items():
        assert job.wait() == "FAILED" and (job.exit_code, job.restarts) == (2, 0), job.summary()
        assert job.console.startswith(f"slurm: {bad}: {BAD[bad]}; "), job.summary()
        assert job.console.count("\n") == 1, job.summary()


def test_submit_refuses_bad_settings(run: Run) -> None:
    """Settings are refused before any job is submitted."""
    run.settings |= {"EDIT_MIXED": "fast:1 slow"}
    argv = ["bash", str(SCRIPTS / "submit.sh"), "a_edit_mixed"]
    done = run.cluster.attempt(*argv, cwd=run.folder, **run.settings)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("slurm: EDIT_MIXED=fast:1 slow: must be partition:nodes")


@full
def test_bad_flags_end_job_before_any_rank(run: Run) -> None:
    """`megatron-edit check` refuses them."""
    run.settings["EDIT_EXTRA_FLAGS"] = "--edit-sync-interval 0"
    job = run.sbatch("edit_per_replica")
    assert job.wait() == "FAILED" and job.exit_code == 2, job.summary()
    assert "--edit-sync-interval 0: must be at least 1" in job.console
    assert "srun" not in job.console


def test_rank_of_a_gpu_gets_its_share_of_the_node(run: Run) -> None:
    """Of 8 CPUs and 2 GPUs. Would catch a format that the real sinfo does not have."""
    settings = run.settings | {"EDIT_GPUS_PER_NODE": "1"}
    job = Run(run.cluster, run.folder, settings).submit("edit", "--hold")
    shown = run.cluster.call("scontrol", "show", "job", str(job.id), "--oneliner")
    run.cluster.attempt("scancel", str(job.id))
    assert " CPUs/Task=4 " in shown and " NumNodes=2" in shown, shown


def test_documented_commands_are_accepted(run: Run) -> None:
    """By the real sbatch, with jobs held, two nodes and no GPUs."""
    jobs: list[str] = []
    for command in commands("sbatch", "scripts/slurm/submit.sh"):
        queued = set(run.cluster.call("squeue", "--noheader", "--format=%A").split())
        line = re.sub(r"--gpus-per-node \d+", "", command.line.replace("nodes 8", "nodes 2"))
        line = re.sub(r"EDIT_GPUS_PER_NODE=\d+", "EDIT_RANKS_PER_NODE=8", line)
        line = re.sub(r"(EDIT_NODES|EDIT_REPLICAS)=\d", r"\1=2", line)
        line = line.replace("sbatch --", "sbatch --hold --")
        if "submit.sh" in line:
            line += " --hold"
        run.cluster.call("bash", "-c", line, cwd=REPOSITORY, EDIT_PYTHON=sys.executable)
        jobs += set(run.cluster.call("squeue", "--noheader", "--format=%A").split()) - queued
    assert len(jobs) >= 6  # het jobs count twice
    run.cluster.attempt("scancel", *jobs)  # one id per het job would be enough


# ---- the text of the scripts


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_pass_shellcheck() -> None:
    """shellcheck accepts all shell scripts of the repository."""
    files = [p for pattern in ("*.sh", "*.sbatch", "*.env") for p in REPOSITORY.rglob(pattern)
             if not p.relative_to(REPOSITORY).parts[0].startswith(".venv")]  # fmt: skip
    done = subprocess.run(
        ["shellcheck", "-x", *map(str, files), str(REPOSITORY / ".ci/run")],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
