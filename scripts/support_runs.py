"""Checks of a clone of Megatron-LM for make_support_doc.py: symbols, and short trainings."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.tools.cli.patch import insert, remove, training_scripts, version_of_clone
from megatron_edit.versions import RELEASES, Release

REPOSITORY = Path(__file__).resolve().parents[1]
TESTED_CODE = ("host", "engine", "comm")  # folders of the package that depend on Megatron's version
# 4 steps of warm-up, rounds of 4 steps, and 8 steps of the final phase. The first checkpoint is in
# the middle of a round, the second one in the final phase.
STEPS, WARMUP, INTERVAL, FINAL = 24, 4, 4, 8
MIDDLE, LATE = 10, 20
BATCH = 8
SECONDS = 300
TINY = f"""--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2
--global-batch-size {BATCH} --eval-interval 1000 --eval-iters 0 --lr 1e-3 --lr-decay-style constant
--log-interval 1 --mock-data --num-workers 0 --train-iters {STEPS}
--tokenizer-type NullTokenizer --vocab-size 127
--make-vocab-size-divisible-by 64 --use-distributed-optimizer --edit-device cpu""".split()
EDIT = f"""--use-edit --edit-num-replicas 2 --edit-warmup-steps {WARMUP}
--edit-sync-interval {INTERVAL} --edit-digest-interval 1
--edit-final-sync-fraction {FINAL / STEPS}""".split()
WARM_UP_ONLY = ["--use-edit", "--edit-num-replicas", "2", "--edit-strategy", "ddp"]
A_EDIT = f"""--use-edit --edit-num-replicas 2 --edit-warmup-steps {WARMUP} --edit-strategy a-edit
--edit-sync-seconds 0.2 --edit-min-round-steps 2""".split()
OVERLAP = ["--overlap-param-gather", "--overlap-grad-reduce", "--ddp-bucket-size", "20000"]
SHARED_RUN = f"""--train-iters 100000 --use-edit --edit-nominal-replicas 2
--edit-warmup-steps {WARMUP} --edit-sync-interval {INTERVAL} --save-interval 40""".split()
TOLERANCE = {"loss": 2e-6, "grad_norm": 1e-5}  # relative, of sums in another order
PROBE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from megatron_edit.host.cpu import enable_cpu_backend
from megatron_edit.host.seams.patching import Patcher
enable_cpu_backend(Patcher("the host"))
from megatron_edit.host.seams.probes import failed_probes
failed = [[str(probe), probe.needed_for, why] for probe, why in failed_probes().items()]
print("\\n" + json.dumps(failed))
"""


def code_hash(package: Path = REPOSITORY / "megatron_edit") -> str:
    """Hash of the code in `TESTED_CODE`: its syntax trees without docstrings and comments."""
    files = sorted(file for part in TESTED_CODE for file in (package / part).rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        tree = ast.parse(file.read_bytes())
        digest.update(f"{file.relative_to(package)} {_shape(tree)!r}\n".encode())
    return digest.hexdigest()[:16]


def _shape(node: object) -> object:
    """A syntax tree as tuples. Empty fields are left out: later versions of Python add some."""
    if isinstance(node, list):
        return tuple(map(_shape, node))
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    body = fields.get("body")
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
        fields["body"] = body[1:] if isinstance(body, list) else body
    return (
        type(node).__name__,
        *((k, _shape(v)) for k, v in fields.items() if v not in (None, [])),
    )


def make_clones(git_dir: Path, folder: Path) -> list[Path]:
    """Make a clone of each supported release from a git directory of Megatron-LM."""
    return [_clone(git_dir, folder / release.tag, release) for release in RELEASES]


def _clone(git_dir: Path, target: Path, release: Release) -> Path:
    clone = ["git", "clone", "--quiet", "--shared", "--no-checkout", str(git_dir), str(target)]
    subprocess.run(clone, check=True, timeout=SECONDS)
    checkout = ["git", "-C", str(target), "checkout", "--quiet", release.commit or release.tag]
    subprocess.run(checkout, check=True, timeout=SECONDS)
    return target


def probe(clone: Path) -> dict[str, Any]:
    """Return version and failed probes of a clone."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=_environment(clone), stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    failed = json.loads(done.stdout.splitlines()[-1])
    return {"version": version_of_clone(clone), "failed": failed}


class Failed(Exception):
    """A run failed, or has other numbers; the message is the verdict."""


@dataclass(frozen=True)
class Numbers:
    """What a run has reported.

    Attributes:
        losses: by step, the mean over the replicas.
        grad_norms: by step, one list for each replica.
        digests: of the parameters after each sync.
    """

    losses: dict[int, float]
    grad_norms: list[dict[int, float]]
    digests: tuple[str, ...] = ()

    def check_steps(self, first: int) -> Numbers:
        """Check that all steps from `first` on have a loss, and return them alone."""
        if missing := set(range(first, STEPS + 1)) - set(self.losses):
            raise Failed(f"{len(missing)} steps are missing")
        return Numbers(
            {k: v for k, v in self.losses.items() if k >= first},
            [{k: v for k, v in norms.items() if k >= first} for norms in self.grad_norms],
            self.digests,
        )

    def check_equal(self, other: Numbers) -> None:
        """Check that the steps of this run have the same bits in another one."""
        if self.losses != {step: other.losses.get(step) for step in self.losses}:
            raise Failed("other losses")
        if (
            not self.digests
            or self.digests != other.digests[len(other.digests) - len(self.digests) :]
        ):
            raise Failed("other parameters")

    def check_close(self, other: Numbers) -> None:
        """Check that losses and gradient norms are those of stock Megatron, to rounding."""
        norms = [("grad_norm", norms, other.grad_norms[0]) for norms in self.grad_norms]
        if not norms:
            raise Failed("no gradient norms")
        for name, mine, wanted in (("loss", self.losses, other.losses), *norms):
            if not wanted or set(mine) != set(wanted):
                raise Failed(f"{name} of steps {sorted(mine)} and not {sorted(wanted)}")
            for step, value in wanted.items():
                if abs(mine[step] - value) > TOLERANCE[name] * abs(value):
                    raise Failed(f"{name} {mine[step]} and not {value} in step {step}")


class Trainer:
    """Trains with a copy of a clone.

    Args:
        clone: unmodified.
        work: folder for the copy, logs and checkpoints.
    """

    def __init__(self, clone: Path, work: Path) -> None:
        self.work, self.copy = work, work / "Megatron-LM"
        shutil.copytree(clone, self.copy, ignore=shutil.ignore_patterns(".git", "tests", "docs"))
        self.script = str(self.copy / "pretrain_gpt.py")
        self.saves = str(work / "saved")

    def runs(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names of the runs, in order, and functions that raise `Failed`."""
        yield "launcher", self._launcher
        yield "overlap", lambda: self._edit("overlap", OVERLAP).check_equal(self._first)
        yield "TP 2", self._tensor_parallel
        yield "warm-up", self._warm_up
        yield "final phase", self._final_phase
        yield "exact resume", self._resume
        yield "A-EDiT", self._a_edit
        yield "hub", self._hub
        yield "patched", self._patched  # the last one: it changes the scripts

    def _launcher(self) -> None:
        save = ["--save", self.saves, "--save-interval", str(MIDDLE)]
        self._first = self._edit("launcher", save)

    def _patched(self) -> None:
        for path, source in training_scripts(self.copy).items():
            (self.copy / path).write_bytes(insert(remove(source, path), path))
        self._edit("patched", launcher=()).check_equal(self._first)

    def _tensor_parallel(self) -> None:
        self._edit("tp", ["--tensor-model-parallel-size", "2"], ranks=4)

    def _warm_up(self) -> None:
        """Two replicas in an endless warm-up, and two ranks of stock Megatron."""
        stock = self._stock("stock").check_steps(1)
        folder = self._train("ddp", [*WARM_UP_ONLY, "--edit-log-dir", str(self.work / "ddp")])
        _events(folder).check_steps(1).check_close(stock)

    def _final_phase(self) -> None:
        """The last steps, and those of stock Megatron from a checkpoint of the final phase."""
        load = ["--load", self.saves, "--ckpt-step", str(LATE)]
        stock = self._stock("stock-late", load).check_steps(LATE + 1)
        self._first.check_steps(LATE + 1).check_close(stock)

    def _resume(self) -> None:
        load = ["--load", self.saves, "--ckpt-step", str(MIDDLE)]
        resumed = self._edit("resumed", load, first=MIDDLE + 1)
        resumed.check_equal(self._first)

    def _a_edit(self) -> None:
        folder = self._train("a-edit", [*A_EDIT, "--edit-log-dir", str(self.work / "a-edit")])
        consumed = sum(_lines(folder / "sync.jsonl")[-1]["samples"])
        if consumed != STEPS * BATCH:
            raise Failed(f"{consumed} samples consumed, and not {STEPS * BATCH}")

    def _edit(
        self, name: str, words: Sequence[str] = (), *, ranks: int = 2, first: int = 1,
        launcher: Sequence[str] = ("-m", "megatron_edit"),
    ) -> Numbers:  # fmt: skip
        folder = self._train(
            name, [*EDIT, "--edit-log-dir", str(self.work / name), *words],
            ranks=ranks, launcher=launcher,
        )  # fmt: skip
        return _events(folder).check_steps(first)

    def _stock(self, name: str, words: Sequence[str] = ()) -> Numbers:
        return _tensorboard(self._train(name, ["--tensorboard-dir", str(self.work / name), *words]))

    def _train(
        self, name: str, words: Sequence[str], *, ranks: int = 2,
        launcher: Sequence[str] = ("-m", "megatron_edit"),
    ) -> Path:  # fmt: skip
        """Train; return the folder of the run's files."""
        command = [*_torchrun(ranks), *launcher, self.script, *TINY, *words]
        log = self.work / f"{name}.log"
        with log.open("wb") as out:
            done = subprocess.run(
                command, env=_environment(), cwd=self.work, stdout=out, stderr=out,
                timeout=SECONDS, check=False,
            )  # fmt: skip
        if done.returncode:
            raise self._failed(f"exit code {done.returncode}", log)
        return self.work / name

    def _failed(self, why: str, log: Path) -> Failed:
        print(log.read_text(errors="replace")[-5000:], file=sys.stderr)
        return Failed(why)

    # ---- elastic run

    def _hub(self) -> None:
        """Kill a replica after a checkpoint, and let torchrun start it again; then stop the run."""
        hub = SharedRun(self.work / "elastic", self.script)
        try:
            hub.start()
            hub.wait("both train", lambda: hub.commits("a", "b") >= 2)
            hub.wait("there is a checkpoint", hub.has_checkpoint)
            hub.kill_rank_of("b")
            before = hub.commits("a", "b")
            hub.wait("a trains alone", lambda: hub.commits("a") >= 1)
            hub.wait("b is back", lambda: hub.commits("a", "b") >= before + 2)
            hub.stop()
        finally:
            hub.close()


@dataclass
class SharedRun:
    """A hub and its two replicas.

    Attributes:
        folder: of the hub's state, logs and checkpoints.
        script: of the clone.
    """

    folder: Path
    script: str

    def __post_init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the hub, then the replicas."""
        self.folder.mkdir()
        words = ["hub", "--state-dir", "hub", "--listen", "127.0.0.1:0"]
        self._start("hub", [sys.executable, "-m", "megatron_edit", *words])
        self.wait("the hub listens", lambda: "listening on" in self._log("hub"))
        self._address = self._log("hub").partition("listening on ")[2].split()[0]
        for name in "ab":
            flags = [*SHARED_RUN, "--edit-hub", self._address, "--edit-replica-name", name]
            saves = ["--save", "saved", "--load", "saved"]
            launch = [*_torchrun(1, "--max-restarts", "3"), "-m", "megatron_edit", self.script]
            self._start(name, [*launch, *TINY, *flags, *saves])

    def stop(self) -> None:
        """Stop the run by the hub's command, and check that all replicas end with 0."""
        command = [sys.executable, "-m", "megatron_edit", "hub", "stop", self._address]
        subprocess.run(command, env=_environment(), timeout=60, check=True)
        for name in "ab":
            if code := self._processes[name].wait(SECONDS):
                raise self._failed(f"replica {name} ended with {code}")

    def commits(self, *members: str) -> int:
        """Number of commits so far in which just these replicas took part."""
        journal = self.folder / "hub" / "journal.jsonl"
        lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return sum(e["event"] == "commit" and e["members"] == [*members] for e in events)

    def has_checkpoint(self) -> bool:
        """Whether a checkpoint is complete."""
        return (self.folder / "saved" / "latest_checkpointed_iteration.txt").exists()

    def kill_rank_of(self, name: str) -> None:
        """Kill the rank of a replica, not its torchrun."""
        pid = self._processes[name].pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + SECONDS
        while not condition():
            has_ended = any(process.poll() is not None for process in self._processes.values())
            if has_ended or time.monotonic() > end:
                raise self._failed(f"not seen that {what}")
            time.sleep(0.1)

    def close(self) -> None:
        """Kill what is left."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                pids = children.read_text().split() if children.exists() else []
                for pid in (process.pid, *map(int, pids)):
                    os.killpg(pid, signal.SIGKILL)
            process.wait()

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command, env=_environment(), cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _failed(self, why: str) -> Failed:
        for name in self._processes:
            print(f"== {name}\n{self._log(name)[-2000:]}", file=sys.stderr)
        return Failed(why)


def train(clone: Path) -> Iterator[tuple[str, str]]:
    """Train with a clone; yields name and verdict ("yes" or a failure) of each run."""
    with tempfile.TemporaryDirectory(prefix="support-") as name:
        for run, check in Trainer(clone, Path(name)).runs():
            try:
                check()
            except (Failed, AttributeError, subprocess.SubprocessError) as error:
                yield run, f"no: {error}"
            else:
                yield run, "yes"


def _events(folder: Path) -> Numbers:
    """Read the event files of a run."""
    losses = {x["iteration"]: x["loss"] for x in _lines(folder / "loss.jsonl") if "loss" in x}
    norms, digests = [], list[str]()
    for file in sorted(folder.glob("replica-*.jsonl")):
        lines = _lines(file)
        norms.append({x["iteration"]: x["grad_norm"] for x in lines if "grad_norm" in x})
        digests += [x["digest"] for x in lines if x.get("digest")]
    return Numbers(losses, norms, tuple(dict.fromkeys(digests)))


def _tensorboard(folder: Path) -> Numbers:
    """Read the scalars of a stock run: its console prints rounded numbers."""
    from tensorboard.backend.event_processing import (  # type: ignore[import-untyped]
        event_accumulator,
    )

    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    scalars = {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in ("lm loss", "grad-norm")
    }
    return Numbers(scalars["lm loss"], [scalars["grad-norm"]])


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _torchrun(ranks: int, *options: str) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launch, f"--nproc-per-node={ranks}", *options]


def _environment(*paths: Path) -> dict[str, str]:
    existing = os.environ.get("PYTHONPATH")
    words = [*map(str, paths), str(REPOSITORY), *([existing] if existing else [])]
    added = {"PYTHONPATH": os.pathsep.join(words), "OMP_NUM_THREADS": "1"}
    return os.environ | added | {"GLOO_SOCKET_IFNAME": "lo"}
