"""Three sweeps over a tiny GPT, each of which changes one size.

| sweep | changes | constant |
|---|---|---|
| units | layers; each is a unit, besides the embedding and the final norm | hidden, replicas |
| replicas | replicas, each of one rank on a host of its own | layers, hidden |
| parameters | hidden size | layers, replicas |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frame.gpt import Model, Window, edit_flags

SEQ_LENGTH = 32
VOCAB_SIZE = 512
DEFAULT_LAYERS, DEFAULT_REPLICAS = 4, 2
# Narrow, so that 64 layers give many units with few bytes; wider in the sweep over replicas, so
# that latency does not dominate.
UNITS_HIDDEN, REPLICAS_HIDDEN = 64, 128


@dataclass(frozen=True)
class Case:
    """A size of the model and a number of replicas."""

    num_layers: int
    hidden_size: int
    num_replicas: int

    @property
    def model(self) -> Model:
        """The GPT of this case."""
        return Model(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            seq_length=SEQ_LENGTH,
            vocab_size=VOCAB_SIZE,
        )

    def flags(self, mode: str, *, tau: int, window: Window, log_dir: str) -> list[str]:
        """Return the flags of the training, without warm-up, whose steps equal stock Megatron's."""
        return [
            *self.model.flags(
                self.num_replicas, train_iters=window.train_iters, log_interval=window.log_interval
            ),
            *edit_flags(self.num_replicas, warmup_steps=0, log_dir=log_dir),
            *("--edit-sync-interval", str(tau)),
            *("--edit-sync-mode", mode),
        ]

    def __str__(self) -> str:
        return f"{self.num_layers} layers, hidden {self.hidden_size}, N {self.num_replicas}"


@dataclass(frozen=True)
class Sweep:
    """Cases that differ in the size given by `name`."""

    name: str
    cases: tuple[Case, ...]


def make_sweeps(
    *, layers: Sequence[int], replicas: Sequence[int], hidden_sizes: Sequence[int]
) -> list[Sweep]:
    """Return the three sweeps; they may share cases."""
    return [
        Sweep("units", tuple(Case(n, UNITS_HIDDEN, DEFAULT_REPLICAS) for n in layers)),
        Sweep("replicas", tuple(Case(DEFAULT_LAYERS, REPLICAS_HIDDEN, n) for n in replicas)),
        Sweep("parameters", tuple(Case(DEFAULT_LAYERS, n, DEFAULT_REPLICAS) for n in hidden_sizes)),
    ]


def distinct_cases(all_sweeps: Sequence[Sweep]) -> list[Case]:
    """Return every case once, in order."""
    return list(dict.fromkeys(case for sweep in all_sweeps for case in sweep.cases))
