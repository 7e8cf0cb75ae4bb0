"""Files and folders that a command line names: are they what a training needs?

Asked in a launch before the model is built, and by `megatron-edit check`. Hosts may see different
file systems: in a launch all ranks hear of what one of them has found.
"""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from pathlib import Path

from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError
from megatron_edit.host.corpus import CorpusReport, check_corpus, reads_indexed_corpus


def check_folder(flag: str, path: str, *, is_local: bool = False) -> None:
    """Refuse what can never be a folder with our files in it. Makes nothing.

    Args:
        flag: that names it.
        path: of a folder that need not exist yet.
        is_local: see `UsageError`.

    Raises:
        UsageError: it, or the first of its parents that exists, is no folder to write to.
    """
    folder = Path(path)
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        rule = f"must be a folder that can be written to; {folder} is none"
        raise UsageError(f"{flag} {path}", rule, "give another folder", is_local=is_local)


def check_data(args: Namespace, provider: object) -> CorpusReport | None:
    """Refuse a corpus that cannot be trained on.

    Args:
        args: Megatron's, validated.
        provider: of data sets, as the script hands it to `pretrain`.

    Returns:
        What was looked at; None where Megatron reads no files of tokens.

    Raises:
        UsageError: a file is not what it must be.
    """
    return check_corpus(args) if reads_indexed_corpus(provider) else None


def looks_for_its_host(world: ReplicaWorld) -> bool:
    """Whether this rank looks at the corpus: the first to ask of a host's ranks that read it.

    Megatron builds data sets on the first and the last pipeline stage, on tensor rank 0. A host
    without such a rank may lack the files. Asked once, when Megatron's groups are there.
    """
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    if stage not in (0, last) or parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return int(world.shared_store.add(f"data/looks/{socket.gethostname()}", 1)) == 1
