"""Megatron with several distributed optimizer instances: its hierarchical data parallelism.

The data-parallel ranks are split into instances of consecutive ranks. An instance reduce-scatters
its gradients and gathers its parameters by itself; between instances only the shards of the
gradients are all-reduced, bucket by bucket. NVIDIA recommends it for training across data centers,
with an instance in each (source: docs/plan.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.tools.compare.flags import canonical, int_flag

INSTANCES_FLAG = "--num-distributed-optimizer-instances"
SHARDED_FLAG = "--use-distributed-optimizer"
_EVERY_STAGE = "--no-align-grad-reduce"  # all stages reduce during the backward pass
_WITH_PIPELINE = ("--use-tp-pp-dp-mapping", _EVERY_STAGE)
_OPTIMIZERS = ("adam", "sgd")  # the others are sharded layer by layer, over all ranks
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_EXPERT_TP, _EP = "--expert-tensor-parallel-size", "--expert-model-parallel-size"


def instance_flags(common: Sequence[str]) -> list[str]:
    """Return the flags with which each replica of the other entries is an instance.

    Gradients are reduced in buckets during the backward pass, as NVIDIA recommends for long
    distances. Pipelines would cross all sites in Megatron's default order of ranks. Later stages,
    unless they reduce during the backward pass, too, would take every step for the first and reduce
    twice (a bug of Megatron up to 0.19 at least).

    Args:
        common: flags of all entries.

    Raises:
        UsageError: there are fewer than two replicas, or their number is not given.
    """
    name = flag("num_replicas")
    try:
        replicas = int_flag(common, name)
    except (KeyError, ValueError):
        raise UsageError(
            f"{name} (not given as a number)", "is the number of instances", f"add {name} N"
        ) from None
    if replicas < 2:
        raise UsageError(
            f"{name} {replicas}", "several instances need at least 2 replicas", "use 2 or more"
        )
    more = _WITH_PIPELINE if size_of(common, _PP) > 1 else ()
    return [INSTANCES_FLAG, str(replicas), "--overlap-grad-reduce", *more]


def size_of(words: Sequence[str], name: str, default: int = 1) -> int:
    """Return the value of a flag with a whole number above 0; the default if it is not given.

    Raises:
        UsageError: it has another value.
    """
    try:
        value = int_flag(words, name)
    except KeyError:
        return default
    except ValueError:
        value = 0
    if value < 1:
        given = " ".join([name, *canonical(words)[name]])
        raise UsageError(given, "must be a whole number above 0", "correct it")
    return value


def model_parallel_ranks(words: Sequence[str]) -> int:
    """Return the ranks that hold the model together: TP x PP."""
    return size_of(words, _TP) * size_of(words, _PP)


def check_instances(label: str, words: Sequence[str], num_ranks: int) -> None:
    """Check what Megatron checks only in the ranks of a training.

    Args:
        label: of the entry, for messages.
        words: flags of a training of stock Megatron.
        num_ranks: of it.

    Raises:
        UsageError: the optimizer cannot have so many instances.
    """
    instances = size_of(words, INSTANCES_FLAG)
    if instances == 1:
        return
    given, what = canonical(words), f"--strategies {label}"
    if SHARDED_FLAG not in given:
        rule = "several optimizer instances need the distributed optimizer"
        raise UsageError(what, rule, f"add {SHARDED_FLAG}")
    optimizer = " ".join(given.get("--optimizer", ["adam"]))
    if optimizer not in _OPTIMIZERS:
        rule = f"several optimizer instances need {' or '.join(_OPTIMIZERS)}, not {optimizer}"
        raise UsageError(what, rule, "drop the entry")
    tp, pp = size_of(words, _TP), size_of(words, _PP)
    if pp > 1 and "--overlap-grad-reduce" in given and _EVERY_STAGE not in given:
        rule = "Megatron would reduce gradients of later pipeline stages twice, and train wrongly"
        raise UsageError(f"{what}, {INSTANCES_FLAG} {instances}", rule, f"add {_EVERY_STAGE}")
    experts = size_of(words, _EXPERT_TP, tp) * size_of(words, _EP) * pp
    for size, product in ((tp * pp, "TP x PP"), (experts, "expert TP x EP x PP")):
        if num_ranks % (size * instances):
            raise UsageError(
                f"{what}, {INSTANCES_FLAG} {instances}",
                f"{num_ranks} ranks must be a multiple of {product} x instances "
                f"= {size * instances}",
                "launch more ranks, or use fewer instances",
            )
