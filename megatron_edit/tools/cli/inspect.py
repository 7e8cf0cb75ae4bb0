"""Show the contents of a checkpoint: round, replicas, files, and whether it is complete."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_edit.checkpoint.files import check_content, check_sizes
from megatron_edit.checkpoint.folder import CheckpointFolder, FoundCheckpoint
from megatron_edit.checkpoint.manifest import Manifest, read_manifest
from megatron_edit.constants import ALL, FP32, REPLICA_NAME
from megatron_edit.errors import UsageError
from megatron_edit.tools.cli.words import refuse_rest
from megatron_edit.tools.plan.values import show_bytes

_NAME = re.compile(REPLICA_NAME)  # a checkpoint of fewer members than nominal has fillers, too


def configure(parser: ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    parser.add_argument("folder", help="the folder of --save, or one checkpoint in it (iter_...)")
    parser.add_argument("--ckpt-step", type=int, help="iteration (default: the one to be loaded)")
    parser.add_argument("--verify", action="store_true", help="read every file, compare checksums")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Inspect one checkpoint.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    refuse_rest("inspect", rest)
    found = _find(Path(options.folder), options.ckpt_step)
    if not found.has_manifest:
        sys.stdout.write(f"{found.path}\n  stock Megatron, without EDiT's state; complete\n")
        return 0
    manifest = read_manifest(found.path)
    check_sizes(found.path, manifest.files)
    if options.verify:
        for name, record in manifest.files.items():
            check_content(found.path, name, record)
    if options.json:
        sys.stdout.write(json.dumps(manifest.as_dict(), indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(found, manifest, is_verified=options.verify)) + "\n")
    return 0


def _find(path: Path, step: int | None) -> FoundCheckpoint:
    if not path.is_dir():
        raise UsageError(str(path), "is not a folder", "give the folder of --save")
    is_one = path.name.startswith("iter_") and path.name[5:].isdecimal()
    folder = CheckpointFolder(path.parent if is_one else path)
    step = int(path.name[5:]) if is_one else step
    found = folder.newest() if step is None else folder.at(step)
    if found is not None:
        return found
    what = "the newest" if step is None else folder.final(step).name
    partial = [p.name for p in sorted(folder.root.glob(".iter_*.partial"))]
    interrupted = f"; interrupted saves: {', '.join(partial)}" if partial else ""
    raise UsageError(
        str(folder.root),
        f"holds no complete checkpoint ({what}){interrupted}",
        "look at another folder, or another --ckpt-step",
    )


def _lines(found: FoundCheckpoint, manifest: Manifest, *, is_verified: bool) -> Iterator[str]:
    yield str(found.path)
    read = (
        "all read and equal to what was saved"
        if is_verified
        else "sizes right (--verify reads them)"
    )
    nbytes = sum(record.size for record in manifest.files.values())
    yield f"  complete: yes; files: {len(manifest.files)} of {show_bytes(nbytes)}, {read}"
    yield f"  written by: {', '.join(f'{k} {v}' for k, v in manifest.written_by.items())}"
    has_names = manifest.members != tuple(map(str, range(len(manifest.members))))
    is_elastic = has_names or bool(manifest.digest)
    elastic, leader = ("elastic, nominally ", "the leader") if is_elastic else ("", "replica 0")
    yield (
        f"  strategy {manifest.strategy}: {elastic}{manifest.num_replicas} replicas x "
        f"{manifest.ranks_per_replica} ranks, form {manifest.form} "
        f"({'inner state of every replica' if manifest.form == ALL else f'of {leader}'})"
    )
    if is_elastic:
        members = [name for name in manifest.members if _NAME.fullmatch(name)]
        yield f"  members: {', '.join(members)}"
        yield f"  digest of anchor and momentum: {manifest.digest or 'none'}"
    parallel = ", ".join(f"{name} {size}" for name, size in manifest.parallel.items() if size > 1)
    yield f"  inside a replica: {parallel or 'data parallel only'}"
    yield f"  iteration {manifest.iteration}, {manifest.samples} samples, {_where(manifest)}"
    yield f"  outer state: {_outer(manifest)}"
    yield f"  units: {', '.join(manifest.units)}"
    numbers = tuple(map(str, range(len(manifest.replicas))))
    names = manifest.members if len(manifest.members) == len(numbers) else numbers
    width = max(map(len, ("replica", *names)))
    yield f"  {'replica':>{width}}  step  in the round    samples  waits at a meeting"
    for name, entry in zip(names, manifest.replicas, strict=True):
        waits = "yes" if entry.is_waiting else "no"
        counts = f"{entry.step:4}  {entry.inner_steps:12}  {entry.samples:9}"
        yield f"  {name:>{width}}  {counts}  {waits}"


def _where(manifest: Manifest) -> str:
    if manifest.is_warmup:
        return "in the final synchronous phase" if manifest.is_final_phase else "in warm-up"
    if manifest.is_mid_round:
        return f"in round {manifest.round + 1}"
    return f"after the sync of round {manifest.round}"


def _outer(manifest: Manifest) -> str:
    if manifest.is_warmup:
        when = "in the final synchronous phase" if manifest.is_final_phase else None
        return f"none {when or 'before the first local step'}"
    what = "momentum and anchor" if manifest.has_anchor else "momentum (the anchor: the parameters)"
    if manifest.wire != FP32:
        what += f"; wire type {manifest.wire}, with its error-feedback residuals"
    late = [
        f"replica {replica}: round {sync.round} ({len(sync.units)} units)"
        for replica, entry in enumerate(manifest.replicas)
        for sync in entry.pending
    ]
    return what + (f"; not landed yet: {', '.join(late)}" if late else "")
