"""Choosing and checking the checkpoint to load, with one result for all ranks of all replicas."""

from __future__ import annotations

import json
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.checkpoint.files import REMEDY, check_content, check_sizes
from megatron_edit.checkpoint.folder import TRACKER, CheckpointFolder, FoundCheckpoint
from megatron_edit.checkpoint.manifest import Manifest, read_manifest
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag_of
from megatron_edit.host.checkpoint.refusals import check_rates, parameters_only
from megatron_edit.observe.console import say


@dataclass(frozen=True)
class Choice:
    """The checkpoint to load.

    Attributes:
        iteration: in its name; None for Megatron's `release`.
        manifest: None for a checkpoint of stock Megatron.
    """

    path: Path
    iteration: int | None
    manifest: Manifest | None


def choose(world: ReplicaWorld, args: Namespace, schedule: Mapping[str, object]) -> Choice | None:
    """Choose and verify a checkpoint under `--load`; None where there is none.

    Every rank verifies a part of its files. Collective: all ranks of all replicas.

    Args:
        args: Megatron's.
        schedule: state of Megatron's learning-rate schedule.

    Raises:
        UsageError: what was chosen cannot be loaded; on every rank.
    """
    text = world.shared_text("load/choice", lambda: _choose_as_json(args))
    chosen = json.loads(text)
    found: list[Choice] = []

    def check() -> None:
        if isinstance(chosen, list):
            raise UsageError(*chosen)
        if chosen is not None:
            path = Path(chosen["path"])
            manifest = _verified_manifest(path, args, world) if chosen["has_manifest"] else None
            found.append(Choice(path, chosen["iteration"], manifest))

    def check_first() -> None:
        if world.scope.global_rank == 0 and found:
            check_rates(found[0].path, args, schedule)

    check_on_all_ranks(world, "load/checked", check)
    check_on_all_ranks(world, "load/rates", check_first)  # reads files, which are correct now
    return found[0] if found else None


def check_on_all_ranks(
    world: ReplicaWorld, event: str, check: Callable[[], None], *, what: str = "--load"
) -> None:
    """Run a check on every rank, and raise the first error on all of them.

    Collective: all ranks of all replicas.

    Args:
        event: a unique name.
        check: raises an error that this rank finds.
        what: the subject of the check; the value in an error that names none.

    Raises:
        UsageError: the check failed on some rank; on every rank.
    """
    error_json = None
    try:
        check()
    except Exception as error:  # if one rank raised here, the others would wait for it
        error_json = _error_json(error, what)
    agreed = world.share_error(event, error_json)
    if agreed is not None:
        raise UsageError(*json.loads(agreed))


def _error_json(error: Exception, what: str = "--load") -> str:
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


def _choose_as_json(args: Namespace) -> str:
    """Return the choice as JSON: an object, null, or the three parts of an error."""
    try:
        found = find(args)
    except Exception as error:  # the others wait for the answer
        return _error_json(error)
    if found is None:
        return "null"
    body = {"path": str(found.path), "iteration": found.iteration}
    return json.dumps(body | {"has_manifest": found.has_manifest})


def find(
    args: Namespace, *, repairs: bool = True, is_stock: bool = False
) -> FoundCheckpoint | None:
    """Return the checkpoint that `--load` and `--ckpt-step` name; None where there is none.

    There may be none at the first start of a run that saves to the same folder.

    Args:
        args: Megatron's.
        repairs: whether saves interrupted between two renames may be completed.
        is_stock: whether this is a run of stock Megatron, which then starts from the beginning.

    Raises:
        UsageError: it cannot be loaded, or is missing where one is required.
    """
    found = _find(CheckpointFolder(Path(args.load)), args.ckpt_step, repairs)
    if found is not None or args.pretrained_checkpoint:
        return found
    if args.exit_on_missing_checkpoint:
        raise UsageError(
            f"--load {args.load}",
            "holds no checkpoint, and --exit-on-missing-checkpoint is given",
            "correct the path, or drop that flag to start from the beginning",
        )
    if not is_stock and (not args.save or Path(args.save).resolve() != Path(args.load).resolve()):
        raise UsageError(
            f"--load {args.load}",
            "holds no checkpoint, and is not the folder of --save, in which a first start has none",
            "correct the path, or drop --load to start from the beginning",
        )
    return None


def _find(folder: CheckpointFolder, step: int | None, repairs: bool) -> FoundCheckpoint | None:
    if folder.root.exists() and not folder.root.is_dir():
        raise UsageError(f"--load {folder.root}", "is a file", "give the folder that --save named")
    for path in folder.repair() if repairs else ():
        say(f"the save of {path} was interrupted before its rename; it is complete now")
    if step:
        if (found := folder.at(step)) is not None:
            return found
        what = "is not complete" if folder.is_incomplete(step) else "is not there"
        raise UsageError(f"--ckpt-step {step}", f"{folder.final(step)} {what}", "drop the flag")
    found = folder.newest()
    tracked = folder.read_tracker()
    if found is None and (folder.root / TRACKER).exists():
        raise UsageError(
            str(folder.root / TRACKER),
            f"names {tracked or 'no iteration'}, and there is no complete checkpoint",
            "restore one, or remove the file to start from the beginning",
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
    if parameters_only(args):
        saved.pop("optimizer", None)  # only the parameters are loaded
    check_same_model(path, saved, args)


def _verified_manifest(path: Path, args: Namespace, world: ReplicaWorld) -> Manifest:
    manifest = read_manifest(path)
    check_manifest(path, manifest, args)
    place = world.scope
    num_ranks = place.num_replicas * place.ranks_per_replica
    mine = dict(list(manifest.files.items())[place.global_rank :: num_ranks])
    check_sizes(path, mine)
    for name, record in mine.items():
        check_content(path, name, record)
    return manifest


# ---- Arguments that define the model and the parallel layout: compared before a load


_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "group_query_attention", "num_query_groups", "position_embedding_type", "normalization",
    "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "multi_latent_attention",
    "untie_embeddings_and_output_weights", "num_experts", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "mtp_num_layers", "optimizer",
)  # fmt: skip
_PARALLEL = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
)  # fmt: skip


def model_of(args: Namespace) -> dict[str, object]:
    """Return Megatron's arguments that must be equal in a checkpoint and a run."""
    found = {name: _plain(getattr(args, name, None)) for name in _MODEL}
    if not found["group_query_attention"]:
        del found["num_query_groups"]  # Megatron sets it while it builds the model
    return found


def layout_of(args: Namespace) -> dict[str, int]:
    """Return the sizes of Megatron's groups inside a replica; 0 where one is not set."""
    return {name: int(getattr(args, name, None) or 0) for name in _PARALLEL}


def check_same_model(checkpoint: Path, saved: Mapping[str, object], args: Namespace) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        UsageError: a value differs.
    """
    for name, mine in model_of(args).items():
        theirs = saved.get(name, mine)
        if theirs != mine:
            raise UsageError(
                f"--load {checkpoint}",
                f"is of another model: {flag_of(name)} is {theirs} there and {mine} here",
                "give the flags of the model that was saved, or load another checkpoint",
            )


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
