"""Command lines as data: reading, dropping and normalising flags."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from megatron_edit.errors import UsageError
from megatron_edit.flags import flag

INSTANCES_FLAG = "--num-distributed-optimizer-instances"
SHARDED_FLAG = "--use-distributed-optimizer"
_EVERY_STAGE = "--no-align-grad-reduce"  # all stages reduce during the backward pass
_WITH_PIPELINE = ("--use-tp-pp-dp-mapping", _EVERY_STAGE)
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


def read_flags(path: Path) -> list[str]:
    """Return the flags of an .args file, as `$(grep -v '^#' FILE)` would pass them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [word for line in lines if not line.startswith("#") for word in shlex.split(line)]


def read_flags_or_refuse(path: Path, given: str, remedy: str) -> list[str]:
    """Return the flags of an .args file, or raise a `UsageError`.

    Args:
        path: of the file.
        given: the user's argument, for the message.
        remedy: what to do instead, for the message.

    Raises:
        UsageError: it cannot be read, or its quotes are not closed.
    """
    try:
        return read_flags(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(given, f"cannot be read: {reason}", remedy) from None
    except ValueError as error:
        raise UsageError(given, f"cannot be read: {error}", "correct the file") from None


def groups(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the values that follow it, in order; `--a=1` is `--a 1`.

    Words before the first flag come under the name "".
    """
    name: str = ""
    values: list[str] = []
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name or values:
            yield name, values
        name, has_value, value = word.partition("=")
        values = [value] if has_value else []
    if name or values:
        yield name, values


def without(words: Sequence[str], names: Container[str]) -> list[str]:
    """Return `words` without some flags and their values."""
    kept = (group for group in groups(words) if group[0] not in names)
    return [word for name, values in kept for word in ([name] if name else []) + values]


def canonical(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the normal form of a command line: sorted, with the last of repeated flags."""
    last = dict(groups(words))
    return {name: last[name] for name in sorted(last)}


def int_flag(words: Sequence[str], name: str) -> int:
    """Return the value of an integer flag; the last one counts if it is repeated.

    Raises:
        KeyError: the flag is not given.
        ValueError: its value is not an integer.
    """
    values = canonical(words)[name]
    if len(values) != 1:
        raise ValueError(f"{name} {' '.join(values)}: one value expected")
    return int(values[0])


def model_of(words: Sequence[str]) -> str:
    """Return the size of the model as text, from the flags of a training; empty if not given.

    Args:
        words: a command line.
    """
    given = canonical(words)
    sizes = (("--num-layers", "{} layers"), ("--hidden-size", "hidden size {}"))
    return ", ".join(text.format(given[name][0]) for name, text in sizes if given.get(name))


# ---- Megatron with several distributed optimizer instances: its hierarchical data parallelism
#
# The data-parallel ranks are split into instances of consecutive ranks. An instance reduce-scatters
# its gradients and gathers its parameters by itself; between instances only the shards of the
# gradients are all-reduced, bucket by bucket. NVIDIA recommends it for training across data
# centers, with an instance in each (source: docs/plan.md).


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


def size_of(words: Sequence[str], name: str) -> int:
    """Return the value of a flag with a whole number above 0; 1 if it is not given.

    Raises:
        UsageError: it has another value.
    """
    try:
        value = int_flag(words, name)
    except KeyError:
        return 1
    except ValueError:
        value = 0
    if value < 1:
        given = " ".join([name, *canonical(words)[name]])
        raise UsageError(given, "must be a whole number above 0", "correct it")
    return value


def model_parallel_ranks(words: Sequence[str]) -> int:
    """Return the ranks that hold the model together: TP x PP."""
    return size_of(words, _TP) * size_of(words, _PP)
