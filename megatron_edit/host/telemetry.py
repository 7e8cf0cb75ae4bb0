"""Telemetry of a run of Megatron: OpenTelemetry and MLflow, checked before and fed in training."""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.flags import flag
from megatron_edit.host.checkpoint.choosing import check_on_all_ranks
from megatron_edit.host.metrics import SafeWriter, loss_interval, metrics_of
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.observe import telemetry
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.listeners import Listener
from megatron_edit.observe.mlflow_run import MlflowRun, check_mlflow

RUN_ID_FILE = "mlflow_run_id"  # in the folder of --save


def check_telemetry(config: EditConfig, placement: Placement) -> None:
    """Check that telemetry can be had on this machine, without opening anything.

    Raises:
        UsageError: a package is missing, or a variable of the environment is not supported.
    """
    num_replicas = 1 if config.hub is not None else placement.num_replicas
    port = config.metrics_port
    telemetry.check_telemetry(otlp=config.telemetry, port=port, num_replicas=num_replicas)
    check_mlflow(config.mlflow_experiment)


class TelemetryControl:
    """Telemetry of this rank: of its replica on the writer rank, else nothing."""

    def __init__(self, config: EditConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._replica = config.replica_name or str(placement.replica)
        port = None if config.metrics_port is None else config.metrics_port + placement.replica
        self._telemetry = telemetry.Telemetry(self._replica, otlp=config.telemetry, port=port)

    def prepare(self, world: ReplicaWorld) -> None:
        """Check packages and environment, and open the port for Prometheus.

        Collective: all ranks of all replicas.

        Raises:
            UsageError: telemetry cannot be had; on every rank.
        """

        def check() -> None:
            if self._placement.is_writer:
                check_telemetry(self._config, self._placement)
                self._telemetry.listen()

        # Also without the flags, which may differ between replicas: all ranks take part.
        check_on_all_ranks(world, "telemetry/checked", check, what=flag("telemetry"))

    def connect(
        self, events: EventLog, progress: RunProgress, run: Mapping[str, Any], *, resumes: bool
    ) -> list[SafeWriter]:
        """Pass the records of the training on; return what reports lost calls at the end.

        Args:
            progress: progress of all replicas.
            run: content of `run.json`.
            resumes: whether the training continues another.
        """
        if not self._placement.is_writer:
            return []
        guarded = []
        if self._placement.replica == 0 and self._config.mlflow_experiment is not None:
            mlflow = MlflowRun(metrics_of(run), progress.iteration_of, loss_interval(progress))
            guarded.append(SafeWriter(mlflow, "MLflow"))
            if self._open(cast(MlflowRun, guarded[-1]), progress.host.arguments, run, resumes):
                events.add_listener(cast(Listener, guarded[-1]))
        guarded.append(SafeWriter(self._telemetry, "telemetry"))
        attributes = {
            "service.instance.id": f"{socket.gethostname()}-replica-{self._replica}",
            "host.name": socket.gethostname(),
            "edit.replica": self._replica,
            "edit.strategy": self._config.strategy,
            "edit.version": run["versions"]["megatron_edit"],
        }
        target, num_replicas = run["training"]["train_iters"], run["topology"]["num_replicas"]
        ours = cast(telemetry.Telemetry, guarded[-1])
        if ours.begin(attributes, target, num_replicas):
            events.add_listener(ours)
        return guarded

    def close(self) -> None:
        """Close the port. Idempotent."""
        self._telemetry.close()

    def _open(
        self, mlflow: MlflowRun, args: Namespace, run: Mapping[str, Any], resumes: bool
    ) -> bool:
        config = self._config
        suffix = "" if config.replica_name is None else f"-{config.replica_name}"
        assert config.mlflow_experiment is not None, "no experiment"
        return mlflow.open(
            config.mlflow_experiment,
            f"{config.strategy}{suffix}",
            _params(args) | {f"version/{name}": text for name, text in run["versions"].items()},
            Path(args.save) / f"{RUN_ID_FILE}{suffix}" if args.save else None,
            # With another --save the checkpoint is the beginning of another training.
            resumes=resumes and args.load == args.save,
        )


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
