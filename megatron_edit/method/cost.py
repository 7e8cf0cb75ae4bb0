"""Time of a sync, from a small simulation: what the link carries, and what training waits for.

A sync proceeds unit by unit. Its exchanges share the link, so one is on the wire at a time, and at
most `depth` units are in flight; a unit that has arrived costs the rank some local work (outer
step, copies), and then its part of the forward pass may run. The time beyond the forward pass is
*exposed*. Fragments share the link, too: a group that is started while others are in flight waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

WORK_BEFORE_EXCHANGE = 0.3  # share of the local work before the exchange: norms, addends
MEETING_MESSAGES = 2  # that wait for one another
ROUNDS = 3  # that are simulated; later ones repeat, unless the link falls further behind


@dataclass(frozen=True)
class Cost:
    """The cost of an exchange: a sync, all of its fragments, or a synchronous step.

    Attributes:
        exchange: seconds on the wire.
        work: seconds of the rank's local work.
        exposed: seconds that training waits for a sync, work included.
        round: seconds of training between two exchanges.
        longest: largest part of `exchange` that is started at once: of one group of units.
    """

    exchange: float
    work: float
    exposed: float
    round: float
    longest: float

    @property
    def share_of_ideal(self) -> float:
        """Speed as a share of the speed without exchanges."""
        return self.round / (self.round + self.exposed)


@dataclass(frozen=True)
class UnitExchange:
    """The seconds of one unit of a sync.

    Attributes:
        forward: the unit's part of the forward pass.
    """

    wire: float
    work: float
    forward: float


def exposed_seconds(
    exchanges: Sequence[UnitExchange],
    *,
    depth: int,
    head_start: float = 0.0,
    queued: float = 0.0,
    burst: float = 0.0,
) -> float:
    """Return the seconds that a sync adds to a forward pass.

    Args:
        exchanges: in forward order.
        depth: most units in flight.
        head_start: seconds of training between the start of all units and the first landing; if
            above 0, `depth` is ignored.
        queued: seconds after the start in which the link still carries earlier exchanges.
        burst: seconds of exchange that a shaped link sends at once after it was idle.
    """
    now = sum(WORK_BEFORE_EXCHANGE * exchange.work for exchange in exchanges)
    starts_at_once = head_start > 0
    now += head_start
    wire_free = now - head_start + queued  # when the link can take the next unit
    landed: list[float] = []
    # A shaped link that was idle begins with a burst.
    idle_since = wire_free - (0.0 if queued else burst)
    for number, exchange in enumerate(exchanges):
        start = wire_free
        if not starts_at_once and number >= depth:
            start = max(start, landed[number - depth])
        saved = min(start - idle_since, burst)
        arrived = start + max(0.0, exchange.wire - saved)
        idle_since = start + (exchange.wire - saved if exchange.wire > saved else 0.0)
        wire_free = arrived
        now = max(now, arrived) + (1 - WORK_BEFORE_EXCHANGE) * exchange.work
        landed.append(now)
        now += exchange.forward
    return now - head_start - sum(exchange.forward for exchange in exchanges)


def exposed_of_round(
    groups: Sequence[Sequence[UnitExchange]],
    *,
    depth: int,
    head_start: float,
    gaps: Sequence[float],
    burst: float,
) -> float:
    """Return the seconds that the syncs of a round add to it, in the steady state.

    Args:
        groups: units that sync together, in forward order.
        depth: most units in flight.
        head_start: seconds of training between start and landing of a group.
        gaps: seconds of training from the start of each group to that of the next; together a
            round.
        burst: seconds of exchange that a shaped link sends at once after it was idle.
    """
    in_flight: deque[tuple[Sequence[UnitExchange], float, float, float]] = deque()
    exposed: list[float] = []
    stalled = busy = 0.0  # exposed so far; seconds of queued work on the link
    now, number = 0.0, 0  # seconds of training; the group that starts now
    while len(exposed) < ROUNDS * len(groups):
        before = stalled
        while in_flight and in_flight[0][3] + head_start <= now + 1e-9:
            exchanges, queued, then, _ = in_flight.popleft()
            head = head_start + stalled - then  # the link is busy while training waits
            exposed.append(
                exposed_seconds(exchanges, depth=depth, head_start=head, queued=queued, burst=burst)
            )
            stalled += exposed[-1]
        busy = max(0.0, busy - (stalled - before))
        exchanges, gap = groups[number % len(groups)], gaps[number % len(groups)]
        in_flight.append((exchanges, busy, stalled, now))
        busy = max(0.0, busy + sum(exchange.wire for exchange in exchanges) - gap)
        now, number = now + gap, number + 1
    # What the link cannot carry within a round makes the rounds longer in the long run.
    carried = sum(exchange.wire for exchanges in groups for exchange in exchanges)
    return max(sum(exposed[-len(groups) :]), carried - sum(gaps))


def gaps_of_round(length: float, fragments: int, steps: int = 0) -> list[float]:
    """Seconds of training between the starts of fragments, [F]; see `exposed_of_round`.

    Args:
        length: of a round, in seconds.
        fragments: F.
        steps: of a round, to whose ends the starts are rounded (`method.schedule`); 0 where that is
            not known.
    """
    parts = steps or fragments
    starts = [group * parts // fragments for group in range(fragments + 1)]
    return [length * (after - start) / parts for start, after in pairwise(starts)]


def round_cost(
    exchanges: Sequence[UnitExchange],
    *,
    gaps: Sequence[float],
    depth: int,
    head_start: float,
    latency: float = 0.0,
    burst: float = 0.0,
) -> Cost:
    """Return the cost of a round in which every unit is exchanged once.

    Args:
        exchanges: of all units, in forward order.
        gaps: see `gaps_of_round`; unit i is of group i mod F.
        depth: most units in flight where units land in the forward pass; else 1.
        head_start: seconds of training between start and landing of a group.
        latency: seconds until a message has arrived.
        burst: seconds of exchange that a shaped link sends at once after it was idle.
    """
    fragments = len(gaps)
    groups = [_of_group(exchanges, group, fragments) for group in range(fragments)]
    exposed = exposed_of_round(
        groups,
        depth=depth if fragments == 1 else len(exchanges),
        head_start=head_start,
        gaps=gaps,
        burst=burst,
    )
    return Cost(
        exchange=sum(exchange.wire for exchange in exchanges),
        work=sum(exchange.work for exchange in exchanges),
        exposed=exposed + MEETING_MESSAGES * latency * fragments,
        round=math.fsum(gaps),
        longest=max(sum(exchange.wire for exchange in group) for group in groups),
    )


def _of_group(exchanges: Sequence[UnitExchange], group: int, fragments: int) -> list[UnitExchange]:
    """A group's exchanges; the forward passes of other units in between are one."""
    found: list[UnitExchange] = []
    for is_own, pairs in groupby(enumerate(exchanges), lambda pair: pair[0] % fragments == group):
        units = [unit for _, unit in pairs]
        found += units if is_own else [UnitExchange(0.0, 0.0, sum(u.forward for u in units))]
    return found
