"""A run of MLflow, written to a folder and to servers that do not answer.

Would catch: a server that delays training or its end, a resumed training that begins another run, a
run that never ends.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.errors import UsageError
from megatron_edit.observe import mlflow_run
from megatron_edit.observe.metrics import SyncMetrics
from megatron_edit.observe.mlflow_run import MlflowRun, check_mlflow
from megatron_edit.observe.records import Ending, Evaluation, Iteration
from tests.harness.ports import free_ports

pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let MLflow use a folder."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_RUN_NAME", *mlflow_run._DEFAULTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    return tmp_path / "store"


def runs() -> list[Any]:
    """Return the runs of the experiment, the newest first."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("gpt")
    return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


def history(run_id: str, name: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric."""
    from mlflow import MlflowClient

    return sorted((m.step, m.value) for m in MlflowClient().get_metric_history(run_id, name))


def new_run(interval: int = 1) -> MlflowRun:
    """Return a run that is not open yet; iterations are numbered from 100 on."""
    return MlflowRun(SyncMetrics(32), lambda step: 100 + step, interval)


def write(id_file: Path | None, steps: range, *, resumes: bool, end: str = "finished") -> None:
    """Write a run with a value at each step."""
    params: dict[str, object] = {f"p{number}": number for number in range(150)}
    run = new_run()
    assert run.open("gpt", "edit", {**params, "long": "x" * 9000}, id_file, resumes=resumes)
    run.on_losses(steps.start, [float(step) for step in steps])
    run.on_losses(steps.stop, [float("nan")])
    run.on_end(Ending(end, "", 0, 41, 328))
    run.close()
    run.close()


def test_values_parameters_and_status_are_written(tmp_path: Path) -> None:
    """More values and parameters than one call may have; values that are not finite are left
    out."""
    write(None, range(1500), resumes=False, end="stopped")
    (run,) = runs()
    assert run.info.run_name == "edit" and run.info.status == "KILLED"
    assert history(run.info.run_id, "edit/lm-loss") == [(100 + n, float(n)) for n in range(1500)]
    assert len(run.data.params) == 151 and len(run.data.params["long"]) == 6000


def test_resumed_training_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the id in the folder of its checkpoints, or by MLFLOW_RUN_ID; a new training does not,
    although the file is there."""
    id_file = tmp_path / "saves" / "mlflow_run_id"
    write(id_file, range(3), resumes=False, end="failed")
    (first,) = runs()
    assert first.info.status == "FAILED"
    write(id_file, range(3, 5), resumes=True)
    (again,) = runs()
    assert again.info.run_id == first.info.run_id and again.info.status == "FINISHED"
    assert [value for _, value in history(first.info.run_id, "edit/lm-loss")] == [0, 1, 2, 3, 4]
    write(id_file, range(1), resumes=False)
    assert len(runs()) == 2
    assert id_file.read_text().strip() != first.info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", first.info.run_id)
    write(None, range(9, 10), resumes=False)
    assert len(runs()) == 2 and history(first.info.run_id, "edit/lm-loss")[-1] == (109, 9.0)


def test_scalars_of_megatron_are_written_at_their_interval() -> None:
    """Learning rate and norm of the gradient by iterations, and every evaluation."""
    run = new_run(interval=2)
    assert run.open("gpt", "edit", {}, None, resumes=False)
    for number in (1, 2):
        run.on_iteration(Iteration(number, number, 3.0, None, 1e-3, 8, 8, 64, 0.1))
    run.on_evaluation(Evaluation(1, 8, "validation", 2.5, "wiki"))
    run.close()
    (found,) = runs()
    assert history(found.info.run_id, "learning-rate") == [(102, 1e-3)]
    assert history(found.info.run_id, "validation-loss/wiki") == [(101, 2.5)]
    assert set(found.data.metrics) == {"learning-rate", "validation-loss/wiki"}


def test_unreachable_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start it fails in a few seconds: nothing listens at the address."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_ports(1)[0]}")
    check_mlflow("gpt")
    began = time.monotonic()
    with pytest.raises(Exception, match="HTTPConnectionPool"):
        new_run().open("gpt", "edit", {}, None, resumes=False)
    assert time.monotonic() - began < 20


def test_server_that_goes_away_delays_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A store that fails after the start: here a file where its folder was. One warning; the end
    is not delayed, either by a store that does not answer."""
    run = new_run()
    assert run.open("gpt", "edit", {}, None, resumes=False)
    store.rename(store.with_name("lost"))
    store.write_text("")
    began = time.monotonic()
    for step in range(200):
        run.on_losses(step, [1.0])
    assert time.monotonic() - began < 2
    monkeypatch.setattr(mlflow_run, "_DRAIN_SECONDS", 1.0)
    monkeypatch.setattr(run, "_finish", lambda: time.sleep(5))
    run.close()
    assert time.monotonic() - began < 4
    while "[edit] mlflow." not in (text := capfd.readouterr().err):
        assert time.monotonic() - began < 60
        time.sleep(0.1)
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("uri", "is_allowed"), [("gopher://x", "true"), ("file:///nowhere/store", "false")]
)
def test_unusable_tracking_uri_is_refused(
    uri: str, is_allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a folder, which MLflow does not accept without a variable."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", is_allowed)
    with pytest.raises(UsageError, match=f"MLFLOW_TRACKING_URI {uri}: MLflow cannot") as caught:
        check_mlflow("gpt")
    assert "\n" not in str(caught.value)
