"""Megatron's memory by its flags; flags that the planner cannot count are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_edit.errors import UsageError
from megatron_edit.tools.compare.flags import read_flags
from megatron_edit.tools.plan.exchanges import gradient_traffic, stock_traffic
from megatron_edit.tools.plan.job import Job, read_job
from megatron_edit.tools.plan.memory import stock_parts

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODEL = [word for word in read_flags(CONFIGS / "llama_350m.args") if word != "--bf16"]
SHARDED = ("--use-distributed-optimizer", "--overlap-param-gather")
NUMEL = 367_969_280


def job_of(flags: str) -> Job:
    """The job of the model with `flags`; `--plain` drops the distributed optimizer."""
    words = flags.split()
    argv = [*MODEL, *words]
    if "--plain" in words:
        argv = [word for word in argv if word not in (*SHARDED, "--plain")]
    return read_job(argv, num_replicas=8, world_size=None, ranks_per_host=None)


@pytest.mark.parametrize(
    ("flags", "parameter", "gradient"),
    [
        ("", 4, 4),
        ("--bf16", 2, 4),
        ("--bf16 --grad-reduce-in-bf16", 2, 2),
        ("--fp16", 2, 2),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 2, 4),
        ("--fp16 --grad-reduce-in-bf16", 2, 2),
    ],
)
def test_bytes_of_parameters_and_gradients_by_flags(
    flags: str, parameter: int, gradient: int
) -> None:
    """Would catch: fp32 gradients with --fp16, which Megatron keeps only with --bf16."""
    job = job_of(flags)
    parts = {part.name: part.nbytes for part in stock_parts(job)}
    assert parts["parameters"] == parameter * NUMEL and parts["gradients"] == gradient * NUMEL
    ring = 2 * 7 / 8 * gradient * NUMEL
    assert gradient_traffic(job).per_replica == pytest.approx(ring, rel=1e-6)
    stock, gradients = stock_traffic(job, reduces_by_all_reduce=False)
    assert gradients / stock.per_host == pytest.approx(gradient / (gradient + parameter))


@pytest.mark.parametrize(
    ("flags", "vectors"),
    [
        ("", 2),
        ("--bf16", 3),
        ("--fp16 --optimizer adam", 3),
        ("--plain --bf16", 3),
        ("--plain --optimizer sgd", 1),
        ("--plain --bf16 --optimizer sgd", 2),
        ("--plain --bf16 --optimizer sgd --sgd-momentum 0.0", 2),
        ("--plain --bf16 --optimizer sgd --sgd-momentum 0.0 --edit-device cpu", 1),
        ("--plain --bf16 --optimizer sgd --sgd-momentum 0.5 --edit-device cpu", 2),
    ],
)
def test_number_of_optimizer_state_vectors_by_flags(flags: str, vectors: int) -> None:
    """Would catch: SGD with a second moment; a momentum that torch's SGD does not keep."""
    job = job_of(flags)
    parts = {part.name: part.nbytes for part in stock_parts(job)}
    assert parts["optimizer state"] == 4 * vectors * max(map(sum, job.rank_numels))


def test_old_rope_flag_removes_position_embedding() -> None:
    """Would catch: a learned position embedding with --use-rotary-position-embeddings."""
    place = MODEL.index("--position-embedding-type")
    plain = [*MODEL[:place], *MODEL[place + 2 :]]
    sizes = {
        flag: read_job(
            [*plain, *flag.split()], num_replicas=8, world_size=None, ranks_per_host=None
        ).architecture.numel
        for flag in ("", "--use-rotary-position-embeddings")
    }
    assert sizes["--use-rotary-position-embeddings"] == NUMEL
    assert sizes[""] == NUMEL + 4096 * 1024


@pytest.mark.parametrize(
    "flag",
    [
        "--use-precision-aware-optimizer",
        "--optimizer-cpu-offload",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--fp8-param-gather",
        "--fp4-param-gather",
        "--optimizer muon",
        "--optimizer sgd",
        "--plain --optimizer sgd --sgd-momentum much",
        "--bf16 --fp16",
    ],
)
def test_flags_the_planner_cannot_count_are_refused(flag: str) -> None:
    """Would catch: a plan for buffers and states that have another layout."""
    with pytest.raises(UsageError) as caught:
        job_of(flag)
    assert caught.value.exit_code == 2 and flag.split()[-1] in str(caught.value)


def test_more_fragments_than_units_are_refused() -> None:
    """Would catch: a plan for fragments that the engine refuses."""
    job = job_of("--use-edit --edit-fragments 27")
    with pytest.raises(UsageError, match="--edit-fragments 27: the model has 26 units"):
        job.config("edit")
