"""A run of MLflow, written by a thread: a slow or unreachable server never delays training.

MLflow's own variables (`MLFLOW_TRACKING_URI`, `MLFLOW_RUN_ID`, `MLFLOW_RUN_NAME`, ...) apply.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any

from megatron_edit.atomic_files import write_atomic
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.observe.console import warn
from megatron_edit.observe.records import FAILED, FINISHED, STOPPED

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

EXTRA = "megatron_edit[mlflow]"
_TRACKING_URI = "MLFLOW_TRACKING_URI"
_RUN_ID, _RUN_NAME = "MLFLOW_RUN_ID", "MLFLOW_RUN_NAME"
_STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
# Limits of one call of MLflow's server.
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = 1000, 100, 6000
_MAX_WAITING = 100_000  # metrics, about 30 MB
_RETRY_SECONDS = 30.0
_DRAIN_SECONDS = 10.0  # how long the last values may take


def check_mlflow(experiment: str | None) -> None:
    """Check that MLflow can be used.

    Args:
        experiment: `--edit-mlflow-experiment`; None: it is not to be used.

    Raises:
        UsageError: the package is missing, or MLFLOW_TRACKING_URI has an unknown form.
    """
    if experiment is None:
        return
    if not experiment:
        raise UsageError(f"{flag('mlflow_experiment')} (empty)", "must be a name", "give one")
    value = f"{flag('mlflow_experiment')} {experiment}"
    if find_spec("mlflow") is None:
        raise UsageError(
            value,
            "needs the package mlflow, which is not installed",
            f"pip install '{EXTRA}', or drop the flag",
        )
    from mlflow import MlflowClient, MlflowException
    from mlflow.tracking import get_tracking_uri

    try:
        MlflowClient()
    except MlflowException as error:
        given = os.environ.get(_TRACKING_URI)
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{_TRACKING_URI} {given or f'(not set; the default is {get_tracking_uri()})'}",
            f"MLflow cannot use it ({reason})",
            f"set it to the address of a server, or drop {flag('mlflow_experiment')}",
        ) from error


class MlflowRun:
    """Writes metrics to a run of MLflow.

    Args:
        experiment: name of the experiment; it is created if there is none.
        name: of a new run, unless MLFLOW_RUN_NAME has one.
        params: to record.
        id_file: where the id of the run is kept for a resumed training; None: nowhere.
        resumes: whether to go on in the run that `id_file` names. MLFLOW_RUN_ID takes precedence.
    """

    def __init__(
        self,
        experiment: str,
        name: str,
        params: Mapping[str, object],
        id_file: Path | None,
        *,
        resumes: bool,
    ) -> None:
        self._experiment, self._name, self._params = experiment, name, params
        self._id_file, self._resumes = id_file, resumes
        self._waiting: Queue[Metric] = Queue(_MAX_WAITING)
        self._num_lost = 0
        self._has_failed = False
        self._status: str | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="edit-mlflow", daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue the finite ones of some values; they are lost if too many are waiting."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for name, value in values.items():
            if not math.isfinite(value):
                continue
            try:
                self._waiting.put_nowait(Metric(name, value, now, step))
            except Full:
                self._num_lost += 1

    def end(self, end: str) -> None:
        """Note how training ended.

        Args:
            end: one of `records.ENDS`.
        """
        self._status = _STATUS[end]

    def close(self) -> None:
        """Write what waits, for some seconds at most. Idempotent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._thread.join(_DRAIN_SECONDS)
        if lost := self._num_lost + self._waiting.qsize():
            warn(f"MLflow: {lost} values could not be written, and are lost")

    def _work(self) -> None:
        """Open the run, write values until the end, and end it."""
        from mlflow import MlflowClient

        opened: list[tuple[MlflowClient, str]] = []

        def open_run() -> None:
            client = MlflowClient()
            opened.append((client, self._open(client)))

        if not self._until_done(open_run):
            return
        client, run_id = opened[0]
        while not (self._is_closing.is_set() and self._waiting.empty()):
            if batch := self._next_batch():

                def write(batch: list[Metric] = batch) -> None:
                    client.log_batch(run_id, metrics=batch)

                if not self._until_done(write):
                    self._num_lost += len(batch)
                    return
        status = self._status
        if status is not None:
            self._until_done(lambda: client.set_terminated(run_id, status))

    def _next_batch(self) -> list[Metric]:
        """Wait a moment for values, and return those that wait."""
        batch: list[Metric] = []
        try:
            batch.append(self._waiting.get(timeout=0.2))
            while len(batch) < _MAX_METRICS:
                batch.append(self._waiting.get_nowait())
        except Empty:
            pass
        return batch

    def _until_done(self, call: Callable[[], None]) -> bool:
        """Make a call until it succeeds; at the end once. Return whether it has succeeded."""
        while True:
            try:
                call()
                return True
            except Exception as error:  # logging must not stop training, whatever the error
                if not self._has_failed:
                    self._has_failed = True
                    text = f"{type(error).__name__}: {error}".splitlines()[0]
                    warn(f"MLflow cannot be written ({text}); training goes on")
            if self._is_closing.wait(_RETRY_SECONDS):
                return False

    def _open(self, client: MlflowClient) -> str:
        """Return the id of the run, which is created unless there is one to go on in."""
        run_id = os.environ.get(_RUN_ID) or self._saved_id()
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
        else:
            experiment = client.get_experiment_by_name(self._experiment)
            number = (
                client.create_experiment(self._experiment)
                if experiment is None
                else experiment.experiment_id
            )
            name = os.environ.get(_RUN_NAME) or self._name
            run_id = client.create_run(number, run_name=name).info.run_id
        if self._id_file is not None:
            self._id_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._id_file, run_id + "\n")
        self._write_params(client, run_id)
        return str(run_id)

    def _saved_id(self) -> str | None:
        if not self._resumes or self._id_file is None or not self._id_file.exists():
            return None
        return self._id_file.read_text().strip() or None

    def _write_params(self, client: MlflowClient, run_id: str) -> None:
        """Write the parameters that the run does not have: MLflow refuses to change one."""
        from mlflow.entities import Param

        known = client.get_run(run_id).data.params
        new: list[Any] = [
            Param(name, str(value)[:_MAX_PARAM_LENGTH])
            for name, value in self._params.items()
            if name not in known
        ]
        for first in range(0, len(new), _MAX_PARAMS):
            client.log_batch(run_id, params=new[first : first + _MAX_PARAMS])
