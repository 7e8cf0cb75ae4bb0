"""Ten tiny runs whose event files show whether two checkouts of the package behave equally.

    python tests/behaviour/event_runs.py record --package CHECKOUT --out FOLDER [--only NAME ...]
    python tests/behaviour/event_runs.py compare FOLDER FOLDER

`record` trains through the command line of the package in CHECKOUT, in processes of their own
(CPU, gloo). It depends only on the package's flags, event files and `method/clock.py`, so that the
same script runs checkouts with other modules:

    git worktree add ../before 00d2a33

`compare` compares the event files of two records line by line, floats digit by digit, without
fields that depend on time and place or are new (`LEFT_OUT`). It prints the first difference of
each file and exits with 1 if there is any. Two records of one checkout on one machine are equal;
those of two machines may differ, as torch's CPU kernels round differently by processor. That is why
the repository contains no record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EVENTS = "events"  # folder of the event files, in that of the run
ATTEMPTS = 3  # gloo may crash, which is unrelated to behaviour
SECONDS = 300.0

# Fields that depend on time and place, by file; dots separate names of fields and list indices.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "sync.jsonl": ("time", "seconds"),
    "replica": ("seconds", "time"),
    "loss.jsonl": (),
    # argv.0: the path of the script; the others: flags that came later than the first record
    "run.json": (
        "versions",
        "topology.host",
        "topology.hosts",
        "argv.0",
        "config.sync_backend",
        "config.check_commits",
        *(
            f"config.{name}"
            for name in (
                "auto",
                "auto_share",
                "sync_net",
                "placement",
                "hub",
                "replica_name",
                "nominal_replicas",
                "min_replicas",
                "hub_token_file",
                "telemetry",
                "metrics_port",
                "mlflow_experiment",
                "warmup_dtype",
            )
        ),
    ),
}

TINY: dict[str, object] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32,
    "max_position_embeddings": 64, "attention_dropout": 0.1, "hidden_dropout": 0.1,
    "micro_batch_size": 2, "global_batch_size": 4, "eval_interval": 1000, "eval_iters": 0,
    "lr": 1e-3, "lr_decay_style": "cosine", "lr_warmup_iters": 3, "log_interval": 1,
    "mock_data": True, "num_workers": 0, "tokenizer_type": "NullTokenizer", "vocab_size": 127,
    "make_vocab_size_divisible_by": 64, "use_distributed_optimizer": True, "train_iters": 18,
    "use_edit": True, "edit_num_replicas": 2, "edit_warmup_steps": 2, "edit_sync_interval": 4,
    "edit_digest_interval": 1, "edit_log_dir": EVENTS,
}  # fmt: skip
TWO_RANKS = {"global_batch_size": 8}
OVERLAP = {
    **TWO_RANKS, "overlap_grad_reduce": True, "overlap_param_gather": True,
    "ddp_bucket_size": 20000, "edit_sync_mode": "overlap",
}  # fmt: skip
# Norms grow with the learning rate: some units are left out of one replica, some of both, which
# rolls them back; weights differ, and the clip binds at times.
PENALTY = {
    "lr_warmup_iters": 16, "edit_anomaly_warmup_syncs": 1, "edit_anomaly_threshold": 2.2,
    "edit_anomaly_alpha": 0.3, "edit_anomaly_patience": 1, "edit_weight_temperature": 0.01,
    "edit_clip": 0.2,
}  # fmt: skip
MOE = {
    "num_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall",
    "disable_bias_linear": True, "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid", "moe_router_bias_update_rate": 0.05,
    "expert_model_parallel_size": 2,
}  # fmt: skip
LATE = {"edit_sync_dtype": "int8", "edit_delay_steps": 2}
SAVED_AT = 11  # the sync after step 10 is in flight, in the round that began there


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: of its folder.
        flags: over those of the tiny GPT; None and False drop one.
        ranks: of all replicas.
        step_seconds: seconds per step of a scripted clock, by replica.
    """

    name: str
    flags: Mapping[str, object] = field(default_factory=dict)
    ranks: int = 2
    step_seconds: tuple[float, ...] | None = None

    def argv(self) -> list[str]:
        """Return the flags as words of a command line."""
        words: list[str] = []
        for name, value in (TINY | dict(self.flags)).items():
            if value is None or value is False:
                continue
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words.append(str(value))
        return words


# The second of the two runs of `resume` loads what the first has saved.
RUNS = (
    Run(
        "edit",
        {**OVERLAP, **PENALTY, "edit_anomaly_threshold": 2.01, "train_iters": 26},
        ranks=4,
    ),
    Run(
        "a-edit",
        {"edit_strategy": "a-edit", "edit_sync_interval": None, "edit_sync_seconds": 6.5,
         "edit_min_round_steps": 6, "edit_step_weight": 0.5, "train_iters": 40, **PENALTY},
        step_seconds=(1.0, 1.7),
    ),
    Run(
        "streaming-diloco",
        {"edit_strategy": "streaming-diloco", "edit_fragments": 2, "edit_delay_steps": 1},
    ),
    Run("co2", {"edit_strategy": "co2", "edit_co2_clip": 0.01}),
    Run("int8-delay", {**LATE, **PENALTY}),
    Run(
        "tp2",
        {**TWO_RANKS, **PENALTY, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        ranks=4,
    ),
    Run(
        "pp2",
        {**TWO_RANKS, **PENALTY, "pipeline_model_parallel_size": 2, "num_layers": 4,
         "edit_fragments": 3},
        ranks=4,
    ),
    Run("moe", {**TWO_RANKS, **PENALTY, **MOE}, ranks=4),
    Run(
        "offload",
        {**OVERLAP, **PENALTY, "bf16": True, "edit_offload": True, "edit_mix": 0.25},
        ranks=4,
    ),
    Run("resume-saved", {**LATE, **PENALTY, "save": "../saves", "save_interval": SAVED_AT}),
    Run("resume-continued", {**LATE, **PENALTY, "load": "../saves", "ckpt_step": SAVED_AT}),
)  # fmt: skip


# ---- record


def environment(package: Path, run: Run) -> dict[str, str]:
    """Environment of the processes of a run: the package of the checkout, one thread, no GPU."""
    more = {
        "PYTHONPATH": os.pathsep.join([str(package), str(package / "scripts")]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    if run.step_seconds is not None:
        more["CLOCK_SECONDS"] = json.dumps(run.step_seconds)
    return {**os.environ, **more}


def train(package: Path, run: Run, folder: Path, extra: Sequence[str]) -> int:
    """Train once, with output to `console.log`; returns the launcher's exit code."""
    script = package / "scripts/pretrain_gpt.py"
    if run.step_seconds is not None:
        script = HERE / "scripted_clock.py"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={run.ranks}", "-m", "megatron_edit", str(script), *run.argv(), *extra,
    ]  # fmt: skip
    with (folder / "console.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(package, run), stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            return process.wait(SECONDS)
        except BaseException:
            process.terminate()  # not kill: torchrun must end its ranks
            process.wait()
            raise


def record(package: Path, out: Path, only: Sequence[str], extra: Sequence[str]) -> int:
    """Make the runs; returns 0 if all of them succeeded."""
    check_package(package)
    for run in RUNS:
        if only and run.name not in only:
            continue
        folder = out / run.name
        folder.mkdir(parents=True)
        began = time.monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            code = train(package, run, folder, extra)
            if code == 0:
                break
            print(f"{run.name}: attempt {attempt} exited with {code}", flush=True)
        else:
            print((folder / "console.log").read_text(errors="replace")[-4000:])
            return 1
        print(f"{run.name}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


def check_package(package: Path) -> None:
    """Check that the package of the checkout is the one that is imported."""
    found = subprocess.run(
        [sys.executable, "-c", "import megatron_edit; print(megatron_edit.__file__)"],
        env=environment(package, RUNS[0]), cwd="/", capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if Path(found).resolve().parent != package / "megatron_edit":
        raise SystemExit(f"{package}: holds no package; {found} would be tested")


# ---- compare


def compare(one: Path, two: Path) -> int:
    """Print the first difference of each file; returns 0 if there is none."""
    names = [{path.parent.name for path in folder.glob(f"*/{EVENTS}")} for folder in (one, two)]
    if names[0] != names[1] or not names[0]:
        print(f"runs: {sorted(names[0])} and {sorted(names[1])}")
        return 1
    lines = differing = 0
    for name in sorted(names[0]):
        folders = one / name / EVENTS, two / name / EVENTS
        files = [{path.name for path in folder.glob("*.json*")} for folder in folders]
        if files[0] != files[1]:
            print(f"{name}: files {sorted(files[0])} and {sorted(files[1])}")
            differing += 1
        for file in sorted(files[0] & files[1]):
            found = [entries(folder / file) for folder in folders]
            lines += len(found[0])
            if difference := first_difference(*found):
                print(f"{name}/{file}: {difference}")
                differing += 1
    print(f"{len(names[0])} runs, {lines} lines: {differing or 'no'} files differ")
    return 1 if differing else 0


def entries(path: Path) -> list[Any]:
    """Parse the lines of an event file, without `LEFT_OUT`; `run.json` is one line."""
    text = path.read_text(encoding="utf-8")
    found = [json.loads(x) for x in ([text] if path.suffix == ".json" else text.splitlines())]
    kind = "replica" if path.name.startswith("replica-") else path.name
    for entry in found:
        for place in LEFT_OUT[kind]:
            drop(entry, place.split("."))
    return found


def drop(entry: Any, place: Sequence[str]) -> None:
    """Remove a field from a line, if present."""
    *outer, last = place
    for name in outer:
        entry = entry.get(name, {})
    if isinstance(entry, list):
        entry[int(last)] = None
    else:
        entry.pop(last, None)


def first_difference(one: Sequence[Any], two: Sequence[Any]) -> str | None:
    """The first difference of two files, or None; the order of fields and every digit count."""
    for number, (mine, other) in enumerate(zip(one, two, strict=False), start=1):
        if json.dumps(mine) != json.dumps(other):
            place, values = next(differences(mine, other), ("", ["order of the fields"]))
            return f"line {number}{place}: {' and '.join(values)}"
    return None if len(one) == len(two) else f"{len(one)} and {len(two)} lines"


def differences(one: Any, two: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the paths at which two values differ, and both values."""
    if isinstance(one, dict) and isinstance(two, dict):
        for name in [*one, *(name for name in two if name not in one)]:
            if (name in one) != (name in two):
                yield f".{name}", ["there" if name in x else "not there" for x in (one, two)]
            else:
                yield from ((f".{name}{p}", v) for p, v in differences(one[name], two[name]))
    elif isinstance(one, list) and isinstance(two, list):
        if len(one) != len(two):
            yield "", [f"{len(x)} entries" for x in (one, two)]
        for index, pair in enumerate(zip(one, two, strict=False)):
            yield from ((f"[{index}]{p}", v) for p, v in differences(*pair))
    elif json.dumps(one) != json.dumps(two):
        yield "", [json.dumps(one), json.dumps(two)]


def main(argv: Sequence[str]) -> int:
    """Run the command line; see the docstring of this module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train")
    recording.add_argument("--package", type=Path, required=True, help="a checkout")
    recording.add_argument("--out", type=Path, required=True, help="a new folder")
    recording.add_argument("--only", nargs="+", default=[], choices=[run.name for run in RUNS])
    recording.add_argument("--extra", default="", help="further flags, to see the comparison fail")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("two", type=Path)
    given = parser.parse_args(argv)
    if given.command == "compare":
        return compare(given.one, given.two)
    return record(given.package.resolve(), given.out.resolve(), given.only, given.extra.split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
