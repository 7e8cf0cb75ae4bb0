"""The corpus check: which token files are checked, how much of them, and for which readers."""

from __future__ import annotations

import socket
import struct
import tracemalloc
from argparse import Namespace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError
from megatron_edit.host import data, files
from megatron_edit.host.files import (
    CorpusReport,
    check_corpus,
    claim_data_check,
    reads_indexed_corpus,
)
from tests.system.check_lines import NUM_TOKENS, VOCABULARY, write_corpus


def arguments(**changes: Any) -> Namespace:
    """Return the arguments of Megatron that concern data."""
    names = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path",
             "per_split_data_args_path")  # fmt: skip
    return Namespace(**(
        dict.fromkeys(names) | {"mock_data": False, "split": "90,10,0", "padded_vocab_size": 128}
        | changes
    ))  # fmt: skip


def test_report_counts_each_corpus_once(tmp_path: Path) -> None:
    """Also if two flags name it; mock data, SFT data and remote data are not checked."""
    write_corpus(tmp_path / "good")
    prefix = str(tmp_path / "good")
    found = check_corpus(arguments(data_path=["1", prefix, "1", prefix]))
    assert found == CorpusReport(1, NUM_TOKENS, 4 * NUM_TOKENS, 4 * NUM_TOKENS)
    assert check_corpus(arguments(mock_data=True, data_path=[prefix])) is None
    assert check_corpus(arguments(sft=True, data_path=["file.jsonl"])) is None
    assert check_corpus(arguments(data_path=["s3://bucket/corpus"])) is None


@pytest.mark.parametrize("blend", ["0.3 a corpus", "0.3 a corpus 0.7 corpus"])
def test_path_with_a_space_in_a_list_is_explained(tmp_path: Path, blend: str) -> None:
    """Megatron splits the list at spaces, and fails without a word, or finds no file `0.3`."""
    (tmp_path / "blend").write_text(blend)
    with pytest.raises(UsageError, match="a weight before each path") as refused:
        check_corpus(arguments(data_args_path=str(tmp_path / "blend")))
    assert "a file of --data-args-path cannot hold one" in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ({"data_cache_path": "/cache", "data_path": ["/corpora/a"]}, "/cache"),
        ({"data_path": ["0.3", "/corpora/a"]}, "/corpora/cache"),
        ({"train_data_path": ["/corpora/a"], "valid_data_path": ["/others/b"]}, "/corpora/cache"),
        ({"valid_data_path": ["1", "/others/b"]}, "/others/cache"),
        ({"data_args_path": "/lists/a"}, "/lists/cache"),
        ({"per_split_data_args_path": "/lists/a"}, "/lists/cache"),
        ({"mock_data": True}, None),
    ],
)
def test_indices_of_every_corpus_have_a_lock(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], folder: str | None
) -> None:
    """Would catch replicas of an elastic run that write the same index at the same time, and one
    that reads it meanwhile."""
    args = arguments(**{"data_cache_path": None, **flags})
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    assert data._index_folder() == (None if folder is None else Path(folder))


@pytest.mark.parametrize("where", [0, NUM_TOKENS // 2, NUM_TOKENS - 1])
@pytest.mark.parametrize("token", [VOCABULARY + 28, -1])
def test_token_outside_vocabulary_is_refused(tmp_path: Path, where: int, token: int) -> None:
    """Anywhere in a small file, and below 0. Would catch a scan that skips the ends."""
    write_corpus(tmp_path / "good")
    tokens = np.memmap(tmp_path / "good.bin", dtype=np.int32, mode="r+")
    tokens[where] = token
    tokens.flush()
    with pytest.raises(UsageError, match=f"holds token {token}, and"):
        check_corpus(arguments(data_path=[str(tmp_path / "good")]))


def test_large_file_is_sampled_up_to_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the budget, which is part of the report."""
    monkeypatch.setattr(files, "_PIECE_BYTES", 400)
    monkeypatch.setattr(files, "SCANNED_BYTES", 4000)
    write_corpus(tmp_path / "good")
    prefix = str(tmp_path / "good")
    found = check_corpus(arguments(data_path=[prefix]))
    assert found is not None and found.scanned_bytes == 4000
    tokens = np.memmap(tmp_path / "good.bin", dtype=np.int32, mode="r+")
    tokens[-1] = 128
    tokens.flush()
    with pytest.raises(UsageError, match="holds token 128"):
        check_corpus(arguments(data_path=[prefix]))


def test_file_longer_than_its_index_is_accepted(tmp_path: Path) -> None:
    """Its index may cover only a part, on which Megatron trains."""
    write_corpus(tmp_path / "good")
    with (tmp_path / "good.bin").open("ab") as file:
        file.write(bytes(400))
    assert check_corpus(arguments(data_path=[str(tmp_path / "good")])) is not None


def test_truncated_index_is_refused(tmp_path: Path) -> None:
    """Catches a traceback of `check`, and a rank of a launch that exits alone."""
    write_corpus(tmp_path / "good")
    with (tmp_path / "good.idx").open("r+b") as file:
        file.truncate(12)
    with pytest.raises(UsageError, match="is not a Megatron index, or is damaged"):
        check_corpus(arguments(data_path=[str(tmp_path / "good")]))


def test_large_index_is_not_copied_to_memory(tmp_path: Path) -> None:
    """Catches 24 bytes of memory for each of 4 million sequences."""
    count = 4_000_000
    pointers = np.arange(count, dtype=np.int64) * 2
    with (tmp_path / "large.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, 1))
        for part in (np.ones(count, dtype=np.int32), pointers, np.array([count])):
            part.tofile(file)
    np.zeros(count, dtype=np.uint16).tofile(tmp_path / "large.bin")
    prefix = str(tmp_path / "large")
    tracemalloc.start()
    try:
        found = check_corpus(arguments(data_path=[prefix]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found is not None and found.num_tokens == count
    assert peak < count * 4


@pytest.mark.parametrize("stages", [1, 3])
def test_one_rank_per_host_with_data_checks_corpus(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only ranks on which Megatron builds data sets check the files: others may not have them.

    Catches a training that does not start because the host of a middle stage has no corpus.
    """
    store, time = dist.HashStore(), timedelta(seconds=1)
    worlds = [ReplicaWorld(Placement(2, r, 1, 0, True), store, store, time) for r in range(2)]
    looked: list[tuple[str, int, int]] = []
    with monkeypatch.context() as patch:
        for host, stage in [("a", stages // 2), ("a", 0), ("b", stages // 2), ("c", stages - 1)]:
            patch.setattr(socket, "gethostname", lambda host=host: host)
            for tensor in (1, 0, 0):
                parallel_state.set_pipeline_model_parallel_rank(stage)
                parallel_state.set_pipeline_model_parallel_world_size(stages)
                parallel_state.set_tensor_model_parallel_rank(tensor)
                if claim_data_check(worlds[len(looked) % 2]):
                    looked.append((host, stage, tensor))
    parallel_state.destroy_model_parallel()
    every = [("a", 0, 0), ("b", 0, 0), ("c", stages - 1, 0)]
    assert looked == (every if stages == 1 else [every[0], every[2]])


PROVIDERS = {
    "megatrons": ("from megatron.core.datasets.gpt_dataset import GPTDataset", True),
    "mock": ("from megatron.core.datasets.gpt_dataset import MockGPTDataset", True),
    "own": ("from megatron.core.datasets.gpt_dataset import GPTDataset\n"
            "class Own(GPTDataset):\n"
            "    def build_low_level_dataset(path, config): pass", False),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVIDERS)
def test_custom_dataset_readers_are_recognized(name: str) -> None:
    """Would catch a script with its own reader whose files are refused."""
    text, is_indexed = PROVIDERS[name]
    builder = (
        "from megatron.core.datasets.blended_megatron_dataset_builder import "
        "BlendedMegatronDatasetBuilder\n"
    )
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(f"{builder}{text}\ndef provide(sizes): pass", script)
    assert reads_indexed_corpus(script["provide"]) == is_indexed
    assert reads_indexed_corpus(partial(script["provide"], 1)) == is_indexed
    exec("def provide(sizes): pass", script := {"__name__": "__main__"})
    assert not reads_indexed_corpus(script["provide"])
    assert not reads_indexed_corpus(None)
