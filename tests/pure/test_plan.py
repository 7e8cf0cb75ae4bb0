"""The planner: bytes equal to the engine's, monotonic costs, and suggestions that hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.comm.control import record_bytes
from megatron_edit.comm.wire import Wire
from megatron_edit.constants import SYNC_DTYPES
from megatron_edit.method.auto import auto_settings
from megatron_edit.method.cost import WORK_BEFORE_EXCHANGE, UnitExchange, exposed_seconds
from megatron_edit.tools.compare.flags import read_flags
from megatron_edit.tools.compare.traffic import Layout, baseline_bytes, warmup_bytes
from megatron_edit.tools.plan.costs import (
    CPU,
    GPU,
    Link,
    TimingSetting,
    added_bytes,
    edit_parts,
    gradient_traffic,
    stock_parts,
    stock_traffic,
    sync_cost,
    sync_traffic,
    synchronous_cost,
)
from megatron_edit.tools.plan.job import NAMES, Job, read_job
from megatron_edit.tools.plan.plan import advise, lines, make_plan, warmup_warning
from tests.harness.planned_state import persistent_bytes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = ("llama_350m", "llama_1b", "llama_3b", "llama_7b")


def job_of(
    name: str = "llama_350m", replicas: int = 8, *more: str, world: int | None = None
) -> Job:
    """The job of a file of flags in configs/, with `more` flags; nothing is chosen without
    `--edit-auto`."""
    fixed = (
        []
        if {"--edit-auto", "--edit-strategy"} & {*more}
        else ["--use-edit", "--edit-preset", "paper"]
    )
    argv = [*read_flags(CONFIGS / f"{name}.args"), *more, *fixed]
    return read_job(argv, num_replicas=replicas, world_size=world, ranks_per_host=None)


def at(rate: float, step: float = 2.0, **more: Any) -> TimingSetting:
    """Timing with a link of `rate` bit/s, without latency, and steps of `step` seconds."""
    return TimingSetting(Link(rate, more.pop("latency", 0.0)), GPU, step, 1 / 3, **more)


# ---- shards


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 4",
    "--pipeline-model-parallel-size 2", "--context-parallel-size 2"])  # fmt: skip
def test_shards_of_a_replica_add_up_to_the_model(name: str, flags: str) -> None:
    """Parameters that tensor parallelism replicates count once per copy."""
    job = job_of(name, 8, *flags.split())
    numels = job.architecture.unit_numels()
    copies = job.mesh.tensor
    for place, unit in enumerate(job.architecture.unit_names):
        held = sum(row[place] for row in job.rank_numels)
        norms = (2 if unit.startswith("layer") else 1) * job.words.count("--hidden-size")
        extra = 0 if unit == "embedding" else (copies - 1) * norms
        assert held == numels[unit] + extra, unit
    assert len(job.rank_numels) == 8


def test_one_bucket_per_layer_shards_layers_evenly() -> None:
    """The purpose of --ddp-bucket-size in the files: no rank holds much more than an eighth."""
    for name in SIZES:
        job = job_of(name)
        for place, unit in enumerate(job.architecture.unit_names):
            if unit.startswith("layer"):
                share = max(row[place] for row in job.rank_numels) / (
                    job.architecture.unit_numels()[unit] / 8
                )
                assert share < 1.01, (name, unit)


def test_every_rank_holds_all_without_distributed_optimizer() -> None:
    """Megatron's plain DDP does not shard."""
    argv = [w for w in read_flags(CONFIGS / "llama_350m.args") if "distributed-opt" not in w]
    job = read_job(argv, num_replicas=2, world_size=4, ranks_per_host=None)
    assert {sum(row) for row in job.rank_numels} == {job.architecture.numel}


# ---- bytes and memory


@pytest.mark.parametrize("wire", SYNC_DTYPES)
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_planned_bytes_equal_engine_payload(wire: str, replicas: int) -> None:
    """The payload of every shard of every unit, and a control record for each other replica."""
    more = () if replicas != 3 else ("--global-batch-size", "768")
    job = job_of("llama_350m", replicas, "--edit-sync-dtype", wire, "--use-edit", *more)
    config = job.config("edit")
    traffic = sync_traffic(job, config, 128)
    form = Wire.of(wire)
    payload = sum(form.payload_bytes(n, replicas) for row in job.rank_numels for n in row)
    records = 8 * (replicas - 1) * record_bytes(128, len(job.architecture.unit_names), 0)
    assert traffic.per_replica == payload + records
    by_rank = [sum(form.payload_bytes(n, replicas) for n in row) for row in job.rank_numels]
    assert traffic.per_rank == max(by_rank)
    assert traffic.per_step == pytest.approx(traffic.per_replica / 128)
    width = {
        "fp32": 4.0,
        "bf16": 2.0,
        "int8": 260 / 256,
        "int4": 66 / 128,
        "int2": 260 / 1024,
        "ternary": 0.2 + 2 / 256,
        "sign": 66 / 512,
    }[wire]
    ring = 2 * (replicas - 1) / replicas * width * job.architecture.numel
    assert traffic.per_replica == pytest.approx(ring, rel=0.01)


@pytest.mark.parametrize("replicas", [2, 8])
def test_planned_bytes_of_sparse_loco(replicas: int) -> None:
    """Each shard, encoded, goes to all others. Flags for other strategies are dropped, and no other
    wire type is suggested, however slow the link is."""
    words = ("--use-edit", "--edit-sync-dtype", "int8", "--edit-outer-momentum", "0.7")
    job = job_of("llama_350m", replicas, *words)
    config = job.config("sparse-loco")
    assert (config.sync_dtype, config.outer_momentum) == ("top64", 0.0)
    sent = sync_traffic(job, config, 128).per_replica
    expected = (replicas - 1) * 116 / 4096 * job.architecture.numel
    records = 8 * (replicas - 1) * record_bytes(128, len(job.architecture.unit_names), 0)
    assert sent - records == pytest.approx(expected, rel=0.001)
    total = sum(sum(row) for row in job.rank_numels)
    assert persistent_bytes(job, config) == 12 * total  # anchor, momentum, residual
    advice = make_plan(job, at(1e6), ["sparse-loco"]).advice
    assert "settings" not in {each.subject for each in advice}


@pytest.mark.parametrize("more", [(), ("--edit-offload",)])
def test_plan_accepts_ranks_without_a_shard(more: tuple[str, ...]) -> None:
    """Would catch: a crash where the last ranks hold only the padding of a bucket."""
    flags = ("--use-distributed-optimizer", "--use-edit", *more)
    ranks = 4096
    batch = ("--micro-batch-size", "1", "--global-batch-size", str(2 * ranks))
    job = job_of("tiny_cpu", 2, *flags, *batch, world=2 * ranks)
    assert min(map(sum, job.rank_numels)) == 0
    staged = {p.name: p.nbytes for p in edit_parts(job, job.config("edit"), overlaps=False)}
    assert staged["staging"] >= 4 * max(map(max, job.rank_numels))


@pytest.mark.parametrize(("which", "every", "each"), [("both", 1, 2), ("second", 4, 0.25)])
def test_plan_counts_bytes_of_moments(which: str, every: int, each: float) -> None:
    """Their bytes are added to those of the parameters; in flight they take device memory."""
    plain, moments = (
        job_of("llama_350m", 2, "--use-edit", *words.split())
        for words in (
            "--edit-sync-dtype int8",
            "--edit-sync-dtype int8 --edit-average-moments "
            f"{which} --edit-average-moments-every {every}",
        )
    )
    sent, more = (sync_traffic(job, job.config("edit"), 128) for job in (plain, moments))
    extra = more.per_replica - sent.per_replica
    assert extra == pytest.approx(each * plain.architecture.numel, rel=0.01)
    before, after = (
        {part.name: part.nbytes for part in edit_parts(job, job.config("edit"), overlaps=True)}
        for job in (plain, moments)
    )
    assert "moments in flight" not in before
    assert after["moments in flight"] == (2 if which == "both" else 1) * after["staging"]
    assert after["encoded units"] > before["encoded units"]


def test_plan_counts_memory_and_time_of_encoded_gradients() -> None:
    """Residuals of 4 (1 + 1/N) bytes per element of the shard, beside anchor and momentum, which
    are allocated from the start; a step of `ddp` waits for fewer bytes."""
    plain, coded = (
        job_of("llama_1b", 8, "--use-edit", *words)
        for words in ((), ("--edit-warmup-dtype", "int8"))
    )
    rows = [{row.name: row for row in make_plan(job, at(1e9), ["edit", "ddp"]).rows}
            for job in (plain, coded)]  # fmt: skip
    shard = coded.largest_shard
    parts = {part.name: part.nbytes for part in rows[1]["ddp"].parts}
    assert parts["gradient residuals of int8"] == pytest.approx(4 * (1 + 1 / 8) * shard, rel=1e-3)
    scratch = 2 * 260 / 256 + 4 / 8
    assert parts["encoded gradients"] == pytest.approx(scratch * shard, rel=1e-3)
    assert not rows[0]["ddp"].parts
    assert added_bytes(rows[1]["ddp"].parts, "device") == sum(parts.values())
    assert added_bytes(rows[1]["edit"].parts, "device") == 8 * shard + sum(parts.values())
    assert rows[1]["ddp"].cost.exchange < 0.3 * rows[0]["ddp"].cost.exchange
    text = " ".join(lines(make_plan(coded, at(1e9), ["edit"])))
    assert "in synchronous steps" in text


def test_plan_reports_bytes_of_final_phase() -> None:
    """They are reported per step of the phase, separate from those of rounds, and in the text."""
    words = ("--use-edit", "--edit-final-sync-fraction", "0.05")
    job, plain = job_of("llama_1b", 8, *words), job_of("llama_1b", 8, "--use-edit")
    plans = [make_plan(each, at(1e9), ["edit"]) for each in (job, plain)]
    rows, others = (plan.as_json()["strategies"] for plan in plans)
    phase, config = rows["edit"]["final_phase"], job.config("edit")
    assert phase == {
        "share_of_training": 0.05, "bytes_per_step": gradient_traffic(job, config).per_step,
    }  # fmt: skip
    assert others["edit"]["final_phase"] == {"share_of_training": 0.0, "bytes_per_step": 0.0}
    assert rows["edit"]["bytes_per_step"] == others["edit"]["bytes_per_step"]
    text, other_text = (" ".join(lines(plan)) for plan in plans)
    assert "in the last 0.05 of the training" in text and "in the last" not in other_text


HUB = "--use-edit --edit-hub h:1 --edit-replica-name a --edit-nominal-replicas 8".split()  # noqa: SIM905


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_synchronous_steps_with_a_hub_are_syncs(wire: str) -> None:
    """All units at once, blocking, in the wire type of syncs, without moments; `ddp` still averages
    gradients. Catches a warm-up that is planned in fp32 where it is sent in int8."""
    words = (*HUB, "--edit-sync-dtype", wire, "--edit-final-sync-fraction", "0.1")
    job = job_of("llama_1b", 8, *words, "--edit-fragments", "4", "--edit-delay-steps", "8",
                 "--edit-average-moments", "both")  # fmt: skip
    config, plain = job.config("edit"), job_of("llama_1b", 8, *words)
    found, same = gradient_traffic(job, config), sync_traffic(plain, plain.config("edit"), 1)
    assert found == same and found.per_step == found.per_replica
    form = Wire.of(wire)
    payload = sum(form.payload_bytes(n, 8) for row in job.rank_numels for n in row)
    assert payload < found.per_replica < 1.001 * payload + 1e6
    assert sync_traffic(job, config, 128).per_replica > 1.5 * found.per_replica  # with moments
    cost = synchronous_cost(job, config, at(1e9))
    assert cost.round == 2.0 and cost.exposed > cost.exchange == pytest.approx(
        8 * found.per_host / 1e9, rel=0.01
    )
    assert gradient_traffic(job, job.config("ddp")) == gradient_traffic(
        job_of("llama_1b", 8, "--use-edit"), config
    )
    text = " ".join(lines(make_plan(job, at(1e9), ["edit"])))
    assert "in the last 0.1 of the training" in text and "(parameters are averaged)" in text


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4.0), ("bf16", 2.0), ("int8", 260 / 256)])
def test_planned_synchronous_bytes_equal_those_of_compare(dtype: str, width: float) -> None:
    """`compare/traffic.py` computes the same for all ranks of a job; both by the width of a
    gradient on the wire. Catches int8 gradients that are counted as fp32."""
    job = job_of("llama_1b", 8, "--use-edit", "--edit-warmup-dtype", dtype)
    layout, config = Layout(8, 8, job.architecture.numel), job.config("ddp")
    planned = gradient_traffic(job, config).per_replica
    assert planned == pytest.approx(2 * 7 / 8 * width * job.architecture.numel, rel=1e-4)
    assert 8 * planned == pytest.approx(warmup_bytes(layout, num_steps=1, dtype=dtype), rel=1e-4)


def test_planned_stock_bytes_equal_those_of_compare() -> None:
    """`compare/traffic.py` computes the same for all ranks of a job."""
    job = job_of("llama_1b", 8)
    layout = Layout(8, 8, job.architecture.numel)
    stock, gradients = stock_traffic(job, reduces_by_all_reduce=False)
    assert 8 * stock.per_replica == pytest.approx(baseline_bytes(layout, num_steps=1))
    assert gradients == pytest.approx(stock.per_host * 4 / 6)


@pytest.mark.parametrize(
    ("flags", "each"),
    [("", 8), ("--edit-delay-steps 8", 16), ("--edit-sync-dtype int8", 12.5),
     ("--edit-strategy co2", 12), ("--edit-strategy streaming-diloco", 12),
     ("--edit-strategy co2 --edit-average-moments both", 20),
     ("--edit-average-moments both", 8)],
)  # fmt: skip
def test_outer_state_per_parameter(flags: str, each: float) -> None:
    """As documented in docs/strategies.md; int8 also keeps residuals of 4 (1 + 1 / N) bytes."""
    job = job_of("llama_350m", 8, "--use-edit", *flags.split())
    strategy = flags.split()[1] if "strategy" in flags else "edit"
    held = persistent_bytes(job, job.config(strategy))
    assert held / job.architecture.numel == pytest.approx(each, rel=0.01)


def test_offload_moves_outer_state_to_the_host() -> None:
    """Anchor and momentum of the units in flight are staged in addition to their addends."""
    job = job_of()
    config = job.config("edit")
    near = {p.name: p for p in edit_parts(job, config, overlaps=True)}
    offloaded = dataclasses.replace(config, offload=True)
    far = {p.name: p for p in edit_parts(job, offloaded, overlaps=True)}
    assert (near["anchor"].place, far["anchor"].place) == ("device", "host")
    layer, head = 12_601_344 / 8, 32_769_024 / 8
    assert near["staging"].nbytes == pytest.approx(4 * (layer + head), rel=0.01)
    assert far["staging"].nbytes == pytest.approx(12 * (layer + head) + 8 * layer, rel=0.15)


def test_stock_memory_of_7b() -> None:
    """2 + 4 bytes per parameter, and 12 shared by eight ranks."""
    job = job_of("llama_7b")
    parts = {part.name: part.nbytes for part in stock_parts(job)}
    numel = 6_738_415_616
    assert parts["parameters"] == 2 * numel and parts["gradients"] == 4 * numel
    assert parts["optimizer state"] == pytest.approx(12 * numel / 8, rel=0.01)


# ---- seconds


def test_exposed_seconds_equal_hand_computed_values() -> None:
    """Three units of 2 s on the wire, without own computation, and forward of 0, 3 and 3 s."""
    exchanges = [UnitExchange(2.0, 0.0, forward) for forward in (0.0, 3.0, 3.0)]
    # arrivals 2, 4, 6; the forward passes end at 2, 7, 10: 4 s more than 6.
    assert exposed_seconds(exchanges, depth=3) == pytest.approx(4.0)
    # One at a time: the next starts when the last has landed.
    assert exposed_seconds(exchanges, depth=1) == pytest.approx(4.0)
    assert exposed_seconds(exchanges, depth=3, head_start=6.0) == pytest.approx(0.0)
    assert exposed_seconds(exchanges, depth=3, head_start=1.0) == pytest.approx(3.0)
    blocked = [UnitExchange(2.0, 1.0, 0.0)] * 3
    assert exposed_seconds(blocked, depth=1) == pytest.approx(0.9 + 3 * 2.7)


rates = st.floats(1e6, 1e12)
names = st.sampled_from(["edit", "diloco", "co2", "streaming-diloco", "local-sgd", "slowmo"])


@settings(max_examples=40, deadline=None)
@given(rates, st.floats(1.0, 100.0), names, st.floats(0, 0.01))
def test_faster_link_never_costs_more(
    rate: float, factor: float, name: str, latency: float
) -> None:
    """The exposed time of every strategy does not grow with the rate."""
    job = job_of()
    slow, fast = (
        make_plan(job, at(r, latency=latency), [name]).rows[0].cost for r in (rate, rate * factor)
    )
    assert fast.exposed <= slow.exposed * (1 + 1e-9) + 1e-12
    assert 0 < slow.share_of_ideal <= fast.share_of_ideal + 1e-12 <= 1 + 1e-9


@settings(max_examples=40, deadline=None)
@given(rates, st.integers(9, 500), st.integers(1, 500))
def test_longer_rounds_never_cost_more(rate: float, tau: int, more: int) -> None:
    """One sync sends the same bytes, except for its record of losses."""
    job = job_of()
    config = job.config("edit")
    one, other = (dataclasses.replace(config, sync_interval=t) for t in (tau, tau + more))
    assert (
        sync_cost(job, one, at(rate)).share_of_ideal
        <= sync_cost(job, other, at(rate)).share_of_ideal + 1e-12
    )
    assert sync_traffic(job, other, tau + more).per_step < sync_traffic(job, one, tau).per_step


@settings(max_examples=20, deadline=None)
@given(rates, st.sampled_from([2, 4, 8, 16, 32]), st.sampled_from(SYNC_DTYPES))
def test_more_replicas_send_more_and_take_longer(rate: float, replicas: int, wire: str) -> None:
    """The factor 2 (N - 1) / N grows with N."""
    costs = []
    for size in (replicas, 2 * replicas):
        job = job_of("llama_350m", size, "--use-edit", "--edit-sync-dtype", wire, world=size)
        config = job.config("edit")
        costs.append((sync_traffic(job, config, 128).per_replica,
                      sync_cost(job, config, at(rate)).exchange))  # fmt: skip
    assert costs[0] < costs[1]


@settings(max_examples=30, deadline=None)
@given(rates, st.integers(0, 120))
def test_longer_delay_never_costs_more(rate: float, delay: int) -> None:
    """Computation of the sync itself stays exposed."""
    job = job_of()
    config = job.config("edit")
    exposed = [
        sync_cost(job, dataclasses.replace(config, delay_steps=d), at(rate)).exposed
        for d in (delay, delay + 1)
    ]
    assert exposed[1] <= exposed[0] + 1e-9
    assert exposed[1] >= 0.99 * WORK_BEFORE_EXCHANGE * sync_cost(job, config, at(rate)).work


def test_one_replica_exchanges_nothing() -> None:
    """There are no suggestions either."""
    plan = make_plan(job_of("llama_350m", 1), at(1e9), ["edit", "ddp", "stock"])
    assert [row.cost.exchange for row in plan.rows] == [0.0, 0.0, 0.0]
    assert plan.advice == ()


def test_exchange_overlaps_only_the_first_micro_batch() -> None:
    """Megatron gathers parameters once per step: more micro-batches hide nothing more."""
    few = job_of("llama_350m", 8, "--global-batch-size", "512")
    many = job_of("llama_350m", 8, "--global-batch-size", "4096")
    assert (few.num_micro_batches, many.num_micro_batches) == (1, 8)
    costs = [sync_cost(job, job.config("edit"), at(1e9, step=8.0)) for job in (few, many)]
    assert costs[0].exchange == costs[1].exchange and costs[0].exposed < costs[1].exposed


# ---- suggestions


def test_suggested_settings_are_those_that_edit_auto_chooses() -> None:
    """The plan with the suggested flags has the speed that the suggestion names. Given settings do
    not restrict it; strategies for which nothing is chosen, and elastic runs, get none."""
    for rate, name, length in (
        (1e12, "edit", "--edit-sync-interval"),
        (1e10, "edit", "--edit-sync-interval"),
        (1e9, "edit", "--edit-sync-interval"),
        (1e9, "a-edit", "--edit-sync-seconds"),
    ):
        strategy = ("--use-edit", "--edit-strategy", name)
        given = (*strategy, length, "256", "--edit-sync-dtype", "bf16")
        job = job_of("llama_7b", 8, *given)
        found = {a.subject: a for a in advise(job, name, at(rate), None)}["settings"]
        auto = make_plan(job_of("llama_7b", 8, *strategy, "--edit-auto"), at(rate), [name])
        choice = auto.rows[0].choice
        assert choice is not None and f"{choice.share:.1%} of the ideal speed" in found.text
        better = job_of("llama_7b", 8, *given, *str(found.value).split()).config(name)
        chosen = {each: getattr(choice.settings, each) for each in auto_settings(name)}
        assert {each: getattr(better, each) for each in chosen} == chosen
    assert "settings" not in {a.subject for a in advise(job, "co2", at(1e9), None)}
    elastic = job_of("llama_7b", 8, *HUB)  # no sync lands in the forward pass
    found = {a.subject: a for a in advise(elastic, "edit", at(1e8), None)}["settings"]
    assert "--edit-delay-steps" in str(found.value)
    delayed = job_of("llama_7b", 8, *HUB, "--edit-delay-steps", "4")
    assert delayed.is_elastic and delayed.config("edit").sync_mode == "blocking"


def test_offload_is_suggested_where_it_saves_the_memory() -> None:
    """50.6 GB of stock Megatron, 7.1 GB of EDiT."""
    job = job_of("llama_7b")
    found = [
        {a.subject: a.value for a in advise(job, "edit", at(1e10), memory)}["offload"]
        for memory in (80e9, 62e9, 40e9)
    ]
    assert found == ["", "--edit-offload", None]


def test_suggested_timeout_is_in_the_unit_of_the_flag() -> None:
    """Would catch: minutes, which a reader may take for seconds."""
    given = ("--use-edit", "--edit-timeout-seconds", "900")
    for flags, expected in (((), "1025 (17 min; auto: "), (given, "900 (15 min; given)")):
        job = job_of("llama_350m", 8, *flags)
        found = {a.subject: a.text for a in advise(job, "edit", at(1e12), None)}
        assert found["timeout-seconds"].startswith(f"--edit-timeout-seconds {expected}"), found


def test_warm_up_that_takes_days_is_a_warning() -> None:
    """Would catch a plan of 7B at 1 Gbit/s that tells of syncs alone. Fewer iterations than W
    count, and a warm-up is not warned of where its steps take longer than its exchanges."""
    job = job_of("llama_7b", 8, "--use-edit")
    plan = make_plan(job, at(1e9, step=22.0), ["edit", "ddp"])
    (line,) = (line for line in lines(plan) if line.startswith("- warm-up: WARNING: "))
    assert "the 1000 steps of the warm-up exchange 47.2 GB per host each" in line
    assert "takes 104.8 h at 1 Gbit/s; --edit-warmup-dtype int8: 26.6 h; " in line
    assert plan.as_json()["advice"]["warm-up"] == pytest.approx(1000 * plan.rows[1].cost.exposed)
    coded = job_of("llama_7b", 8, "--use-edit", "--edit-warmup-dtype", "int8")
    found = warmup_warning(coded, coded.config("edit"), at(1e9))
    assert found is not None and "26.6 h" in found.text and "int8" not in found.text
    elastic = job_of("llama_7b", 8, *HUB)
    found = warmup_warning(elastic, elastic.config("edit"), at(1e9))
    assert found is not None and "--edit-sync-dtype int8: " in found.text
    assert "--edit-warmup-dtype" not in found.text
    for rate, step, flags in (
        (1e10, 60.0, ""),  # longer steps
        (1e12, 0.1, ""),  # a quarter of an hour
        (1e9, 2.0, "--edit-warmup-steps 0"),
        (1e9, 2.0, "--train-iters 9"),
    ):
        job = job_of("llama_7b", 8, "--use-edit", *flags.split())
        assert warmup_warning(job, job.config("edit"), at(rate, step)) is None, (rate, flags)


def test_every_strategy_has_a_plan() -> None:
    """With the presets of each, and with flags of one that do not apply to another."""
    job = job_of("llama_350m", 8, "--use-edit", "--edit-clip", "5", "--edit-sync-interval", "64")
    plan = make_plan(job, at(1e9), NAMES)
    every = {row.name: row.every for row in plan.rows}
    assert every["edit"] == every["diloco"] == 64
    assert every["stock"] == every["ddp"] == 1 and every["a-edit"] == 600 / 2.0
    shares = {row.name: row.cost.share_of_ideal for row in plan.rows}
    assert shares["edit"] >= shares["diloco"] > shares["ddp"]
    assert synchronous_cost(job, job.config("ddp"), at(1e9)).share_of_ideal == shares["ddp"]
    json.dumps(plan.as_json())


def test_outer_step_costs_more_on_cpu_than_on_gpu() -> None:
    """Catches: a coefficient in the wrong unit."""
    job = job_of()
    near, far = (
        sync_cost(job, job.config("edit"), dataclasses.replace(at(1e11), machine=machine)).work
        for machine in (GPU, CPU)
    )
    assert 0 < near < far < 60
