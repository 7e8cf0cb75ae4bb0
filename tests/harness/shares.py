"""Shares of the full tier: CI runs one of them per commit, so that each case runs now and then."""

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
        number: which, from 1.
        count: of how many.
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number} of {self.count}"

    @classmethod
    def parse(cls, text: str) -> Share:
        """`K/N`, as the option --full-share gives it."""
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"{text}: must be K/N with 1 <= K <= N, such as 3/8")
        return cls(int(number), int(count))


def share_of_each(names: Sequence[str], count: int) -> dict[str, int]:
    """The number of the share, 1 to `count`, that each test id belongs to.

    The cases of a file go to the shares in turn, in the order of `names`: cases of one test, which
    take about as long as each other, lie next to each other there. A file begins with a share that
    its name determines; no file depends on another.

    Args:
        names: test ids, without repetition, those of a file complete.
        count: how many shares there are.
    """
    dealt: Counter[str] = Counter()
    shares = {}
    for name in names:
        file = name.partition("::")[0]
        shares[name] = (zlib.crc32(file.encode()) + dealt[file]) % count + 1
        dealt[file] += 1
    return shares
