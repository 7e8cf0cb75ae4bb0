"""Supported releases of Megatron-LM and torch. Imports neither."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_edit.errors import HostVersionError


@dataclass(frozen=True)
class Release:
    """A minor version of megatron-core, and the tag of Megatron-LM on which it is tested.

    Attributes:
        tag: tag or branch of Megatron-LM that is tested and has patches.
        commit: commit of the branch; empty for a tag.
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


# Also in pyproject.toml.
OLDEST_TORCH = (2, 8)


def check_torch(version: str) -> None:
    """Check that this torch is new enough.

    Args:
        version: torch's version. Only the first two numbers count: in Python's version order
            ``"2.13.0a0+x.nv26.9"``, as in NVIDIA's containers, is older than 2.13.0.

    Raises:
        HostVersionError: torch is too old, or the version has no two numbers.
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
    """Return the supported release of a version of megatron-core.

    Args:
        version: version of megatron-core, e.g. ``"0.17.0rc0"``. Its patch number is ignored:
            clones of one tag differ in it.

    Raises:
        HostVersionError: the version is not supported.
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
