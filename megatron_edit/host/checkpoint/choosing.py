"""Which checkpoint is loaded, and whether it is sound: one answer for all ranks of all replicas."""

from __future__ import annotations

import json
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.checkpoint.files import REMEDY, check_content, check_sizes
from megatron_edit.checkpoint.folder import TRACKER, CheckpointFolder, Found
from megatron_edit.checkpoint.manifest import Manifest, read_manifest
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.fingerprint import check_same_model
from megatron_edit.observe.console import say


@dataclass(frozen=True)
class Choice:
    """What is loaded.

    Attributes:
        path: the checkpoint.
        iteration: in its name; None for Megatron's `release`.
        manifest: None for a checkpoint of stock Megatron.
    """

    path: Path
    iteration: int | None
    manifest: Manifest | None


def choose(world: ReplicaWorld, args: Namespace) -> Choice | None:
    """Choose a checkpoint under `--load`; None where there is none.

    Every rank reads a part of its files. Blocks until all ranks of all replicas have.

    Raises:
        UsageError: what was chosen cannot be loaded; on every rank.
    """
    text = world.shared_text("load/choice", lambda: _describe(args))
    told = json.loads(text)
    found: list[Choice] = []

    def check() -> None:
        if isinstance(told, list):
            raise UsageError(*told)
        if told is not None:
            path = Path(told["path"])
            manifest = _sound_manifest(path, args, world) if told["has_manifest"] else None
            found.append(Choice(path, told["iteration"], manifest))

    check_together(world, "load/checked", check)
    return found[0] if found else None


def check_together(
    world: ReplicaWorld, event: str, check: Callable[[], None], *, what: str = "--load"
) -> None:
    """Let every rank check, and nobody leave before all have heard a complaint.

    Args:
        world: whose ranks all come here.
        event: a name of its own.
        check: raises what this rank finds.
        what: is checked; the value of a complaint that names none.

    Raises:
        UsageError: a rank found one, or failed in any other way; on every rank.
    """
    complaint = None
    try:
        check()
    except Exception as error:  # who left alone would keep the others waiting
        complaint = _complaint(error, what)
    heard = world.agree(event, complaint)
    if heard is not None:
        raise UsageError(*json.loads(heard))


def _complaint(error: Exception, what: str = "--load") -> str:
    if isinstance(error, UsageError):
        return json.dumps([error.value, error.rule, error.remedy])
    remedy = REMEDY if what == "--load" else "correct what it names"
    if isinstance(error, OSError) and error.filename is not None:
        return json.dumps(
            [f"{what} {error.filename}", f"cannot be used ({error.strerror})", remedy]
        )
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}, line {frame.lineno}"
    return json.dumps(
        [what, f"cannot be checked ({type(error).__name__}: {error}; {where})", remedy]
    )


def _describe(args: Namespace) -> str:
    """The choice as JSON: an object, null, or the three parts of a complaint."""
    try:
        found = find(args)
    except Exception as error:  # the others wait for the answer
        return _complaint(error)
    if found is None:
        return "null"
    body = {"path": str(found.path), "iteration": found.iteration}
    return json.dumps(body | {"has_manifest": found.has_manifest})


def find(args: Namespace, *, repairs: bool = True) -> Found | None:
    """The checkpoint that `--load` and `--ckpt-step` name; None where there is none.

    Args:
        args: Megatron's.
        repairs: whether what was cut off between two renames may be completed.

    Raises:
        UsageError: there is something that cannot be loaded, or must be something.
    """
    found = _find(CheckpointFolder(Path(args.load)), args.ckpt_step, repairs)
    must_be_there = args.exit_on_missing_checkpoint and not args.pretrained_checkpoint
    if found is None and must_be_there:
        raise UsageError(
            f"--load {args.load}",
            "holds no checkpoint, and --exit-on-missing-checkpoint is given",
            "correct the path, or drop that flag to start anew",
        )
    return found


def _find(folder: CheckpointFolder, step: int | None, repairs: bool) -> Found | None:
    if folder.root.exists() and not folder.root.is_dir():
        raise UsageError(f"--load {folder.root}", "is a file", "give the folder that --save named")
    for path in folder.repair() if repairs else ():
        say(f"{path} was cut off in its last moment; it is complete")
    if step:
        if (found := folder.at(step)) is not None:
            return found
        what = "is not complete" if folder.is_broken_off(step) else "is not there"
        raise UsageError(f"--ckpt-step {step}", f"{folder.final(step)} {what}", "drop the flag")
    found = folder.newest()
    tracked = folder.tracked()
    if found is None and (folder.root / TRACKER).exists():
        raise UsageError(
            str(folder.root / TRACKER),
            f"names {tracked or 'no iteration'}, and there is no complete checkpoint",
            "bring one back, or remove the file to start anew",
        )
    if found is not None and str(found.iteration) != tracked and tracked != "release":
        say(f"the tracker says {tracked}; loading {found.path}, the newest complete checkpoint")
    return found


def check_manifest(path: Path, manifest: Manifest, args: Namespace) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        UsageError: it is one.
    """
    saved = dict(manifest.model)
    if args.finetune or args.no_load_optim:
        saved.pop("optimizer", None)  # only its parameters are wanted
    check_same_model(path, saved, args)


def _sound_manifest(path: Path, args: Namespace, world: ReplicaWorld) -> Manifest:
    manifest = read_manifest(path)
    check_manifest(path, manifest, args)
    place = world.placement
    everybody = place.num_replicas * place.ranks_per_replica
    mine = dict(list(manifest.files.items())[place.global_rank :: everybody])
    check_sizes(path, mine)
    for name, record in mine.items():
        check_content(path, name, record)
    return manifest
