"""Groups that form again with other ranks, over the hub's store. Needs torch 2.14.

Would catch: a rank that waits for a lost one while groups are formed.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.hub_store import EpochGroup, HubStore
from megatron_edit.elastic.channel import HubAddress
from megatron_edit.elastic.messages import Abandon, End, FormEpoch
from megatron_edit.elastic.replica import GroupsFormed, Order, Report, RoundDue
from megatron_edit.elastic.store import StoreClient
from megatron_edit.engine.membership import Membership, Transports, _unique_number
from megatron_edit.errors import ReplicaLostError
from tests.harness.hub import running_hub
from tests.harness.torch_groups import HAS_GROUPS

pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
TIMEOUT = timedelta(seconds=20)
FORM_TIMEOUT = timedelta(seconds=120)
ANYTHING: Any = None


class Orders:
    """Rank 0's connection to a hub that loses replica `b` while the groups are formed.

    Args:
        lost: groups of b's ranks.
        forming: ranks of b that are not lost.
    """

    def __init__(self, lost: list[EpochGroup], forming: list[int]) -> None:
        self.lost, self.forming, self.epoch = lost, forming, 1
        self.orders = deque[tuple[float, Order]]()

    def report(self, what: Report) -> None:
        if isinstance(what, RoundDue):
            self.epoch += 1
            if self.epoch == 2:
                theirs = tuple(json.dumps(["", each.handle]) for each in self.lost)
                order = FormEpoch(1, 2, ("a", "b"), (what.handles, theirs), "a")
                for rank in self.forming:
                    self.form(order, rank)
                self.give(order, Abandon(2))
            else:
                self.give(FormEpoch(1, self.epoch, ("a",), (what.handles,), "a"))
        elif isinstance(what, GroupsFormed):
            assert what.epoch == 3
            self.give(End("over", 0))

    def form(self, order: FormEpoch, rank: int) -> None:
        handles = [json.loads(each[rank])[1] for each in order.handles]
        given = _unique_number(order, rank) * 8, handles
        threading.Thread(target=self.lost[rank].form, args=given, daemon=True).start()

    def give(self, *orders: Order) -> None:
        """One order at once, the next one when the ranks are forming."""
        now = time.monotonic()
        self.orders.extend((now + number, each) for number, each in enumerate(orders))

    def next_order(self, timeout: float = 0.0) -> Order | None:
        time.sleep(timeout)
        if self.orders and time.monotonic() > self.orders[0][0]:
            return self.orders.popleft()[1]
        return None


def take_part(rank: int, address: HubAddress, control: Path, forming: list[int]) -> None:
    """A rank of replica `a`, which has two."""
    client = StoreClient(address)

    def make() -> EpochGroup:
        store = HubStore(client, FORM_TIMEOUT)
        return EpochGroup(store, secrets.randbelow(1 << 20), "127.0.0.1", FORM_TIMEOUT)

    def group(what: str) -> Group:
        return Group(None, 0, 1, torch.device("cpu"), TIMEOUT, what, is_own=True)

    native = dist.ProcessGroupGloo(dist.FileStore(str(control), 2), rank, 2, TIMEOUT)
    agent: Any = None if rank else Orders([make(), make()], forming)
    both = Group.of(native, torch.device("cpu"), TIMEOUT, "control")
    transports = Transports(group("sync"), group("meeting"), make, 1)
    membership = Membership("a", agent, both, transports, "")
    membership.open_round(ANYTHING, ANYTHING, None)
    while True:
        membership.turn(waits=True)


@pytest.mark.parametrize("forming", [[], [0]], ids=["both ranks wait", "one rank waits"])
def test_groups_that_the_hub_abandons_are_not_waited_for(
    tmp_path: Path, forming: list[int]
) -> None:
    """A replica is lost while its groups with another are formed; nor does that one's end wait."""
    with running_hub(tmp_path) as (_, address):
        context = multiprocessing.get_context("spawn")
        given = address, tmp_path / "control", forming
        ranks = [context.Process(target=take_part, args=(rank, *given)) for rank in range(2)]
        for each in ranks:
            each.start()
        try:
            for each in ranks:
                each.join(FORM_TIMEOUT.total_seconds() / 2)
            assert [each.exitcode for each in ranks] == [0, 0]
        finally:
            for each in ranks:
                each.kill()
                each.join(10)


def test_unreachable_hub_is_a_failed_forming() -> None:
    store = HubStore(StoreClient(HubAddress("127.0.0.1", 1)), TIMEOUT)  # nobody listens there
    groups = [EpochGroup(store, number, "127.0.0.1", TIMEOUT) for number in range(2)]
    with pytest.raises(ReplicaLostError, match="cannot be used"):
        groups[0].form(1, [each.handle for each in groups])
