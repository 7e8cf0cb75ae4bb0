"""Which torch is accepted."""

from __future__ import annotations

import re

import pytest

from megatron_edit.errors import HostVersionError
from megatron_edit.versions import OLDEST_TORCH, check_torch
from tests.harness.launch import REPOSITORY


@pytest.mark.parametrize(
    "version", ["2.6.0", "2.6.0a0+ecf3bae40a.nv25.1", "2.13.0+cpu", "2.13.0a0+x.nv26.9", "3.0"]
)
def test_torch_that_is_new_enough(version: str) -> None:
    """Catches a container of NVIDIA that is refused: its torch is older than itself by PEP 440."""
    check_torch(version)


@pytest.mark.parametrize("version", ["2.5.1", "1.13.0", "2.5.0a0+x.nv24.10", "nightly"])
def test_torch_that_is_not(version: str) -> None:
    with pytest.raises(HostVersionError, match=f"torch {re.escape(version)}: "):
        check_torch(version)


def test_the_oldest_torch_is_said_alike() -> None:
    """By the package, its requirements, and what our own tests run with."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f'TORCH = "torch>={oldest}"' in (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = [line for line in lines if line.startswith("torch")]
    check_torch(pin.removeprefix("torch=="))
