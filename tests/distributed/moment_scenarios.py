"""Functions that the ranks of the moment tests run: a toy host with moments, step by step."""

from __future__ import annotations

from typing import Any

from megatron_edit.config import EditConfig
from megatron_edit.constants import FIRST_MOMENT, SECOND_MOMENT
from tests.distributed.toy import build_engine, with_outer

Values = dict[str, Any]  # by unit
KINDS = (FIRST_MOMENT, SECOND_MOMENT)


def run_moments(
    settings: dict[str, Any],
    sizes: dict[str, int],
    start: Values,
    moves: list[list[Values]],
    moments: list[list[dict[str, Values]]],
) -> list[dict[str, Any]]:
    """Move by `moves[step][replica]` and add `moments[step][replica]` to the moments; then sync.

    Returns:
        One record per step: this rank's slices of moments and parameters after it, by unit, the
        bytes sent and reported, and the calls of `set_local_training`.
    """
    config = EditConfig(use_edit=True, digest_interval=1, warmup_steps=0, **with_outer(settings))
    engine, host, reporter = build_engine(config, sizes, start)
    engine.start()
    replica, records = engine.groups.sync.rank, []
    host.moments = {kind: {n: values * 0 for n, values in host.full.items()} for kind in KINDS}
    for step, (move, change) in enumerate(zip(moves, moments, strict=True), start=1):
        host.is_last = step == len(moves)
        engine.before_step()
        host.move(move[replica])
        kept = dict(host.moments)
        for kind in KINDS:
            host.set_moments(kind, change[replica][kind])
            for name, values in host.moments[kind].items():
                values += kept[kind][name]
        engine.after_step()
        sync = engine.groups.sync
        records.append(
            {
                "slices": host.slices,
                "theta": {n: values.numpy().copy() for n, values in host.full.items()},
                **{
                    kind: {n: each.numpy().copy() for n, each in host.moments[kind].items()}
                    for kind in KINDS
                },
                "sent": sync.payload_bytes + engine.groups.meeting.payload_bytes,
                "reported": [report.wire_bytes for report in reporter.syncs],
                "is_local": list(host.is_local),
            }
        )
    return records
