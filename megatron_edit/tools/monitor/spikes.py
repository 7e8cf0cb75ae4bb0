"""Detection of losses that jump far above the preceding ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

SPIKE_SIGMAS = 8.0  # above the normal noise of a training
MEAN_DECAY, NOISE_DECAY = 0.1, 0.02  # weights of the newest loss: 10 and 50 iterations back
MIN_LOSSES = 50  # before the first comparison with the mean
MIN_DEVIATION = 1e-3  # relative to the mean: nearly constant losses have no useful deviation
RECOVERED_SIGMAS = 3.0  # below it a loss counts as recovered


class Spike(NamedTuple):
    """Consecutive losses far above the preceding ones.

    Attributes:
        iteration: of the first loss of the spike.
        loss: the highest loss of the spike.
        mean: running mean of the losses before the spike.
        sigmas: height of `loss` above `mean`, in standard deviations of the losses before.
        length: iterations until the loss recovered; 0 before.
    """

    iteration: int
    loss: float
    mean: float
    sigmas: float
    length: int


@dataclass
class SpikeDetector:
    """Compare each loss with the running mean of the preceding ones, in units of their noise.

    The noise is that of the differences between neighbours: a steep fall adds little to it.

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
        """Add the next loss.

        Args:
            iteration: of the loss.
            loss: finite.
        """
        deviation = max(math.sqrt(self._noise), MIN_DEVIATION * abs(self._mean), 1e-12)
        sigmas = (loss - self._mean) / deviation
        is_armed = self._num_losses >= MIN_LOSSES
        if self._present is not None:
            self._update_spike(self._present, iteration, loss)
        elif is_armed and sigmas > SPIKE_SIGMAS:
            self.count += 1
            self._present = Spike(iteration, loss, self._mean, sigmas, 0)
            self._keep_worst(self._present)
        if is_armed:  # limits the weight of a spike in the mean
            loss = self._mean + min(sigmas, RECOVERED_SIGMAS) * deviation
        if self._num_losses:
            weight = max(NOISE_DECAY, 1 / self._num_losses)
            self._noise += weight * ((loss - self._newest) ** 2 / 2 - self._noise)
        self._num_losses += 1
        self._mean += max(MEAN_DECAY, 1 / self._num_losses) * (loss - self._mean)
        self._newest = loss

    def _update_spike(self, spike: Spike, iteration: int, loss: float) -> None:
        deviation = (spike.loss - spike.mean) / spike.sigmas
        sigmas = (loss - spike.mean) / deviation
        has_recovered = sigmas <= RECOVERED_SIGMAS
        if sigmas > spike.sigmas:
            spike = spike._replace(loss=loss, sigmas=sigmas)
        if has_recovered:
            spike = spike._replace(length=iteration - spike.iteration)
        self._keep_worst(spike)
        self._present = None if has_recovered else spike

    def _keep_worst(self, spike: Spike) -> None:
        if self.worst is None or spike.sigmas >= self.worst.sigmas:
            self.worst = spike
