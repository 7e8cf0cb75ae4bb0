"""Shares of the full tier: CI runs one per commit, so that all cases run over several commits."""

from __future__ import annotations

import argparse
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """One of the equal shares that the cases of the full tier are divided into.

    Attributes:
        number: number of the share, from 1.
        count: number of shares.
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number} of {self.count}"

    @classmethod
    def parse(cls, text: str) -> Share:
        """Parse `K/N`, the value of the option --full-share."""
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"{text}: must be K/N with 1 <= K <= N, such as 3/8")
        return cls(int(number), int(count))


def share_of_each(names: Sequence[str], count: int) -> dict[str, int]:
    """Return the number of the share, 1 to `count`, that each test id belongs to.

    The cases of a file are assigned to the shares round-robin in the order of `names`, in which
    cases of one test, of similar duration, are adjacent. The name of a file determines its first
    share; files are independent of each other.

    Args:
        names: distinct test ids, with all ids of each file.
        count: number of shares.
    """
    num_assigned: Counter[str] = Counter()
    shares = {}
    for name in names:
        file = name.partition("::")[0]
        shares[name] = (zlib.crc32(file.encode()) + num_assigned[file]) % count + 1
        num_assigned[file] += 1
    return shares
