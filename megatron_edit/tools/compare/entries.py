"""The entries of `--strategies`: a strategy each, with flags of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.constants import AUTO_STRATEGIES
from megatron_edit.errors import UsageError
from megatron_edit.flags import FLAG_PREFIXES, PREFIX, flag
from megatron_edit.method.strategy import STRATEGIES, TIMED_SETTINGS
from megatron_edit.refusals import SYNC_SETTINGS
from megatron_edit.tools.compare.flags import (
    canonical,
    instance_flags,
    int_flag,
    read_flags_or_refuse,
    without,
)

STOCK = "stock"  # Megatron without the plugin, on all ranks
STOCK_INSTANCES = "stock-instances"  # the same, with an optimizer instance per replica
IDEAL = "ideal"  # replicas that never sync after the warm-up

FILE = "@"  # before the path of an .args file

_IDEAL_STRATEGY = "edit"
_ROUND_FLAGS = frozenset((flag("warmup_steps"), flag("sync_interval")))
_SYNC_FLAGS = frozenset(map(flag, (*SYNC_SETTINGS, "sync_dtype")))
_TIMED_FLAGS = frozenset(map(flag, TIMED_SETTINGS))
_AUTO_FLAGS = frozenset((flag("auto"), flag("auto_share")))


@dataclass(frozen=True)
class Entry:
    """One entry of the comparison."""

    name: str  # a strategy, `stock`, `stock-instances`, or `ideal`
    own_flags: tuple[str, ...] = ()  # command-line words of this entry only, after all others
    # The user's notation of them, with names of files: `no-clip`, `@edit_quality.args`.
    settings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Label, such as `edit`, `edit no-clip`, `edit delay-steps=8`, `edit @quality.args`."""
        return " ".join([self.name, *self.settings])

    @property
    def slug(self) -> str:
        """The label as it is used in names of folders."""
        return re.sub(r"[^A-Za-z0-9.=-]+", "_", self.label)

    @property
    def strategy(self) -> str | None:
        """The value of `--edit-strategy`; None without the plugin."""
        if self.name in (STOCK, STOCK_INSTANCES):
            return None
        return _IDEAL_STRATEGY if self.name == IDEAL else self.name

    @property
    def is_synchronous(self) -> bool:
        """Whether gradients are exchanged at every step."""
        strategy = self.strategy
        return strategy is None or STRATEGIES[strategy].endless_warmup

    def words(self, common: Sequence[str]) -> list[str]:
        """Return the flags of a training.

        Common flags that do not apply to this entry's strategy are dropped, such as an interval in
        steps for timed rounds. The entry's own flags are always kept.

        Args:
            common: flags of all entries, Megatron's and EDiT's.

        Raises:
            UsageError: the length of the training is not given, for `ideal`; there are fewer than
                two replicas, for `stock-instances`.
        """
        strategy = self.strategy
        if strategy is None:
            ours = {w.partition("=")[0] for w in common if w.startswith(FLAG_PREFIXES)}
            more = instance_flags(common) if self.name == STOCK_INSTANCES else []
            return [*without(common, ours - {flag("device")}), *more, *self.own_flags]
        rule = STRATEGIES[strategy]
        unused = frozenset({flag("sync_interval")}) if rule.is_timed else _TIMED_FLAGS
        if rule.endless_warmup:
            unused = _ROUND_FLAGS | _TIMED_FLAGS | _SYNC_FLAGS
        elif self.name == IDEAL:
            unused = unused | _SYNC_FLAGS  # fragments would sync within its endless round
        if self.name not in AUTO_STRATEGIES:  # nothing is chosen for others, nor for `ideal`
            unused = unused | _AUTO_FLAGS
        unused = unused.union(map(flag, rule.fixed_settings))
        words = [*without(common, unused | {flag("use_edit")}), flag("use_edit")]
        words += [flag("strategy"), strategy]
        if self.name == IDEAL:
            # No longer: replicas allocate space for the losses of a complete round.
            words += [flag("sync_interval"), str(num_iterations(common) + 1)]
        return [*words, *self.own_flags]


def num_iterations(words: Sequence[str]) -> int:
    """Return the length of a training, from its flags.

    Raises:
        UsageError: it is not given.
    """
    try:
        if "--train-iters" in canonical(words):
            return int_flag(words, "--train-iters")
        return int_flag(words, "--train-samples") // int_flag(words, "--global-batch-size")
    except (KeyError, ValueError, ZeroDivisionError):
        raise UsageError(
            "--with-ideal", "needs the length of a training", "give --train-iters"
        ) from None


def parse_entries(text: str, *, with_ideal: bool) -> tuple[Entry, ...]:
    """Parse the value of `--strategies`.

    Entries are separated by commas. The name is followed by the entry's own flags, each after a
    colon, with its value after an equals sign: `edit:delay-steps=8:no-clip`. A flag is a setting
    of EDiT or, with its dashes (`--lr=1e-3`), any flag of the training. `@FILE` inserts the flags
    of an .args file: `edit:@configs/edit_quality.args`.

    Args:
        text: the value.
        with_ideal: whether `ideal` comes first.

    Raises:
        UsageError: an entry is empty, repeated or unknown, or a file cannot be read.
    """
    entries = [Entry(IDEAL)] if with_ideal else []
    for part in text.split(","):
        name, *settings = part.strip().split(":")
        known = (*STRATEGIES, STOCK, STOCK_INSTANCES)
        if name not in known:
            raise UsageError(
                f"--strategies {name or '(an empty entry)'}",
                f"must be of {', '.join(known)}",
                "name these, separated by commas",
            )
        own = tuple(word for setting in settings for word in _own_flags(part, setting))
        entry = Entry(name, own, tuple(map(_label_of, settings)))
        if entry.label in [other.label for other in entries]:
            raise UsageError(
                f"--strategies {entry.label}", "is listed twice", "list it once, or change a flag"
            )
        entries.append(entry)
    return tuple(entries)


def _label_of(setting: str) -> str:
    """Return a setting as it is shown: a file by its name."""
    if setting.startswith(FILE):
        return FILE + Path(setting.removeprefix(FILE)).name
    return setting.removeprefix(PREFIX)


def _own_flags(part: str, setting: str) -> list[str]:
    if not setting.startswith(FILE):
        return _own_flag(part, setting)
    given = f"--strategies {part.strip()}"
    words = read_flags_or_refuse(
        Path(setting.removeprefix(FILE)), given, "give the path of an .args file after the @"
    )
    if not words or not words[0].startswith("--"):
        raise UsageError(
            given, "the file must begin with a flag", "put one flag with its values on each line"
        )
    return words


def _own_flag(part: str, setting: str) -> list[str]:
    name, has_value, value = setting.partition("=")
    if not name or not name.strip("-"):
        raise UsageError(
            f"--strategies {part.strip()}",
            "a colon is followed by the name of a flag",
            "write for example edit:delay-steps=8:no-clip",
        )
    word = name if name.startswith("--") else PREFIX + name
    return [word, value] if has_value else [word]
