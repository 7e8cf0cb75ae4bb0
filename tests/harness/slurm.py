"""A SLURM cluster for tests: munged, slurmctld and two slurmd on this machine, in one folder.

Only processes started here are ended here: the daemons are children of this process, and the
processes of jobs are identified by their `SLURM_CONF`.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tests.harness.ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue",
            "setpriv")  # fmt: skip
ADMIN_PATHS = "/usr/sbin:/usr/local/sbin:/sbin"
NODES = ("n1", "n2")
# Two nodes on one machine, without control groups, and with GPUs that are only counted. Short
# time-outs, to notice a lost node soon.
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=3600
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 Gres=gpu:fake:2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 Gres=gpu:fake:2
PartitionName=main Nodes=n1,n2 Default=YES State=UP PriorityTier=1 GraceTime=300
PartitionName=fast Nodes=n1 State=UP PriorityTier=1 GraceTime=300
PartitionName=slow Nodes=n2 State=UP PriorityTier=1 GraceTime=300
PartitionName=urgent Nodes=n1,n2 State=UP PriorityTier=10
"""


def unavailable_reason() -> str:
    """Return why no cluster can be started here, or an empty string."""
    path = f"{os.environ.get('PATH', '')}:{ADMIN_PATHS}"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"SLURM is not installed: no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def wait_until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    """Poll until a condition holds.

    Raises:
        AssertionError: it does not hold after `seconds`; the message includes `what()`.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not after {seconds} s: {what()}")
        time.sleep(0.3)


class Cluster:
    """Two nodes; `with Cluster(folder) as cluster` starts and stops them.

    Args:
        folder: an empty folder with a short path, as it contains a socket.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        path = f"{os.environ.get('PATH', '')}:{ADMIN_PATHS}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.env: dict[str, str] = clean | {"SLURM_CONF": str(self.config), "PATH": path}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            stack.callback(self.stop)
            self._start()
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        text = CONFIGURATION.format(folder=self.folder, user=getpass.getuser(), ports=free_ports(3))
        self.config.write_text(text, encoding="utf-8")
        (self.folder / "gres.conf").write_text(
            "Name=gpu Type=fake File=/dev/full\nName=gpu Type=fake File=/dev/zero\n"
        )
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log",
                 "seed-file": "seed"}  # fmt: skip
        files = [f"--{option}={self.folder}/munge.{ending}" for option, ending in names.items()]
        self._run_daemon("munged", ["munged", "--foreground", "--force", *files])
        socket_path = self.folder / "munge.socket"
        wait_until(socket_path.exists, 20, self.logs)
        self._run_daemon("slurmctld", ["slurmctld", "-D", "-f", str(self.config)])
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: self._idle_nodes() == len(NODES), 60, self.logs)

    def _run_daemon(self, name: str, argv: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *argv],  # ends them even if the test is killed
                env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _idle_nodes(self) -> int:
        words = ("--noheader", "--Node", "--partition=main", "--format=%t")
        return self.attempt("sinfo", *words).stdout.split().count("idle")

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._run_daemon(node, ["slurmd", "-D", "-f", str(self.config), "-N", node])

    def fail_node(self, node: str) -> None:
        """Kill the slurmd of a node and all its tasks at once, like a power failure."""
        daemon = self._daemons.pop(node)
        tasks = [p for p, env in self.processes() if env.get("SLURMD_NODENAME") == node]
        step_daemons = [
            p for p in (task.parent() for task in tasks) if p and p.name() == "slurmstepd"
        ]
        daemon.kill()
        for process in {*step_daemons, *tasks}:
            _kill(process)
        daemon.wait(timeout=20)

    def call(self, *argv: str, cwd: Path | None = None, **env: str) -> str:
        """Run a SLURM command that must succeed, and return its standard output."""
        done = self.attempt(*argv, cwd=cwd, **env)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def attempt(
        self, *argv: str, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a SLURM command that may fail."""
        return subprocess.run(
            argv, env=self.env | env, cwd=cwd or self.folder, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip

    def processes(self) -> Iterator[tuple[psutil.Process, Mapping[str, str]]]:
        """Yield the processes of jobs of this cluster, with their environment."""
        for process in psutil.process_iter():
            try:
                env = process.environ()
            except (psutil.Error, OSError):
                continue
            is_ours = env.get("SLURM_CONF") == str(self.config)
            if is_ours and process.pid not in self._pids() and process.pid != os.getpid():
                yield process, env

    def _pids(self) -> set[int]:
        return {daemon.pid for daemon in self._daemons.values()}

    def logs(self) -> str:
        """Return the last part of the log of each daemon."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)

    def stop(self) -> None:
        """End all jobs, their remaining processes, and the daemons. May be called twice."""
        if "slurmctld" in self._daemons:
            self.attempt("scancel", "--user", getpass.getuser())
            time.sleep(1)
        for name in reversed(list(self._daemons)):  # munged last
            daemon = self._daemons.pop(name)
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=10)
        for process, _ in list(self.processes()):
            _kill(process)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
