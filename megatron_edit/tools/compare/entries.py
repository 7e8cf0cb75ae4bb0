"""What `--strategies` lists: a strategy each, with flags of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.config import ONLY_SYNCED
from megatron_edit.errors import UsageError
from megatron_edit.flags import BEGINNINGS, PREFIX, flag
from megatron_edit.method.strategy import STRATEGIES, TIMED_SETTINGS
from megatron_edit.tools.compare.flags import canonical, int_flag, read_flags_or_refuse, without

STOCK = "stock"  # Megatron without the plugin, on all ranks
IDEAL = "ideal"  # replicas that part after the warm-up and never meet again

FILE = "@"  # before the path of an .args file

_IDEAL_STRATEGY = "edit"
_OF_ROUNDS = frozenset((flag("warmup_steps"), flag("sync_interval")))
_OF_SYNCS = frozenset(map(flag, (*ONLY_SYNCED, "sync_dtype")))
_FINAL = flag("final_sync_fraction")
_OF_THE_CLOCK = frozenset(map(flag, TIMED_SETTINGS))


@dataclass(frozen=True)
class Entry:
    """One line of the comparison.

    Attributes:
        name: a strategy, `stock`, or `ideal`.
        own_flags: words of the command line that only this entry has, after all others.
        settings: what people wrote for them, where files stand for flags: `@edit_quality.args`.
    """

    name: str
    own_flags: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For people: `edit`, `edit no-clip`, `edit delay-steps=8`, `edit @edit_quality.args`."""
        if self.settings:
            return " ".join([self.name, *self.settings])
        words: list[str] = []
        for word in self.own_flags:
            if word.startswith("--"):
                words.append(word.removeprefix(PREFIX))
            else:
                words[-1] += f"={word}"
        return " ".join([self.name, *words])

    @property
    def slug(self) -> str:
        """For the names of folders."""
        return re.sub(r"[^A-Za-z0-9.=-]+", "_", self.label)

    @property
    def strategy(self) -> str | None:
        """The value of `--edit-strategy`; None without the plugin."""
        if self.name == STOCK:
            return None
        return _IDEAL_STRATEGY if self.name == IDEAL else self.name

    @property
    def syncs(self) -> bool:
        """Whether there are rounds with an outer step at their end."""
        strategy = self.strategy
        if strategy is None or self.name == IDEAL:
            return False
        return not STRATEGIES[strategy].endless_warmup

    def words(self, common: Sequence[str]) -> list[str]:
        """The flags of a training.

        A common flag that this entry's strategy has no use for is left out: the interval counts
        steps or seconds, and without rounds there is neither. What an entry has of its own stays.

        Args:
            common: flags of all entries, Megatron's and ours.

        Raises:
            UsageError: `ideal` does not know how long the training is.
        """
        strategy = self.strategy
        if strategy is None:
            ours = {w.partition("=")[0] for w in common if w.startswith(BEGINNINGS)}
            return [*without(common, ours - {flag("device")}), *self.own_flags]
        rule = STRATEGIES[strategy]
        unused = frozenset({flag("sync_interval"), _FINAL}) if rule.is_timed else _OF_THE_CLOCK
        if rule.endless_warmup:
            unused = _OF_ROUNDS | _OF_THE_CLOCK | _OF_SYNCS
        elif self.name == IDEAL:
            unused = unused | _OF_SYNCS  # fragments would meet within the round that has no end
        words = [*without(common, unused | {flag("use_edit")}), flag("use_edit")]
        words += [flag("strategy"), strategy]
        if self.name == IDEAL:
            # No longer than that: replicas keep room for the losses of a whole round.
            words += [flag("sync_interval"), str(num_iterations(common) + 1)]
        return [*words, *self.own_flags]


def num_iterations(words: Sequence[str]) -> int:
    """Length of a training, from its flags.

    Raises:
        UsageError: they do not say it.
    """
    try:
        if "--train-iters" in canonical(words):
            return int_flag(words, "--train-iters")
        return int_flag(words, "--train-samples") // int_flag(words, "--global-batch-size")
    except (KeyError, ValueError, ZeroDivisionError):
        raise UsageError(
            "--with-ideal", "must know how long a training is", "give --train-iters"
        ) from None


def parse_entries(text: str, *, with_ideal: bool) -> tuple[Entry, ...]:
    """Read the value of `--strategies`.

    Entries are separated by commas. Behind the name come an entry's own flags, each after a
    colon, with its value after an equals sign: `edit:delay-steps=8:no-clip`. A name is that of a
    setting of EDiT; with its dashes (`--lr=1e-3`) it may be any flag of the training. `@FILE`
    stands for the flags of an .args file: `edit:@configs/edit_quality.args`.

    Args:
        text: the value.
        with_ideal: whether `ideal` comes first.

    Raises:
        UsageError: nothing is listed, something twice, a strategy that there is not, or a file
            that cannot be read.
    """
    entries = [Entry(IDEAL)] if with_ideal else []
    for part in text.split(","):
        name, *settings = part.strip().split(":")
        if name not in STRATEGIES and name != STOCK:
            raise UsageError(
                f"--strategies {name or '(an empty entry)'}",
                f"must be of {', '.join((*STRATEGIES, STOCK))}",
                "name these, separated by commas",
            )
        own = tuple(word for setting in settings for word in _own_flags(part, setting))
        entry = Entry(name, own, _names_of(settings))
        if entry.label in [other.label for other in entries]:
            raise UsageError(
                f"--strategies {entry.label}", "is listed twice", "list it once, or change a flag"
            )
        entries.append(entry)
    return tuple(entries)


def _names_of(settings: Sequence[str]) -> tuple[str, ...]:
    """Settings with the names of files instead of their paths; empty where there is no file."""
    if not any(setting.startswith(FILE) for setting in settings):
        return ()
    return tuple(
        FILE + Path(setting.removeprefix(FILE)).name
        if setting.startswith(FILE)
        else setting.removeprefix(PREFIX)
        for setting in settings
    )


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
