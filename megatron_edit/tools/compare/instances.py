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
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


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


def check_reductions(label: str, words: Sequence[str]) -> None:
    """Refuse instances with which Megatron reduces gradients twice, and trains wrongly.

    Args:
        label: of the entry, for messages.
        words: flags of a training of stock Megatron.

    Raises:
        UsageError: later pipeline stages would reduce a second time.
    """
    given, instances = canonical(words), size_of(words, INSTANCES_FLAG)
    is_late = "--overlap-grad-reduce" in given and _EVERY_STAGE not in given
    if instances > 1 and size_of(words, _PP) > 1 and is_late:
        what = f"--strategies {label}, {INSTANCES_FLAG} {instances}"
        rule = "Megatron would reduce gradients of later pipeline stages twice, and train wrongly"
        raise UsageError(what, rule, f"add {_EVERY_STAGE}")


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
