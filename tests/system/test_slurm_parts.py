"""Parts of the batch scripts, with stubs of SLURM's commands instead of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.launch import REPOSITORY

SCRIPTS = REPOSITORY / "scripts" / "slurm"
TWO_LINES = "\n  --one 0.1\n--two first second\n"
WORDS = TWO_LINES.split()
RECORD = 'echo "${0##*/}" "$@" >>"$CALLS"'
# Prints the state, after as many failures as the file FAILURES has lines.
SQUEUE = 'if read -r _ <"$FAILURES"; then sed -i 1d "$FAILURES"; exit 1; fi; echo "$STATE"'


def write_stub(folder: Path, name: str, body: str) -> None:
    """Write a stub that replaces a command of SLURM."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def bash(folder: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run bash with these words, the stubs in `folder` and settings."""
    env = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "EDIT_DIR": str(folder),
        "EDIT_PYTHON": sys.executable, "CALLS": str(folder / "calls"),
    }  # fmt: skip
    return subprocess.run(
        ["bash", *words], env=env | settings, capture_output=True, text=True, timeout=30,
        check=False,
    )  # fmt: skip


def in_job(folder: Path, code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run code in a batch script after it has read its settings."""
    script = f'set -euo pipefail; source "{SCRIPTS}/common.sh"; prepare edit; {code}'
    return bash(folder, "-c", script, **settings)


# ---- multiline settings


@pytest.mark.parametrize(
    ("setting", "array"), [("EDIT_EXTRA_FLAGS", "flags"), ("EDIT_SRUN_OPTIONS", "srun_options")]
)
@pytest.mark.parametrize("text", [TWO_LINES, "", " ".join(WORDS)])
def test_job_uses_all_lines_of_a_setting(
    tmp_path: Path, setting: str, array: str, text: str
) -> None:
    """Would catch words after the first line that are silently dropped."""
    done = in_job(tmp_path, f'printf "%s\\n" end "${{{array}[@]}}"', **{setting: text})
    assert done.returncode == 0, done.stderr
    given = text.split()
    words = done.stdout.split()
    assert words[len(words) - len(given) :] == given
    assert ("--one" in words) == bool(text)


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        ("", "", "32"),
        ("--tensor-model-parallel-size 2", "", "1"),
        ("--context-parallel-size=2", "", "1"),
        ("--tensor-model-parallel-size 2 --tensor-model-parallel-size 1", "", "32"),
        ("--tensor-model-parallel-size 2", "8", "8"),
    ],
)
def test_number_of_hardware_queues(tmp_path: Path, flags: str, given: str, expected: str) -> None:
    """One if Megatron requires it, else 32. Would catch one for all, which prevents overlap."""
    code = "bash -c 'echo queues $CUDA_DEVICE_MAX_CONNECTIONS'"
    done = in_job(tmp_path, code, EDIT_EXTRA_FLAGS=flags, CUDA_DEVICE_MAX_CONNECTIONS=given)
    assert done.stdout.split() == ["queues", expected], done.stderr


def test_job_checks_its_command_first(tmp_path: Path) -> None:
    """Would catch ranks that start with unchecked flags."""
    write_stub(tmp_path, "python-of-the-job", 'printf "%s\\n" "$@" >"$CALLS"')
    done = in_job(tmp_path, "check_command 8 --more",
                  EDIT_PYTHON=str(tmp_path / "python-of-the-job"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "calls").read_text().split()
    assert words[:3] == ["-m", "megatron_edit", "check"]
    assert words[-3:] == ["--more", "--world-size", "8"]


def test_submit_uses_all_lines_of_a_setting(tmp_path: Path) -> None:
    """Would catch a dropped component of a het job, or a dropped option of sbatch."""
    write_stub(tmp_path, "sbatch", RECORD)
    done = bash(tmp_path, str(SCRIPTS / "submit.sh"), "a_edit_mixed",
                EDIT_MIXED="\nfast:1\nslow:2\n", EDIT_SBATCH_OPTIONS=TWO_LINES)  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = (tmp_path / "calls").read_text().split(" : ")
    assert "--nodes=1" in first and "--partition=fast" in first
    assert "--nodes=2" in second and "--partition=slow" in second
    for component in (first, second):
        assert " ".join(WORDS) in component


@pytest.mark.parametrize(
    ("nodes", "given", "cpus"),
    [
        ("128 gpu:8(S:0-1)", "", "16"),
        ("128 gpu:a100:4(S:0,1),nvme:1,gpu:h100:4(S:0)", "", "16"),
        ("128 gpu:8\n96 gpu:8\n64 (null)\n8 gpu:1", "", "12"),  # of those with 8 GPUs
        ("128 gpu:8", "3", "3"),
    ],
)
def test_rank_gets_its_share_of_the_node(tmp_path: Path, nodes: str, given: str, cpus: str) -> None:
    """Would catch one CPU for a GPU's rank, its data loader and its threads."""
    write_stub(tmp_path, "sbatch", RECORD)
    write_stub(tmp_path, "sinfo", f'{RECORD}; echo "{nodes}"')
    done = bash(tmp_path, str(SCRIPTS / "submit.sh"), "edit", EDIT_GPUS_PER_NODE="8",
                EDIT_CPUS_PER_RANK=given, EDIT_PARTITION="big")  # fmt: skip
    assert done.returncode == 0, done.stderr
    *asked, submitted = (tmp_path / "calls").read_text().splitlines()
    assert f"--ntasks-per-node=8 --cpus-per-task={cpus} " in submitted
    assert [("--partition=big" in line) for line in asked] == [True] * (not given)


@pytest.mark.parametrize("sinfo", ["exit 1", 'echo "64 (null)"', ":"])
def test_unknown_cpus_of_a_node_are_refused(tmp_path: Path, sinfo: str) -> None:
    """Would catch a job without CPUs that waits for ever, and one with a single CPU per GPU."""
    write_stub(tmp_path, "sbatch", RECORD)
    write_stub(tmp_path, "sinfo", sinfo)
    done = bash(tmp_path, str(SCRIPTS / "submit.sh"), "edit", EDIT_GPUS_PER_NODE="8")
    assert done.returncode == 2 and not (tmp_path / "calls").exists()
    assert done.stderr.startswith("slurm: EDIT_CPUS_PER_RANK (empty): sinfo names no node with 8")


@pytest.mark.parametrize(
    ("variables", "cpus"),
    [
        ({"SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_CPUS_PER_NODE": "64"}, "4"),
        ({"SLURM_JOB_CPUS_PER_NODE": "64(x2),48,100(x3)"}, "6"),
        ({"SLURM_HET_SIZE": "2", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "16"}, "2"),
        ({}, ""),
    ],
)
def test_ranks_of_a_job_without_submit_get_all_that_was_granted(
    tmp_path: Path, variables: dict[str, str], cpus: str
) -> None:
    """As with --exclusive. Would catch srun's own default, one CPU for each rank."""
    group = 1 if "SLURM_HET_SIZE" in variables else 0
    suffix = f"_HET_GROUP_{group}" if group else ""
    job = {f"SLURM_NTASKS{suffix}": "16", f"SLURM_JOB_NUM_NODES{suffix}": "2"}
    done = in_job(tmp_path, f'echo "cpus $(cpus_per_rank {group})"', **variables, **job)
    assert done.stdout.strip() == f"cpus {cpus}".strip(), done.stderr


def test_bad_multiline_setting_is_reported_in_one_line(tmp_path: Path) -> None:
    """Would catch a message that ends after the first line of the value."""
    done = bash(tmp_path, str(SCRIPTS / "submit.sh"), "a_edit_mixed", EDIT_MIXED="fast:1\nslow")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("slurm: EDIT_MIXED=fast:1 slow: must be partition:nodes")


# ---- end of a job when SLURM does not answer


def stopped(
    folder: Path, failures: int, state: str, **variables: str
) -> tuple[int, str, list[str]]:
    """End a run that was asked to stop; return exit code, stderr and requeue calls.

    Args:
        failures: number of failures of squeue before it answers.
        state: job state that it then prints.
        variables: of SLURM.
    """
    (folder / "failures").write_text("once more\n" * failures)
    (folder / "calls").touch()
    for name, body in {"squeue": SQUEUE, "scontrol": RECORD, "sleep": ""}.items():
        write_stub(folder, name, body)
    code = 'launched=1; on_signal USR1; : >"$EDIT_STATE/stopped"; finish'
    done = in_job(folder, code, STATE=state, FAILURES=str(folder / "failures"), **variables)
    return done.returncode, done.stderr, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_brief_squeue_failure_does_not_end_run(tmp_path: Path, failures: int) -> None:
    """Would catch a script that `set -e` ends silently, so that the run is not requeued."""
    code, message, calls = stopped(tmp_path, failures, "RUNNING")
    assert (code, calls) == (0, ["scontrol requeue 7"]), message
    assert "USR1: the run was stopped; queued again" in message


def test_unresponsive_slurm_is_reported(tmp_path: Path) -> None:
    """Would catch no message, and a cancelled job that is requeued, which SLURM itself allows."""
    code, message, calls = stopped(tmp_path, 1000, "RUNNING")
    assert (code, calls) == (1, []), message
    assert "not queued again" in message and "submit it once more by hand" in message


@pytest.mark.parametrize(("state", "shown"), [("COMPLETING", "COMPLETING"), ("", "gone")])
def test_cancelled_job_is_not_requeued(tmp_path: Path, state: str, shown: str) -> None:
    """Would catch an answer of squeue that is ignored."""
    code, message, calls = stopped(tmp_path, 1, state)
    assert (code, calls) == (1, []), message
    assert f"not queued again, the job is {shown}" in message


def test_task_of_array_is_requeued_alone(tmp_path: Path) -> None:
    """Would catch the number of a task's job, which for one of them is that of the array."""
    code, message, calls = stopped(
        tmp_path, 0, "RUNNING", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3"
    )
    assert (code, calls) == (0, ["scontrol requeue 7_3"]), message


# ---- elastic runs

# An interpreter that runs no hub: it notes its arguments, and writes the end of a run to the
# journal, with the next exit code of the file ENDS.
HUB = r"""
echo "$@" >>"$CALLS"
[ "$3" = hub ] && [ "$4" = --state-dir ] || exit 1
read -r exit_code <"$ENDS" && sed -i 1d "$ENDS"
echo '{"event":"end","reason":"so","exit_code":'"$exit_code"',"holes":[]}' >>"$5/journal.jsonl"
"""


def in_elastic_job(folder: Path, code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run code in elastic.sbatch or hub.sbatch after it has read its settings, with short waits."""
    for name, body in {"scontrol": RECORD, "squeue": "echo RUNNING", "sleep": ""}.items():
        write_stub(folder, name, body)
    short = "HUB_WAIT_SECONDS=0 HUB_POLL_SECONDS=0 HUB_LAST_SECONDS=0"
    script = f'set -euo pipefail; source "{SCRIPTS}/elastic.sh"; prepare elastic; {short}; {code}'
    return bash(folder, "-c", script, **settings)


def test_replica_must_be_task_of_array(tmp_path: Path) -> None:
    """Would catch replicas without a name of their own."""
    done = in_elastic_job(tmp_path, "launch_elastic_replica")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("slurm: SLURM_ARRAY_TASK_ID (not set): each task of a job array is a")


@pytest.mark.parametrize("end", ["0", "3"])
def test_task_does_not_start_after_end_of_run(tmp_path: Path, end: str) -> None:
    """Would catch a requeued task that waits for a hub which has ended."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "ended").write_text(f"{end}\n")
    done = in_elastic_job(
        tmp_path, "HUB_WAIT_SECONDS=9; launch_elastic_replica", SLURM_ARRAY_JOB_ID="7",
        SLURM_ARRAY_TASK_ID="3",
    )  # fmt: skip
    assert done.returncode == int(end) and "the run has ended" in done.stderr


def test_task_without_hub_is_requeued(tmp_path: Path) -> None:
    """Would catch a task that is given up because the job of the hub has not started yet."""
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    done = in_elastic_job(tmp_path, "launch_elastic_replica", **task)
    assert done.returncode == 0, done.stderr
    assert f"no hub answers at (no file {tmp_path}/hub/address); queued again" in done.stderr
    assert (tmp_path / "calls").read_text() == "scontrol requeue 7_3\n"


@pytest.mark.parametrize("end", ["0", "3"])
def test_hub_of_a_job_ends_with_its_run(tmp_path: Path, end: str) -> None:
    """With a journal of its own after that of an earlier run. Would catch a hub that goes on with a
    run that has ended, a secret that others can read, and a job that does not end with its run."""
    write_stub(tmp_path, "python-of-the-job", HUB)
    (tmp_path / "ends").write_text(f"0\n{end}\n")
    node = {"SLURM_JOB_NODELIST": "n1", "EDIT_PYTHON": str(tmp_path / "python-of-the-job")}
    code = "address() { echo 10.0.0.1; }; node_names() { echo n1; }; sleep() { :; }; run_hub"
    for expected in ("0", end):
        done = in_elastic_job(tmp_path, code, ENDS=str(tmp_path / "ends"), **node)
        assert done.returncode == int(expected), done.stderr
    hub = tmp_path / "hub"
    assert [int(x.split("--state-dir")[1].split()[0].rpartition("/")[2])
            for x in (tmp_path / "calls").read_text().splitlines()] == [1, 2]  # fmt: skip
    assert (hub / "ended").read_text() == f"{end}\n"
    assert (hub / "address").read_text() == "10.0.0.1:10448\n"  # from the job's number
    token = hub / "token"
    assert len(token.read_text()) == 64 and token.stat().st_mode & 0o077 == 0
