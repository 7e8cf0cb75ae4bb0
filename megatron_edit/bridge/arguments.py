"""Megatron-Bridge's configuration and training state, by the names of Megatron's arguments.

`host/` reads and writes an `argparse.Namespace` of Megatron-LM's arguments. Megatron-Bridge has the
same names as fields of several configurations. `ConfigArguments` is a live view of these.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.state import TrainState

# A name that several of these have is that of the first.
_SECTIONS = ("model", "train", "validation", "ddp", "optimizer", "scheduler", "checkpoint",
             "logger", "dist", "rng", "rerun_state_machine", "dataset")  # fmt: skip
# Arguments whose field has another name.
_RENAMED = {
    "accumulate_allreduce_grads_in_fp32": ("ddp", "grad_reduce_in_fp32"),
    "ddp_bucket_size": ("ddp", "bucket_size"),
}


class ConfigArguments(Namespace):
    """A live view of a configuration. Names that no configuration has are its own attributes.

    Args:
        rank: of this process in its replica; `world_size` is that of the replica.

    Attributes:
        iteration: at which this launch begins.
        step_samples: samples of all replicas by which the current step is ahead of Bridge's count.
    """

    def __init__(self, config: ConfigContainer, rank: int, world_size: int) -> None:
        sections = {name: getattr(config, name, None) for name in _SECTIONS}
        owners: dict[str, tuple[object, str]] = {}
        for name, section in sections.items():
            for part in (getattr(section, "transformer", None), section):
                if dataclasses.is_dataclass(part):
                    for spec in dataclasses.fields(part):
                        owners.setdefault(spec.name, (part, f"{name}.{spec.name}"))
        for name, (section_name, renamed) in _RENAMED.items():
            section = sections[section_name]
            if hasattr(section, renamed):
                owners[name] = (section, f"{section_name}.{renamed}")
        # Not as attributes of this instance: `__setattr__` needs them.
        object.__setattr__(self, "_owners", owners)
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_state", None)
        super().__init__(
            rank=rank, world_size=world_size, iteration=0, step_samples=0, timing_log_level=0
        )

    def follow(self, state: TrainState) -> None:
        """Read iterations and samples from the training state from now on."""
        object.__setattr__(self, "_state", state)
        self.iteration = int(state.step)

    @property
    def data_parallel_size(self) -> int:
        """Data-parallel ranks of all replicas."""
        return int(self._config.data_parallel_size)

    @property
    def curr_iteration(self) -> int:
        """Iterations before the current one."""
        return self.iteration if self._state is None else int(self._state.step)

    @property
    def consumed_train_samples(self) -> int:
        """Samples consumed by all replicas."""
        consumed = 0 if self._state is None else int(self._state.consumed_train_samples)
        return consumed + int(self.step_samples)

    def snapshot(self) -> Namespace:
        """Return a copy of all values, as a plain namespace."""
        values = {name: getattr(self, name) for name in self._owners}
        own = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return Namespace(**values, **{n: v for n, v in own.items() if n not in values})

    def paths(self) -> dict[str, str]:
        """Return the field of each argument, as a path in the configuration."""
        return {name: path for name, (_, path) in self._owners.items()}

    def __getattr__(self, name: str) -> Any:
        owners = self.__dict__.get("_owners", {})
        if name not in owners:
            raise AttributeError(name)
        owner, path = owners[name]
        return getattr(owner, path.rpartition(".")[2])

    def __setattr__(self, name: str, value: object) -> None:
        owner, path = self.__dict__.get("_owners", {}).get(name, (None, ""))
        if owner is None:
            super().__setattr__(name, value)
        else:
            setattr(owner, path.rpartition(".")[2], value)
