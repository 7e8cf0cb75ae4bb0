"""Single flags of a training's command line, each with what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_edit.errors import UsageError
from megatron_edit.tools.compare.flags import canonical
from megatron_edit.tools.plan.limits import MOST_COUNTED, shortened


class Words:
    """A command line to be asked.

    Args:
        argv: flags and values; the last of two equal flags counts.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._values = canonical(argv)

    def has(self, name: str) -> bool:
        """Whether the flag is given."""
        return name in self._values

    def text(self, name: str, default: str) -> str:
        """The single value of a flag.

        Raises:
            UsageError: it has none, or several.
        """
        return default if not self.has(name) else self._single(name)

    def count(self, name: str, default: int | None = None, most: int = MOST_COUNTED) -> int:
        """The value of a flag that counts something: a whole number from 1 on.

        Args:
            name: of the flag.
            default: where it is missing.
            most: the largest value.

        Raises:
            UsageError: it is none, or larger; or the flag is missing, and there is no default.
        """
        if not self.has(name):
            if default is None:
                raise UsageError(f"{name} (not given)", "the planner needs it", f"add {name}")
            return default
        text = self._single(name)
        # Python reads no whole numbers of thousands of digits.
        if not text.isdecimal() or len(text) > 100 or not 1 <= int(text) <= most:
            rule = f"must be a whole number from 1 to {most}"
            raise UsageError(f"{name} {shortened(text)}", rule, "correct it")
        return int(text)

    def _single(self, name: str) -> str:
        values = self._values[name]
        if len(values) != 1:
            raise UsageError(
                " ".join([name, *values]), "must have one value", "correct the flag, or drop it"
            )
        return values[0]
