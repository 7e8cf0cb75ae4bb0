"""Checks of a clone of Megatron-LM for make_support_doc.py: symbols, and short trainings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_edit.tools.patch import insert, training_scripts, version_of_clone

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS, SAVED = 20, 10
SECONDS = 300
TINY = f"""--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2
--global-batch-size 8 --train-iters {STEPS} --eval-interval 1000 --eval-iters 0 --lr 1e-3
--lr-decay-style constant --log-interval 1 --mock-data --num-workers 0
--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 64
--use-distributed-optimizer --use-edit --edit-device cpu --edit-num-replicas 2
--edit-warmup-steps 4 --edit-sync-interval 4""".split()
OVERLAP = ["--overlap-param-gather", "--overlap-grad-reduce", "--ddp-bucket-size", "20000"]
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


def probe(clone: Path) -> dict[str, Any]:
    """Return version and failed probes of a clone."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=_environment(clone), stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    failed = json.loads(done.stdout.splitlines()[-1])
    return {"version": version_of_clone(clone), "failed": failed}


def train(clone: Path) -> Iterator[tuple[str, str]]:
    """Train with a copy of the clone; yields name and verdict ("yes" or a failure) of each run."""
    with tempfile.TemporaryDirectory(prefix="support-") as name:
        copy, work = Path(name, "Megatron-LM"), Path(name)
        shutil.copytree(clone, copy, ignore=shutil.ignore_patterns(".git", "tests", "docs"))
        script = copy / "pretrain_gpt.py"
        launcher = ["-m", "megatron_edit", str(script)]
        save = ["--save", str(work / "saved"), "--save-interval", str(SAVED)]
        load = ["--load", str(work / "saved"), "--ckpt-step", str(SAVED)]
        first = _losses(work / "launcher", [*launcher, *save])
        yield "launcher", _verdict(first, first)
        yield "overlap", _verdict(_losses(work / "overlap", [*launcher, *OVERLAP]), first)
        tensor_parallel = [*launcher, "--tensor-model-parallel-size", "2"]
        yield "TP 2", _verdict(_losses(work / "tp", tensor_parallel, ranks=4), None)
        resumed = _losses(work / "load", [*launcher, *load])
        yield "exact resume", _verdict(resumed, first, SAVED)
        for path, source in training_scripts(copy).items():
            (copy / path).write_bytes(insert(source, path))
        yield "patched", _verdict(_losses(work / "patched", [str(script)]), first)


def _losses(folder: Path, words: list[str], ranks: int = 2) -> dict[int, float]:
    """Train and return the loss by step; empty after a failure, or without a sync."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={ranks}", *words, *TINY, "--edit-log-dir", str(folder),
    ]  # fmt: skip
    log = folder.with_suffix(".log")
    with log.open("wb") as out:
        code = subprocess.run(
            command, env=_environment(), cwd=folder.parent, stdout=out, stderr=out,
            timeout=SECONDS, check=False,
        ).returncode  # fmt: skip
    if code or not (folder / "sync.jsonl").exists():
        print(log.read_text(errors="replace")[-5000:], file=sys.stderr)
        return {}
    lines = map(json.loads, (folder / "loss.jsonl").read_text().splitlines())
    return {line["iteration"]: line["loss"] for line in lines if "loss" in line}


def _verdict(
    losses: dict[int, float], expected: dict[int, float] | None, resumed_after: int = 0
) -> str:
    """Return "yes" if all steps have the expected losses, else a reason.

    A resumed run may repeat steps before its checkpoint.
    """
    missing = set(range(resumed_after + 1, STEPS + 1)) - set(losses)
    if missing:
        return f"no: {len(missing)} steps are missing"
    is_equal = expected is None or losses == {step: expected.get(step) for step in losses}
    return "yes" if is_equal else "no: other losses"


def _environment(*paths: Path) -> dict[str, str]:
    existing = os.environ.get("PYTHONPATH")
    words = [*map(str, paths), str(REPOSITORY), *([existing] if existing else [])]
    added = {"PYTHONPATH": os.pathsep.join(words), "OMP_NUM_THREADS": "1"}
    return os.environ | added | {"GLOO_SOCKET_IFNAME": "lo"}
