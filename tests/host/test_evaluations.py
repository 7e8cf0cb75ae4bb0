"""Evaluations of complete validation sets equal those of one process of stock Megatron."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_edit.host.assigned_data import FilledSet, FullSampler
from tests.harness import Flags
from tests.host.runs import cached_run, run_edit, stock_run
from tests.system.check_lines import write_corpus

SAMPLES = (1, 3, 13, 7)
SETS: Flags = {
    "mock_data": None, "full_validation": True, "multiple_validation_sets": True, "train_iters": 4,
    "eval_interval": 2, "eval_iters": 1, "global_batch_size": 8, "seq_length": 32,
}  # fmt: skip
PARALLEL = {"tp2": "tensor_model_parallel_size", "pp2": "pipeline_model_parallel_size"}
_LOSS = re.compile(r"validation-(\d) loss at iteration (\d) \| lm loss value: (\S+)")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    """Write the corpora; return the flags that name them."""
    folder = tmp_path_factory.mktemp("sets")
    write_corpus(folder / "train", 4000)
    for count in SAMPLES:
        write_corpus(folder / str(count), count * 32 + 1)
    paths = [folder / str(count) for count in SAMPLES]
    return SETS | {"train_data_path": folder / "train", "valid_data_path": paths}


def losses(text: str) -> dict[tuple[str, int], float]:
    """Return the printed loss of each set at each evaluation."""
    return {(name, int(step)): float(value) for name, step, value in _LOSS.findall(text)}


@pytest.mark.parametrize(
    ("world_size", "replicas", "micro_batch", "layout"),
    [
        (2, 2, 2, "dp"),
        (4, 2, 1, "dp"),
        pytest.param(4, 4, 1, "dp", marks=pytest.mark.system),
        pytest.param(4, 2, 1, "tp2", marks=pytest.mark.system),
        pytest.param(4, 2, 1, "pp2", marks=pytest.mark.system),
    ],
)
def test_full_validation_equals_one_process(
    tmp_path: Path, sets: Flags, world_size: int, replicas: int, micro_batch: int, layout: str
) -> None:
    """Sets that the ranks cannot share equally, or that have fewer samples than there are ranks.

    Would catch a replica without a sample that counts as 0, means of replicas that are not weighted
    by their samples, and ranks that wait for each other for ever. All replicas are equal here.
    """
    model = {PARALLEL[layout]: 2} if layout in PARALLEL else {}
    flags: Flags = {**sets, **model, "micro_batch_size": micro_batch, "edit_warmup_steps": 100}
    run = run_edit(tmp_path, world_size, replicas, **flags)
    stock: Flags = {**sets, **model, "micro_batch_size": micro_batch}
    alone = cached_run(stock_run, 2 if model else 1, **stock).result.ranks[-1].stdout
    expected = pytest.approx(losses(alone), rel=2e-6)
    assert len(losses(alone)) == 2 * len(SAMPLES)
    last = run.result.ranks[world_size // replicas - 1]  # of replica 0
    assert losses(last.stdout) == expected
    lines = [line for line in run.lines("loss.jsonl") if line.get("split") == "validation"]
    assert {(x["name"], x["iteration"]): x["validation_loss"] for x in lines} == expected


def test_timed_rounds_evaluate_unequal_shares(tmp_path: Path, sets: Flags) -> None:
    """With A-EDiT, in local training. Would catch a replica that waits for ever in one."""
    run = run_edit(
        tmp_path, 2, 2, **{**sets, "train_iters": 8}, edit_strategy="a-edit",
        edit_sync_interval=None, edit_sync_seconds=0.05, edit_min_round_steps=0,
    )  # fmt: skip
    found = [x["validation_loss"] for x in run.lines("loss.jsonl") if x.get("split")]
    assert len(found) >= len(SAMPLES) and all(2 < loss < 6 for loss in found)


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("num_samples", [1, 3, 13, 24])
def test_each_sample_is_read_once(num_samples: int, ranks: int) -> None:
    """And all ranks read as many batches. Would catch samples that count twice or never."""
    samplers = [FullSampler(num_samples, 2, 3, ranks, rank) for rank in range(ranks)]
    batches = [list(sampler) for sampler in samplers]
    assert {len(each) for each in batches} == {3 * len(samplers[0])}
    numbers = sorted(number for each in batches for batch in each for number in batch)
    assert numbers == list(range(len(numbers))) and len(numbers) >= num_samples
    assert len(numbers) - num_samples < 2 * 3 * ranks


def test_samples_that_fill_up_a_share_do_not_count() -> None:
    """Their loss is masked; the first sample, whose tokens they have, is not changed."""
    samples = [{"tokens": torch.arange(4), "loss_mask": torch.ones(4)} for _ in range(3)]
    filled = FilledSet(samples)
    assert filled[2] is samples[2]
    assert not filled[3]["loss_mask"].any() and torch.equal(filled[3]["tokens"], torch.arange(4))
    assert samples[0]["loss_mask"].all()
