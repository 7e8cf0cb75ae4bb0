"""Make a small corpus for Megatron: a tokenizer, a training and a held-out indexed dataset.

    python scripts/prepare_corpus.py --output-dir corpus

Without --input the text is the source of Python's standard library, which exists on every machine.
The same input gives the same bytes. Use it with Megatron's own flags:

    --train-data-path corpus/corpus --valid-data-path corpus/corpus_valid
    --tokenizer-type NullTokenizer --vocab-size 4096

NullTokenizer works because the end-of-document token is the last id of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from corpus_files import (
    END_OF_DOCUMENT,
    PREFIX,
    VALID_PREFIX,
    install,
    scratch_folder,
    train_tokenizer,
    write_dataset,
)
from corpus_text import is_held_out, named_files, read_documents, standard_library_files
from script_errors import OneLineParser, exit_code_of

from megatron_edit.errors import UsageError

NUM_BYTES = 256  # a byte-level vocabulary contains every byte
MAX_VOCAB_SIZE = 200_000


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and check it without reading any text."""
    parser = OneLineParser(prog="prepare_corpus", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write into")
    parser.add_argument("--vocab-size", type=int, default=4096, help="including the end token")
    parser.add_argument(
        "--input", nargs="+", default=None, help="text files or folders (default: Python's library)"
    )
    parser.add_argument(
        "--max-megabytes", type=float, default=8.0, help="size of the text, 10^6 bytes"
    )
    parser.add_argument(
        "--valid-percent", type=float, default=5.0, help="share of held-out documents"
    )
    args = parser.parse_args(argv)
    if not NUM_BYTES + 1 <= args.vocab_size <= MAX_VOCAB_SIZE:
        raise UsageError(
            f"--vocab-size {args.vocab_size}",
            f"must be from {NUM_BYTES + 1} (all bytes and the end token) to {MAX_VOCAB_SIZE}",
            "4096 suits some megabytes of text",
        )
    if not 0 < args.valid_percent <= 50:
        raise UsageError(
            f"--valid-percent {args.valid_percent:g}",
            "must be above 0 and at most 50",
            "5 is usual",
        )
    if not 0 < args.max_megabytes <= 100_000:
        raise UsageError(
            f"--max-megabytes {args.max_megabytes:g}",
            "must be above 0 and at most 100000",
            "8 is the default",
        )
    return args


def is_own_output(path: Path, args: argparse.Namespace) -> bool:
    """Return whether `path` is output of an earlier run, in an output folder inside an input."""
    return (
        path.name in ("corpus.json", "tokenizer.json")
        and path.parent.resolve() == args.output_dir.resolve()
    )


def split_corpus(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Read the text and split its documents into the training and the held-out part."""
    if args.input is None:
        files = [(path, False) for path in standard_library_files()]
    else:
        files = [
            (path, named)
            for path, named in named_files(args.input)
            if not is_own_output(path, args)
        ]
    train: list[str] = []
    valid: list[str] = []
    for document in read_documents(files, max_bytes=int(args.max_megabytes * 1e6)):
        (valid if is_held_out(document, percent=args.valid_percent) else train).append(document)
    if not train or not valid:
        raise UsageError(
            f"{len(train)} documents to train on and {len(valid)} held out",
            "each part needs at least one that is not blank",
            "give more text with --input, or another --max-megabytes or --valid-percent",
        )
    return train, valid


def write_corpus(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Write the corpus into an empty folder; returns the content of corpus.json."""
    train, valid = split_corpus(args)
    print(f"corpus: training a tokenizer on {len(train)} documents", file=sys.stderr)
    tokenizer = train_tokenizer(train, args.vocab_size)
    summary: dict[str, object] = {
        "source": "named files" if args.input else f"Python {platform.python_version()} library",
        "vocab_size": args.vocab_size,
        "eod_id": args.vocab_size - 1,
        "tokenizer": "tokenizer.json",
    }
    for part, name, documents in (("train", PREFIX, train), ("valid", VALID_PREFIX, valid)):
        summary[part] = write_dataset(
            folder / name, documents, tokenizer, vocab_size=args.vocab_size
        )
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    assert tokenizer.token_to_id(END_OF_DOCUMENT) == args.vocab_size - 1, "end token is not last"
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(summary, indent=2, sort_keys=True) + "\n"
    (folder / "corpus.json").write_text(text, encoding="utf-8")
    return summary


def make(argv: Sequence[str] | None = None) -> dict[str, object]:
    """Make the corpus of a command line; returns the content of corpus.json."""
    args = parse_args(argv)
    with scratch_folder(args.output_dir) as scratch:
        summary = write_corpus(args, scratch)
        install(scratch, args.output_dir)
    return summary


def main() -> int:
    """Make the corpus, and print its summary."""
    print(json.dumps(make()))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of("prepare_corpus", main))
