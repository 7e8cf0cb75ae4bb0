"""Files of tokens: which are looked at, how much of them, and by whose reader."""

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
from megatron_edit.host import corpus
from megatron_edit.host.corpus import CorpusReport, check_corpus, reads_indexed_corpus
from megatron_edit.host.files import looks_for_its_host
from tests.system.check_lines import NUM_TOKENS, VOCABULARY, write_corpus


def arguments(**changes: Any) -> Namespace:
    """Of Megatron, as far as they are about data."""
    names = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path",
             "per_split_data_args_path")  # fmt: skip
    return Namespace(**(
        dict.fromkeys(names) | {"mock_data": False, "split": "90,10,0", "padded_vocab_size": 128}
        | changes
    ))  # fmt: skip


def test_the_report(tmp_path: Path) -> None:
    """What was looked at; a corpus that two flags name counts once."""
    write_corpus(tmp_path / "good")
    prefix = str(tmp_path / "good")
    found = check_corpus(arguments(data_path=["1", prefix, "1", prefix]))
    assert found == CorpusReport(1, NUM_TOKENS, 4 * NUM_TOKENS, 4 * NUM_TOKENS)
    assert check_corpus(arguments(mock_data=True, data_path=[prefix])) is None
    assert check_corpus(arguments(sft=True, data_path=["file.jsonl"])) is None
    assert check_corpus(arguments(data_path=["s3://bucket/corpus"])) is None


@pytest.mark.parametrize("where", [0, NUM_TOKENS // 2, NUM_TOKENS - 1])
@pytest.mark.parametrize("token", [VOCABULARY + 28, -1])
def test_a_token_beyond_the_vocabulary(tmp_path: Path, where: int, token: int) -> None:
    """Anywhere in a small file, and below 0. Would catch: a scan that leaves its ends out."""
    write_corpus(tmp_path / "good")
    tokens = np.memmap(tmp_path / "good.bin", dtype=np.int32, mode="r+")
    tokens[where] = token
    tokens.flush()
    with pytest.raises(UsageError, match=f"holds token {token}, and"):
        check_corpus(arguments(data_path=[str(tmp_path / "good")]))


def test_a_large_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To both ends, and within the budget, which the report names."""
    monkeypatch.setattr(corpus, "_PIECE_BYTES", 400)
    monkeypatch.setattr(corpus, "SCANNED_BYTES", 4000)
    write_corpus(tmp_path / "good")
    prefix = str(tmp_path / "good")
    found = check_corpus(arguments(data_path=[prefix]))
    assert found is not None and found.scanned_bytes == 4000
    tokens = np.memmap(tmp_path / "good.bin", dtype=np.int32, mode="r+")
    tokens[-1] = 128
    tokens.flush()
    with pytest.raises(UsageError, match="holds token 128"):
        check_corpus(arguments(data_path=[prefix]))


def test_a_longer_file_is_accepted(tmp_path: Path) -> None:
    """Its index may name a part of it: Megatron trains on that."""
    write_corpus(tmp_path / "good")
    with (tmp_path / "good.bin").open("ab") as file:
        file.write(bytes(400))
    assert check_corpus(arguments(data_path=[str(tmp_path / "good")])) is not None


def test_an_index_that_ends_in_its_head(tmp_path: Path) -> None:
    """Catches a traceback of `check`, and in a launch a rank that leaves alone."""
    write_corpus(tmp_path / "good")
    with (tmp_path / "good.idx").open("r+b") as file:
        file.truncate(12)
    with pytest.raises(UsageError, match="is no index of Megatron's, or is damaged"):
        check_corpus(arguments(data_path=[str(tmp_path / "good")]))


def test_a_large_index_is_not_copied(tmp_path: Path) -> None:
    """Of 4 million sequences. Catches 24 bytes of memory for each."""
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
def test_which_ranks_look(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a host, and only ranks that Megatron builds data sets on: others may lack the files.

    Catches a training that does not start because a host of a middle stage has no corpus.
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
                if looks_for_its_host(worlds[len(looked) % 2]):
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
def test_who_reads_the_corpus(name: str) -> None:
    """Would catch: a script with a reader of its own whose files are refused."""
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
