"""The bytes of the outer state of a replica, as the method has them."""

from __future__ import annotations

from megatron_edit.comm.wire import Wire
from megatron_edit.config import EditConfig
from megatron_edit.constants import FP32_BYTES
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.moments import MomentSchedule
from megatron_edit.tools.plan.job import Job


def persistent_bytes(job: Job, config: EditConfig) -> int:
    """Return the outer state of a replica, all of its ranks together, as counted in `sync.jsonl`.

    With a delay it includes the averages and snapshots of syncs that have not landed, of all units.
    """
    wire, landing = Wire.of(config.sync_dtype), LandingRule.of(config)
    kept = 2 + int(landing.needs_snapshot)
    if not landing.is_immediate:
        kept += 1 + len(MomentSchedule.of(config).rule.kinds)
    total = sum(sum(row) for row in job.rank_numels)
    residuals = 0
    if wire.has_residual:
        size = job.mesh.num_replicas
        residuals = total + sum(wire.owner_numel(n, size) for row in job.rank_numels for n in row)
    return FP32_BYTES * (kept * total + residuals)
