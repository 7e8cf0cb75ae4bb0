"""Megatron's memory by its flags; flags that the planner cannot count are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_edit.errors import UsageError
from megatron_edit.tools.compare.flags import read_flags
from megatron_edit.tools.compare.traffic import Layout, baseline_bytes
from megatron_edit.tools.plan.costs import gradient_traffic, stock_parts, stock_traffic
from megatron_edit.tools.plan.job import Job, read_job

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODEL = [word for word in read_flags(CONFIGS / "llama_350m.args") if word != "--bf16"]
SHARDED = ("--use-distributed-optimizer", "--overlap-param-gather")
NUMEL = 367_969_280
AWARE = "--bf16 --use-precision-aware-optimizer"


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
    config = job.config("ddp")
    assert gradient_traffic(job, config).per_replica == pytest.approx(ring, rel=1e-6)
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
    ],
)
def test_number_of_optimizer_state_vectors_by_flags(flags: str, vectors: int) -> None:
    """Would catch: SGD with a second moment."""
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
        f"{AWARE} --exp-avg-dtype int8",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--num-distributed-optimizer-instances 3",
        "--fp4-param-gather",
        "--optimizer muon",
        "--optimizer sgd",
    ],
)
def test_flags_the_planner_cannot_count_are_refused(flag: str) -> None:
    """Would catch: a plan for buffers and states that have another layout."""
    with pytest.raises(UsageError) as caught:
        stock_parts(job_of(flag))
    last = [word for word in flag.split() if word.startswith("--")][-1]
    assert caught.value.exit_code == 2 and last in str(caught.value)


def test_more_fragments_than_units_are_refused() -> None:
    """Would catch: a plan for fragments that the engine refuses."""
    job = job_of("--use-edit --edit-fragments 27")
    with pytest.raises(UsageError, match="--edit-fragments 27: the model has 26 units"):
        job.config("edit")


def parts_of(job: Job) -> dict[str, int]:
    """Megatron's memory by its names."""
    return {part.name: part.nbytes for part in stock_parts(job)}


@pytest.mark.parametrize(
    ("flags", "gradient", "state"),
    [
        # Kept of a main parameter: the low half beside bf16, all beside fp16 (optimizer/__init__.py
        # passes store_param_remainders); then the two moments.
        (AWARE, 4, 2 + 8),
        (f"{AWARE} --main-grads-dtype bf16", 2, 2 + 8),
        (f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", 4, 2 + 2 + 1),
        ("--fp16 --use-precision-aware-optimizer --exp-avg-dtype fp16", 2, 4 + 2 + 4),
        # Fp8 that is not scaled with a delay: Megatron keeps the main parameter in fp32
        # (use_precision_aware_optimizer_no_fp8_or_ds_fp8 in optimizer_config.py).
        (f"{AWARE} --fp8-format hybrid --fp8-recipe tensorwise", 4, 4 + 8),
        (f"{AWARE} --fp8-format hybrid", 4, 2 + 8),
    ],
)
def test_precision_aware_optimizer_is_counted_by_its_types(
    flags: str, gradient: int, state: int
) -> None:
    job, parts = job_of(flags), parts_of(job_of(flags))
    assert parts["gradients"] == gradient * NUMEL
    assert parts["optimizer state"] == state * job.largest_shard


@pytest.mark.parametrize(
    ("flags", "device", "host"),
    [
        # hybrid_optimizer.py: an fp32 copy, a pinned fp32 gradient and two moments on the CPU.
        (f"{AWARE} --optimizer-cpu-offload", 0, 16),
        (f"{AWARE} --optimizer-cpu-offload --exp-avg-dtype bf16", 0, 16),  # of its own types
        ("--bf16 --optimizer-cpu-offload", 4, 16),  # it gets the main parameters, and keeps them
        ("--optimizer-cpu-offload", 0, 16),
    ],
)
def test_offloaded_optimizer_is_counted_on_the_host(flags: str, device: int, host: int) -> None:
    job, parts = job_of(flags), parts_of(job_of(flags))
    assert parts["optimizer state"] == device * job.largest_shard
    assert parts["offloaded optimizer state"] == host * job.largest_shard
    places = {part.name: part.place for part in stock_parts(job)}
    assert places["offloaded optimizer state"] == "host"


def test_optimizer_instances_divide_ranks_and_traffic() -> None:
    """Each instance holds all shards; replicas exchange those of all instances.

    The traffic of stock Megatron is that of `compare/traffic.py`. Compared with real runs by
    tests/host/test_plan_memory.py.
    """
    plain, job = job_of("--bf16"), job_of("--bf16 --num-distributed-optimizer-instances 2")
    assert job.largest_shard == pytest.approx(2 * plain.largest_shard, rel=0.01)
    assert sum(map(sum, job.rank_numels)) == 2 * NUMEL
    stock, gradients = stock_traffic(job, reduces_by_all_reduce=False)
    layout = Layout(8, 8, NUMEL, num_instances=2)
    assert stock.per_replica == pytest.approx(baseline_bytes(layout, num_steps=1) / 8)
    assert 0 < gradients < stock.per_host
    by_all_reduce, more = stock_traffic(job, reduces_by_all_reduce=True)
    assert more > gradients
    assert by_all_reduce.per_host - more == pytest.approx(stock.per_host - gradients)
