"""The releases of Megatron-LM and torch that this package works with. Nothing is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_edit.errors import HostVersionError


@dataclass(frozen=True)
class Release:
    """One minor version of megatron-core, and the state of Megatron-LM that stands for it.

    Attributes:
        major: of megatron-core.
        minor: of megatron-core.
        tag: of Megatron-LM, or its branch; what we test and make patches for.
        commit: of the branch, where `tag` is one; empty for a tag.
    """

    major: int
    minor: int
    tag: str
    commit: str = ""

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.x"


RELEASES = (
    Release(0, 16, "core_v0.16.1"),
    Release(0, 17, "core_v0.17.0"),
    Release(0, 18, "core_v0.18.2"),
    Release(0, 19, "core_v0.19.0"),
    Release(0, 20, "main", "d98e8a64ddf34856e74b24714e3bedb2f5a39553"),
)


# setup.py has the same number.
OLDEST_TORCH = (2, 6)


def check_torch(version: str) -> None:
    """Is this torch new enough?

    Args:
        version: as torch says it. Only its first two numbers count: by the order of Python's
            packages ``"2.13.0a0+x.nv26.9"``, as NVIDIA's containers have it, is older than 2.13.0.

    Raises:
        HostVersionError: it is not, or is no version.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise HostVersionError(
            f"torch {version}",
            f"megatron_edit needs torch {oldest} or newer",
            "install a newer torch, or use a newer container",
        )


def release_of(version: str) -> Release:
    """The release that a version of megatron-core belongs to.

    Args:
        version: as megatron-core says it, ``"0.17.0rc0"``. Its last number does not count: clones
            of one tag differ in it.

    Raises:
        HostVersionError: it belongs to none.
    """
    numbers = version.split(".")
    for release in RELEASES:
        if numbers[:2] == [str(release.major), str(release.minor)]:
            return release
    raise HostVersionError(
        f"megatron-core {version}",
        f"megatron_edit supports {RELEASES[0]} to {RELEASES[-1]}",
        f"use one of the tags {', '.join(release.tag for release in RELEASES)}",
    )
