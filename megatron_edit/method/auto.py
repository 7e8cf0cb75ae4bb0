"""What `--edit-auto` chooses: the least expected loss at which syncs cost little time.

`choose` is a pure function of values that all ranks have gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import groupby, product
from statistics import fmean
from typing import Any

from megatron_edit.constants import (
    ALL,
    AUTO_WARMUP_STEPS,
    BF16,
    FP32,
    INT2,
    INT4,
    INT8,
    MAX_TIMEOUT_SECONDS,
    MOMENTS_BOTH,
    NONE,
    SIGN,
    TERNARY,
)
from megatron_edit.method.cost import (
    MEETING_MESSAGES,
    Cost,
    UnitExchange,
    gaps_of_round,
    round_cost,
)
from megatron_edit.method.settings import Settings
from megatron_edit.method.strategy import STRATEGIES, outer_preset

LEAST_ROUNDS = 4  # that local training has with a chosen interval
INTERVALS = (8, 16, 32, 64, 128, 256)
DELAYS = (0, 1, 2, 4, 8, 16, 32, 64)
LEAST_BLOCKS = 4  # of steps, whose waits are averaged
MOMENTS_EVERY = (1, 4)  # syncs; without moments 1
FINAL_FRACTIONS = (0.05, 0.02, 0.0)
FINAL_COST = 0.02  # most of the training's time that a final phase may add
# Where averaging takes long, the warm-up ends once it has added this share to the time of the
# training, but not before this share of the steps.
WARMUP_COST, LEAST_WARMUP_SHARE = 0.3, 0.02
EVEN = 0.97  # replicas whose speed is less of their own are told about A-EDiT
SHARE_STEP = 0.01  # predictions are not better than this
MESSAGES_PER_EXCHANGE = 2  # that wait for one another
PATIENCE = 3  # syncs that leave the prediction before the settings are chosen again
LEAST_PATIENCE = 2  # rounds, with fragments
FACTOR = 2.0  # by which they leave it
MOST_WORK = 4.0  # times the measured local work; more is rather a link that has recovered since
SPARE_STEPS = 1.25  # times the least steps of a timed round: a slower step must not extend it


@dataclass(frozen=True)
class SyncSettings:
    """The settings that are chosen, by their names in `Settings`.

    Attributes:
        sync_interval: tau; where the clock ends rounds, the expected steps of a round, on average
            over the replicas.
        sync_seconds: tau_time; where steps end rounds, the expected seconds of a round.
    """

    sync_interval: int
    sync_dtype: str
    fragments: int
    delay_steps: int
    outer_lr: float
    outer_momentum: float
    sync_seconds: float
    average_moments: str
    average_moments_every: int
    final_sync_fraction: float

    @property
    def words(self) -> str:
        """The settings that decide about speed and loss, for people."""
        found = [f"tau {self.sync_interval}", self.sync_dtype]
        found += [f"fragments {self.fragments}"] if self.fragments > 1 else []
        found += [f"delay {self.delay_steps}"] if self.delay_steps else []
        every = f" every {self.average_moments_every}" if self.average_moments_every > 1 else ""
        found += [] if self.average_moments == NONE else [f"moments {self.average_moments}{every}"]
        return ", ".join(found)


# Older versions did not choose them.
_NOT_CHOSEN_BEFORE = {
    "average_moments": NONE, "average_moments_every": 1, "final_sync_fraction": 0.0,
}  # fmt: skip
AUTO_SETTINGS = tuple(each.name for each in fields(SyncSettings))


def auto_settings(strategy: str, *, has_hub: bool = False) -> tuple[str, ...]:
    """The names of the settings that are chosen for a strategy. Where blocks are assigned to
    replicas, a final phase must be known before they are."""
    is_timed = STRATEGIES[strategy].is_timed
    unused = {"sync_interval" if is_timed else "sync_seconds"}
    unused |= {"final_sync_fraction"} if is_timed or has_hub else set()
    return tuple(name for name in AUTO_SETTINGS if name not in unused)


def chosen_of(strategy: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were chosen for a strategy, by name.

    Args:
        record: `settings` of a recorded choice; one of an older version lacks some.
    """
    return {name: record[name] for name in auto_settings(strategy) if name in record}


@dataclass(frozen=True)
class Measurement:
    """What a choice depends on, the same on all ranks.

    Attributes:
        step: seconds of a step without any exchange between replicas: of the slowest replica;
            where the clock ends rounds, the median of the replicas.
        forward: seconds of the forward pass that a sync may overlap.
        rate: bytes per second that a rank sends to other replicas while all ranks do.
        latency: seconds until a message of another replica has arrived.
        work: seconds per element of the local work of a sync, by wire type; `MOMENTS_BOTH` has
            those of averaging both moments.
        wait: seconds that a replica waits for others at a meeting after one step, on average; after
            n steps sqrt(n) times as long. See `mean_wait`.
        slowest: seconds of a step of the slowest replica; 0 where that is `step`.
        averaging: seconds that the averaging of gradients adds to a step.
        evenness: speed of replicas that wait for the slowest one, as a share of their own.
    """

    step: float
    forward: float
    rate: float = math.inf
    latency: float = 0.0
    work: Mapping[str, float] = field(default_factory=dict)
    wait: float = 0.0
    slowest: float = 0.0
    averaging: float = 0.0
    evenness: float = 1.0

    @property
    def slowness(self) -> float:
        """Duration of a step of the slowest replica, as a multiple of `step`; at least 1."""
        return max(1.0, self.slowest / self.step)


@dataclass(frozen=True)
class AutoChoice:
    """The chosen settings, and what is expected of them.

    Attributes:
        settings: see `SyncSettings`.
        share: speed, as a share of that without syncs.
        exposed: seconds that a sync of one fragment adds, without its meeting; the mean of a round.
        loss: relative increase of the final loss over stock DDP, by tables of small models.
        since: the step after which they are used.
        measured: see `Measurement`.
        is_timed: whether the clock ends rounds (A-EDiT).
        slower: what would cost less loss, but is too slow, for people; empty for nothing.
    """

    settings: SyncSettings
    share: float
    exposed: float
    loss: float
    since: int
    measured: Measurement
    is_timed: bool = False
    slower: str = ""

    def lines(self, source: str = "measured") -> tuple[str, ...]:
        """What is chosen, what is expected of it, and from what, for people.

        Args:
            source: where the values of `measured` are from.
        """
        chosen, measured = self.settings, self.measured
        length = f"every {chosen.sync_interval} steps"
        if self.is_timed:
            length = f"every {chosen.sync_seconds:g} s (about {chosen.sync_interval} steps)"
        parts = [f"a sync {length} in {chosen.sync_dtype}"]
        parts += [f"in {chosen.fragments} fragments"] if chosen.fragments > 1 else []
        later = f"step{'s' if chosen.delay_steps > 1 else ''} later"
        parts += [f"landing {chosen.delay_steps} {later}"] if chosen.delay_steps else []
        if chosen.average_moments != NONE:
            every = chosen.average_moments_every
            parts.append(f"with Adam's moments at {f'1 of {every} syncs' if every > 1 else 'each'}")
        parts.append(f"outer learning rate {chosen.outer_lr:g}, momentum {chosen.outer_momentum:g}")
        if chosen.final_sync_fraction:
            parts.append(f"the last {100 * chosen.final_sync_fraction:g}% of training synchronous")
        expected = (
            f"expected: {self.share:.3f} of the speed without exchange, and a loss {self.loss:+.1%}"
            " over stock Megatron's (as for small models)"
        )
        expected += f"; less loss, but slower: {self.slower}" if self.slower else ""
        if measured.evenness < EVEN and not self.is_timed:
            expected += (
                f"; as all wait for the slowest replica, {measured.evenness:.2f} of their own "
                "speeds: --edit-strategy a-edit does not wait"
            )
        # Without a gather of parameters in it nothing can overlap a forward pass.
        forward = f"forward pass {_shown(measured.forward)}, " if measured.forward else ""
        return (
            f"chosen after step {self.since}: {', '.join(parts)}",
            expected,
            f"{source}: a step {_shown(measured.step)}, {forward}{measured.rate / 1e6:.3g} MB/s "
            f"from each rank to other replicas, latency {_shown(measured.latency)}, a wait for "
            f"other replicas of {_shown(measured.wait)} after one step",
        )

    def as_json(self) -> dict[str, Any]:
        """The choice as JSON values; the rate is None where there is no other replica."""
        record = asdict(self)
        if math.isinf(self.measured.rate):
            record["measured"]["rate"] = None
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> AutoChoice:
        """Restore a choice from `as_json`.

        Raises:
            KeyError: a field is missing. TypeError: there is another one.
        """
        measured = Measurement(**record["measured"])
        if measured.rate is None:
            measured = replace(measured, rate=math.inf)
        values: dict[str, Any] = _NOT_CHOSEN_BEFORE | record["settings"]
        if "sync_seconds" not in values:  # of an older version
            values = {**values, "sync_seconds": values["sync_interval"] * measured.step}
        settings = SyncSettings(**values)
        return cls(**{**record, "settings": settings, "measured": measured})


@dataclass(frozen=True)
class AutoSetting:
    """What is known before anything is measured.

    Attributes:
        given: the settings of the run; `open_settings` may be chosen.
        unit_numels: elements of each unit in the shards of the rank that has most, in forward
            order.
        payload: bytes that a rank sends in an exchange of so many elements in a wire type, with
            these moments of the inner optimizer (a value of `--edit-average-moments`).
        depth: most units in flight in the forward pass; 1 where syncs block.
        num_replicas: N.
    """

    given: Settings
    unit_numels: tuple[int, ...]
    payload: Callable[[int, str, str], int]
    depth: int
    num_replicas: int

    @property
    def is_timed(self) -> bool:
        """Whether the clock ends rounds."""
        return STRATEGIES[self.given.strategy].is_timed

    @property
    def least_steps(self) -> int:
        """Steps of a round, on average over the replicas, below which it could be extended."""
        least = SPARE_STEPS * self.given.min_round_steps / self.num_replicas
        return math.ceil(least) if self.is_timed else 0


def choose(setting: AutoSetting, measured: Measurement, step: int, local_steps: int) -> AutoChoice:
    """Choose the settings of the rounds.

    Args:
        setting: see `AutoSetting`.
        measured: see `Measurement`.
        step: s, after which they are used.
        local_steps: steps of local training from there on.

    Returns:
        The choice with the least expected loss among those that reach the target; where none does,
        that with the least expected loss among the fastest.
    """
    candidates = sorted(_candidates(setting, measured, local_steps), key=_loss)
    choices: list[AutoChoice] = []
    least, costs = setting.given.auto_share, Costs(setting, measured)
    for _, equals in groupby(candidates, key=_loss):
        of_loss = [predict(setting, measured, each, step, costs) for each in equals]
        choices.append(max(of_loss, key=lambda each: each.share))
        if choices[-1].share >= least:
            break  # the others, which cost more, are not computed
    else:
        least = max(each.share for each in choices) - SHARE_STEP
    found = next(each for each in choices if each.share >= least)
    better = [each for each in choices[: choices.index(found)] if each.loss < found.loss]
    slower = ""
    if better:
        nearest = max(better, key=lambda each: each.share)
        slower = f"{nearest.settings.words}: {nearest.share:.3f}"
    warmup = min(setting.given.warmup_steps, step) / (step + local_steps)
    return replace(found, loss=found.loss + warmup_loss(warmup), slower=slower)


def with_choice[S: Settings](given: S, choice: AutoChoice) -> S:
    """The settings with a choice, as if it had been given without `--edit-auto`."""
    chosen: dict[str, Any] = {n: getattr(choice.settings, n) for n in given.open_settings}
    chosen["warmup_steps"] = min(given.warmup_steps, choice.since)  # it may have ended early
    return replace(given, auto=False, auto_share=Settings.auto_share, **chosen)


class Costs:
    """Costs of rounds with and without moments, each computed once.

    Args:
        setting: see `AutoSetting`.
        measured: see `Measurement`.
    """

    def __init__(self, setting: AutoSetting, measured: Measurement) -> None:
        self._setting, self._measured = setting, measured
        self._cost, self._exchanges = cache(self._compute_cost), cache(self._compute_exchanges)

    def of(self, settings: SyncSettings, moments: str) -> Cost:
        """The cost of a round in which all syncs have these moments, or none."""
        return self._cost(settings.sync_interval, settings.sync_dtype, settings.fragments,
                          settings.delay_steps, moments)  # fmt: skip

    def _compute_cost(
        self, interval: int, wire: str, fragments: int, delay: int, moments: str
    ) -> Cost:
        setting, step = self._setting, self._measured.step
        steps = 0 if setting.is_timed else interval
        return round_cost(
            self._exchanges(wire, moments),
            gaps=gaps_of_round(interval * step, fragments, steps),
            depth=setting.depth,
            head_start=delay * step,
            latency=self._measured.latency,
        )

    def _compute_exchanges(self, wire: str, moments: str) -> list[UnitExchange]:
        setting, measured = self._setting, self._measured
        numels, work = setting.unit_numels, measured.work[wire]
        if moments != NONE:
            work += measured.work.get(MOMENTS_BOTH, 0.0)
        total = sum(numels[1:]) or 1  # the embedding, which comes first, is only a look-up
        forward = measured.forward if setting.depth > 1 else 0.0
        return [
            UnitExchange(0.0, 0.0, 0.0)
            if numel == 0  # of another pipeline stage
            else UnitExchange(
                setting.payload(numel, wire, moments) / measured.rate
                + MESSAGES_PER_EXCHANGE * measured.latency,
                work * numel,
                forward * numel / total if place else 0.0,
            )
            for place, numel in enumerate(numels)
        ]


def predict(
    setting: AutoSetting,
    measured: Measurement,
    settings: SyncSettings,
    step: int,
    costs: Costs | None = None,
) -> AutoChoice:
    """The expected speed and loss of some settings.

    Args:
        costs: of the same setting and measurement, that are known.
    """
    costs, every = costs or Costs(setting, measured), settings.average_moments_every
    cost = costs.of(settings, settings.average_moments)
    if every > 1:
        plain = costs.of(settings, NONE)
        cost = replace(cost, exposed=(cost.exposed + (every - 1) * plain.exposed) / every)
    # Without the meeting: the time that it takes is not told from the wait for slower replicas.
    exposed = max(0.0, cost.exposed / settings.fragments - MEETING_MESSAGES * measured.latency)
    # A round has F meetings, each after tau / F steps.
    steps = settings.sync_interval / settings.fragments
    wait = measured.wait * math.sqrt(steps)
    if setting.is_timed:  # a replica makes further steps while another one would let it wait
        wait = min(wait + steps * (1 - measured.evenness) * measured.step, measured.step / 2)
    share = cost.round / (cost.round + cost.exposed + wait * settings.fragments)
    loss = _loss(settings)
    return AutoChoice(settings, share, exposed, loss, step, measured, setting.is_timed)


def warmup_end(measured: Measurement, most: int, total: int) -> int:
    """The step after which a warm-up of at most so many steps ends, where averaging takes long.

    Args:
        most: W.
        total: steps of the training.
    """
    least = max(AUTO_WARMUP_STEPS, math.ceil(LEAST_WARMUP_SHARE * total))
    paid = WARMUP_COST * total * measured.step / max(measured.averaging, 1e-9)
    return min(most, max(least, math.floor(paid)))


def mean_wait(seconds: Sequence[Sequence[float]]) -> float:
    """What replicas would wait for the slowest one after a step, by how their steps vary; see
    `Measurement.wait`.

    That a replica is always slower does not count: `Measurement.step` has it, and rounds of all
    lengths wait for it. Independent steps let the differences of n steps grow with sqrt(n), and
    those of a replica that is slow for a while faster: the largest value of blocks of 1, 2, 4, ...
    steps counts.

    Args:
        seconds: of the same steps on each replica; may be empty.
    """
    count = len(seconds[0]) if seconds else 0
    means = [fmean(own or [0.0]) for own in seconds]
    varying = [[each - mean for each in own] for own, mean in zip(seconds, means, strict=True)]
    waits, length = [0.0], 1
    while LEAST_BLOCKS * length <= count:
        starts = range(0, count - length + 1, length)
        blocks = [[sum(own[at : at + length]) for own in varying] for at in starts]
        waits.append(fmean(max(each) - fmean(each) for each in blocks) / math.sqrt(length))
        length *= 2
    return max(waits)


def _loss(settings: SyncSettings) -> float:
    return expected_loss(
        settings.sync_interval, settings.sync_dtype, settings.delay_steps,
        (settings.average_moments, settings.average_moments_every), settings.final_sync_fraction,
    )  # fmt: skip


def num_judged(choice: AutoChoice) -> int:
    """How many syncs tell whether the prediction of a choice is left: `PATIENCE`, or more in whole
    rounds, as some fragments are larger than others."""
    fragments = choice.settings.fragments
    return fragments * (PATIENCE if fragments == 1 else LEAST_PATIENCE)


def leaves_prediction(choice: AutoChoice, exposed: Sequence[float], target: float) -> bool:
    """Whether the time that syncs added leaves the prediction by a factor of two, in either
    direction, in each of the last rounds. Less than what the target allows is not told from
    nothing.

    Args:
        choice: that is in use.
        exposed: seconds that training waited for each of the last `num_judged` syncs, each of one
            fragment; with fewer the prediction is not left.
        target: share of the speed without syncs that was to be reached.
    """
    settings, count = choice.settings, choice.settings.fragments
    allowed = (1 - target) * settings.sync_interval * choice.measured.step / count
    rounds = [fmean(exposed[at : at + count]) for at in range(0, len(exposed), count)]
    if len(exposed) < num_judged(choice):
        return False
    if min(rounds) > FACTOR * max(choice.exposed, allowed):
        return True
    return choice.exposed > allowed and max(rounds) * FACTOR < choice.exposed


def calibrated(
    setting: AutoSetting, measured: Measurement, settings: SyncSettings, exposed: float
) -> Measurement:
    """The measurement, with more local work if syncs add more time than is expected of it: they
    work beside the training, on memory that is not in a cache, and not alone as when measured.

    Args:
        setting: see `AutoSetting`.
        measured: with the links as they are now.
        exposed: seconds that a sync of one fragment was observed to add.
    """
    work = measured.work[settings.sync_dtype] * sum(setting.unit_numels) / settings.fragments
    more = exposed - predict(setting, measured, settings, 0).exposed
    if more <= 0 or work <= 0:
        return measured
    factor = min(1 + more / work, MOST_WORK)
    return replace(measured, work={wire: factor * each for wire, each in measured.work.items()})


def _shown(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _candidates(
    setting: AutoSetting, measured: Measurement, local_steps: int
) -> Iterator[SyncSettings]:
    """All combinations of the values of the open settings."""
    given, num_units = setting.given, len(setting.unit_numels)
    # Else there is no step at which replicas are equal.
    lands_at_once = given.check_commits or given.inner_state != ALL
    final = given.final_sync_fraction
    if "final_sync_fraction" in given.open_settings:
        cost = measured.averaging / measured.step
        final = next((each for each in FINAL_FRACTIONS if each * cost <= FINAL_COST), 0.0)
    local_steps -= math.ceil(final * local_steps)

    def values[T](name: str, tried: Iterable[T]) -> list[T]:
        return list(tried) if name in given.open_settings else [getattr(given, name)]

    moments = [
        (kinds, every)
        for kinds, every in product(
            values("average_moments", (MOMENTS_BOTH, NONE)),
            values("average_moments_every", MOMENTS_EVERY),
        )
        if kinds != NONE or every == 1
    ]

    for interval, seconds in _rounds(setting, measured, local_steps):
        # A delay counts own steps: the slowest replica must make more in a round.
        fewest = max(1.0, interval / measured.slowness)
        delays = [each for each in DELAYS if each <= fewest - 1]
        most = 1 if lands_at_once else min(num_units, int(fewest))
        for fragments, delay, wire, (kinds, every) in product(
            values("fragments", sorted({1, most})),
            values("delay_steps", delays[: 1 if lands_at_once else None]),
            values("sync_dtype", WIRE_LOSS),
            moments,
        ):
            lr, momentum = _outer(setting, interval, wire)
            yield SyncSettings(
                interval, wire, fragments, delay, lr, momentum, seconds, kinds, every, final
            )


def _rounds(
    setting: AutoSetting, measured: Measurement, local_steps: int
) -> list[tuple[int, float]]:
    """The lengths of rounds that are tried: steps and seconds."""
    given, is_open = setting.given, setting.given.open_settings
    if setting.is_timed and "sync_seconds" not in is_open:
        return [(max(1, round(given.sync_seconds / measured.step)), given.sync_seconds)]
    shortest = max(
        0 if "delay_steps" in is_open else given.delay_steps + 1,
        1 if "fragments" in is_open else given.fragments,
    )
    shortest = max(math.ceil(shortest * measured.slowness), setting.least_steps)
    longest = max(INTERVALS[0], local_steps // LEAST_ROUNDS)
    intervals = [each for each in INTERVALS if shortest <= each <= longest] or [shortest]
    if not setting.is_timed and "sync_interval" not in is_open:
        intervals = [given.sync_interval]
    # Four digits: people copy the number into a command line.
    seconds = [min(each * measured.step, MAX_TIMEOUT_SECONDS) for each in intervals]
    return [(each, float(f"{long:.4g}")) for each, long in zip(intervals, seconds, strict=True)]


def _outer(setting: AutoSetting, interval: int, wire: str) -> tuple[float, float]:
    preset = outer_preset(interval, wire)
    lr, momentum = preset["outer_lr"], min(preset["outer_momentum"], MOST_MOMENTUM)
    given = setting.given
    return (
        lr if "outer_lr" in given.open_settings else given.outer_lr,
        momentum if "outer_momentum" in given.open_settings else given.outer_momentum,
    )


# ---- Loss that a setting is expected to cost: measured tables of small models (docs/results.md)
#
# All numbers are relative increases of the final validation loss, of a GPT of 1.1 million
# parameters after 960 steps. For other models and batches they have other sizes (less loss with
# more samples per replica and step); `--edit-auto` only needs their order.


# By interval, over stock DDP, with averaged moments and the best outer settings of the interval.
INTERVAL_LOSS = ((8, 0.014), (16, 0.015), (32, 0.033), (64, 0.057), (128, 0.085), (256, 0.12))
# By wire type, each with the outer settings that are preset for it, over fp32 with the usual ones.
WIRE_LOSS = {
    FP32: 0.0,
    BF16: 0.0001,
    INT8: 0.0001,
    INT4: 0.0002,
    TERNARY: 0.0104,
    INT2: 0.001,
    SIGN: 0.031,
}
# By moments that are averaged, over both at every sync.
MOMENT_LOSS = {(MOMENTS_BOTH, 4): 0.004, (NONE, 1): 0.012}
# By the share of a final synchronous phase.
FINAL_GAIN = {0.02: 0.003, 0.05: 0.006}
# By the share of the steps in the warm-up, over a tenth of them.
WARMUP_LOSS = ((0.02, 0.048), (0.05, 0.022), (0.1, 0.0), (0.25, -0.009))
# By share of the interval that a sync is delayed.
DELAY_LOSS = 0.030
# Of the outer step: more costs loss at nearly all measured intervals (docs/strategies.md).
MOST_MOMENTUM = 0.7


def interval_loss(interval: int) -> float:
    """Increase at a sync interval: linear in log(tau) between the measured ones and beyond them."""
    return _interpolate(INTERVAL_LOSS, interval)


def warmup_loss(share: float) -> float:
    """Increase by a warm-up of another share of the steps; beyond the measured ones constant."""
    return _interpolate(WARMUP_LOSS, min(max(share, WARMUP_LOSS[0][0]), WARMUP_LOSS[-1][0]))


def expected_loss(
    interval: int,
    wire: str,
    delay: int,
    moments: tuple[str, int] = (MOMENTS_BOTH, 1),
    final_fraction: float = 0.0,
) -> float:
    """Increase of the final loss over that of stock DDP; the parts are added.

    Args:
        delay: d, steps.
        moments: that are averaged, and at which syncs.
        final_fraction: of the final synchronous phase.
    """
    parts = WIRE_LOSS[wire] + DELAY_LOSS * delay / interval - FINAL_GAIN.get(final_fraction, 0.0)
    return interval_loss(interval) + parts + MOMENT_LOSS.get(moments, 0.0)


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    place = next((i for i, (x, _) in enumerate(points) if x >= at), len(points) - 1)
    place = max(place, 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * math.log(at / x0) / math.log(x1 / x0)
