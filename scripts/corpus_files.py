"""The files of a corpus: tokenizer, indexed datasets, and their installation."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_edit.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_DOCUMENT = "<|endoftext|>"
PREFIX = "corpus"
VALID_PREFIX = f"{PREFIX}_valid"
ENCODE_BATCH = 64


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE with `vocab_size - 1` tokens; the caller adds the end token.

    The end token must be added after the text has been encoded, so that text that spells it is not
    encoded as the end token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer, length=len(documents))
    found = tokenizer.get_vocab_size() + 1
    if found < vocab_size:
        raise UsageError(
            f"--vocab-size {vocab_size}",
            f"this text gives only {found} tokens",
            f"use --vocab-size {found} or less, or give more text with --input",
        )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[str], label: str) -> Iterator[list[int]]:
    """Yield the token ids of each document, with a progress bar."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=len(documents), desc=f"encode {label}", unit="doc", leave=False) as bar:
        for start in range(0, len(documents), ENCODE_BATCH):
            batch = tokenizer.encode_batch(list(documents[start : start + ENCODE_BATCH]))
            for encoding in batch:
                yield encoding.ids
            bar.update(len(batch))


def write_dataset(
    prefix: Path, documents: Sequence[str], tokenizer: Tokenizer, *, vocab_size: int
) -> dict[str, object]:
    """Write one indexed dataset with Megatron's builder; returns its counts."""
    import torch

    with warnings.catch_warnings():  # about missing GPU packages
        warnings.simplefilter("ignore", UserWarning)
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    data, index = prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")
    builder = IndexedDatasetBuilder(str(data), dtype=DType.optimal_dtype(vocab_size))
    num_tokens = 0
    for ids in encode(tokenizer, documents, prefix.name):
        ids.append(vocab_size - 1)
        builder.add_document(torch.tensor(ids), [len(ids)])
        num_tokens += len(ids)
    builder.finalize(str(index))
    return {
        "prefix": prefix.name,
        "documents": len(documents),
        "tokens": num_tokens,
        "bytes": sum(len(document.encode("utf-8")) for document in documents),
        "sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
    }


def install(finished: Path, output_dir: Path) -> None:
    """Move a finished corpus into place; corpus.json is deleted first and written last.

    An existing corpus.json thus always describes the corpus next to it. Megatron caches sample
    indices next to a dataset by its name only, so those of an older corpus are deleted.
    """
    (output_dir / "corpus.json").unlink(missing_ok=True)
    for name in (PREFIX, VALID_PREFIX):
        shutil.rmtree(output_dir / name / "cache", ignore_errors=True)
    for path in sorted(finished.iterdir(), key=lambda path: path.name == "corpus.json"):
        path.replace(output_dir / path.name)


@contextlib.contextmanager
def scratch_folder(output_dir: Path) -> Iterator[Path]:
    """Make a hidden folder inside `output_dir`; removed at the end, like new folders left empty.

    Raises:
        UsageError: `output_dir` cannot be written.
    """
    created = [folder for folder in (output_dir, *output_dir.parents) if not folder.exists()]
    scratch: Path | None = None
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".corpus-", dir=output_dir))
        yield scratch
    except OSError as error:
        raise UsageError(
            f"--output-dir {output_dir}",
            f"cannot be written ({error.strerror})",
            "give a folder that can be",
        ) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):  # from the first folder that is not empty
            for folder in created:
                folder.rmdir()
