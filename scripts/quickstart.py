"""Train a small GPT with EDiT and with stock Megatron, and compare the two.

    bash scripts/quickstart.sh            makes the environment first
    python scripts/quickstart.py          in an existing environment

Both runs read the same samples with the same Megatron flags (configs/tiny_cpu.args); EDiT's are in
configs/tiny_cpu_edit.args and configs/edit_quality.args, the recommended settings for loss.
Results: a table, OUTPUT/loss.png, OUTPUT/summary.json and the logs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import prepare_corpus
from corpus_files import PREFIX, VALID_PREFIX
from quickstart_parts.picture import Curve, draw
from quickstart_parts.runs import REPOSITORY, train
from quickstart_parts.table import format_table, summarize, sync_bytes
from script_errors import OneLineParser, exit_code_of

from megatron_edit.errors import UsageError
from megatron_edit.observe.line_files import read_json_lines
from megatron_edit.tools.compare.flags import int_flag, read_flags
from megatron_edit.tools.compare.readings import RunLog, edit_losses
from megatron_edit.tools.compare.traffic import (
    ElementBytes,
    Layout,
    baseline_bytes,
    warmup_bytes,
)

RANKS_PER_REPLICA = 2
CONFIGS = REPOSITORY / "configs"
EDIT_CONFIGS = ("tiny_cpu_edit.args", "edit_quality.args")
FOOTNOTE = """\
Bytes are payload between the replicas. Those of EDiT's syncs are recorded; those of its
{synchronous} synchronous steps (warm-up and final phase) and of the baseline are computed, as if
each machine held one replica's ranks; formulas: megatron_edit/tools/compare/traffic.py. Here all
replicas share one machine: the speeds show the overhead of EDiT, not its gain on a slow network."""


@dataclass(frozen=True)
class Plan:
    """Flags of the two runs, and the folder of the results."""

    flags: list[str]
    edit_flags: list[str]
    output_dir: Path

    @property
    def num_replicas(self) -> int:
        """N."""
        return int_flag(self.edit_flags, "--edit-num-replicas")

    @property
    def num_ranks(self) -> int:
        """Ranks of each run."""
        return self.num_replicas * RANKS_PER_REPLICA

    @property
    def edit_dir(self) -> Path:
        """Folder of EDiT's event files."""
        return self.output_dir / "edit"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(prog="quickstart", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=REPOSITORY / "quickstart_out")
    parser.add_argument("--train-iters", type=int, help="instead of those in configs/tiny_cpu.args")
    args = parser.parse_args(argv)
    if args.train_iters is not None and args.train_iters < 1:
        raise UsageError(
            f"--train-iters {args.train_iters}", "must be 1 or more", "leave it out for the default"
        )
    return args


def ensure_corpus(folder: Path, vocab_size: int) -> list[str]:
    """Make the corpus unless one with this vocabulary exists; returns Megatron's flags for it."""
    summary = folder / "corpus.json"
    exists = summary.exists() and (
        json.loads(summary.read_text(encoding="utf-8"))["vocab_size"] == vocab_size
    )
    if not exists:
        prepare_corpus.make(["--output-dir", str(folder), "--vocab-size", str(vocab_size)])
    train, valid = (str(folder / name) for name in (PREFIX, VALID_PREFIX))
    return ["--train-data-path", train, "--valid-data-path", valid]


def make_plan(args: argparse.Namespace) -> Plan:
    """Read the flags, make the corpus, and delete results of an earlier quickstart."""
    output_dir = args.output_dir.absolute()
    flags = read_flags(CONFIGS / "tiny_cpu.args")
    if args.train_iters is not None:
        flags += ["--train-iters", str(args.train_iters)]
    flags += ensure_corpus(output_dir / "corpus", int_flag(flags, "--vocab-size"))
    edit_flags = [word for name in EDIT_CONFIGS for word in read_flags(CONFIGS / name)]
    plan = Plan(flags, edit_flags, output_dir)
    shutil.rmtree(plan.edit_dir, ignore_errors=True)
    for name in ("loss.png", "summary.json"):
        (output_dir / name).unlink(missing_ok=True)
    return plan


def run_timed(name: str, plan: Plan, extra_flags: Sequence[str]) -> tuple[RunLog, float]:
    """Run one training; returns its log, and its seconds, start-up included."""
    start = time.monotonic()
    flags = [*plan.flags, *extra_flags, "--edit-device", "auto"]
    log_path = plan.output_dir / f"{name.lower()}.log"
    log = train(name, flags, num_ranks=plan.num_ranks, log_path=log_path)
    return log, time.monotonic() - start


def num_synchronous_steps(edit_dir: Path, warmup: int, last_iteration: int) -> int:
    """Return the number of steps that average gradients: warm-up and final phase.

    Args:
        edit_dir: folder of EDiT's event files.
        warmup: steps of the warm-up.
        last_iteration: of the training.
    """
    run = json.loads((edit_dir / "run.json").read_text(encoding="utf-8"))
    last_local = run["training"].get("last_local_step")
    final = 0 if last_local is None else max(0, last_iteration - max(last_local, warmup))
    return min(warmup, last_iteration) + final


def report(plan: Plan, edit: tuple[RunLog, float], baseline: tuple[RunLog, float]) -> None:
    """Print the table, and write the picture and the summary."""
    (edit_log, edit_seconds), (base_log, base_seconds) = edit, baseline
    seq_length = int_flag(plan.flags, "--seq-length")
    warmup = int_flag(plan.edit_flags, "--edit-warmup-steps")
    layout = Layout(plan.num_replicas, RANKS_PER_REPLICA, base_log.num_parameters)
    element = ElementBytes.of_flags(plan.flags.__contains__)
    syncs = read_json_lines(plan.edit_dir / "sync.jsonl")
    synchronous = num_synchronous_steps(plan.edit_dir, warmup, edit_log.last_iteration)
    synchronous_total = warmup_bytes(layout, num_steps=synchronous, element=element)
    edit_bytes = sync_bytes(layout, syncs) + synchronous_total
    results = [
        summarize(
            f"EDiT, {plan.num_replicas} replicas x {RANKS_PER_REPLICA} ranks",
            edit_log,
            seq_length=seq_length,
            bytes_total=edit_bytes,
            seconds=edit_seconds,
        ),
        summarize(
            f"Megatron, {plan.num_ranks} ranks",
            base_log,
            seq_length=seq_length,
            bytes_total=baseline_bytes(layout, num_steps=base_log.last_iteration, element=element),
            seconds=base_seconds,
        ),
    ]
    losses = (edit_losses(plan.edit_dir, edit_log), base_log.losses())
    curves = [
        Curve(r.name, loss, log.validation(), r.bytes_total, in_synchronous_steps)
        for r, loss, log, in_synchronous_steps in zip(
            results, losses, (edit_log, base_log), (synchronous_total, 0.0), strict=True
        )
    ]
    picture = plan.output_dir / "loss.png"
    tokens = base_log.batch_size * seq_length
    draw(picture, curves, warmup_steps=warmup, tokens_per_step=tokens)
    summary = {"layout": asdict(layout), "syncs": len(syncs), "runs": [asdict(r) for r in results]}
    text = json.dumps(summary, indent=2) + "\n"
    (plan.output_dir / "summary.json").write_text(text, encoding="utf-8")
    size = f"{layout.num_parameters / 1e6:.1f} million parameters"
    print(f"\n{size}, {base_log.last_iteration} iterations of {tokens} tokens, {len(syncs)} syncs")
    footnote = FOOTNOTE.format(synchronous=synchronous)
    print(f"\n{format_table(results)}\n\n{footnote}\n\npicture: {picture}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run both trainings and report."""
    plan = make_plan(parse_args(argv))
    edit = run_timed("EDiT", plan, [*plan.edit_flags, "--edit-log-dir", str(plan.edit_dir)])
    baseline = run_timed("Baseline", plan, [])
    report(plan, edit, baseline)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of("quickstart", main))
