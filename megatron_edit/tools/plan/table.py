"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_edit.tools.plan.plan import Plan
from megatron_edit.tools.plan.quantities import show_bytes, show_count, show_rate, show_seconds
from megatron_edit.tools.plan.timing import forward_seconds

HEAD = (
    "strategy", "exchange every", "sent by a host", "a step, replica", "on the wire", "exposed",
    "of the ideal", "device", "host",
)  # fmt: skip


def lines(plan: Plan) -> Iterator[str]:
    """The whole plan."""
    job, mesh, setting = plan.job, plan.job.mesh, plan.setting
    shape = ", ".join(
        f"{name} {size}"
        for name, size in (("TP", mesh.tensor), ("PP", mesh.pipeline), ("CP", mesh.context))
        if size > 1
    )
    yield (
        f"{show_count(job.architecture.numel)} parameters; {mesh.num_replicas} replicas x "
        f"{mesh.ranks_per_replica} ranks{f' ({shape})' if shape else ''}, "
        f"{mesh.ranks_per_host} of them on a host"
    )
    latency = f", latency {show_seconds(setting.link.latency)}" if setting.link.latency else ""
    hidden = show_seconds(forward_seconds(job, setting))
    yield (
        f"link {show_rate(setting.link.bandwidth)}{latency}; a step {show_seconds(setting.step)}, "
        f"its first forward pass {hidden} ({job.num_micro_batches} micro-batches); "
        f"own work as on a {setting.machine.name}"
    )
    yield ""
    yield from _units(plan)
    yield ""
    yield from _memory(plan)
    yield ""
    yield from aligned([HEAD, *_strategies(plan)])
    for row in plan.rows:
        if row.final_fraction:
            yield (
                f"{row.name}: in the last {row.final_fraction:.3g} of the training a replica sends "
                f"{show_bytes(row.final_step_bytes)} a step (gradients are averaged)"
            )
    if plan.advice:
        yield ""
        yield from (f"- {each.subject}: {each.text}" for each in plan.advice)


def _units(plan: Plan) -> Iterator[str]:
    """Parameters by unit; layers that are alike count as one line."""
    numels = plan.job.architecture.unit_numels()
    largest = [max(column) for column in zip(*plan.job.held, strict=True)]
    shards = dict(zip(plan.job.unit_names, largest, strict=True))
    layers = [name for name in numels if name.startswith("layer.")]
    rows = [("unit", "parameters", "largest shard")]
    for name in (plan.job.unit_names[0], layers[0], plan.job.unit_names[-1]):
        shown = f"each of {len(layers)} layers" if name in layers else name
        most = max(shards[layer] for layer in layers) if name in layers else shards[name]
        rows.append((shown, f"{numels[name]:,}".replace(",", " "), f"{most:,}".replace(",", " ")))
    yield from aligned(rows)


def _memory(plan: Plan) -> Iterator[str]:
    rows = [("memory of a rank", "device", "host", "")]
    for part in plan.stock:
        rows.append((part.name, show_bytes(part.nbytes), "", "stock"))
    for row in plan.rows:
        for part in row.parts:
            shown = show_bytes(part.nbytes)
            on = (shown, "") if part.place == "device" else ("", shown)
            note = row.name + ("" if part.is_persistent else ", during a sync")
            rows.append((part.name, *on, note))
    yield from aligned(rows)
    yield "activations, and what a save copies to host memory, are not counted"


def _strategies(plan: Plan) -> Iterator[tuple[str, ...]]:
    for row in plan.rows:
        yield (
            row.name,
            "step" if row.every == 1 else f"{row.every:.0f} steps",
            show_bytes(row.traffic.per_host),
            show_bytes(row.traffic.per_step),
            show_seconds(row.cost.exchange),
            show_seconds(row.cost.exposed),
            f"{row.cost.share_of_ideal:.1%}",
            show_bytes(row.added("device")),
            show_bytes(row.added("host")),
        )


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of equal width; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()
