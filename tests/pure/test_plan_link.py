"""The planner where fragments share one link: exchanges beyond its capacity are exposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.config import EditConfig
from megatron_edit.method.cost import UnitExchange, exposed_of_round, gaps_of_round, round_cost
from megatron_edit.tools.compare.flags import read_flags
from megatron_edit.tools.plan.costs import GPU, Link, TimingSetting, sync_cost
from megatron_edit.tools.plan.job import Job, read_job

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
STREAMING = ("--edit-strategy", "streaming-diloco", "--edit-delay-steps", "67")
FRAGMENTS = ("--edit-fragments", "4", "--edit-delay-steps", "100")
INT4 = ("--edit-sync-dtype", "int4")


def planned(*own: str) -> tuple[Job, EditConfig]:
    """Job and config of a billion parameters on 8 replicas, with --edit flags."""
    argv = [*read_flags(CONFIGS / "llama_1b.args"), "--use-edit", *own]
    job = read_job(argv, num_replicas=8, world_size=None, ranks_per_host=None)
    return job, job.config(own[1] if own[0] == "--edit-strategy" else "edit")


def at(rate: float) -> TimingSetting:
    """Timing with a link of `rate` bit/s and steps of 4 s."""
    return TimingSetting(Link(rate), GPU, 4.0, 1 / 3)


@pytest.mark.parametrize("own", [STREAMING, FRAGMENTS])
def test_exchange_longer_than_the_round_is_exposed(own: tuple[str, ...]) -> None:
    """Would catch: fragments that are planned as if each had the link to itself."""
    job, config = planned(*own, *INT4)
    cost = sync_cost(job, config, at(10e6))
    assert cost.exchange > cost.round == 128 * 4.0
    assert cost.exposed >= cost.exchange - cost.round
    assert cost.share_of_ideal < 0.55


def exchanges(*wires: float) -> list[list[UnitExchange]]:
    """One fragment of one unit for each wire time, without computation and forward pass."""
    return [[UnitExchange(wire, 0.0, 0.0)] for wire in wires]


def exposed(groups: list[list[UnitExchange]], head_start: float, length: float) -> float:
    """Exposed seconds of a round of `length` seconds, whose syncs begin at equal intervals."""
    gaps = [length / len(groups)] * len(groups)
    return exposed_of_round(groups, depth=1, head_start=head_start, gaps=gaps, burst=0.0)


def test_fragment_waits_for_the_link_behind_earlier_ones() -> None:
    """Launches at 0, 10, 20, ...; fragments of 15 and 3 s; 12 s until they must land."""
    # 15 s arrive at 15, 3 s late; then all is 3 s later: the second, launched at 10, has the link
    # from 15 on and arrives at 18, long before 22 + 3. The link is idle again at 20 + 3.
    assert exposed(exchanges(15.0, 3.0), 12.0, 20.0) == pytest.approx(3.0)
    # 11 s fit into 12, but the second has the link from 11 on, not from 10, and 11.5 s for 11.
    assert exposed(exchanges(11.0, 11.5, 1.0), 12.0, 30.0) == pytest.approx(0.5)
    # One fragment at a time: none waits for the link.
    assert exposed(exchanges(11.0, 11.5, 1.0), 10.0, 30.0) == pytest.approx(2.5)


def test_fragments_begin_at_steps() -> None:
    """Rounds of 8 steps of a second with three fragments, which begin after 0, 2 and 5 steps and
    land 2 steps later: exchanges of 3, 2 and 1 s would fit if they began after 0, 2.67 and 5.33.

    The first arrives a second late, at 3; training is at 2, and the second begins: it has the link
    from then on, and lands in time at 4. The third has 2 s for 1.
    """
    wires = [UnitExchange(wire, 0.0, 0.0) for wire in (3.0, 2.0, 1.0)]
    gaps = gaps_of_round(8.0, 3, 8)
    assert gaps == [2, 3, 3]
    options: dict[str, Any] = {"depth": 1, "head_start": 2.0}
    assert round_cost(wires, gaps=gaps, **options).exposed == pytest.approx(1.0)
    # With a delay of 3 steps the second waits for the first until 3, and arrives at 5, in time;
    # of 3.5 s, at 6.5: 1.5 s late. At equal intervals it would begin 0.67 s later.
    options["head_start"], wires[1] = 3.0, UnitExchange(3.5, 0.0, 0.0)
    assert round_cost(wires, gaps=gaps, **options).exposed == pytest.approx(1.5)
    assert round_cost(wires, gaps=gaps_of_round(8.0, 3), **options).exposed == pytest.approx(
        1.5 - 2 / 3
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6),
    st.floats(0.0, 1.0),
    st.floats(0.1, 30.0),
)
def test_exposed_time_is_between_its_bounds(wires: list[float], part: float, length: float) -> None:
    """At least the wire time beyond the round, at most all of the wire time."""
    found = exposed(exchanges(*wires), part * length, length)
    total = sum(wires)
    assert max(0.0, total - length) - 1e-9 <= found <= total + 1e-9
    alone = sum(max(0.0, wire - part * length) for wire in wires)
    assert found >= alone - 1e-9 or len(wires) > 1
