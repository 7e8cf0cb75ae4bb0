"""The engine's `RoundState`, equal on all replicas, to and from the fields of a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_edit.checkpoint.files import REMEDY
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.checkpoint.resume import ResumePlan, ledger_of
from megatron_edit.engine import RoundState
from megatron_edit.errors import UsageError
from megatron_edit.method.auto import AutoChoice
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.loss_check import LossHistory


def fields_of(rounds: RoundState, *, is_warmup: bool) -> dict[str, Any]:
    """Return the fields of a manifest that store `rounds`; `rounds_of` is the inverse.

    Args:
        is_warmup: whether gradients are averaged at every step: no blocks are assigned.
    """
    assignment = None if is_warmup else rounds.assignment
    return {
        "round": rounds.count,
        "detectors": rounds.detectors.to_lists(),
        "unit_steps": tuple(map(tuple, rounds.unit_steps.tolist())),
        "loss_history": rounds.loss_history.to_lists(),
        "replicas_identical": rounds.replicas_identical,
        "ledger": None if assignment is None else ledger_of(assignment),
        "first_loss": rounds.first_loss,
        "members": rounds.members,
        "choice": None if rounds.choice is None else rounds.choice.as_json(),
        "exposed": rounds.exposed,
        "leaves_prediction": rounds.leaves_prediction,
    }


def rounds_of(
    path: Path,
    manifest: Manifest,
    plan: ResumePlan,
    units: tuple[str, ...],
    replica: int,
    num_replicas: int,
) -> RoundState:
    """Build the state of the rounds for this run from a checkpoint.

    Args:
        replica: r.
        num_replicas: N of this run.

    Raises:
        UsageError: it is of another model, or damaged.
    """
    continues = plan.continues
    return RoundState(
        count=manifest.round + (manifest.is_mid_round and not continues),
        detectors=_detectors_of(path, manifest, units),
        unit_steps=_unit_steps_of(manifest, units, num_replicas, is_same=continues),
        loss_history=_loss_history_of(path, manifest, num_replicas),
        replicas_identical=manifest.replicas_identical or not continues,
        length=plan.entries[replica].round_length,
        assignment=plan.assignment,
        resumes_at_meeting=plan.resumes_at_meeting,
        first_loss=manifest.first_loss if continues else None,
        members=manifest.members if continues else (),
        choice=choice_of(path, manifest),
        exposed=manifest.exposed if continues else (),
        leaves_prediction=manifest.leaves_prediction and continues,
    )


def choice_of(path: Path, manifest: Manifest) -> AutoChoice | None:
    """Return the saved choice of settings, in the rounds.

    Raises:
        UsageError: it is damaged.
    """
    if manifest.choice is None or manifest.is_warmup:
        return None
    try:
        return AutoChoice.from_json(manifest.choice)
    except (KeyError, TypeError) as error:
        raise UsageError(str(path), f"the choice of settings is broken: {error}", REMEDY) from error


def _unit_steps_of(
    manifest: Manifest, units: tuple[str, ...], num_replicas: int, *, is_same: bool
) -> Tensor:
    """Return int64 [N, U], steps since a unit's own last sync; columns in this run's unit order.

    Args:
        num_replicas: N.
        is_same: whether the replicas that saved continue.
    """
    if not is_same or not manifest.unit_steps:
        return torch.zeros(num_replicas, len(units), dtype=torch.int64)
    columns = [manifest.units.index(unit) for unit in units]
    return torch.tensor(manifest.unit_steps, dtype=torch.int64)[:, columns]


def saved_unit_steps(manifest: Manifest, units: tuple[str, ...]) -> Tensor:
    """Return int64 [N, U], steps of the saved replicas from a unit's last sync to the save."""
    inner = torch.tensor([[entry.inner_steps] for entry in manifest.replicas])
    if not manifest.unit_steps:
        return inner.expand(-1, len(manifest.units))
    columns = [manifest.units.index(unit) for unit in units]
    return torch.tensor(manifest.unit_steps)[:, columns] + inner


def _detectors_of(path: Path, manifest: Manifest, units: tuple[str, ...]) -> DetectorState:
    """Return the detectors: rows of the saved replicas, columns in this run's unit order.

    Raises:
        UsageError: they are of another model, or damaged.
    """
    if set(units) != set(manifest.units):
        raise UsageError(
            f"--load {path}",
            f"has the units {', '.join(manifest.units)}, this model has {', '.join(units)}",
            "load a checkpoint of this model",
        )
    try:
        saved = DetectorState.from_lists(manifest.detectors)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(str(path), f"detectors are broken: {error}", REMEDY) from error
    columns = [manifest.units.index(unit) for unit in units]
    return DetectorState(**{name: table[:, columns] for name, table in vars(saved).items()})


def _loss_history_of(path: Path, manifest: Manifest, num_replicas: int) -> LossHistory:
    """Return the saved loss history; a new one if this run has another number of replicas.

    Args:
        num_replicas: N of this run.

    Raises:
        UsageError: it is damaged.
    """
    try:
        return LossHistory.from_lists(manifest.loss_history, num_replicas)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(str(path), f"the loss history is broken: {error}", REMEDY) from error
