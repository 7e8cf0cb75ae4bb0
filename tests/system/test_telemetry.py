"""Telemetry of real trainings: scraped by a real Prometheus, sent over OTLP, written to MLflow.

Would catch: a metric, query or alert that does not reach its user, replicas that export as one, a
second export beside Megatron's own, a drift that ends the run before Prometheus can see it.
"""

from __future__ import annotations

import json
import math
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.observe.telemetry import PHASES, SYNC
from tests.harness import Flags, train
from tests.harness.dashboards import as_grafana_sends, panel_queries, variable_queries
from tests.harness.elastic_run import elastic_run
from tests.harness.otlp_receiver import collector
from tests.harness.ports import free_ports
from tests.harness.prometheus import JOB, Prometheus, prometheus, wait_until
from tests.harness.torch_groups import HAS_GROUPS
from tests.host.runs import edit_flags, run_edit

PAUSED = "tests/harness/pretrain_paused.py"


def two_ports() -> int:
    """Return a port that is free, and so is the next one."""
    while True:
        first, second = free_ports(2)
        if second == first + 1:
            return first


@contextmanager
def paused_training(folder: Path, port: int, step: int, **flags: Any) -> Iterator[list[Any]]:
    """Train two replicas, which wait in a step until the context ends, or the file PAUSE names a
    later one; yield the result's list."""
    pause, results = folder / "PAUSE", list[Any]()
    pause.write_text(str(step))
    argv = edit_flags(2, edit_metrics_port=port, edit_log_dir=folder / "log", **flags)

    def run() -> None:
        results.append(train(argv, 2, script=PAUSED, env={"PAUSE_DIR": str(folder)}, timeout=200))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        pause.unlink()
        thread.join()


def test_prometheus_answers_the_dashboard_during_training(tmp_path: Path) -> None:
    """Every query of the dashboard and of its variables has values; both replicas are there; all
    rules are loaded and can be evaluated."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    port = two_ports()
    training: Flags = {
        "train_iters": 40, "eval_interval": 10, "eval_iters": 1, "edit_anomaly_warmup_syncs": 2
    }  # fmt: skip
    with (
        prometheus(tmp_path / "prometheus", [port, port + 1]) as server,
        paused_training(tmp_path, port, 20, **training) as results,
    ):
        # A rate needs two scrapes, with syncs between them.
        wait_until(lambda: _last_iteration(server) >= 19, "no iteration 19", 150)
        (tmp_path / "PAUSE").write_text("38")
        wait_until(lambda: _last_iteration(server) >= 37, "no iteration 37", 150)
        queries = [*panel_queries(), *variable_queries()]
        for title, query in queries:
            text = as_grafana_sends(query, JOB, "60s")
            wait_until(partial(_has_values, server, text), f"{title}: {text}")
            found = server.query(text)
            assert all(math.isfinite(value) for _, value in found), (title, text, found)
        by_replica = server.query("max by (replica) (edit_round)")
        assert {labels["replica"] for labels, _ in by_replica} == {"0", "1"}
        (info,) = server.query('target_info{edit_replica="1"}')
        assert info[0]["edit_strategy"] == "edit" and info[0]["service_name"] == "megatron-lm"
        _check_values(server, tmp_path / "log")
        wait_until(lambda: _are_evaluated(server), "rules are not evaluated")
    (result,) = results
    assert [rank.returncode for rank in result.ranks] == [0, 0]


def _has_values(server: Prometheus, query: str) -> bool:
    return bool(server.query(query))


def _last_iteration(server: Prometheus) -> float:
    found = server.query("min(edit_iterations_done)")
    return found[0][1] if found else 0.0


def _check_values(server: Prometheus, log: Path) -> None:
    """Compare totals with the event files."""
    syncs = [json.loads(line) for line in (log / "sync.jsonl").read_text().splitlines()]
    wait_until(lambda: server.query("min(edit_round)")[0][1] == len(syncs), "the last sync")
    sums = server.query('edit_sync_duration_seconds_sum{replica="0"}')
    for labels, value in sums:
        expected = sum(sync["seconds"][labels["phase"]] for sync in syncs)
        assert value == pytest.approx(expected, abs=1e-4), labels["phase"]
    ((_, sent),) = server.query('edit_sync_sent_bytes_total{replica="0"}')
    assert sent == sum(sync["wire_bytes"] for sync in syncs)
    assert {labels["phase"] for labels, _ in sums} == set(syncs[0]["seconds"])


def _are_evaluated(server: Prometheus) -> bool:
    (group,) = server.get("/api/v1/rules")["groups"]
    assert len(group["rules"]) == 8
    return all(rule["health"] == "ok" for rule in group["rules"])


def test_prometheus_sees_drift(tmp_path: Path) -> None:
    """The process waits for a scrape, ends with code 3, and the alert fires."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    port = two_ports()
    with prometheus(tmp_path / "prometheus", [port, port + 1]) as server:
        run = run_edit(
            tmp_path, 2, 2, train_iters=320, before="tests.host.spy:drift_after_sync", check=False,
            edit_metrics_port=port, edit_warmup_steps=300,  # some seconds, with several scrapes
        )  # fmt: skip
        assert [rank.returncode for rank in run.result.ranks] == [3, 3]

        def fires() -> bool:
            alerts = server.get("/api/v1/alerts")["alerts"]
            return "EditDriftFound" in {alert["labels"]["alertname"] for alert in alerts}

        wait_until(fires, "no alert")


@pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
def test_prometheus_sees_a_lost_replica_of_an_elastic_run(tmp_path: Path) -> None:
    """One of two replicas is killed; the metrics of the other name it, and two alerts are raised
    (they fire later)."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    port = two_ports()
    with (
        prometheus(tmp_path / "prometheus", [port, port + 1]) as server,
        elastic_run(tmp_path / "run", 2, flags={"train_iters": 100_000}) as run,
    ):
        for number, name in enumerate("ab"):
            run.start(name, edit_metrics_port=port + number)
        both = "min(edit_replicas_active) == 2 and count(edit_replicas_active) == 2"
        wait_until(lambda: bool(server.query(both)), "two replicas", 120)
        names = {labels["replica"] for labels, _ in server.query("edit_replicas_active")}
        assert names == {"a", "b"}
        run.signal("b", signal.SIGKILL)

        def are_raised() -> bool:
            alerts = server.get("/api/v1/alerts")["alerts"]
            raised = {alert["labels"]["alertname"] for alert in alerts}
            return {"EditReplicaLost", "EditReplicasMissing"} <= raised

        wait_until(are_raised, "no alert")
        assert server.query('edit_replicas_expected{replica="a"}')[0][1] == 2
        run.signal("a", signal.SIGKILL)


def test_used_port_is_refused_before_training(tmp_path: Path) -> None:
    """On all ranks, with one line, although only replica 1 has the problem."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    port = two_ports()
    with socket.socket() as other:
        other.bind(("", port + 1))
        other.listen()
        run = run_edit(tmp_path, 2, 2, check=False, edit_metrics_port=port, grace=30)
    assert [rank.returncode for rank in run.result.ranks] == [2, 2]
    (line,) = [x for x in run.result.ranks[0].stderr.splitlines() if x.startswith("megatron_edit:")]
    assert f"--edit-metrics-port (any address, port {port + 1}): cannot be listened at" in line


@pytest.mark.parametrize("flags", [{}, {"edit_delay_steps": 2, "edit_sync_interval": 4}])
def test_collector_receives_spans_of_each_sync(tmp_path: Path, flags: Flags) -> None:
    """Over OTLP: one sync with its four phases per round and replica, and one trace per round. The
    workers of the data loaders, which are forked, add nothing."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with collector() as found:
        run = run_edit(
            tmp_path, 2, 2, train_iters=14, num_workers=1, edit_telemetry=True, **flags,
            env={"OTEL_EXPORTER_OTLP_ENDPOINT": found.url, "OTEL_METRIC_EXPORT_INTERVAL": "500"},
        )  # fmt: skip
    rounds = len(run.syncs)
    assert rounds >= 3
    assert Counter(span.name for span in found.spans) == dict.fromkeys((SYNC, *PHASES), 2 * rounds)
    whole = {span.id: span for span in found.spans if span.name == SYNC}
    for span in found.spans:
        if span.name != SYNC:
            parent = whole[span.parent]
            assert parent.start <= span.start <= span.end <= parent.end
            assert (span.trace, span.replica) == (parent.trace, parent.replica)
    rounds_of_traces = {(span.trace, span.attributes["edit.round"]) for span in whole.values()}
    assert len(rounds_of_traces) == len({trace for trace, _ in rounds_of_traces}) == rounds
    for sync in run.syncs:
        (mine,) = [s for s in whole.values()
                   if (s.replica, s.attributes["edit.round"]) == ("0", sync["round"])]  # fmt: skip
        assert (mine.end - mine.start) / 1e9 == pytest.approx(sync["seconds"]["total"], abs=1e-5)
        assert mine.attributes["megatron.iteration"] == sync["iteration"]
    assert set(found.metrics) == {"0", "1"} and found.services == {"megatron-lm"}
    assert {"edit.round", "edit.run.ends", "edit.sync.duration"} <= found.metrics["1"]


def test_telemetry_joins_the_global_providers(tmp_path: Path) -> None:
    """Without a flag; with OTLP requested, too, nothing is sent twice. Only the writer rank of each
    replica takes part."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with collector() as found:
        run = run_edit(
            tmp_path, 4, 2, train_iters=8, edit_telemetry=True,
            before="tests.host.spy_telemetry:set_global_providers",
            env={"OTEL_EXPORTER_OTLP_ENDPOINT": found.url},
        )  # fmt: skip
    assert not found.spans and not found.metrics
    assert {path.name for path in tmp_path.glob("telemetry-*")} == {
        "telemetry-1.jsonl", "telemetry-3.jsonl"
    }  # fmt: skip
    lines = [json.loads(x) for x in (tmp_path / "telemetry-3.jsonl").read_text().splitlines()]
    assert Counter(name for name, _ in lines) == dict.fromkeys((SYNC, *PHASES), len(run.syncs))
    _, names = lines[-1]
    assert "edit.round" in names


def test_mlflow_run_is_continued_by_a_resumed_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of both parts are in one run, with Megatron's arguments, and the scalars of all
    syncs."""
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    environment = {
        "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": (tmp_path / "store").as_uri(),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    saves, syncs, evaluated = tmp_path / "saves", [], list[int]()
    for last in (8, None):
        run = run_edit(
            tmp_path / "log", 2, 2, train_iters=12, exit_interval=last, save=saves, load=saves,
            save_interval=100, eval_interval=4, eval_iters=1, env=environment,
            edit_mlflow_experiment="gpt",
        )  # fmt: skip
        syncs += run.syncs
        lines = run.lines("loss.jsonl")
        evaluated += [line["iteration"] for line in lines if line.get("split") == "validation"]
    client = MlflowClient()
    experiment = client.get_experiment_by_name("gpt")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "edit"
    assert found.data.params["edit_sync_interval"] == "3"
    assert found.data.params["hidden_size"] == "64" and "version/torch" in found.data.params

    def steps(name: str) -> list[int]:
        return [m.step for m in client.get_metric_history(found.info.run_id, name)]

    assert steps("grad-norm") == list(range(1, 13))
    # The last loss before a save is reported at the end, and again after the resume.
    assert steps("edit/lm-loss") == sorted([*range(1, 13), 8])
    assert steps("edit/round") == [sync["iteration"] for sync in syncs]
    assert evaluated[-1] == 12 and steps("validation-loss") == evaluated
    assert found.data.metrics["edit/bytes-between-replicas"] == syncs[-1]["wire_bytes"]


def test_training_without_the_extras_has_no_telemetry(tmp_path: Path) -> None:
    """Even the modules of OpenTelemetry and MLflow are not imported."""
    run_edit(tmp_path, 2, 2, train_iters=4, before="tests.system.test_telemetry:forbid_imports")


def forbid_imports() -> None:
    """A `before` hook: make the optional packages unimportable."""
    import sys

    for name in ("opentelemetry", "prometheus_client", "mlflow"):
        assert name not in sys.modules
        sys.modules[name] = None  # type: ignore[assignment]
