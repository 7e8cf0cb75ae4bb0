"""A spy that records at which place in Megatron's step each unit lands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from tests.host.spy import built_chunks, out_dir, record

INSIDE = ("schedule", "forward", "gather")


class Landing(NamedTuple):
    """One unit that landed.

    Attributes:
        round: round of its sync.
        where: "forward" in a chunk's forward pass, "schedule" in Megatron's schedule but outside
            a forward pass, both through a bucket group's `start_param_sync`; else "elsewhere".
        gather: number of the `start_param_sync` call in which it landed.
    """

    round: int
    where: str
    gather: int


class _Places:
    """Tracks which of the watched calls are under way, and how many of each have begun."""

    def __init__(self) -> None:
        self.depth = dict.fromkeys(INSIDE, 0)
        self.begun = dict.fromkeys(INSIDE, 0)

    def watched(self, place: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call to track it."""

        @wraps(call)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self._entered(place):
                return call(*args, **kwargs)

        return inside

    @contextmanager
    def _entered(self, place: str) -> Iterator[None]:
        self.depth[place] += 1
        self.begun[place] += 1
        try:
            yield
        finally:
            self.depth[place] -= 1

    def where(self) -> str:
        """Return the current place; see `Landing`."""
        if not self.depth["gather"] or not self.depth["schedule"]:
            return "elsewhere"
        return "forward" if self.depth["forward"] else "schedule"


def record_landings() -> None:
    """Call `record`, and record for each rank its stage, its number of bucket groups, its landings,
    and the devices on which it keeps its model's pipeline sends asynchronous."""
    import megatron.training.training as training
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    from megatron_edit.engine.sync.manager import SyncManager
    from megatron_edit.host import training as ours

    record()
    places, landings, chunks = _Places(), list[Landing](), built_chunks()
    rank = os.environ["RANK"]  # before the launcher renumbers the ranks
    train, land = training.train, SyncManager._publish
    keep, sends = vars(ours)["keep_sends_asynchronous"], list[str]()
    schedule_of = training.get_forward_backward_func

    def spied_train(*args: Any, **kwargs: Any) -> Any:
        groups = _watch(chunks, places)  # these wrappers call the plugin's overrides
        try:
            return train(*args, **kwargs)
        finally:
            for group in groups:
                group.start_param_sync = group.start_param_sync.__wrapped__
            stage = parallel_state.get_pipeline_model_parallel_rank()
            facts = {
                "stage": stage, "groups": len(groups), "landings": landings, "sends": sends,
            }  # fmt: skip
            (out_dir() / f"landings-{rank}.json").write_text(json.dumps(facts))

    def spied_land(self: SyncManager, sync: Any, shard: Any, has_bad_moments: bool) -> None:
        land(self, sync, shard, has_bad_moments)
        landings.append(Landing(sync.plan.round, places.where(), places.begun["gather"]))

    def spied_keep(patcher: Any, config: Any, device: Any) -> None:
        keep(patcher, config, device)
        if config is get_model_config(chunks[0]):
            sends.append(device.type)

    def watched_schedule(*args: Any, **kwargs: Any) -> Any:
        return places.watched("schedule", schedule_of(*args, **kwargs))

    training.train = spied_train
    training.get_forward_backward_func = watched_schedule
    SyncManager._publish = spied_land  # type: ignore[method-assign]
    vars(ours)["keep_sends_asynchronous"] = spied_keep


def _watch(chunks: list[Any], places: _Places) -> list[Any]:
    from megatron_edit.host.overlap import bucket_groups

    for chunk in chunks:
        chunk.forward = places.watched("forward", chunk.forward)
    groups: list[Any] = list(bucket_groups(chunks))
    for group in groups:
        group.start_param_sync = places.watched("gather", group.start_param_sync)
    return groups


def read_landings(folder: Path, rank: int) -> tuple[int, int, list[Landing], list[str]]:
    """Read of a rank: its stage, its number of bucket groups, its landings in order, and the
    devices on which it keeps sends asynchronous."""
    facts = json.loads((folder / f"landings-{rank}.json").read_text())
    landings = [Landing(*landing) for landing in facts["landings"]]
    return facts["stage"], facts["groups"], landings, facts["sends"]
