"""Telemetry of a run of Megatron: OpenTelemetry and MLflow, checked before and fed in training."""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.engine import SyncReport
from megatron_edit.flags import flag
from megatron_edit.host.checkpoint.choosing import check_on_all_ranks
from megatron_edit.host.metrics import SafeWriter, loss_interval, metrics_of
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.exporters import TelemetryTargets
from megatron_edit.observe.listeners import Listener
from megatron_edit.observe.metrics import LOSS, SyncMetrics
from megatron_edit.observe.mlflow_run import MlflowRun, check_mlflow
from megatron_edit.observe.records import Ending, Evaluation, Iteration
from megatron_edit.observe.telemetry import Telemetry

RUN_ID_FILE = "mlflow_run_id"  # in the folder of --save


def check_telemetry(config: EditConfig, placement: Placement) -> None:
    """Check that telemetry can be had on this machine, without opening anything.

    Args:
        config: settings.
        placement: of this process.

    Raises:
        UsageError: a package is missing, or a variable of the environment is not supported.
    """
    num_replicas = 1 if config.hub is not None else placement.num_replicas
    _targets(config, placement).check(num_replicas)
    check_mlflow(config.mlflow_experiment)


def _targets(config: EditConfig, placement: Placement) -> TelemetryTargets:
    return TelemetryTargets(config.telemetry, config.metrics_port, placement.replica)


class TelemetryControl:
    """Telemetry of this rank: of its replica on the writer rank, else nothing.

    Args:
        config: settings.
        placement: of this process.
    """

    def __init__(self, config: EditConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._replica = config.replica_name or str(placement.replica)
        self._telemetry = Telemetry(_targets(config, placement), self._replica)

    def prepare(self, world: ReplicaWorld) -> None:
        """Check packages and environment, and open the port for Prometheus.

        Collective: all ranks of all replicas.

        Raises:
            UsageError: telemetry cannot be had; on every rank.
        """
        # Also without the flags, which may differ between replicas: all ranks take part.
        check_on_all_ranks(world, "telemetry/checked", self._prepare, what=flag("telemetry"))

    def connect(
        self,
        events: EventLog,
        progress: RunProgress,
        run: Mapping[str, Any],
        *,
        resumes: bool,
    ) -> list[SafeWriter]:
        """Pass the records of the training on; return what reports lost calls at the end.

        Args:
            events: event files of this rank.
            progress: progress of all replicas.
            run: content of `run.json`.
            resumes: whether the training continues another.
        """
        if not self._placement.is_writer:
            return []
        guarded = []
        telemetry = SafeWriter(self._telemetry, "telemetry")
        listener = cast(Listener, telemetry)
        writes_mlflow = self._placement.replica == 0 and self._config.mlflow_experiment is not None
        if writes_mlflow:
            mlflow = MlflowWriter(self._open_mlflow(progress, run, resumes=resumes), run, progress)
            guarded.append(SafeWriter(mlflow, "MLflow"))
            events.add_listener(cast(Listener, guarded[-1]))
        if cast(Telemetry, telemetry).begin(
            self._attributes(run), run["training"]["train_iters"], run["topology"]["num_replicas"]
        ):
            guarded.append(telemetry)
            events.add_listener(listener)
        return guarded

    def close(self) -> None:
        """Close the port. Idempotent."""
        self._telemetry.close()

    def _prepare(self) -> None:
        if self._placement.is_writer:
            check_telemetry(self._config, self._placement)
            self._telemetry.listen()

    def _attributes(self, run: Mapping[str, Any]) -> dict[str, str]:
        """Return attributes of this process, beside those of the environment."""
        return {
            "service.instance.id": f"{socket.gethostname()}-replica-{self._replica}",
            "host.name": socket.gethostname(),
            "edit.replica": self._replica,
            "edit.strategy": self._config.strategy,
            "edit.version": run["versions"]["megatron_edit"],
        }

    def _open_mlflow(
        self, progress: RunProgress, run: Mapping[str, Any], *, resumes: bool
    ) -> MlflowRun:
        config, args = self._config, progress.host.arguments
        suffix = "" if config.replica_name is None else f"-{config.replica_name}"
        id_file = Path(args.save) / f"{RUN_ID_FILE}{suffix}" if args.save else None
        assert config.mlflow_experiment is not None, "no experiment"
        return MlflowRun(
            config.mlflow_experiment,
            f"{config.strategy}{suffix}",
            _params(args) | {f"version/{name}": text for name, text in run["versions"].items()},
            id_file,
            # With another --save the checkpoint is the beginning of another training.
            resumes=resumes and args.load == args.save,
        )


class MlflowWriter(Listener):
    """Writes the scalars of syncs, and the most important ones of Megatron, to a run of MLflow.

    Args:
        mlflow: the run.
        run: content of `run.json`.
        progress: progress of all replicas.
    """

    def __init__(self, mlflow: MlflowRun, run: Mapping[str, Any], progress: RunProgress) -> None:
        self._mlflow = mlflow
        self._metrics: SyncMetrics = metrics_of(run)
        self._progress = progress
        self._interval = loss_interval(progress)

    def on_iteration(self, iteration: Iteration) -> None:
        """Write learning rate and norm of the gradient, at the interval of TensorBoard."""
        found = {"learning-rate": iteration.lr, "grad-norm": iteration.grad_norm}
        self._log({name: x for name, x in found.items() if x is not None}, iteration.iteration)

    def on_sync(self, report: SyncReport) -> None:
        """Write the scalars of a sync."""
        self._mlflow.log(self._metrics.values(report), self._progress.iteration_of(report.step))

    def on_losses(self, first_step: int, losses: Sequence[float]) -> None:
        """Write mean losses, at the interval of TensorBoard."""
        for step, loss in enumerate(losses, first_step):
            self._log({LOSS: loss}, step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Write the loss of an evaluation."""
        name = f"{evaluation.split}-loss" + (f"/{evaluation.name}" if evaluation.name else "")
        step = self._progress.iteration_of(evaluation.iteration)
        self._mlflow.log({name: evaluation.loss}, step)

    def on_end(self, ending: Ending) -> None:
        """Note how training ended."""
        self._mlflow.end(ending.end)

    def close(self) -> None:
        """Write what waits, and end the run."""
        self._mlflow.close()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        number = self._progress.iteration_of(step)
        if number % self._interval == 0:
            self._mlflow.log(values, number)


def _params(args: Namespace) -> dict[str, object]:
    """Return Megatron's arguments that are plain values, with ours among them.

    Args:
        args: Megatron's arguments, or a view of another configuration by their names, which has
            `snapshot`.
    """
    return {
        name: value
        for name, value in vars(getattr(args, "snapshot", lambda: args)()).items()
        if isinstance(value, bool | int | float | str)
    }
