"""Real launches: torchrun, one launch per replica, an unmodified clone, `megatron-edit check`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.launch import REPOSITORY
from tests.harness.ports import free_ports
from tests.host.runs import edit_flags

SCRIPT = REPOSITORY / "scripts/pretrain_gpt.py"
FLAGS = {"train_iters": 8, "global_batch_size": 4}


@dataclass
class Launch:
    """A running torchrun, which writes its output to a file."""

    process: subprocess.Popen[bytes]
    log: Path

    def finish(self) -> tuple[int, str]:
        """Wait and return exit code and output; a launch that hangs is terminated."""
        try:
            code = self.process.wait(timeout=100)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(timeout=30)
            raise AssertionError(f"the launch hung:\n{self.log.read_text()[-3000:]}") from None
        return code, self.log.read_text()


def start(argv: list[str], ranks: int, log: Path) -> Launch:
    """Start torchrun with `ranks` processes on this machine."""
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--master-port={free_ports(1)[0]}",
        f"--nproc-per-node={ranks}", "-m", "megatron_edit", *argv,
    ]  # fmt: skip
    env = os.environ | {
        "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"
    }  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=log.parent, env=env, stdout=out, stderr=subprocess.STDOUT
        )
    return Launch(process, log)


def losses(folder: Path) -> list[float]:
    """Read the mean losses over the replicas."""
    return [json.loads(x)["loss"] for x in (folder / "loss.jsonl").read_text().splitlines()]


def test_single_and_per_replica_launches_have_equal_losses(tmp_path: Path) -> None:
    """Would catch any effect of how the ranks are launched on the losses."""
    single, separate = tmp_path / "single", tmp_path / "separate"
    argv = [str(SCRIPT), *edit_flags(2, edit_log_dir=single, **FLAGS)]
    code, output = start(argv, 2, tmp_path / "single.out").finish()
    assert code == 0, output[-3000:]
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    launches = [
        start(
            [
                str(SCRIPT),
                *edit_flags(2, edit_log_dir=separate, edit_replica_id=replica,
                            edit_rendezvous=rendezvous, **FLAGS),
            ],
            1,
            tmp_path / f"separate-{replica}.out",
        )
        for replica in (1, 0)
    ]  # fmt: skip
    for code, output in map(Launch.finish, launches):
        assert code == 0, output[-3000:]
    assert losses(single) == losses(separate)
    assert len(losses(single)) == 8


@pytest.mark.parametrize(("num_replicas", "ids"), [(2, (0, 0)), (3, (0, 1, 1))])
def test_duplicate_replica_id_ends_all_launches(
    num_replicas: int, ids: tuple[int, ...], tmp_path: Path
) -> None:
    """Each prints one line, long before the time-out for a missing replica."""
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    flags = edit_flags(
        num_replicas, edit_rendezvous=rendezvous, **FLAGS | {"global_batch_size": 12}
    )
    launches = [
        start([str(SCRIPT), *flags, "--edit-replica-id", str(replica)], 1, tmp_path / f"{i}.out")
        for i, replica in enumerate(ids)
    ]
    for launch in launches:
        code, output = launch.finish()
        assert code == 1 and "exitcode  : 2" in output, output[-3000:]
        assert (
            output.count(f"megatron_edit: --edit-replica-id {ids[-1]}: two launches have it") == 1
        )


def test_bad_input_under_torchrun_prints_one_line(tmp_path: Path) -> None:
    """torchrun exits with 1 and reports the rank's exit code 2."""
    argv = [str(SCRIPT), *edit_flags(2, edit_sync_interval=0)]
    code, output = start(argv, 2, tmp_path / "launch.out").finish()
    assert code == 1
    assert output.count("megatron_edit: --edit-sync-interval 0: must be at least 1") == 1
    assert "exitcode  : 2" in output


def processes_of(folder: Path) -> dict[int, int]:
    """Return processes with the folder in their command line, with their parents."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.fsencode(folder) in (entry / "cmdline").read_bytes():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    found[int(entry.name)] = int(fields[1])
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.parametrize("is_async", [False, True])
def test_no_process_outlives_a_killed_launch(is_async: bool, tmp_path: Path) -> None:
    """Would catch processes that write checkpoints and keep memory and ports."""
    saves = tmp_path / "saves"
    flags = edit_flags(
        2, **FLAGS | {"train_iters": 9999}, save=saves, save_interval=2, async_save=is_async
    )
    launch = start([str(SCRIPT), *flags], 2, tmp_path / "launch.out")
    try:
        until = time.monotonic() + 90
        while not (saves / "latest_checkpointed_iteration.txt").exists():
            assert time.monotonic() < until and launch.process.poll() is None, (
                launch.log.read_text()
            )
            time.sleep(0.5)
        there = processes_of(tmp_path)
        ranks = [pid for pid, parent in there.items() if parent == launch.process.pid]
        assert len(ranks) == 2 and len(there) > 3, (
            "no helper process besides torchrun and the ranks"
        )
        for pid in (launch.process.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        launch.process.wait(timeout=10)
        until = time.monotonic() + 10
        while (left := processes_of(tmp_path)) and time.monotonic() < until:
            time.sleep(0.2)
        assert left == {}
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)


FAILING = """
import os, time, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/{os.getpid()}",
                        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
if os.environ["LOCAL_RANK"] == "1":
    raise ValueError("something broke")
time.sleep(60)  # torchrun ends it
"""


def test_traceback_names_replica(tmp_path: Path) -> None:
    """Each line has replica and rank. Would catch replicas that are all `[rank0]`."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    code, output = start([str(script), *edit_flags(2)], 2, tmp_path / "launch.out").finish()
    assert code == 1
    assert "[replica1 rank0]: Traceback (most recent call last):\n" in output
    assert "[replica1 rank0]: ValueError: something broke\n" in output
    assert "[rank0]: " not in output


@pytest.mark.clone
def test_unmodified_clone_trains(tmp_path: Path, megatron_clone: Path) -> None:
    """With pretrain_gpt.py and the megatron package of the clone, not those of the wheel."""
    argv = [str(megatron_clone / "pretrain_gpt.py"),
            *edit_flags(2, edit_log_dir=tmp_path / "log", **FLAGS)]  # fmt: skip
    code, output = start(argv, 2, tmp_path / "launch.out").finish()
    assert code == 0, output[-3000:]
    assert len(losses(tmp_path / "log")) == 8
    assert str(megatron_clone) in output or "compiling dataset index builder" in output


def check(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run ``megatron-edit check`` in a process, as a module."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_edit", "check", str(SCRIPT), *argv],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_check_validates_without_launching() -> None:
    """Exit code 0 and a summary for a valid command; 2 and one line for an invalid one."""
    good = check(*edit_flags(2), "--world-size", "4")
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith("ok: 2 replicas x 2 ranks, strategy edit\n")
    separate = ["--edit-replica-id", "1", "--edit-rendezvous", "node0:29400"]
    good = check(*edit_flags(2), *separate, "--world-size", "1")
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith("ok: 2 replicas x 1 ranks, strategy edit\n")
    bad = check(*edit_flags(2), "--world-size", "3")
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr.count("\n") == 1 and "must divide the 3 ranks" in bad.stderr
    bad = check(*edit_flags(2))  # would catch wrong advice to launch more ranks
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1
    assert "--world-size (not given)" in bad.stderr and "a multiple of 2" in bad.stderr


def test_check_warns_if_warmup_covers_training() -> None:
    """Would catch a missing warning if EDiT never starts, and a warning if it does."""
    for warmup, is_warned in ((8, True), (7, False)):
        done = check(*edit_flags(2, train_iters=8, edit_warmup_steps=warmup), "--world-size", "2")
        assert done.returncode == 0, done.stderr
        first, *others = done.stdout.splitlines()
        assert first == "ok: 2 replicas x 1 ranks, strategy edit"
        assert any(
            line.startswith("WARNING: ") and f"--edit-warmup-steps {warmup}" in line
            and "EDiT never starts" in line for line in others
        ) == is_warned, done.stdout  # fmt: skip


@pytest.mark.parametrize("words", [["-h"], [str(SCRIPT), "--train-iters", "5", "--help"]])
def test_launcher_help_is_printed_once(words: list[str]) -> None:
    """One rank prints our help. Would catch Megatron's parser, which cannot print its help."""
    for rank, is_printed in ((None, True), ("0", True), ("1", False)):
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "SLURM_PROCID")}
        done = subprocess.run(
            [sys.executable, "-m", "megatron_edit", *words],
            env=env | {"PYTHONPATH": str(REPOSITORY)} | ({} if rank is None else {"RANK": rank}),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert bool(done.stdout) == is_printed
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--lr", "fast"], "invalid float value"),
        (["--tensor-model-parallel-size", "4"], "TP x PP x CP = 4"),
        (["--use-megatron-fsdp"], "own parameter buffers"),
    ],
)
def test_check_validates_megatron_arguments(words: list[str], complaint: str) -> None:
    """Would catch errors that Megatron itself reports only after the launch, in a traceback."""
    bad = check(*edit_flags(2), "--world-size", "4", *words)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and complaint in bad.stderr
