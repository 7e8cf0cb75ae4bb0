"""Command lines as data: reading, dropping and normalising flags."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from megatron_edit.errors import UsageError


def read_flags(path: Path) -> list[str]:
    """Return the flags of an .args file, as `$(grep -v '^#' FILE)` would pass them."""
    flags: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            flags.extend(shlex.split(line))
    return flags


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
