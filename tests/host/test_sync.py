"""Syncs on real Megatron: equal replicas, faults, traffic, memory, drift."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_edit.tools.monitor.run import MonitoredRun
from tests.host.runs import run_edit

DAMAGE = "tests.host.spy:damage_before_sync"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("precision", "steps"),
    [
        ("bf16", 80),
        pytest.param("bf16", 200, marks=pytest.mark.full),
        pytest.param("fp32", 200, marks=pytest.mark.full),
    ],
)
def test_digests_equal_after_every_sync(tmp_path: Path, precision: str, steps: int) -> None:
    """With dropout. Would catch rounding that depends on the replica, which would cause drift."""
    run = run_edit(
        tmp_path, 4, 2, train_iters=steps, edit_warmup_steps=20, edit_sync_interval=6,
        hidden_dropout=0.1, attention_dropout=0.1, bf16=precision == "bf16", timeout=220,
    )  # fmt: skip
    first, second = run.digests(0), run.digests(1)
    assert len(first) == len(run.syncs) == (steps - 20) // 6
    assert first == second and None not in first
    assert len(set(first)) == len(first)  # and the parameters do change
    losses = [line["loss"] for line in run.lines("loss.jsonl")]
    assert len(losses) == steps and losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_model_parallel_replicas_stay_equal(tmp_path: Path, tp: int, pp: int) -> None:
    """TP-replicated and tied copies are counted once and stay equal; all units are reported."""
    run = run_edit(tmp_path, 4, 2, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    assert run.digests(0) == run.digests(1)
    assert run.syncs[0]["units"] == ["embedding", "layer.1", "layer.2", "final"]
    for line in run.syncs:
        assert None not in line["clip"] and None not in line["update_norm"]


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(100.0, id="x100", marks=pytest.mark.system),
        pytest.param("nan", id="nan"),
        pytest.param("inf", id="inf", marks=pytest.mark.system),
    ],
)
def test_anomalous_replica_is_rejected_and_recovers(tmp_path: Path, what: float | str) -> None:
    """Damage on one ZeRO rank of a replica rejects the whole replica, for one sync."""
    run = run_edit(
        tmp_path, 4, 2, train_iters=17, edit_sync_interval=1, edit_anomaly_warmup_syncs=8,
        before=DAMAGE, env={"SPY_DAMAGE": json.dumps([[12, [1], "layer.2", what]])},
        no_check_for_nan_in_loss_and_grad=True,
    )  # fmt: skip
    syncs = run.syncs
    unit = syncs[0]["units"].index("layer.2")
    assert [line["anomalous"][unit][1] for line in syncs] == [r == 12 for r in range(1, 16)]
    assert syncs[11]["weights"][unit] == [1.0, 0.0]
    assert run.digests(0) == run.digests(1)
    losses = [line["loss"] for line in run.lines("loss.jsonl")]
    assert None not in losses and losses[-1] < losses[0]


def test_unit_anomalous_on_all_replicas_rolls_back(tmp_path: Path) -> None:
    """A unit that is nonfinite on all replicas returns to its anchor; the other units are
    synced."""
    run = run_edit(
        tmp_path, 2, 2, train_iters=11, global_batch_size=4, before=DAMAGE,
        env={"SPY_DAMAGE": json.dumps([[2, [0, 1], "layer.1", "nan"]])},
        no_check_for_nan_in_loss_and_grad=True,
    )  # fmt: skip
    unit = run.syncs[0]["units"].index("layer.1")
    assert [line["rollback"][unit] for line in run.syncs] == [False, True, False]
    assert sum(sum(line["rollback"]) for line in run.syncs) == 1
    assert run.digests(0) == run.digests(1)


def test_fp16_overflow_on_one_replica_keeps_replicas_in_step(tmp_path: Path) -> None:
    """Replica 1 skips a step: step counts, syncs and schedules must still agree."""
    run = run_edit(
        tmp_path, 4, 2, train_iters=14, fp16=True, initial_loss_scale=1024, lr_decay_style="linear",
        before="tests.host.spy:overflow_one_replica", env={"SPY_STEP": "7"},
    )  # fmt: skip
    assert [line["iteration"] for line in run.syncs] == [5, 8, 11, 14]
    assert [line["inner_steps"] for line in run.syncs] == [[3, 3]] * 4
    assert run.digests(0) == run.digests(1)
    lr = [
        {x["iteration"]: x["lr"] for x in run.lines(f"replica-{r}.jsonl") if "lr" in x}
        for r in (0, 1)
    ]
    different = [i for i in lr[0] if lr[0][i] != lr[1][i]]
    assert different == [
        7
    ]  # the skipped step itself; they agree after the sync that follows step 8


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_sync_group_is_silent_between_syncs(tmp_path: Path, wire: str) -> None:
    """Calls to the process groups are counted. Would catch a gradient, a loss or a barrier."""
    run_edit(
        tmp_path, 2, 2, train_iters=14, global_batch_size=4, edit_warmup_steps=2,
        edit_sync_interval=6, before="tests.host.spy:count_sync_traffic", edit_sync_dtype=wire,
    )  # fmt: skip
    for rank in range(2):
        log = json.loads((tmp_path / f"traffic-{rank}.json").read_text())
        by_step: dict[int, int] = {}
        for step, nbytes in log:
            by_step[step] = by_step.get(step, 0) + nbytes
        # `step` is counted before the sync of that step runs: warm-up 0..2, syncs at 8 and 14
        assert {step for step, nbytes in by_step.items() if nbytes and step > 2} == {8, 14}
        assert by_step[8] > (100_000 if wire == "fp32" else 50_000)


def test_outer_state_is_sharded(tmp_path: Path) -> None:
    """Every rank has 8 / M bytes per parameter, like Megatron's own shards, and no full-size
    copy."""
    run = run_edit(tmp_path, 4, 2, train_iters=5, before="tests.host.spy_memory:measure")
    facts = [json.loads((tmp_path / f"memory-{rank}.json").read_text()) for rank in range(4)]
    for replica in (facts[:2], facts[2:]):
        numel = replica[0]["model_numel"]
        assert sum(fact["outer_bytes"] for fact in replica) == 8 * numel
        for fact in replica:
            assert fact["optimizer_class"] == "EditDistributedOptimizer"
            assert fact["aligned"]
            # Padding makes shards uneven by a little. The live tensors are the outer state and a
            # few small ones (a batch, tables); one full-size copy would add 4 * numel.
            assert fact["outer_bytes"] <= 8 * numel / 2 * 1.1
            assert fact["new_tensor_bytes"] <= fact["outer_bytes"] + 0.3 * numel
    assert run.syncs


@pytest.mark.parametrize(
    ("delay", "fault", "where", "num_syncs"),
    [
        (0, "drift_after_sync", "after the sync of round 2 in unit layer.2", 1),
        (1, "anchor_drift", "in what had landed before the sync of round 3 in unit layer.2", 2),
    ],
    ids=["at once", "later"],
)
def test_drift_ends_run_and_names_unit(
    tmp_path: Path, delay: int, fault: str, where: str, num_syncs: int
) -> None:
    """A difference of one ulp in one element of one replica gives exit code 3 on every rank. Where
    syncs land later, anchor and momentum are compared at the next meeting."""
    run = run_edit(
        tmp_path, 4, 2, train_iters=20, before=f"tests.host.spy:{fault}", check=False,
        edit_delay_steps=delay,
    )  # fmt: skip
    assert [rank.returncode for rank in run.result.ranks] == [3] * 4
    assert where in run.result.ranks[0].stderr
    assert len(run.syncs) == num_syncs


def test_event_files_describe_run(tmp_path: Path) -> None:
    """All event files have the right fields and counts (design section 4)."""
    run = run_edit(tmp_path, 4, 2, train_iters=10, eval_interval=5, eval_iters=1)
    described = json.loads((tmp_path / "run.json").read_text())
    assert described["config"]["sync_interval"] == 3
    assert described["topology"]["num_replicas"] == 2
    assert [line["iteration"] for line in run.syncs] == [5, 8, 10]  # the last round is partial
    assert [line["round"] for line in run.syncs] == [1, 2, 3]
    assert run.syncs[-1]["inner_steps"] == [2, 2]
    assert run.syncs[-1]["samples"] == [40, 40]
    assert all(abs(sum(weights) - 1.0) < 1e-12 for weights in run.syncs[0]["weights"])
    for replica in range(2):
        lines = [x for x in run.lines(f"replica-{replica}.jsonl") if "loss" in x]
        assert [line["iteration"] for line in lines] == list(range(1, 11))
        assert lines[0]["samples"] == 4 and lines[0]["tokens"] == 4 * 32
    loss_lines = run.lines("loss.jsonl")  # including lines of evaluations
    assert [line["iteration"] for line in loss_lines if "split" in line] == [5, 10, 10, 10]
    evaluated = {x["iteration"]: x["validation_loss"] for x in loss_lines if "split" in x}
    assert evaluated == pytest.approx(run.result.valid_losses, rel=1e-6)
    assert all(line["samples"] == 8 * line["iteration"] for line in loss_lines)
    losses = [line for line in loss_lines if "loss" in line]
    assert [line["iteration"] for line in losses] == list(range(1, 11))
    for replica in range(2):
        assert run.lines(f"replica-{replica}.jsonl")[-1].items() >= {
            "end": "finished", "reason": None, "exit_code": 0, "iteration": 10, "samples": 40,
            "lines_lost": 0,
        }.items()  # fmt: skip
    monitored = MonitoredRun(tmp_path)
    monitored.poll()
    assert not monitored.num_damaged
    ones, twos = (
        [x["loss"] for x in run.lines(f"replica-{r}.jsonl") if "loss" in x] for r in (0, 1)
    )
    for line, one, two in zip(losses, ones, twos, strict=True):
        assert line["loss"] == pytest.approx((one + two) / 2)
    stdout = run.result.ranks[1].stdout
    assert "validation loss at iteration 5 |" in stdout  # at a sync, without label
    assert run.result.ranks[3].stdout.count("iteration") == 0  # only replica 0 prints
    assert "iteration       10/" in (tmp_path / "replica-1.log").read_text()
