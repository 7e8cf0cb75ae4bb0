"""Losses that jump far above those before them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

SPIKE_SIGMAS = 8.0  # normal noise does not reach that in any training
MEAN_DECAY, NOISE_DECAY = 0.1, 0.02  # weights of the newest loss: 10 and 50 iterations back
LEAST_LOSSES = 50  # before there is a mean worth comparing with
LEAST_DEVIATION = 1e-3  # of the mean: losses that hardly differ are no measure
BACK_SIGMAS = 3.0  # a loss below that is back to what is usual


class Spike(NamedTuple):
    """Losses in a row that are far above those before them.

    Attributes:
        iteration: of its first loss.
        loss: the highest.
        mean: of the losses before it.
        sigmas: by how many standard deviations of the losses before it was above them.
        length: iterations until the loss was back; 0 while it is not.
    """

    iteration: int
    loss: float
    mean: float
    sigmas: float
    length: int


@dataclass
class SpikeDetector:
    """Compares each loss with the running mean of those before, in units of their noise.

    The noise is that of the differences of neighbours: a loss that falls steeply has no more.

    Attributes:
        count: spikes so far.
        worst: the highest of them, in standard deviations.
    """

    count: int = 0
    worst: Spike | None = None
    _num_losses: int = 0
    _mean: float = 0.0
    _newest: float = 0.0
    _noise: float = 0.0  # variance
    _present: Spike | None = None

    def add(self, iteration: int, loss: float) -> None:
        """Take the next loss.

        Args:
            iteration: of it.
            loss: finite.
        """
        deviation = max(math.sqrt(self._noise), LEAST_DEVIATION * abs(self._mean), 1e-12)
        sigmas = (loss - self._mean) / deviation
        is_armed = self._num_losses >= LEAST_LOSSES
        if self._present is not None:
            self._follow(self._present, iteration, loss)
        elif is_armed and sigmas > SPIKE_SIGMAS:
            self.count += 1
            self._present = Spike(iteration, loss, self._mean, sigmas, 0)
            self._compare(self._present)
        if is_armed:  # a spike counts little: the losses after it are compared with those before
            loss = self._mean + min(sigmas, BACK_SIGMAS) * deviation
        if self._num_losses:
            weight = max(NOISE_DECAY, 1 / self._num_losses)
            self._noise += weight * ((loss - self._newest) ** 2 / 2 - self._noise)
        self._num_losses += 1
        self._mean += max(MEAN_DECAY, 1 / self._num_losses) * (loss - self._mean)
        self._newest = loss

    def _follow(self, spike: Spike, iteration: int, loss: float) -> None:
        deviation = (spike.loss - spike.mean) / spike.sigmas
        sigmas = (loss - spike.mean) / deviation
        is_back = sigmas <= BACK_SIGMAS
        if sigmas > spike.sigmas:
            spike = spike._replace(loss=loss, sigmas=sigmas)
        if is_back:
            spike = spike._replace(length=iteration - spike.iteration)
        self._compare(spike)
        self._present = None if is_back else spike

    def _compare(self, spike: Spike) -> None:
        if self.worst is None or spike.sigmas >= self.worst.sigmas:
            self.worst = spike
