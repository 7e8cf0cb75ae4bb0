"""Checkpoints: each replica saves and loads one of its own, with a file per rank for EDiT's state.

`save/replica-0`, `save/replica-1`, ... are ordinary folders of Megatron-Bridge. A resumed run must
have the same replicas, ranks and settings; then it continues bit for bit, also within a round.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megatron_edit.bridge.folders import REPLICA
from megatron_edit.comm.compressed_all_reduce import Residual
from megatron_edit.comm.placement import Placement
from megatron_edit.config import EditConfig
from megatron_edit.engine import EditEngine, EngineState, PendingState, RoundState
from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.choosing import check_on_all_ranks
from megatron_edit.host.checkpoint.loading import LoadControl, reserve_memory, training_settings
from megatron_edit.host.checkpoint.outer import RankPieces
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.training import TrainingRun
from megatron_edit.method.auto import AutoChoice, Measurement, SyncSettings
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.ledger import IN_ORDER, share_of
from megatron_edit.method.loss_check import LossHistory
from megatron_edit.observe.console import say
from megatron_edit.saved_state import PendingSync, ReplicaEntry

FORMAT = 1
FOLDER = "edit"  # in the folder of an iteration
_SAVED_TYPES = [EngineState, PendingState, RoundState, DetectorState, LossHistory, PendingSync,
                ReplicaEntry, Residual, AutoChoice, SyncSettings, Measurement]  # fmt: skip


class BridgeLoads(LoadControl):
    """Starts the engine, from a checkpoint that Megatron-Bridge has loaded if there is one."""

    _loaded: dict[str, Any] | None = None

    @property
    def resumed_from(self) -> dict[str, object] | None:
        """Iteration, samples and steps that this run resumes at; None where training begins."""
        if self._loaded is None:
            return None
        step, replicas = self._loaded["engine"].replica.step, self._world.placement.num_replicas
        samples = self._loaded["samples"] * replicas
        return {"iteration": step, "samples": samples, "replica_steps": [step] * replicas}

    @property
    def warmup_step(self) -> int | None:
        """See `LoadControl`."""
        if self._loaded is not None and not self._loaded["engine"].is_warmup:
            return None
        return self._step

    def read(self, folder: str | None, step: int) -> None:
        """Read this rank's state of EDiT, once Megatron-Bridge has loaded a checkpoint.

        Collective: all ranks of all replicas.

        Args:
            folder: `checkpoint.load` of this replica.
            step: iterations of the checkpoint; 0 if none was loaded.

        Raises:
            UsageError: the checkpoint cannot be resumed; on every rank.
        """
        first = self._world.shared_text("load/step", lambda: str(step))
        self._step = step

        def check() -> None:
            if first != str(step):
                raise UsageError(
                    f"checkpoint.load {folder}",
                    f"the replicas have loaded iterations {first} and {step}",
                    "set checkpoint.ckpt_step to an iteration that all replicas have",
                )
            if step and folder is not None:
                self._loaded = self._read(Path(folder), step)

        check_on_all_ranks(self._world, "load/checked", check, what="checkpoint.load")

    def begin(self, engine: EditEngine, host: MegatronHost, pieces: RankPieces) -> None:
        """Start the engine, from the checkpoint if one was loaded.

        Args:
            engine: not started yet.
            pieces: not used: each rank loads what it has saved.
        """
        place, loaded = self._world.placement, self._loaded
        reserve_memory(engine, self._world)
        consumed = host.arguments.consumed_train_samples
        if loaded is None:
            share = share_of(consumed, place.replica, place.num_replicas)
            host.counters.resume(share, consumed, IN_ORDER)
            engine.start(self._step)
            return
        host.counters.resume(loaded["samples"], consumed, IN_ORDER)
        host.common_steps = loaded["common_steps"]
        saved = loaded["engine"]
        if (choice := saved.rounds.choice) is not None:
            engine.use(choice, is_resumed=True)
        engine.load_state_dict(saved)
        if place.global_rank == 0:
            say(f"resumed after step {self._step}, with {saved.rounds.count} syncs")

    def _read(self, folder: Path, step: int) -> dict[str, Any] | None:
        """Return the state that this rank has saved; None for a checkpoint without EDiT."""
        place = self._world.placement
        own = REPLICA.match(folder.name)
        path = _iteration_folder(folder, step) / FOLDER
        if own is None and not path.is_dir():
            return None
        what = f"checkpoint.load {path.parent}"
        file = path / f"rank-{place.rank}.pt"
        if not file.exists():
            raise UsageError(
                what, f"lacks {FOLDER}/{file.name}", "set checkpoint.ckpt_step to another one"
            )
        with torch.serialization.safe_globals(_SAVED_TYPES):
            saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        if saved["header"]["replica"] != place.replica:
            raise UsageError(
                what,
                "is the checkpoint of one replica alone",
                "load the folder that contains replica-0",
            )
        for name, value in _header(self.config, place).items():
            if saved["header"].get(name) != value:
                raise UsageError(
                    what,
                    f"was saved with {name} {saved['header'].get(name)}, this run has {value}",
                    "resume with the settings of the checkpoint",
                )
        return saved


def save_state(
    folder: str, step: int, config: EditConfig, place: Placement, run: TrainingRun
) -> None:
    """Write this rank's state of EDiT beside Megatron-Bridge's checkpoint, which is complete.

    Collective: all ranks of the replica.

    Args:
        folder: `checkpoint.save` of this replica.
        run: has the engine and its host.
    """
    run.engine.settle()
    run.engine.land_all()
    is_at_sync = not run.engine.status.is_mid_round
    state = dataclasses.replace(run.engine.state_dict(), is_at_sync=is_at_sync)
    content = {
        "header": _header(config, place),
        "samples": run.host.counters.samples,
        "common_steps": run.host.common_steps,
        "engine": state,
    }
    path = _iteration_folder(Path(folder), step) / FOLDER
    path.mkdir(parents=True, exist_ok=True)
    partial = path / f"rank-{place.rank}.partial"
    torch.save(content, partial)
    partial.replace(partial.with_suffix(".pt"))


def _header(config: EditConfig, place: Placement) -> dict[str, Any]:
    """Return what must be equal on resume."""
    return {
        "format": FORMAT,
        "num_replicas": place.num_replicas,
        "ranks_per_replica": place.ranks_per_replica,
        "replica": place.replica,
        **{name: value for name, value in training_settings(config).items()
           if name != "warmup_steps" or not config.has_open_warmup},
    }  # fmt: skip


def _iteration_folder(folder: Path, step: int) -> Path:
    from megatron.bridge.training.utils.checkpoint_utils import (
        get_checkpoint_name,
        is_checkpoint_iteration_directory,
    )

    if is_checkpoint_iteration_directory(str(folder)):
        return folder
    return Path(get_checkpoint_name(str(folder), step))
