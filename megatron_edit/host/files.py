"""Checks the files and folders that a command line names.

Used in a launch before the model is built, and by `megatron-edit check`. Hosts may see different
file systems, so that in a launch an error on one rank is reported to all.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag_of
from megatron_edit.host.argument_errors import ARGUMENT_ERRORS


def check_folder(flag: str, path: str, *, is_local: bool = False) -> None:
    """Refuse a path at which no writable folder can be made. Leaves nothing behind.

    Args:
        flag: flag that names the folder.
        path: path of a folder, which need not exist yet.
        is_local: see `UsageError`.

    Raises:
        UsageError: the path, or its first existing parent, is no writable folder.
    """
    folder = Path(path)
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:  # the permissions do not tell: nobody can make a folder in /proc, whose owner may write
        with TemporaryDirectory(prefix=".megatron_edit-", dir=folder):
            pass
    except OSError as error:
        rule = f"must be a writable folder; {folder} is not one ({error.strerror})"
        raise UsageError(f"{flag} {path}", rule, "give another folder", is_local=is_local) from None


def check_data(args: Namespace, provider: object) -> CorpusReport | None:
    """Refuse a corpus with missing or damaged files, or with tokens outside the vocabulary.

    Args:
        args: Megatron's validated arguments.
        provider: data set provider that the script passes to `pretrain`.

    Returns:
        Report of the check; None if Megatron reads no indexed files.

    Raises:
        UsageError: the corpus cannot be used.
    """
    if not reads_indexed_corpus(provider):
        return None
    return check_corpus(args)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process at a time be inside the context for a folder, on any machine that sees it.

    Without locks on the file system, or in a folder that cannot be written to, nobody waits.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".megatron_edit.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def claim_data_check(world: ReplicaWorld) -> bool:
    """Claim the check of the corpus for this host; only the first of its ranks gets True.

    Only ranks that read the corpus can claim it: Megatron builds data sets on the first and last
    pipeline stage, on tensor rank 0, and a host without such a rank may lack the files. Call it
    once, after Megatron has made its groups.
    """
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    if stage not in (0, last) or parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return int(world.shared_store.add(f"data/looks/{socket.gethostname()}", 1)) == 1


# ---- Checks the files of the corpus before the model is built
#
# Megatron finds a missing file only after it has built the model, a truncated file at the first
# incomplete sample, and a token outside the vocabulary by an index error in a training step.


# Bytes of tokens that are read in all files together, in pieces spread evenly over each file.
SCANNED_BYTES = 64 << 20
_PIECE_BYTES = 1 << 18
_BLOCK = 1 << 18  # sequences of an index that are checked at a time
_ENDINGS = (".idx", ".bin")
# Arguments of Megatron that name corpora: prefixes and weights, or a file with them.
CORPUS_ARGUMENTS = (
    "data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path",
    "per_split_data_args_path",
)  # fmt: skip
_REMEDY = "give the path of the two files without .idx and .bin"
_BLEND = "must be paths, or a weight before each path"
_SPACES = (
    "quote a path with spaces; a file of --data-args-path cannot hold one, and that of "
    "--per-split-data-args-path only in a list"
)


@dataclass(frozen=True)
class CorpusReport:
    """Result of the check of a corpus.

    Attributes:
        num_files: pairs of .idx and .bin files.
        num_tokens: tokens in all files, according to their indices.
        scanned_bytes: bytes of these that were read to find the largest token.
    """

    num_files: int
    num_tokens: int
    num_bytes: int
    scanned_bytes: int

    def __str__(self) -> str:
        share = "all" if self.scanned_bytes >= self.num_bytes else _mebibytes(self.scanned_bytes)
        return (
            f"{self.num_files} x .idx and .bin, {self.num_tokens} tokens in "
            f"{_mebibytes(self.num_bytes)}; {share} of it read for the largest token"
        )


def reads_indexed_corpus(provider: object) -> bool:
    """Whether a script's data set provider reads Megatron's indexed files.

    It does if its module imports Megatron's builder, and no data set class with its own reader.

    Args:
        provider: data set provider that the script passes to `pretrain`.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.megatron_dataset import MegatronDataset

    while isinstance(provider, partial):
        provider = provider.func
    known = getattr(provider, "__globals__", {}).values()
    classes = [x for x in known if isinstance(x, type)]
    readers = [
        getattr(c, "build_low_level_dataset", None)
        for c in classes
        if issubclass(c, MegatronDataset)
    ]
    is_own = any(not str(getattr(r, "__module__", "")).startswith("megatron.") for r in readers)
    return BlendedMegatronDatasetBuilder in classes and not is_own


def check_corpus(args: Namespace) -> CorpusReport | None:
    """Compare the files of the corpus with their indices, and their tokens with the vocabulary.

    Args:
        args: Megatron's validated arguments; with the vocabulary size if a tokenizer was built.

    Returns:
        Report of the check; None if there are no indexed files.

    Raises:
        UsageError: a file is missing, invalid or truncated, or has tokens outside the vocabulary.
    """
    prefixes = list(dict.fromkeys(_prefixes(args)))
    if not prefixes:
        return None
    budget = max(_PIECE_BYTES, SCANNED_BYTES // len(prefixes))
    vocabulary = getattr(args, "padded_vocab_size", None)
    found = [_check_pair(args, prefix, vocabulary, budget) for prefix in prefixes]
    return CorpusReport(
        len(found),
        sum(one.num_tokens for one in found),
        sum(one.num_bytes for one in found),
        sum(one.scanned_bytes for one in found),
    )


def _prefixes(args: Namespace) -> Iterator[str]:
    """Yield the paths, without ending, of all local indexed files that the flags name."""
    if args.mock_data:
        _check_splits(args, [True, True, True])
    if args.mock_data or getattr(args, "sft", False):
        return
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
    from megatron.training.utils import get_blend_and_blend_per_split

    given = [name for name in CORPUS_ARGUMENTS if getattr(args, name, None) is not None]
    shown = ", ".join(f"{flag_of(name)} {_shown(getattr(args, name))}" for name in given)
    blend, per_split = _read(shown, lambda: get_blend_and_blend_per_split(args))
    if blend is not None and args.split is not None:
        shares = _read(f"--split {args.split}", lambda: parse_and_normalize_split(args.split))
        if not all(map(math.isfinite, shares)):
            raise UsageError(
                f"--split {args.split}",
                "must be the shares of training, validation and test",
                "give for example 969,30,1",
            )
        _check_splits(args, [share > 0 for share in shares])
    elif per_split is not None:
        _check_splits(args, [one is not None for one in per_split])
        _check_names(args, per_split[1])
    for one in [blend, *(per_split or ())]:
        for prefix in one[0] if one is not None else ():
            if "://" not in prefix:  # not in an object store, where reading is slow
                yield prefix


def _check_splits(args: Namespace, is_there: Sequence[bool]) -> None:
    """Refuse a run without the sets that it reads, or with a test set that Megatron cannot read.

    Args:
        args: Megatron's.
        is_there: whether there is a training, a validation and a test set.

    Raises:
        UsageError: a set is missing, or must not be there.
    """
    training, validation, test = is_there
    has_several = getattr(args, "multiple_validation_sets", False)
    if not training:
        raise UsageError("the corpus", "has no training set", "add --train-data-path PATH")
    if not validation and (args.eval_iters or has_several):
        raise UsageError(
            f"--eval-iters {args.eval_iters}",
            "the corpus has no validation set, and Megatron fails at the first evaluation",
            "add --valid-data-path PATH (or a share of --split), or --eval-iters 0",
        )
    if test and has_several:
        raise UsageError(
            "--multiple-validation-sets with a test set",
            "Megatron fails at the test, after training",
            "drop --test-data-path (or the third share of --split), or evaluate one validation set",
        )


def _check_names(args: Namespace, validation: tuple[list[str], object] | None) -> None:
    names = getattr(args, "validation_set_names", None)
    if names and validation is not None and len(names) != len(validation[0]):
        raise UsageError(
            f"--validation-set-names {' '.join(names)}",
            f"must be as many as the {len(validation[0])} validation sets",
            "give a name for each",
        )


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _read[R](value: str, read: Callable[[], R]) -> R:
    try:
        return read()
    except ARGUMENT_ERRORS as error:
        if isinstance(error, AssertionError) and not str(error):  # of a blend
            raise UsageError(value, _BLEND, _SPACES) from error
        why = f": {error}" if str(error) else ""
        rule = f"cannot be understood ({type(error).__name__}{why})"
        raise UsageError(value, rule, "see Megatron's own help for this flag") from error


def _check_pair(args: Namespace, prefix: str, vocabulary: int | None, budget: int) -> CorpusReport:
    import megatron.core.datasets.indexed_dataset as indexed_dataset

    value = f"{_flag_with(args, prefix)} {prefix}"
    if prefix.endswith(_ENDINGS) and Path(prefix).exists():
        raise UsageError(value, "is one file of a corpus", f"use {prefix[:-4]}")
    for ending in _ENDINGS:
        file = Path(prefix + ending)
        if not file.is_file():
            if is_number(prefix):
                raise UsageError(value, f"is taken for a path: a blend {_BLEND}", _SPACES)
            raise UsageError(value, f"there is no file {file}", _REMEDY)
        if not os.access(file, os.R_OK):
            raise UsageError(value, f"{file} cannot be read", "correct its permissions")
    dtype, lengths, last_byte = _index_of(indexed_dataset, prefix, value)
    size = Path(prefix + ".bin").stat().st_size
    if size < last_byte:
        raise UsageError(
            value,
            f"{prefix}.bin has {size} bytes where its index needs {last_byte}: it is truncated, or "
            "of another corpus",
            "copy or preprocess it again",
        )
    scanned = 0
    if vocabulary is not None:
        scanned = _check_tokens(prefix, dtype, size, vocabulary, budget, value)
    return CorpusReport(1, lengths, size, scanned)


def _flag_with(args: Namespace, prefix: str) -> str:
    """Return the flag that names a path, in its value or in the file that is its value."""
    given = [name for name in CORPUS_ARGUMENTS if getattr(args, name, None) is not None]
    named = [name for name in given if prefix in getattr(args, name)]
    return flag_of((named or given)[0])


def _index_of(
    indexed_dataset: ModuleType, prefix: str, value: str
) -> tuple[np.dtype[np.generic], int, int]:
    """Return the data type and number of an index's tokens, and the bytes that they need."""

    class Corpus(indexed_dataset.IndexedDataset):  # type: ignore[misc, name-defined]
        def __del__(self) -> None:
            """Do nothing: Megatron's method prints an error if no file was opened."""

    try:
        index = Corpus(prefix, mmap=False).index
        dtype = np.dtype(index.dtype)
        num_tokens, last_byte = 0, 0
        # In blocks: the index is memory-mapped and may be huge.
        for start in range(0, len(index.sequence_lengths), _BLOCK):
            block = slice(start, start + _BLOCK)
            lengths = index.sequence_lengths[block].astype(np.int64)
            ends = index.sequence_pointers[block] + lengths * dtype.itemsize
            if lengths.min() < 0 or ends.min() < 0:
                raise ValueError("lengths below 0")
            num_tokens += int(lengths.sum())
            last_byte = max(last_byte, int(ends.max()))
        return dtype, num_tokens, last_byte
    except (*ARGUMENT_ERRORS, EOFError, struct.error) as error:
        why = str(error) or "its parts contradict each other"
        raise UsageError(
            value,
            f"{prefix}.idx is not a Megatron index, or is damaged ({why})",
            "preprocess the corpus again (tools/preprocess_data.py)",
        ) from error


def _check_tokens(
    prefix: str, dtype: np.dtype[np.generic], size: int, vocabulary: int, budget: int, value: str
) -> int:
    """Refuse tokens outside the vocabulary; return the number of bytes read."""
    file = Path(prefix + ".bin")
    if size < dtype.itemsize or not np.issubdtype(dtype, np.integer):
        return 0
    tokens = np.memmap(file, dtype=dtype, mode="r", shape=(size // dtype.itemsize,))
    read = 0
    for piece in _pieces(tokens, budget // dtype.itemsize):
        read += piece.nbytes
        largest, least = int(piece.max()), int(piece.min())
        if largest >= vocabulary or least < 0:
            token = largest if largest >= vocabulary else least
            raise UsageError(
                value,
                f"{file} holds token {token}, and the model has a vocabulary of {vocabulary} "
                "(with its padding)",
                "give the tokenizer that the corpus was preprocessed with, or a --vocab-size above "
                "its largest token",
            )
    return read


def _pieces(tokens: NDArray[np.generic], most: int) -> Iterator[NDArray[np.generic]]:
    """Yield all tokens in pieces, or about `most` of them, evenly spread over the file."""
    length = max(1, _PIECE_BYTES // tokens.itemsize)
    if len(tokens) <= most:
        yield from (tokens[start : start + length] for start in range(0, len(tokens), length))
        return
    starts = np.linspace(0, len(tokens) - length, max(2, most // length), dtype=np.int64)
    yield from (tokens[start : start + length] for start in starts)


def is_number(word: str) -> bool:
    """Whether a word of a blend is a weight."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
