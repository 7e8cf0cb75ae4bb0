"""Seconds and tokens of a training by iteration, from the lines that Megatron prints."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_edit.tools.compare.console_log import RunLog


@dataclass(frozen=True)
class Timeline:
    """Where a training was, by iteration. All three columns are equally long and increase.

    Attributes:
        iterations: of replica 0, that of Megatron's lines; the first entry is the start.
        seconds: spent in training, without start-up and evaluations.
        tokens: consumed by all replicas together.
    """

    iterations: Sequence[int]
    seconds: Sequence[float]
    tokens: Sequence[float]

    @classmethod
    def of(
        cls, log: RunLog, seq_length: int, meetings: Mapping[int, int] | None = None
    ) -> Timeline:
        """From a console log.

        Args:
            log: of the training.
            seq_length: tokens of a sample.
            meetings: samples consumed by all replicas together at some iterations of replica 0;
                needed where replicas make different numbers of steps, as Megatron's own count
                is then right at these iterations only.
        """
        times = log.milliseconds()
        logged = list(times)
        if not logged:
            return cls((0,), (0.0,), (0.0,))
        # A line is about the iterations since the one before; the first one is about as many.
        start = max(0, logged[0] - (logged[1] - logged[0] if len(logged) > 1 else logged[0]))
        seconds, samples = [0.0], [float(start * log.batch_size)]
        for before, iteration in zip([start, *logged], logged, strict=False):
            seconds.append(seconds[-1] + times[iteration] * (iteration - before) / 1e3)
            samples.append(float(log.samples.get(iteration, iteration * log.batch_size)))
        iterations = [start, *logged]
        if meetings:
            known = {start: samples[0]} | {i: float(n) for i, n in sorted(meetings.items())}
            first = min(meetings)
            known |= {i: n for i, n in zip(iterations, samples, strict=True) if i < first}
            places = sorted(known)
            counts = [known[place] for place in places]
            samples = [interpolate(places, counts, i) for i in iterations]
        return cls(iterations, seconds, [count * seq_length for count in samples])

    def seconds_at(self, iteration: int) -> float:
        """Seconds of training until an iteration is over."""
        return interpolate(self.iterations, self.seconds, iteration)

    def tokens_at(self, iteration: int) -> float:
        """Tokens consumed until an iteration is over."""
        return interpolate(self.iterations, self.tokens, iteration)

    def speed(self, first: int, last: int) -> float | None:
        """Tokens per second in the iterations first + 1 .. last; None without such a line."""
        kept = [i for i in self.iterations if first <= i <= last]
        if len(kept) < 2:
            return None
        seconds = self.seconds_at(kept[-1]) - self.seconds_at(kept[0])
        tokens = self.tokens_at(kept[-1]) - self.tokens_at(kept[0])
        return tokens / seconds if seconds > 0 else None


def interpolate(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """A value on the line between its neighbours; at the ends, that of the end.

    Args:
        places: increasing.
        values: one for each place.
        place: where the value is wanted.
    """
    right = bisect_left(places, place)
    if right == len(places):
        return values[-1]
    if right == 0 or places[right] == place:
        return values[right]
    share = (place - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def meetings_of(syncs: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Samples of all replicas together at each sync, by iteration of replica 0."""
    return {int(sync["iteration"]): sum(sync["samples"]) for sync in syncs}
