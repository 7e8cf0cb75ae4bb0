"""Checks the files and folders that a command line names.

Used in a launch before the model is built, and by `megatron-edit check`. Hosts may see different
file systems, so that in a launch an error on one rank is reported to all.
"""

from __future__ import annotations

import fcntl
import os
import socket
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError
from megatron_edit.host.corpus import CorpusReport, check_corpus, reads_indexed_corpus


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
