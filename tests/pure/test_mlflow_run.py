"""The thread that writes a run of MLflow, to a folder and to servers that do not answer.

Would catch: a server that delays training, values that are lost although it comes back, a resumed
training that begins another run, a run that never ends.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.errors import UsageError
from megatron_edit.observe import mlflow_run
from megatron_edit.observe.mlflow_run import MlflowRun, check_mlflow
from tests.harness.ports import free_ports

pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let MLflow use a folder."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_RUN_NAME"):
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

    return [(m.step, m.value) for m in MlflowClient().get_metric_history(run_id, name)]


def write(id_file: Path | None, steps: range, *, resumes: bool, end: str = "finished") -> None:
    """Write a run with a value at each step."""
    params: dict[str, object] = {f"p{number}": number for number in range(150)}
    run = MlflowRun("gpt", "edit", {**params, "long": "x" * 9000}, id_file, resumes=resumes)
    for step in steps:
        run.log({"edit/loss": float(step), "bad": float("nan")}, step)
    run.end(end)
    run.close()
    run.close()


def test_values_parameters_and_status_are_written(tmp_path: Path) -> None:
    """More values and parameters than one call may have; values that are not finite are left
    out."""
    write(None, range(1500), resumes=False, end="stopped")
    (run,) = runs()
    assert run.info.run_name == "edit" and run.info.status == "KILLED"
    assert history(run.info.run_id, "edit/loss") == [(n, float(n)) for n in range(1500)]
    assert set(run.data.metrics) == {"edit/loss"}
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
    assert [step for step, _ in history(first.info.run_id, "edit/loss")] == [0, 1, 2, 3, 4]
    write(id_file, range(1), resumes=False)
    assert len(runs()) == 2
    assert id_file.read_text().strip() != first.info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", first.info.run_id)
    write(None, range(9, 10), resumes=False)
    assert len(runs()) == 2 and history(first.info.run_id, "edit/loss")[-1] == (9, 9.0)


def test_unreachable_server_delays_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The queue is bounded; there is one warning, and at the end the number of lost values."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(mlflow_run, "_MAX_WAITING", 50)
    monkeypatch.setattr(mlflow_run, "_DRAIN_SECONDS", 5.0)
    check_mlflow("gpt")
    run = MlflowRun("gpt", "edit", {}, None, resumes=False)
    began = time.monotonic()
    for step in range(200):
        run.log({"edit/loss": 1.0}, step)
    assert time.monotonic() - began < 2
    while "MLflow cannot be written" not in (text := capfd.readouterr().err):
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    run.close()
    text += capfd.readouterr().err
    assert text.count("MLflow cannot be written") == 1
    assert "MLflow: 200 values could not be written" in text and "Traceback" not in text


def test_values_wait_for_the_server(
    store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A store that fails at first: here a file where its folder must be."""
    monkeypatch.setattr(mlflow_run, "_RETRY_SECONDS", 0.1)
    store.write_text("")
    run = MlflowRun("gpt", "edit", {}, None, resumes=False)
    run.log({"edit/loss": 1.0}, 1)
    began, text = time.monotonic(), ""
    while "MLflow cannot be written" not in text:
        assert time.monotonic() - began < 60
        text += capfd.readouterr().err
        time.sleep(0.05)
    store.unlink()
    run.log({"edit/loss": 2.0}, 2)
    run.end("finished")
    while not runs() or len(history(runs()[0].info.run_id, "edit/loss")) < 2:
        assert time.monotonic() - began < 60
        time.sleep(0.1)
    run.close()
    assert history(runs()[0].info.run_id, "edit/loss") == [(1, 1.0), (2, 2.0)]


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
