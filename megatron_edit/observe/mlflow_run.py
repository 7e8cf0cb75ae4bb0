"""A run of MLflow, written by MLflow's own asynchronous logging.

MLflow's own variables (`MLFLOW_TRACKING_URI`, `MLFLOW_RUN_ID`, `MLFLOW_RUN_NAME`, ...) apply.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_edit.atomic_files import write_atomic
from megatron_edit.engine import SyncReport
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.observe.console import show_one_warning
from megatron_edit.observe.listeners import Listener, finish_within, require_package
from megatron_edit.observe.metrics import LOSS, SyncMetrics
from megatron_edit.observe.records import FAILED, FINISHED, STOPPED, Ending, Evaluation, Iteration

_TRACKING_URI = "MLFLOW_TRACKING_URI"
_STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
_MAX_PARAMS, _MAX_PARAM_LENGTH = 100, 6000  # of one call of MLflow's server
_DRAIN_SECONDS = 30.0  # how long the last values may take
# Bounds how long a server that does not answer delays the start and the end of a training.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS": "5",
}


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
    require_package(value, "mlflow", "megatron_edit[mlflow]")
    from mlflow import MlflowClient, MlflowException
    from mlflow.tracking import get_tracking_uri

    try:
        MlflowClient()
    except MlflowException as error:
        given = os.environ.get(_TRACKING_URI)
        raise UsageError(
            f"{_TRACKING_URI} {given or f'(not set; the default is {get_tracking_uri()})'}",
            f"MLflow cannot use it ({error})",
            f"set it to the address of a server, or drop {flag('mlflow_experiment')}",
        ) from error


class MlflowRun(Listener):
    """Writes the scalars of syncs, and the most important ones of Megatron, to a run of MLflow.

    Args:
        metrics: computes the scalars of a sync.
        number_of: returns Megatron's number of an iteration.
        interval: of losses, learning rate and norm of the gradient, in iterations.
    """

    def __init__(
        self, metrics: SyncMetrics, number_of: Callable[[int], int], interval: int
    ) -> None:
        self._metrics, self._number_of, self._interval = metrics, number_of, interval
        self._client: Any = None
        self._run_id = ""
        self._status: str | None = None

    def open(
        self, experiment: str, name: str, params: Mapping[str, object], id_file: Path | None,
        *, resumes: bool,
    ) -> bool:  # fmt: skip
        """Open the run; the server may raise any error. Return True.

        Args:
            experiment: its name; it is created if there is none.
            name: of a new run, unless MLFLOW_RUN_NAME has one.
            params: to record.
            id_file: where the id of the run is kept for a resumed training; None: nowhere.
            resumes: whether to go on in the run that `id_file` names. MLFLOW_RUN_ID takes
                precedence.
        """
        for variable, default in _DEFAULTS.items():
            os.environ.setdefault(variable, default)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for logger in ("mlflow", "urllib3.connectionpool"):
            show_one_warning(logger)
        client, run_id = MlflowClient(), os.environ.get("MLFLOW_RUN_ID")
        if not run_id and resumes and id_file is not None and id_file.exists():
            run_id = id_file.read_text().strip()
        if run_id:
            client.update_run(run_id, status="RUNNING")
        else:
            found = client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else client.create_experiment(experiment)
            name = os.environ.get("MLFLOW_RUN_NAME") or name
            run_id = client.create_run(number, run_name=name).info.run_id
        if id_file is not None:
            id_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(id_file, run_id + "\n")
        known = client.get_run(run_id).data.params  # MLflow refuses to change one
        new = [Param(n, str(v)[:_MAX_PARAM_LENGTH]) for n, v in params.items() if n not in known]
        for first in range(0, len(new), _MAX_PARAMS):
            client.log_batch(run_id, params=new[first : first + _MAX_PARAMS], synchronous=False)
        self._client, self._run_id = client, run_id
        return True

    def on_iteration(self, iteration: Iteration) -> None:
        """Write learning rate and norm of the gradient, at the interval of TensorBoard."""
        found = {"learning-rate": iteration.lr, "grad-norm": iteration.grad_norm}
        self._log_at_interval(
            {k: x for k, x in found.items() if x is not None}, iteration.iteration
        )

    def on_sync(self, report: SyncReport) -> None:
        """Write the scalars of a sync."""
        self._log(self._metrics.values(report), self._number_of(report.step))

    def on_losses(self, first_step: int, losses: Sequence[float]) -> None:
        """Write mean losses, at the interval of TensorBoard."""
        for step, loss in enumerate(losses, first_step):
            self._log_at_interval({LOSS: loss}, step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write the loss of an evaluation."""
        name = f"{evaluation.split}-loss" + (f"/{evaluation.name}" if evaluation.name else "")
        self._log({name: evaluation.loss}, self._number_of(evaluation.iteration))

    def on_end(self, ending: Ending) -> None:
        """Note how training ended."""
        self._status = _STATUS[ending.end]

    def close(self) -> None:
        """Write what waits, for some seconds at most, and end the run. Idempotent."""
        if self._client is not None:
            finish_within(_DRAIN_SECONDS, self._finish, "values of MLflow")
            self._client = None

    def _finish(self) -> None:
        from mlflow import flush_async_logging

        flush_async_logging()
        if self._status is not None:
            self._client.set_terminated(self._run_id, self._status)

    def _log_at_interval(self, values: Mapping[str, float], step: int) -> None:
        if (number := self._number_of(step)) % self._interval == 0:
            self._log(values, number)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        """Queue the finite ones of some values."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(name, x, now, step) for name, x in values.items() if math.isfinite(x)]
        if found:
            self._client.log_batch(self._run_id, metrics=found, synchronous=False)
