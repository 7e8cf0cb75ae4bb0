"""Check before a sync is applied: all replicas have the same plan, and will get the same anchor.

The drift check (`drift`) finds a difference after it has landed. This check finds it before
parameters, anchor, momentum and the state of the rounds change, so that they are still good.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megatron_edit.engine.host import EngineGroups
from megatron_edit.engine.plan import RoundPlan
from megatron_edit.engine.sync.drift import check
from megatron_edit.engine.units import UnitPlan
from megatron_edit.errors import DriftError
from megatron_edit.method.digest import combine


def plan_digest(plan: RoundPlan) -> int:
    """64 bits of a plan, the same on rank i of all replicas that have the same plan.

    Fields that do not compare, as scores, decide nothing and are left out. Ranks of one replica
    differ: records hold losses and buffers that only some of them know.
    """
    found = hashlib.sha256()
    _add(plan, found.update)
    return int.from_bytes(found.digest()[:8], "little", signed=True)


def check_before_commit(
    plan: UnitPlan, groups: EngineGroups, digests: Mapping[int, Tensor], plan_digest: int, when: str
) -> None:
    """Compare the replicas' plans, and digests of anchor and momentum as they will be.

    Collective: all ranks of all replicas; all raise, or none.

    Args:
        plan: the units that sync.
        groups: the communication groups.
        digests: of this rank's shards by unit position; see `CheckedSync.preview`.
        plan_digest: of the round's plan.
        when: of the error, in words.

    Raises:
        DriftError: they differ; the message names a unit.
    """
    of_ranks = groups.replica.all_gather(torch.tensor([plan_digest])).flatten().tolist()
    plans = groups.meeting.all_gather(torch.tensor([combine(of_ranks)]))
    if bool((plans != plans[0]).any()):
        raise DriftError(f"the replicas differ {when} in their plans of the round")
    check(plan, groups, digests, when)


def _add(value: Any, update: Callable[[bytes], object]) -> None:
    """Hash a value: fields by name, numbers and tensors by their bits."""
    if isinstance(value, Tensor):
        kept = value.detach().cpu().contiguous()
        update(f"{kept.dtype}{tuple(kept.shape)}".encode())
        update(kept.view(torch.uint8).numpy().tobytes() if kept.numel() else b"")
    elif dataclasses.is_dataclass(value):
        update(type(value).__name__.encode())
        for field in filter(lambda field: field.compare, dataclasses.fields(value)):
            update(field.name.encode())
            _add(getattr(value, field.name), update)
    elif isinstance(value, Enum):
        update(value.name.encode())
    elif isinstance(value, float):
        update(struct.pack("<d", value))
    elif isinstance(value, list | tuple):
        update(f"[{len(value)}".encode())
        for each in value:
            _add(each, update)
    else:
        update(repr(value).encode())
