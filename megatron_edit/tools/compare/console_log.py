"""Reading Megatron's console output, and the losses in EDiT's event files.

With EDiT every replica is a separate Megatron world and may print its own lines: several values for
one iteration are averaged.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_edit.observe.line_files import read_json_lines
from megatron_edit.observe.records import LOSSES, VALIDATION, LossRecord

_ITERATION = re.compile(r"(?<!at )\biteration\s+(\d+)/\s*(\d+)\s*\|(.*)")
_EVALUATED = re.compile(
    r"validation\S* loss at iteration\s+(\d+)([^|]*)\|\s*lm loss value:\s*(\S+)"
)
_PARAMETERS = re.compile(r"number of parameters on .*model parallel rank \(([\d, ]+)\):\s*(\d+)")

# Excluded from speeds: the first iterations allocate memory and import modules.
NUM_EXCLUDED_ITERATIONS = 5


@dataclass
class RunLog:
    """Numbers collected from the console lines of one training, as they are printed."""

    last_iteration: int = 0  # highest iteration seen
    num_iterations: int = 0  # of the complete training, as printed by Megatron
    last_loss: float = math.nan  # training loss of the newest line that has one
    batch_size: int = 0  # samples per iteration, of the newest line
    # Consumed since the start of the training, by iteration.
    samples: dict[int, int] = field(default_factory=dict)
    _parameters: dict[str, int] = field(default_factory=dict)
    _losses: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _validation: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    _milliseconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, lines: Iterable[str]) -> RunLog:
        """Read the log of a finished training."""
        log = cls()
        for line in lines:
            log.feed(line)
        return log

    def feed(self, line: str) -> None:
        """Parse one line; unknown lines are ignored."""
        if found := _ITERATION.search(line):
            self.num_iterations = int(found[2])
            self._feed_iteration(int(found[1]), _fields(found[3]))
        elif found := _EVALUATED.search(line):
            # At the end of a training Megatron also evaluates "on test set".
            if "test" not in found[2]:
                self._validation[int(found[1])].append(float(found[3]))
        elif found := _PARAMETERS.search(line):
            self._parameters[found[1]] = int(found[2])

    def _feed_iteration(self, iteration: int, values: dict[str, str]) -> None:
        self.last_iteration = max(self.last_iteration, iteration)
        if "elapsed time per iteration (ms)" in values:
            elapsed = float(values["elapsed time per iteration (ms)"])
            self._milliseconds[iteration].append(elapsed)
        if "global batch size" in values:
            self.batch_size = int(values["global batch size"])
        if "consumed samples" in values:
            self.samples[iteration] = int(values["consumed samples"])
        if "lm loss" in values:  # absent in a skipped iteration
            self.last_loss = float(values["lm loss"])
            self._losses[iteration].append(self.last_loss)

    @property
    def num_parameters(self) -> int:
        """Parameters of all model-parallel ranks together; replicated ones count several times."""
        return sum(self._parameters.values())

    def losses(self) -> dict[int, float]:
        """Return the training loss by iteration."""
        return _means(self._losses)

    def validation(self) -> dict[int, float]:
        """Return the validation loss by iteration."""
        return _means(self._validation)

    def milliseconds(self) -> dict[int, float]:
        """Return milliseconds per iteration since the previous line, by the line's iteration."""
        return _means(self._milliseconds)


def _fields(text: str) -> dict[str, str]:
    """Parse the `name: value | name: value |` part of an iteration line."""
    pairs = (part.rpartition(":") for part in text.split("|"))
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def _means(values: dict[int, list[float]]) -> dict[int, float]:
    """Return the mean per key, in the order of the keys."""
    return {key: sum(values[key]) / len(values[key]) for key in sorted(values)}


def edit_losses(log_dir: Path, log: RunLog) -> dict[int, float]:
    """Return the training loss of an EDiT run from its event files, else from the console."""
    found = {
        record.iteration: record.loss
        for record in _loss_records(log_dir)
        if record.split is None and not math.isnan(record.loss)
    }
    return found or log.losses()


def edit_validation(log_dir: Path, log: RunLog) -> dict[int, float]:
    """Return the validation loss of an EDiT run from its event files, else from the console."""
    found: dict[int, list[float]] = defaultdict(list)  # several validation sets have equal weight
    for record in _loss_records(log_dir):
        if record.split == VALIDATION and not math.isnan(record.loss):
            found[record.iteration].append(record.loss)
    return _means(found) or log.validation()


def _loss_records(log_dir: Path) -> Iterator[LossRecord]:
    return map(LossRecord.of, read_json_lines(log_dir / LOSSES))
