"""Validation loss of strategies and settings on real text, seed by seed.

    python benchmarks/convergence.py --only recommended,wire
    python benchmarks/convergence.py --list

Four replicas of one rank train a GPT of about a million parameters on Python's standard library,
on the cores of this machine. Each question is one `megatron-edit compare`, which stores its runs:
the same command continues an interrupted study. The page of a question is
OUTPUT/QUESTION/compare.md; differences are to the first entry, in pairs of equal seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from frame.gpt import flag_words
from frame.launch import BENCHMARKS, REPOSITORY, SCRIPT
from frame.study import split_commas

from megatron_edit.tools.cli.words import OneLineParser

sys.path.insert(0, str(REPOSITORY / "scripts"))

import prepare_corpus
from corpus_files import PREFIX, VALID_PREFIX

NUM_REPLICAS, SEEDS = 4, "1,2,3"
EVALUATED_SAMPLES = 512
VOCAB_SIZE, MEGABYTES = 1024, 8.0
CORPUS = Path(tempfile.gettempdir()) / "megatron_edit_convergence_corpus"
MODEL = {
    "num-layers": 2, "hidden-size": 192, "num-attention-heads": 4, "seq-length": 64,
    "max-position-embeddings": 64, "position-embedding-type": "rope",
    "tokenizer-type": "NullTokenizer", "vocab-size": VOCAB_SIZE,
    "make-vocab-size-divisible-by": 64, "attention-dropout": 0, "hidden-dropout": 0,
}  # fmt: skip
TRAINING = {
    "train-iters": 960, "lr": 2e-3, "min-lr": 2e-4, "lr-decay-style": "cosine",
    "lr-warmup-iters": 48, "weight-decay": 0.1, "adam-beta2": 0.95, "clip-grad": 1.0,
    "eval-interval": 240, "log-interval": 10, "num-workers": 0, "edit-device": "cpu",
    "edit-num-replicas": NUM_REPLICAS, "edit-warmup-steps": 96, "edit-sync-interval": 16,
    "edit-sync-seconds": 2.4, "edit-min-round-steps": 32,
}  # fmt: skip
QUICK = {"num-layers": 1, "hidden-size": 32, "train-iters": 20, "lr-warmup-iters": 2,
         "eval-interval": 10, "edit-warmup-steps": 4, "edit-sync-interval": 4}  # fmt: skip
RECOMMENDED = f"edit:@{REPOSITORY / 'configs' / 'edit_quality.args'}"
DDP = "ddp:--adam-beta2=0.9873"  # 0.95 ** (1 / 4), that of replicas with --edit-scale-beta2
STRATEGIES = ("ddp", "edit", "a-edit", "diloco", "slowmo", "post-local-sgd",
              "local-sgd:warmup-steps=0", "streaming-diloco", "sparse-loco", "co2")  # fmt: skip
TAU_64 = {"edit-sync-interval": 64, "edit-sync-seconds": 9.6, "edit-min-round-steps": 128}
MUON = {"optimizer": "muon", "muon-fp32-matmul-prec": "high", "muon-extra-scale-factor": 0.2,
        "lr": 4e-3, "min-lr": 4e-4}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A comparison.

    Attributes:
        name: on the command line.
        entries: of `--strategies`; the first is the one that others are compared with.
        flags: of the training that differ from `MODEL` and `TRAINING`.
        samples: of a replica in a step.
    """

    name: str
    entries: tuple[str, ...]
    flags: dict[str, object]
    samples: int = 8

    def words(self, corpus: Path, *, is_quick: bool) -> list[str]:
        """Return the flags of the training."""
        values: dict[str, object] = MODEL | TRAINING | (QUICK if is_quick else {}) | self.flags
        batch = NUM_REPLICAS * self.samples
        values |= {"micro-batch-size": self.samples, "global-batch-size": batch,
                   "eval-iters": max(1, EVALUATED_SAMPLES // batch),
                   "train-data-path": corpus / PREFIX,
                   "valid-data-path": corpus / VALID_PREFIX}  # fmt: skip
        return flag_words(values, ["disable-bias-linear"])


def questions() -> Iterator[Question]:
    """Yield all questions."""
    yield Question("strategies", STRATEGIES, {})
    yield Question("strategies-64", STRATEGIES, dict(TAU_64))
    both = f"{RECOMMENDED}:sync-interval=64"
    yield Question("recommended", (DDP, "ddp", "edit", RECOMMENDED, both), {})
    wires = ("int8", "int4", "int2", "ternary", "sign")
    yield Question("wire", ("edit", *(f"edit:sync-dtype={name}" for name in wires)), {})
    delays = [f"edit:fragments=4:delay-steps={steps}" for steps in (8, 12)]
    delays += [f"{delays[0]}:outer-momentum=0.7", "edit:delay-steps=30"]
    yield Question("delay", ("edit", *delays), {"edit-sync-interval": 40})
    pairs = ((0.8, 0.85), (0.8, 0.7), (0.9, 0.6))
    outer = tuple(f"edit:outer-lr={rate}:outer-momentum={momentum}" for rate, momentum in pairs)
    for tau in (8, 16, 32, 64, 128):
        yield Question(f"outer-{tau}", outer, {"edit-sync-interval": tau})
    parts = ("no-anomaly", "no-weighting", "no-clip", "no-anomaly:no-weighting:no-clip")
    yield Question("penalty", ("edit", *(f"edit:{each}" for each in parts)), {})
    yield Question("warm-up", ("ddp", "edit", "edit:warmup-steps=240"), {})
    for iterations in (480, 960):  # a warm-up of 2, 5 and 10 % of the steps
        lengths = (
            f"{RECOMMENDED}:warmup-steps={iterations * share // 100}" for share in (2, 5, 10)
        )
        flags: dict[str, object] = {"train-iters": iterations, "lr-warmup-iters": iterations // 20}
        in_int8 = f"{RECOMMENDED}:warmup-steps={iterations // 20}:warmup-dtype=int8"
        yield Question(f"warm-up-{iterations}", (DDP, *lengths, in_int8), flags)
    for tau in (16, 64):
        flags = {"edit-warmup-steps": 48, "edit-sync-interval": tau, "edit-sync-dtype": "int8"}
        scaled, both = "edit:scale-beta2", "average-moments=both"
        yield Question(
            f"parts-{tau}",
            ("edit", scaled, f"{scaled}:final-sync-fraction=0.02", f"{scaled}:{both}",
             f"{scaled}:{both}:average-moments-every=4",
             f"{scaled}:{both}:final-sync-fraction=0.02"),
            flags,
        )  # fmt: skip
    yield Question("rates", tuple(f"edit:--lr={rate}" for rate in (2e-3, 5e-4, 1e-3, 4e-3)), {})
    for samples in (4, 16, 32):
        yield Question(f"samples-{samples}", (DDP, RECOMMENDED), {}, samples)
    for size in (96, 384):
        yield Question(f"size-{size}", (DDP, RECOMMENDED), {"hidden-size": size})
    yield Question("muon", ("ddp", "edit:outer-lr=0.9:outer-momentum=0.6"), dict(MUON))


def main(argv: Sequence[str]) -> int:
    """Run the comparisons one after another; returns the exit code of the last that failed."""
    args = parse(argv)
    prepare(args.corpus)
    code = 0
    for question in args.questions:
        print(f"\n== {question.name}", flush=True)
        command = [sys.executable, "-m", "megatron_edit", *compare_words(question, args)]
        code = subprocess.run(command, cwd=REPOSITORY).returncode or code
    return code


def compare_words(question: Question, args: argparse.Namespace) -> list[str]:
    """Return the arguments of `megatron-edit` for a question."""
    values = {"strategies": ",".join(question.entries), "seeds": args.seeds,
              "nproc-per-node": NUM_REPLICAS, "output-dir": args.output / question.name,
              "time-limit": args.time_limit}  # fmt: skip
    training = question.words(args.corpus, is_quick=args.quick)
    own = flag_words(values, ["list"] if args.list else [])
    return ["compare", str(SCRIPT), *training, *own]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `args.questions` are those that are asked."""
    parser = OneLineParser(prog="convergence", description=(__doc__ or "").partition("\n")[0])
    known = {question.name: question for question in questions()}
    add = parser.add_argument
    add("--only", default="", help=f"separated by commas: {', '.join(known)} (default: all)")
    add("--list", action="store_true", help="check all runs and list them, but run nothing")
    add("--seeds", default=SEEDS, help="(default: %(default)s)")
    add("--output", type=Path, default=BENCHMARKS / "out" / "convergence",
        help="folder of the pages and runs (default: benchmarks/out/convergence)")  # fmt: skip
    add("--corpus", type=Path, default=CORPUS, help="folder; prepared if there is none in it")
    add("--time-limit", type=float, default=1800.0, help="seconds of a run (default: %(default)g)")
    add("--quick", action="store_true", help="a smoke test: a tiny model and a few steps")
    args = parser.parse_args(argv)
    names = split_commas(args.only) or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--only {unknown[0]}: must be of {', '.join(known)}")
    args.questions = [known[name] for name in names]
    return args


def prepare(folder: Path, megabytes: float = MEGABYTES) -> None:
    """Prepare the corpus of the quickstart, with a smaller vocabulary, where it is not there."""
    file = folder / "corpus.json"
    if not file.exists() or json.loads(file.read_text())["vocab_size"] != VOCAB_SIZE:
        words = {"output-dir": folder, "vocab-size": VOCAB_SIZE, "max-megabytes": megabytes}
        prepare_corpus.make(flag_words(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
