"""What all tests share: tiers, time limits, the server of ranks. Paths are in pyproject.toml."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import shut_down

CLONE = "MEGATRON_LM_DIR"
SECONDS = 120
FULL_SECONDS = 600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_full = pytest.mark.skip(reason="full tier: needs --full")
    no_clone = pytest.mark.skip(reason=f"needs a clone of Megatron-LM in {CLONE}")
    for item in items:
        is_full = item.get_closest_marker("full") is not None
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(FULL_SECONDS if is_full else SECONDS))
        if is_full and not config.getoption("--full"):
            item.add_marker(no_full)
        if item.get_closest_marker("clone") and not os.environ.get(CLONE):
            item.add_marker(no_clone)


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Shells start background jobs deaf to Ctrl-C, and what tests start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks() -> Iterator[None]:
    """Close the warm server at the end. The first test that needs ranks starts it."""
    yield
    shut_down()


@pytest.fixture(scope="session")
def megatron_clone() -> Path:
    """The clone of Megatron-LM, for tests marked `clone`."""
    return Path(os.environ[CLONE])
