"""Tables of a manifest, for the units of this run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_edit.checkpoint.files import REMEDY
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.errors import UsageError
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.loss_check import LossHistory


def unit_steps_of(
    manifest: Manifest, units: tuple[str, ...], num_replicas: int, *, is_same: bool
) -> Tensor:
    """int64 [N, U], steps since a unit's own last sync; columns as this run numbers its units.

    Args:
        manifest: of the checkpoint.
        units: of this run.
        num_replicas: N.
        is_same: whether the replicas that saved go on.
    """
    if not is_same or not manifest.unit_steps:
        return torch.zeros(num_replicas, len(units), dtype=torch.int64)
    columns = [manifest.units.index(unit) for unit in units]
    return torch.tensor(manifest.unit_steps, dtype=torch.int64)[:, columns]


def saved_steps_of(manifest: Manifest, units: tuple[str, ...]) -> Tensor:
    """int64 [N, U], steps of the saved replicas since a unit's own last sync, up to the save."""
    inner = torch.tensor([[entry.inner_steps] for entry in manifest.replicas])
    if not manifest.unit_steps:
        return inner.expand(-1, len(manifest.units))
    columns = [manifest.units.index(unit) for unit in units]
    return torch.tensor(manifest.unit_steps)[:, columns] + inner


def detectors_of(path: Path, manifest: Manifest, units: tuple[str, ...]) -> DetectorState:
    """Rows of the saved replicas; columns as this run numbers its units.

    Raises:
        UsageError: they are of another model, or broken.
    """
    if set(units) != set(manifest.units):
        raise UsageError(
            f"--load {path}",
            f"has the units {', '.join(manifest.units)}, this model has {', '.join(units)}",
            "load a checkpoint of this model",
        )
    try:
        saved = DetectorState.of_lists(manifest.detectors)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(str(path), f"detectors are broken: {error}", REMEDY) from error
    columns = [manifest.units.index(unit) for unit in units]
    return DetectorState(**{name: table[:, columns] for name, table in vars(saved).items()})


def loss_history_of(path: Path, manifest: Manifest, num_replicas: int) -> LossHistory:
    """Of the saved replicas, where this run has as many; else it starts anew.

    Args:
        path: of the checkpoint.
        manifest: of the checkpoint.
        num_replicas: N of this run.

    Raises:
        UsageError: it is broken.
    """
    try:
        return LossHistory.of_lists(manifest.loss_history, num_replicas)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(str(path), f"the loss history is broken: {error}", REMEDY) from error
