"""`--edit-auto`: measures links and steps, chooses the settings of the rounds, and chooses again.

In the last steps of the warm-up the time of a step, of its averaging of gradients, and of its
forward pass are measured; at the switch the links, with all ranks of all replicas at once, and the
local work of an exchange in each wire type. Every rank then chooses from the same gathered values.
With a hub, replicas may be lost at any time: the links are measured at the start, records of the
warm-up's last rounds have the rest, and the commit of such a round has the choice.
In the rounds each record has the time that the replica's last sync added to training. If it leaves
the prediction for some syncs in a row (`method/auto.py`), all units sync at the next meeting and
land at once, the links are measured again, and the next round begins with a new choice.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from megatron_edit.comm.collectives import all_reduce_payload
from megatron_edit.comm.control import ControlRecord
from megatron_edit.comm.timeouts import AdaptiveTimeout
from megatron_edit.comm.wire import Wire, unit_bytes
from megatron_edit.constants import AUTO_WARMUP_STEPS, FP32_BYTES, MEASURED_STEPS, MOMENTS_BOTH
from megatron_edit.engine.host import EngineGroups, Reporter
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.state import RunState
from megatron_edit.method.auto import (
    LEAST_ROUNDS,
    WIRE_LOSS,
    AutoChoice,
    AutoSetting,
    Measurement,
    calibrated,
    choose,
    mean_wait,
    warmup_end,
)
from megatron_edit.method.digest import tensor_digest
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.moments import MomentRule
from megatron_edit.method.norms import sum_of_squares
from megatron_edit.method.outer import Nesterov
from megatron_edit.method.strategy import USUAL_LR, USUAL_MOMENTUM

# Least duration, without the latency, of the transfer that gives the rate.
_PROBE_SECONDS, _PROBE_LATENCIES = 0.3, 4
_FIRST_PROBE = 1 << 14  # elements
_LARGEST_PROBE = 1 << 24
_LEAST_WORK, _MOST_WORK = 1 << 18, 1 << 22  # elements
_TINY_MESSAGES = 5
# Fewer bytes are sent before a time-out on any link, and a shorter latency costs little: then the
# rate is not measured at the start.
_QUICK_BYTES, _SHORT_LATENCY = 10_000_000, 0.005
_LANDING = LandingRule(delay=1, mix=0.0, keeps_progress=True, at_next_meeting=False)


@dataclass
class StepMeter:
    """Seconds of the last steps of the warm-up on this rank.

    Attributes:
        last_step: that is measured: W, or a step after which the warm-up may end; infinite with a
            hub, until the settings are chosen. None measures nothing.
        steps: seconds of measured steps, without the averaging of gradients.
        forwards: seconds of their forward passes, from the first gather of parameters to the last.
        averagings: seconds that the averaging of gradients added to them.
    """

    groups: EngineGroups
    last_step: float | None
    steps: list[float] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)
    averagings: list[float] = field(default_factory=list)
    _began: float | None = None  # when the step began
    _averaging: float = 0.0
    _gathers: tuple[float, float] | None = None  # first and last gather of the step

    def is_measured(self, step: int) -> bool:
        """Whether a step is measured.

        Args:
            step: s, from 1.
        """
        last = self.last_step
        return last is not None and (last - MEASURED_STEPS < step <= last or math.isinf(last))

    @contextmanager
    def averaging(self, step: int) -> Iterator[None]:
        """Measure the averaging of gradients, and the wait for other replicas in it."""
        if not self.is_measured(step):
            yield
            return
        began = self._now()
        yield
        self._averaging += self._now() - began

    def restart(self, last_step: int) -> None:
        """Forget what was measured; measure the steps up to this one."""
        self.last_step, self._began = last_step, None
        for values in (self.steps, self.forwards, self.averagings):
            values.clear()

    def interrupt(self) -> None:
        """Do not measure the step that goes on: the replica does something else in it."""
        self._began = None

    def note_gather(self, step: int) -> None:
        """Note that the forward pass of step `step` gathers parameters."""
        if self.is_measured(step):
            now = self._now()
            self._gathers = (now if self._gathers is None else self._gathers[0], now)

    def end_step(self, step: int) -> None:
        """Note the end of step `step`."""
        if not self.is_measured(step + 1):
            self._began = None
            return
        now = self._now()
        if self._began is not None:
            self.steps.append(now - self._began - self._averaging)
            self.averagings.append(self._averaging)
            if self._gathers is not None:
                self.forwards.append(self._gathers[1] - self._gathers[0])
        self._began, self._averaging, self._gathers = now, 0.0, None

    def _now(self) -> float:
        _synchronize(self.groups)
        return time.monotonic()


@dataclass
class AutoTuner:
    """Measures and chooses, on all ranks alike.

    Attributes:
        settings: of the run, before a choice.
        unit_numels: elements that each rank of the replica holds of each unit, int64 [K, U].
        meter: of the steps of the warm-up; measures nothing where nothing is chosen.
        links: rate and latency, see `measure_links`, as measured at the start; NaN if not.
        work: seconds of `_work_per_element` by wire type, from the first `row` on; else empty.
    """

    settings: EngineSettings
    groups: EngineGroups
    unit_numels: Tensor
    meter: StepMeter
    links: tuple[float, float] = (math.nan, math.nan)
    work: tuple[float, ...] = ()

    @classmethod
    def of(cls, settings: EngineSettings, groups: EngineGroups, unit_numels: Tensor) -> AutoTuner:
        """The tuner of a run, with `--edit-auto` or without."""
        given = settings.given
        last = given.warmup_steps if given.hub is None else math.inf
        return cls(settings, groups, unit_numels, StepMeter(groups, last if given.auto else None))

    def begin(self, step: int) -> None:
        """Begin or resume the warm-up after `step`."""
        given = self.settings.given
        if self._may_shorten:
            first = max(AUTO_WARMUP_STEPS, step + MEASURED_STEPS)
            self.meter.restart(min(given.warmup_steps, first))

    def ends_warmup(self, step: int) -> bool:
        """Whether the warm-up ends after `step`, before W, as it takes too long.

        Collective at the steps of `StepMeter.last_step`: all ranks of all replicas.
        """
        given, total = self.settings.given, self.settings.last_local_step
        is_due = self._may_shorten and step == self.meter.last_step
        if not is_due or (known := self._measured_steps()) is None:
            return False
        if (end := warmup_end(known, given.warmup_steps, total)) <= step:
            return True
        following = max(step + MEASURED_STEPS, min(end, 2 * step))
        self.meter.restart(min(given.warmup_steps, following))
        return False

    @property
    def _may_shorten(self) -> bool:
        given = self.settings.given
        return given.auto and given.has_open_warmup and given.hub is None

    def open_groups(self, timeout: AdaptiveTimeout) -> int:
        """Use every group once, and allow exchanges the time that their bytes need.

        Collective: all ranks of all replicas that are there.

        Args:
            timeout: between replicas.

        Returns:
            Bytes that a rank could send in the latency of an exchange; 0 if it was not measured.
        """
        self.groups.warm_up(has_exchanges=self.settings.num_phases > 0)
        tensors = 1 + len(self.settings.moments.rule.kinds)
        nbytes = FP32_BYTES * tensors * int(self.unit_numels.sum(dim=1).max())
        size = self.groups.sync.size
        if self.num_measured and size > 1:
            self.links = measure_links(self.groups)
        if size == 1 or self.settings.given.hub is not None:
            return 0
        latency = measure_latency(self.groups)
        if nbytes <= _QUICK_BYTES and latency <= _SHORT_LATENCY:
            return 0
        rate = measure_rate(self.groups, latency)
        timeout.allow_transfer(latency + all_reduce_payload(nbytes, size) / rate)
        return round(rate * latency)

    def choose(self, state: RunState, reporter: Reporter) -> AutoChoice | None:
        """Measure links and local work, and choose the settings of the next rounds.

        Collective: all ranks of all replicas.

        Args:
            state: of the run; has the choice in use, whose step and forward pass stay.
            reporter: receives a message if no step of the warm-up was measured.

        Returns:
            The choice; None where nothing is to be chosen, or no step was measured.
        """
        if not self.settings.given.auto:
            return None
        if (before := state.rounds.choice) is not None:
            return self._choose_again(state, before)
        if (known := self._measured_steps()) is None:
            reporter.on_message("no step of the warm-up was measured: no settings are chosen")
            return None
        setting, measured = self._measure(known)
        local_steps = self.settings.last_local_step - state.step
        return choose(setting, measured, state.step, local_steps)

    def _measured_steps(self) -> Measurement | None:
        """What the meters of all ranks have measured; None where one has not measured a step.

        Collective: all ranks of all replicas.
        """
        meter, replicas = self.meter, self.groups.sync.size
        mine = [_median(meter.steps), _median(meter.forwards, default=0.0),
                _median(meter.averagings), float(len(meter.steps))]  # fmt: skip
        seconds, forward, averaging, counts = _gather_all(self.groups, mine).unbind(dim=1)
        if bool(seconds.isnan().any()):
            return None
        last = _gather_all(self.groups, meter.steps[-int(counts.min()) :])
        # A rank that waits for others of its replica has longer steps than these.
        shortest = last.unflatten(0, (replicas, -1)).amin(dim=1)
        of_replicas = seconds.unflatten(0, (replicas, -1)).amax(dim=1).tolist()
        slowest = max(of_replicas)
        return Measurement(
            step=statistics.median(of_replicas) if self.settings.is_timed else slowest,
            forward=float(forward.min()),
            wait=mean_wait(shortest.tolist()),
            slowest=slowest,
            # Of the slowest stage, and without the wait for slower replicas.
            averaging=float(averaging.unflatten(0, (replicas, -1)).amax(dim=1).min()),
            evenness=statistics.harmonic_mean(of_replicas) / slowest,
        )

    def _choose_again(self, state: RunState, before: AutoChoice) -> AutoChoice:
        """Choose again. If nothing better is found, or too few steps remain, the settings stay, and
        the time that was observed is expected from now on, so that this does not repeat."""
        observed = statistics.fmean(state.rounds.exposed or [before.exposed])
        choice = replace(before, since=state.step)
        local_steps = self.settings.last_local_step - state.step
        if local_steps >= LEAST_ROUNDS * before.settings.sync_interval:
            setting, measured = self._measure(before.measured)
            slower = before.measured.rate / measured.rate
            # Where an older version has not measured it, a final phase counts as too expensive.
            averaging = slower * before.measured.averaging or 100 * measured.step
            measured = replace(measured, averaging=averaging)
            measured = calibrated(setting, measured, before.settings, observed)
            choice = choose(setting, measured, state.step, local_steps)
        is_same = choice.settings == before.settings
        return replace(choice, exposed=observed) if is_same else choice

    def _measure(self, known: Measurement) -> tuple[AutoSetting, Measurement]:
        """Measure links and local work; the rest is known.

        Collective: all ranks of all replicas.
        """
        rate, latency = measure_links(self.groups)
        work = _gather_all(self.groups, self._measure_work()).max(dim=0).values.tolist()
        of_names = dict(zip(self._worked, work, strict=True))
        return self._setting(), replace(known, rate=rate, latency=latency, work=of_names)

    # ---- with a hub

    @property
    def num_measured(self) -> int:
        """Values of `row`; 0 where no choice is awaited."""
        is_awaited = self.settings.given.hub is not None and self.meter.last_step is not None
        return 4 + len(self._worked) + MEASURED_STEPS if is_awaited else 0

    def row(self) -> list[float]:
        """What the ranks of this replica have measured: rate and latency of the links, seconds of
        a step and of its forward pass, seconds of local work by wire type, and the shortest seconds
        of each of the last steps; NaN where they are not known. Empty where no choice is awaited.

        Collective: the ranks of the replica.
        """
        if not self.num_measured:
            return []
        self.work = self.work or tuple(self._measure_work())
        steps, (rate, latency) = self.meter.steps[-MEASURED_STEPS:], self.links
        if len(steps) < MEASURED_STEPS:
            steps = [math.nan] * MEASURED_STEPS
        forward = _median(self.meter.forwards, default=0.0)
        longest = [-rate, latency, _median(steps), *self.work]
        shortest = [-value for value in (forward, *steps)]
        mine = torch.tensor([*longest, *shortest], dtype=torch.float64)
        least, *most = self.groups.control.all_gather(mine).amax(dim=0).tolist()
        count = len(longest) - 1
        latency, step, *work = most[:count]
        forward, *steps = (-value for value in most[count:])
        return [-least, latency, step, forward, *work, *steps]

    def note_exchange(self, nbytes: int, seconds: float) -> None:
        """Take an exchange for the measurement of the links, on a replica that has joined others
        or that they have joined.

        Args:
            nbytes: sent by this rank.
        """
        if math.isnan(self.links[0]) and nbytes:
            self.links = nbytes / max(seconds, 1e-9), 0.0

    def choose_from(self, records: Sequence[ControlRecord], consumed: int) -> AutoChoice | None:
        """The choice from the records of a meeting; None where no replica has measured
        enough steps yet. Pure.

        Args:
            consumed: blocks, by all replicas.
        """
        rows = torch.tensor([record.measured for record in records], dtype=torch.float64)
        rows = rows[~rows[:, 2:].isnan().any(dim=1)] if rows.numel() else rows
        if not rows.numel():
            return None
        works, settings = len(self._worked), self.settings
        links = rows[~rows[:, 0].isnan(), :2].tolist()
        if not links and len(records) > 1:  # they have not exchanged anything yet
            return None
        links = links or [[math.inf, 0.0]]
        steps, work = rows[:, 2].tolist(), rows[:, 4 : 4 + works].amax(dim=0).tolist()
        slowest = max(steps)
        measured = Measurement(
            statistics.median(steps) if settings.is_timed else slowest,
            float(rows[:, 3].min()), min(rate for rate, _ in links), max(x for _, x in links),
            dict(zip(self._worked, work, strict=True)),
            mean_wait(rows[:, 4 + works :].tolist()), slowest,
            evenness=statistics.harmonic_mean(steps) / slowest,
        )  # fmt: skip
        left = (settings.local_blocks - consumed) // len(records)
        return choose(self._setting(), measured, consumed // settings.num_nominal, left)

    # ---- parts of the above

    @property
    def _worked(self) -> list[str]:
        """Wire types whose local work is measured, and `MOMENTS_BOTH` for that of moments."""
        given = self.settings.given
        wires = WIRE_LOSS if "sync_dtype" in given.open_settings else [given.sync_dtype]
        return [*wires, MOMENTS_BOTH]

    def _measure_work(self) -> list[float]:
        numel = min(max(int(self.unit_numels.max()), _LEAST_WORK), _MOST_WORK)
        return [_work_per_element(name, numel, self.groups) for name in self._worked]

    def _setting(self) -> AutoSetting:
        numels = self.unit_numels[self.unit_numels.sum(dim=1).argmax()].tolist()
        size = self.groups.sync.size
        payload = partial(unit_bytes, size=size)
        given, depth = self.settings.given, self.settings.depth
        return AutoSetting(given, tuple(map(int, numels)), payload, depth, size)


def measure_links(groups: EngineGroups) -> tuple[float, float]:
    """Bytes per second that a rank sends while all ranks of all replicas do, and the latency.

    Collective: all ranks of all replicas.
    """
    if groups.sync.size == 1:
        return math.inf, 0.0
    latency = measure_latency(groups)
    return measure_rate(groups, latency), latency


def measure_rate(groups: EngineGroups, latency: float) -> float:
    """Bytes per second that a rank sends while all ranks of all replicas do.

    Transfers are doubled until the slowest rank needs `_PROBE_SECONDS`, and several latencies: TCP
    uses the whole rate of a link only some round trips after a transfer has begun.

    Collective: all ranks of all replicas.

    Args:
        latency: seconds of an exchange without content.
    """
    sync, numel = groups.sync, _FIRST_PROBE
    least = latency + max(_PROBE_SECONDS, _PROBE_LATENCIES * latency)
    while True:
        values = torch.zeros(numel, device=sync.device)
        sent = sync.payload_bytes
        seconds = float(_gather_all(groups, [_seconds_of(groups, values)]).max())
        sent = sync.payload_bytes - sent
        if seconds >= least or numel >= _LARGEST_PROBE:
            return sent / max(seconds - latency, 1e-9)
        numel *= 2


def measure_latency(groups: EngineGroups) -> float:
    """Seconds of an exchange without content. Collective: all ranks of all replicas."""
    delays = [_seconds_of(groups, torch.zeros(1)) for _ in range(_TINY_MESSAGES)]
    return float(_gather_all(groups, [min(delays)]).max())


def _seconds_of(groups: EngineGroups, values: Tensor) -> float:
    """Seconds of an all-reduce that all ranks begin together."""
    _gather_all(groups, [0.0])
    began = time.monotonic()
    groups.sync.all_reduce(values.to(groups.sync.device))
    _synchronize(groups)
    return time.monotonic() - began


def _work_per_element(name: str, numel: int, groups: EngineGroups) -> float:
    """Seconds per element of a sync's local work on this rank, in a wire type, or for moments.

    Addend, norms, encoding, decoding, outer step, landing after a delay, and digests.

    Args:
        name: of `AutoTuner._worked`.
        numel: of a unit; a large one is not in a cache, as in the training.
    """
    size, device = groups.sync.size, groups.sync.device
    if name == MOMENTS_BOTH:
        return _moment_work(numel, groups)
    wire = Wire.of(name)
    # Not random numbers, which would change those of the training.
    values, anchor, momentum = (
        torch.linspace(-1, end, numel, device=device) for end in (1.0, 2.0, 3.0)
    )
    residual = wire.new_residual(numel, size, device) if wire.has_residual else None

    def sync() -> None:
        snapshot = values.clone()
        addend = torch.sub(anchor, values)
        sum_of_squares(addend)
        if (codec := wire.codec) is not None:
            sent = None if residual is None else residual.sent
            data = codec.encode(addend, residual=sent)  # the addends, and then the sum of a chunk
            codec.decode_sum(data.unsqueeze(0), addend)
            codec.decode(data, addend)
        sum_of_squares(addend)
        Nesterov(USUAL_LR, USUAL_MOMENTUM).step_(anchor, momentum, addend, clip=1.0, inner_lr=0.0)
        values.copy_(_LANDING.merge_(values.clone(), anchor, snapshot))
        tensor_digest([anchor, momentum])

    return _seconds_of_work(sync, groups) / numel


def _moment_work(numel: int, groups: EngineGroups) -> float:
    """Seconds per element of encoding and decoding both moments."""
    values, rule = (
        torch.linspace(0, 1, numel, device=groups.sync.device),
        MomentRule.of(MOMENTS_BOTH),
    )
    codecs = [codec for kind in rule.kinds if (codec := rule.codec_of(kind)) is not None]

    def average() -> None:
        for codec in codecs:
            data = codec.encode(values.clone())
            codec.decode_sum(data.unsqueeze(0), values.clone())
            codec.decode(data, values.clone())

    return _seconds_of_work(average, groups) / numel


def _seconds_of_work(work: Callable[[], None], groups: EngineGroups) -> float:
    """Seconds of local work, the median of three times."""
    found: list[float] = []
    for _ in range(3):
        _synchronize(groups)
        began = time.monotonic()
        work()
        _synchronize(groups)
        found.append(time.monotonic() - began)
    return statistics.median(found)


def _gather_all(groups: EngineGroups, mine: Sequence[float]) -> Tensor:
    """float64 [N K, n]: values of all ranks of all replicas, in the same order on all of them.

    Collective: all ranks of all replicas.
    """
    rows = groups.control.all_gather(torch.tensor(mine, dtype=torch.float64))
    return groups.meeting.all_gather(rows).flatten(0, 1)


def _median(values: Sequence[float], default: float = math.nan) -> float:
    return statistics.median(values) if values else default


def _synchronize(groups: EngineGroups) -> None:
    streams = groups.sync.streams
    streams.synchronize(streams.record(streams.current()))
