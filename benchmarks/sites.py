"""Bytes and time of a sync between two sites, with encoded sums formed on each site first.

    python benchmarks/sites.py --output benchmarks/results/sites.json

Two hosts of a network lab (`netlab`) are the sites. On each of them two replicas of one rank train
a GPT: what replicas of a site send to each other does not cross the limited link. Compared are
fp32, int8 between all replicas (`flat`: the file of `--edit-placement` names no sites), and int8
between the sites, all in blocking mode, in turn, in one run. The bytes are those that the hosts'
interfaces sent, with headers, beside those of the formula of `megatron-edit plan`. Needs root and
iproute2.

Prints a Markdown table; writes it and OUTPUT.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from frame.gpt import Model, edit_flags, flag_words, link_name
from frame.launch import Hosts, Rank, RunFailedError
from frame.study import write_series
from netlab import Lab, LabError

from megatron_edit.comm.wire import Wire
from megatron_edit.tools.plan.exchanges import cut_bytes
from megatron_edit.tools.plan.job import read_job

SITES = (0, 0, 1, 1)
KINDS: Mapping[str, tuple[str, bool]] = {
    "fp32": ("fp32", True), "int8 flat": ("int8", False), "int8 of sites": ("int8", True),
}  # fmt: skip
TAU, FIRST_SYNC, LIMIT, POLL = 8, 2, 600.0, 0.2


@dataclass(frozen=True)
class Measurement:
    """Numbers of one run.

    Attributes:
        kind: see `KINDS`.
        rate: of the link, bits per second.
        sent: bytes that leave a site in a sync, the larger of both, with headers.
        planned: the same by the formula, without headers.
        exposed: seconds that a sync adds, median of those measured.
    """

    kind: str
    rate: float
    sent: float
    planned: int
    exposed: float


def measure(
    lab: Lab, hosts: Hosts, kind: str, rate: float, model: Model, num_syncs: int
) -> Measurement:
    """Run one kind.

    Raises:
        RunFailedError: it failed, or took too long.
    """
    wire, has_sites = KINDS[kind]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = flags(folder, wire, model, num_syncs, has_sites=has_sites)
        with hosts.training("sites", folder, [Rank(words) for _ in SITES]) as training:

            def after(count: int) -> list[dict[str, Any]] | None:
                path = folder / "logs" / "sync.jsonl"
                lines = path.read_text().splitlines() if path.exists() else []
                return [json.loads(line) for line in lines] if len(lines) >= count else None

            def wait(count: int) -> list[dict[str, Any]]:
                return training.until(lambda: after(count), limit=LIMIT, poll=POLL)

            wait(FIRST_SYNC)
            lab.set_rate(rate)
            first = len(wait(FIRST_SYNC + 1))
            before = lab.sent_bytes()
            measured = wait(first + num_syncs)[first:]
            sent = [b - a for a, b in zip(before, lab.sent_bytes(), strict=True)]
    job = read_job(words, num_replicas=None, world_size=len(SITES), ranks_per_host=None)
    planned = sum(_planned(wire, n, is_flat=not has_sites) for row in job.rank_numels for n in row)
    exposed = median(float(line["seconds"]["exposed"]) for line in measured)
    return Measurement(kind, rate, max(sent) / len(measured), planned, exposed)


def _planned(wire: str, numel: int, *, is_flat: bool) -> int:
    """Bytes of a unit that leave a site."""
    if not is_flat:
        return cut_bytes(Wire.of(wire), numel, SITES)
    # Each of two replicas sends to three others, of which two are at the other site.
    return 2 * Wire.of(wire).payload_bytes(numel, len(SITES)) * 2 // 3


def flags(folder: Path, wire: str, model: Model, num_syncs: int, *, has_sites: bool) -> list[str]:
    """Return the flags of a run, whose placement is written to its folder."""
    replicas = f"{socket.gethostname()}\n" * 2
    heads = ("[a]\n", "[b]\n") if has_sites else ("", "")
    (folder / "placement").write_text("".join(head + replicas for head in heads))
    own = {
        "edit-placement": folder / "placement", "edit-sync-dtype": wire,
        "edit-sync-interval": TAU, "edit-sync-mode": "blocking", "edit-digest-interval": 1000,
    }  # fmt: skip
    return [
        *model.flags(len(SITES), train_iters=TAU * (FIRST_SYNC + num_syncs + 4), log_interval=1000),
        *edit_flags(len(SITES), warmup_steps=1, log_dir=str(folder / "logs")),
        *flag_words(own),
    ]


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=100e6, help="of the link, bits per second")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--syncs", type=int, default=4, help="measured in a run")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    args = parser.parse_args(argv)
    model = Model(num_layers=args.layers, hidden_size=args.hidden_size)
    found = list[Measurement]()
    try:
        with Lab(2) as lab:
            hosts = Hosts(lab, ranks_per_host=2)
            for repeat in range(args.repeats):
                kinds = list(KINDS) if repeat % 2 == 0 else list(KINDS)[::-1]
                for kind in kinds:
                    found.append(measure(lab, hosts, kind, args.rate, model, args.syncs))
                    print(found[-1], file=sys.stderr, flush=True)
    except (LabError, RunFailedError) as error:
        print(f"sites: {error}", file=sys.stderr)
        return 1
    table = markdown(found)
    print(table)
    settings = {"model": asdict(model), "sites": SITES, "cpus": os.cpu_count()}
    result = {"settings": settings, "runs": [asdict(each) for each in found]}
    write_series(args.output, "sites", {"all": result})
    command = f"    python benchmarks/sites.py --repeats {args.repeats} --output {args.output.name}"
    page = f"# Syncs between two sites of two replicas\n\n{command}\n\n{table}\n"
    args.output.with_suffix(".md").write_text(page)
    return 0


def markdown(found: Sequence[Measurement]) -> str:
    """Return a table with the medians of each kind, and their ranges."""
    rows = ["| kind | link | MB out of a site per sync | by the formula | s exposed per sync |",
            "|---|---|---|---|---|"]  # fmt: skip
    for kind in KINDS:
        runs = [each for each in found if each.kind == kind]
        if runs:
            cells = (
                f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
                for values in ([x.sent / 1e6 for x in runs], [x.exposed for x in runs])
            )
            sent, exposed = cells
            planned = f"{runs[0].planned / 1e6:.3f}"
            rows.append(f"| {kind} | {link_name(runs[0].rate)} | {sent} | {planned} | {exposed} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
