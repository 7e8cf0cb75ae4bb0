"""Elastic runs of real Megatron: replicas are killed, frozen, leave, return and join.

Needs torch 2.14. Would catch: a run with a hub that trains otherwise than one without, a commit
that some replica has not applied, samples lost or consumed twice, and a survivor that waits for a
lost replica.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.elastic_run import ElasticRun, elastic_run
from tests.harness.torch_groups import HAS_GROUPS
from tests.host.layouts import LAYOUTS
from tests.host.runs import run_edit
from tests.host.spy import read_records
from tests.host.spy_faults import SIGNALS

pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
RECORD = "tests.host.spy:record"
ENDLESS = 100_000  # steps


# What a training over a slow link needs.
TRAINS_ON: dict[str, Any] = {
    "edit_delay_steps": 1, "edit_fragments": 2, "edit_sync_dtype": "int8",
    "edit_average_moments": "both",
}  # fmt: skip


def losses_of(lines: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Step, loss and learning rate of each iteration in a replica's event file."""
    return [(x["replica_step"], x["loss"], x["lr"]) for x in lines if "replica_step" in x]


def digests_of(run: ElasticRun, name: str) -> list[str]:
    """Digests of the final parameters of a replica's ranks, as `RECORD` has written them."""
    return [record["digest"] for record in read_records(run.spy_dir(name), run.ranks)]


@pytest.mark.parametrize(
    ("layout", "replicas", "more"),
    [
        ("m3", 3, {}),
        ("m2", 2, {"edit_sync_dtype": "bf16", "edit_offload": True}),
        ("tp2", 2, {"edit_outer_momentum": 0.9}),
        (
            "m3",
            3,
            {
                "edit_sync_dtype": "int8",
                "edit_average_moments": "both",
                "edit_scale_beta2": True,
            },
        ),
        ("tp2", 2, {"edit_sync_dtype": "int4", "edit_average_moments": "second"}),
        ("m2", 2, {"edit_delay_steps": 2}),
        ("pp2", 2, {"edit_fragments": 4}),
        ("m2", 2, {"edit_mix": 0.25}),
        (
            "tp2",
            2,
            {
                "edit_fragments": 2,
                "edit_delay_steps": 1,
                "edit_sync_dtype": "int8",
                "edit_average_moments": "both",
            },
        ),
    ],
)
def test_hub_changes_no_bit(
    tmp_path: Path, layout: str, replicas: int, more: dict[str, Any]
) -> None:
    ranks, flags = LAYOUTS.get(layout, (1, {}))
    flags = {**flags, **more, "train_iters": 17, "global_batch_size": 4 * replicas,
             "lr_decay_style": "cosine", "lr_warmup_iters": 3,
             "edit_warmup_steps": 0}  # fmt: skip
    plain = tmp_path / "plain"
    without = run_edit(
        plain, replicas * ranks, replicas, before=RECORD, edit_sync_mode="blocking",
        edit_sync_interval=4, **flags,
    )  # fmt: skip
    finals = {record["digest"] for record in read_records(plain, replicas * ranks)}
    names = "abc"[:replicas]
    with elastic_run(tmp_path / "hub", replicas, ranks=ranks, flags=flags, before=RECORD) as run:
        for name in names:
            run.start(name)
        run.finish(names)
        for number, name in enumerate(names):
            before = losses_of(without.lines(f"replica-{number}.jsonl"))
            assert losses_of(run.lines(f"replica-{name}.jsonl")) == before
            digests = {record["digest"] for record in read_records(run.spy_dir(name), ranks)}
            assert digests == finals
        rows = run.lines("sync.jsonl")
        for line, same in zip(rows, without.syncs, strict=True):
            for key in ("round", "iteration", "norms", "weights", "clip", "update_norm"):
                assert line[key] == same[key], key
        assert run.check_blocks() == 17 * replicas
        (end,) = run.events("end")
        assert end["reason"] == "finished" and end["holes"] == []


# Four parameter groups, whose rates and weight decays move at every step.
RATES = {"decoupled_lr": 4e-4, "decoupled_min_lr": 1e-4, "start_weight_decay": 0.01,
         "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}  # fmt: skip


def check_rates(run: ElasticRun, returned: str, members: str) -> None:
    """Check that all replicas have the same rate and weight decay in each parameter group, in each
    step that one that has returned makes in the same round as a member."""
    found: dict[str, dict[tuple[int, int], Any]] = {}
    for name in (*members, returned):
        path = run.spy_dir(name) / "rates-0.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        newest = run.starts[name][-1].pids[0]
        found[name] = {(x[1], x[2]): x[3] for x in lines if x[0] == newest}
    back = found[returned]
    for name in members:
        shared = back.keys() & found[name].keys()
        assert len({samples for samples, _ in shared}) >= 3, "no round in common"
        assert all(back[key] == found[name][key] for key in shared), f"{returned}, {name}"
    groups = list(back.values())
    assert all(len({rate for rate, _ in each}) >= 2 for each in groups), "all groups have one rate"
    assert all(len({decay for _, decay in each}) >= 2 for each in groups)
    assert len({str(each) for each in groups}) == len(groups), "the rates do not move"


def test_killed_replica_returns(tmp_path: Path) -> None:
    flags = {"train_iters": ENDLESS, "lr_decay_iters": 150, "global_batch_size": 12,
             "lr_decay_style": "cosine", **RATES}  # fmt: skip
    before = "tests.host.spy_state:record_rates"
    with elastic_run(tmp_path, 3, flags=flags, before=before, start="abc") as run:
        run.wait_for_commits(2)
        run.signal("b", signal.SIGKILL)
        run.wait_for(lambda: run.events("leave"), 20)
        run.wait_for_commits(len(run.events("commit")) + 2)
        run.start("b")
        run.wait_for(lambda: "b" in run.events("commit")[-1]["members"], 60)
        run.stop("abc")
        run.check_blocks()
        assert [line["reason"] for line in run.events("leave")[:1]] == ["lost"]
        rates: dict[int, set[float]] = {}
        for name in "abc":
            for line in run.lines(f"replica-{name}.jsonl"):
                if "lr" in line:
                    rates.setdefault(line["samples_all"], set()).add(line["lr"])
        assert all(len(values) == 1 for values in rates.values()), "learning rates differ"
        check_rates(run, "b", "ac")


@pytest.mark.parametrize("is_later", [True, False], ids=["after the choice", "before it"])
def test_returning_replica_uses_the_chosen_settings(tmp_path: Path, is_later: bool) -> None:
    """All replicas choose at the end of the warm-up, as the commit says; one that joins later
    copies the choice with the state, and one that joins before takes part in it."""
    flags = {"train_iters": ENDLESS, "lr_decay_iters": 400, "global_batch_size": 12,
             "edit_auto": True, "edit_sync_interval": None, "edit_warmup_steps": 60}  # fmt: skip
    env = {"SPY_RATES": "4e5,4e5", "SPY_DEVIATES": ""}  # bytes per second
    hook = "tests.host.spy_state:record_with_fixed_measurements"
    header = tmp_path / "logs" / "run.json"

    def choices() -> list[dict[str, Any]]:
        return list(json.loads(header.read_text()).get("choices", []))

    with elastic_run(tmp_path, 3, flags=flags, env=env, before=hook, start="abc") as run:
        run.wait_for_commits(5)
        if is_later:
            run.wait_for(choices)
        run.signal("b", signal.SIGKILL)
        run.wait_for(lambda: run.events("leave"), 20)
        run.start("b")
        run.wait_for(lambda: "b" in run.events("commit")[-1]["members"], 60)
        assert bool(choices()) is is_later
        run.wait_for(choices)
        run.stop("abc")
        run.check_blocks()
        (choice,) = choices()
        chosen = choice["settings"]
        assert chosen["sync_dtype"] != "fp32" and chosen["delay_steps"] > 0
        edges = [k * chosen["sync_interval"] // chosen["fragments"] for k in range(300)]
        rows = run.lines("sync.jsonl")
        lengths = [edges[line["round"]] - edges[line["round"] - 1] for line in rows]
        warm_up = [line["samples_all"] <= 12 * 60 + 12 * 10 for line in rows]
        first = next(n for n, line in enumerate(rows) if max(line["inner_steps"]) > 1)
        assert rows[first - 1]["samples_all"] >= 12 * 60 and warm_up[first - 1]
        for n, line in enumerate(rows[:-1]):
            length = 1 if n < first else lengths[n]
            assert set(line["inner_steps"]) <= {0, length}, line["round"]
        assert "chosen after step" in run.starts["b"][-1].log.read_text()


@pytest.mark.parametrize("more", [{}, TRAINS_ON], ids=["waits", "trains on"])
def test_hub_is_killed_again_and_again(tmp_path: Path, more: dict[str, Any]) -> None:
    with elastic_run(
        tmp_path, 2, flags={"train_iters": 120, "global_batch_size": 8, **more}, start="ab"
    ) as run:
        for count in range(4):
            run.wait_for_commits(2 * count + 2)
            run.signal_hub(signal.SIGKILL)
            run.start_hub()
        run.finish("ab")
        assert run.check_blocks() == 120 * 2
        assert run.events("open")[-1]["term"] == 5
        assert not [line for line in run.events("leave") if line["reason"] != "finished"]


def test_frozen_replica_is_fenced_and_rejoins(tmp_path: Path) -> None:
    flags = {"train_iters": ENDLESS, "global_batch_size": 12}
    with elastic_run(tmp_path, 3, flags=flags, start="abc") as run:
        run.wait_for_commits(2)
        run.signal("c", signal.SIGSTOP)
        run.wait_for(lambda: run.events("leave"), 30)
        run.wait_for_commits(len(run.events("commit")) + 2)
        run.signal("c", signal.SIGCONT)
        assert run.codes("c") == [5]
        run.start("c")
        run.wait_for(lambda: "c" in run.events("commit")[-1]["members"], 60)
        run.stop("abc")
        run.check_blocks()


def test_replica_leaves_on_request_and_others_join(tmp_path: Path) -> None:
    """With moments of their own."""
    flags = {"train_iters": ENDLESS, "global_batch_size": 8, "exit_signal_handler": True,
             "edit_inner_state": "reset"}  # fmt: skip
    before = "tests.host.spy_state:record_first_moments"
    with elastic_run(tmp_path, 2, flags=flags, before=before, start="ab") as run:
        run.wait_for_commits(2)
        run.signal("a", signal.SIGTERM)
        assert run.codes("a") == [0]
        assert run.events("leave")[0]["reason"] == "signal"
        run.start("d")
        run.start("e")
        run.wait_for(lambda: run.events("commit")[-1]["members"] == ["b", "d", "e"], 60)
        run.stop("bde")
        run.check_blocks()
        for name in "de":
            assert float((run.spy_dir(name) / "first-counter.txt").read_text()) <= 5


@pytest.mark.parametrize(
    ("rank", "more"),
    [
        pytest.param(1, {}, id="fp32"),
        pytest.param(
            0, {"bf16": True, "edit_sync_dtype": "bf16"}, id="bf16-rank-0", marks=pytest.mark.full
        ),
    ],
)
def test_rank_of_a_replica_is_killed(tmp_path: Path, rank: int, more: dict[str, Any]) -> None:
    """The other rank ends by itself, also where rank 0 is killed, which speaks with the hub."""
    flags = {"train_iters": ENDLESS, "global_batch_size": 8, "tensor_model_parallel_size": 2,
             **more}  # fmt: skip
    with elastic_run(tmp_path, 2, ranks=2, flags=flags, before=RECORD, start="ab") as run:
        run.wait_for_commits(2)
        run.signal("b", signal.SIGKILL, rank=rank)
        assert run.codes("b", 5) == ([-9, 5] if rank == 0 else [5, -9]), run.tails()
        run.wait_for(lambda: run.events("leave"), 20)
        run.start("b")
        run.wait_for(lambda: len(run.events("epoch")) >= 3, 60)
        run.stop("ab")
        run.check_blocks()
        assert digests_of(run, "a") == digests_of(run, "b")


def test_timed_rounds_are_elastic(tmp_path: Path) -> None:
    flags = {"edit_strategy": "a-edit", "edit_sync_seconds": 0.5, "edit_sync_interval": None,
             "train_iters": 120, "global_batch_size": 12}  # fmt: skip
    with elastic_run(tmp_path, 3, flags=flags, start="abc") as run:
        run.wait_for_commits(2)
        run.signal("a", signal.SIGKILL)
        run.wait_for(lambda: run.events("leave"), 20)
        run.wait_for_commits(len(run.events("commit")) + 1)
        run.start("a")
        run.finish("bc")
        assert run.codes("a", 60) == [0]
        run.check_blocks()


def test_hub_stop_ends_the_run_with_a_save(tmp_path: Path) -> None:
    """Also after Ctrl-C in one of two replicas. Would catch an end record that names neither."""
    flags = {"train_iters": 1000, "global_batch_size": 8, "save": tmp_path / "saves",
             "save_interval": 10_000}  # fmt: skip
    with elastic_run(tmp_path, 2, flags=flags, start="ab") as run:
        run.wait_for_commits(2)
        run.signal("b", signal.SIGINT)
        run.codes("b")
        end = run.lines("replica-b.jsonl")[-1]
        assert (end["end"], end["reason"], end["exit_code"]) == ("stopped", "Ctrl-C", 130)
        run.wait_for(lambda: run.events("leave"))
        run.ask_hub("stop")
        run.finish("a")
        end = run.lines("replica-a.jsonl")[-1]
        assert (end["end"], end["reason"]) == ("stopped", "megatron-edit hub stop")
        committed = run.events("commit")[-1]["samples"] // 8
        tracker = tmp_path / "saves" / "latest_checkpointed_iteration.txt"
        assert int(tracker.read_text()) == committed
        assert run.events("end")


def test_checkpoint_resumes_with_another_membership(tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    flags = {"train_iters": 80, "global_batch_size": 8, "save": saves, "save_interval": 10,
             "edit_anomaly_warmup_syncs": 1}  # fmt: skip
    with elastic_run(tmp_path / "first", 2, flags=flags, start="ab") as run:
        run.wait_for_commits(8)
        run.wait_for(lambda: (saves / "latest_checkpointed_iteration.txt").exists(), 30)
        for name in "ab":
            run.signal(name, signal.SIGKILL)
        run.wait_for(lambda: len(run.events("leave")) == 2, 100)
        rounds = len(run.events("commit"))
        for name in "bc":
            run.start(name, load=saves)
        run.finish("bc")
        lineages = [line["lineage"] for line in run.events("open")]
        assert lineages[-1] == 1, run.journal()[-1]
        resumed = run.events("open")[-1]["round"]
        assert 0 < resumed <= rounds
        first = run.lines("sync.jsonl")[0]
        assert first["members"] == ["b", "c"]
        # The statistics of b are those of the checkpoint; c was not there.
        assert all(z[0] is not None and z[1] is None for z in first["z"])


def test_leader_that_was_frozen_in_a_save_does_not_complete_it(tmp_path: Path) -> None:
    """Others have saved meanwhile. Would catch: a tracker that goes back."""
    saves = tmp_path / "saves"
    flags = {"train_iters": 2000, "global_batch_size": 12, "save": saves, "save_interval": 20,
             "save_retain_interval": 10_000}  # fmt: skip
    tracker = saves / "latest_checkpointed_iteration.txt"
    with elastic_run(
        tmp_path, 3, flags=flags, before="tests.host.spy_faults:end_in_save", start="abc"
    ) as run:
        run.wait_for_commits(2)
        old = run.events("epoch")[-1]["leader"]
        others = "abc".replace(old, "")
        (run.spy_dir(old) / "save").write_text(f"{signal.SIGSTOP:d} ")
        run.wait_for((run.spy_dir(old) / "saving").exists)
        before = tracker.read_text() if tracker.exists() else "0"
        run.wait_for(lambda: run.events("leave"), 30)
        run.wait_for(lambda: tracker.exists() and int(tracker.read_text()) > int(before) + 40)
        for name in others:  # so that only the old leader could change something
            run.freeze(name)
        found, text = sorted(saves.rglob("*")), tracker.read_text()
        run.signal(old, signal.SIGCONT)
        assert run.codes(old, 30) == [5], run.tails()
        assert (sorted(saves.rglob("*")), tracker.read_text()) == (found, text)
        for name in others:
            run.signal(name, signal.SIGCONT)
        run.wait_for(lambda: int(tracker.read_text()) > int(text))
        run.ask_hub("stop")
        run.finish(others)


def test_run_has_not_ended_while_its_last_save_is_missing(tmp_path: Path) -> None:
    """The leader is killed in it, and the others have ended: started again, all load what there is.
    Would catch: a run that has ended with success, of which the end is lost."""
    saves = tmp_path / "saves"
    flags = {"train_iters": 60, "global_batch_size": 8, "save": saves, "save_interval": 20,
             "load": saves}  # fmt: skip
    spy = "tests.host.spy_faults:end_in_save"
    with elastic_run(tmp_path, 2, flags=flags, before=spy) as run:
        for name in "ab":
            (run.spy_dir(name) / "save").write_text(f"{signal.SIGKILL:d} iter_0000060")
            run.start(name)
        run.wait_for(lambda: any((run.spy_dir(name) / "saving").exists() for name in "ab"))
        killed = "a" if (run.spy_dir("a") / "saving").exists() else "b"
        assert run.codes(killed) == [-signal.SIGKILL]
        assert run.codes("ab".replace(killed, "")) == [0]
        run.wait_for(lambda: len(run.events("leave")) == 2, 60)
        assert not run.events("end")
        for name in "ab":
            (run.spy_dir(name) / "save").unlink(missing_ok=True)
            run.start(name)
        run.finish("ab")
        assert run.events("end")[-1]["reason"] == "finished"
        assert (saves / "latest_checkpointed_iteration.txt").read_text() == "60"


@pytest.mark.parametrize(
    ("how", "more"), [("killed", {}), ("frozen", {}), ("killed", TRAINS_ON), ("frozen", TRAINS_ON)]
)
def test_replica_is_lost_in_the_exchange(tmp_path: Path, how: str, more: dict[str, Any]) -> None:
    """With all units on their way: collectives that wait for it must not hold up the next ones."""
    flags = {"train_iters": ENDLESS, "global_batch_size": 8, "num_layers": 6, **more}
    with elastic_run(
        tmp_path, 4, flags=flags, before="tests.host.spy_faults:end_in_exchange", start="abcd"
    ) as run:
        run.wait_for_commits(2)
        (run.spy_dir("c") / "signal").write_text(str(int(SIGNALS[how])))
        run.wait_for(lambda: run.events("leave"), 40)
        count = len(run.events("commit"))
        run.wait_for_commits(count + 2, 20)
        if how == "frozen":
            run.signal("c", signal.SIGKILL)
        run.stop("abd")
        run.check_blocks()


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_average_that_is_corrupt_on_all_replicas_is_not_applied(tmp_path: Path, wire: str) -> None:
    """Would catch: a flipped bit that digests cannot show, as all replicas have added it."""
    ranks, flags = LAYOUTS["tp2"]
    flags = {**flags, "train_iters": 14, "global_batch_size": 8, "edit_sync_dtype": wire,
             "edit_warmup_steps": 0}  # fmt: skip
    plain = tmp_path / "plain"
    run_edit(
        plain, 2 * ranks, 2, before=RECORD, edit_sync_mode="blocking", edit_sync_interval=4,
        **flags,
    )  # fmt: skip
    finals = {record["digest"] for record in read_records(plain, 2 * ranks)}
    hook = "tests.host.spy_faults:flip_in_exchange"
    with elastic_run(tmp_path / "hub", 2, ranks=ranks, flags=flags, before=hook) as run:
        run.start("a")
        (run.spy_dir("b") / "flip").touch()
        run.start("b")
        run.finish("ab")
        assert (run.spy_dir("b") / "flipped").exists()
        assert run.check_blocks() == 14 * 2
        assert len(run.events("epoch")) == 2 and {e["reason"] for e in run.events("leave")} == {
            "finished"
        }
        text = "the average is not that of the replicas' updates in unit final"
        assert run.tails(100_000).count(text) == 3, "the hub and both replicas say so"
        for name in "ab":
            assert set(digests_of(run, name)) == finals


def test_evaluations_and_tensorboard_need_no_other_replica(tmp_path: Path) -> None:
    """All replicas hold the same parameters at an evaluation, and only the leader records it."""
    flags = {"train_iters": 60, "global_batch_size": 8, "eval_interval": 10, "eval_iters": 2,
             "tensorboard_dir": tmp_path / "board", "num_layers": 4}  # fmt: skip
    with elastic_run(tmp_path, 2, flags=flags, start="ab") as run:
        run.wait_for_commits(3)
        run.signal("a", signal.SIGKILL)
        run.finish("b")
        found = [line for line in run.lines("loss.jsonl") if line.get("split") == "validation"]
        assert len(found) >= 5, run.lines("loss.jsonl")
        assert all(any((tmp_path / "board" / name).iterdir()) for name in "ab")


def test_leader_that_stops_in_an_open_round_ends(tmp_path: Path) -> None:
    """It saves nothing that is not committed, and does not wait for a commit that it has left."""
    saves = tmp_path / "saves"
    flags = {"train_iters": ENDLESS, "global_batch_size": 8, "exit_signal_handler": True,
             "save": saves, "save_interval": ENDLESS, **TRAINS_ON}  # fmt: skip
    hook = "tests.host.spy_faults:stop_at_meeting"
    with elastic_run(tmp_path / "run", 2, flags=flags, before=hook, start="ab") as run:
        run.wait_for_commits(3)
        leader = run.events("epoch")[-1]["leader"]
        (run.spy_dir(leader) / "stop").touch()
        assert run.codes(leader) == [0]
        assert (run.spy_dir(leader) / "stopped").exists()
        assert not (saves / "latest_checkpointed_iteration.txt").exists()
        run.stop("ab".replace(leader, ""))
        run.check_blocks()


def test_request_to_stop_in_the_warm_up(tmp_path: Path) -> None:
    """The replica that has it leaves, and the others go on; a stop of the whole run saves."""
    saves = tmp_path / "saves"
    flags = {"train_iters": 4000, "global_batch_size": 8, "exit_signal_handler": True,
             "edit_warmup_steps": 3000, "save": saves, "save_interval": 10_000}  # fmt: skip
    with elastic_run(tmp_path / "first", 2, flags=flags, start="ab") as run:
        run.wait_for_commits(5)
        run.signal("b", signal.SIGTERM)
        run.finish("b")
        run.wait_for_commits(len(run.events("commit")) + 3)
        run.stop("a")
        commits = run.events("commit")
        assert [line["members"] for line in commits[:1] + commits[-1:]] == [["a", "b"], ["a"]]
        saved = int((saves / "latest_checkpointed_iteration.txt").read_text())
        assert saved == run.check_blocks() // 2


def test_fewer_than_the_minimum_wait_for_one_that_returns(tmp_path: Path) -> None:
    """Two of three are killed: the last one commits nothing until one of them is back."""
    flags = {"train_iters": 80, "global_batch_size": 12}
    with elastic_run(tmp_path, 3, minimum=2, flags=flags, start="abc") as run:
        run.wait_for_commits(2)
        run.signal("a", signal.SIGKILL)
        run.wait_for(lambda: run.events("commit")[-1]["members"] == ["b", "c"], 30)
        run.signal("b", signal.SIGKILL)
        run.wait_for(lambda: len(run.events("leave")) == 2, 30)
        count = len(run.events("commit"))
        run.wait_for(lambda: "c: waiting" in run.ask_hub("status"), 30)
        run.start("b")
        run.wait_for_commits(count + 3)
        commits = run.events("commit")
        assert commits[count]["seq"] > run.events("join")[3]["seq"]
        assert commits[count]["members"] == ["b", "c"]
        run.finish("bc")
        run.check_blocks()
