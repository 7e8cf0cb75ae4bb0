"""Shared test setup: tiers, time limits, the server of ranks. Paths are in pyproject.toml."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.harness import shut_down
from tests.harness.shares import Share, share_of_each

# No deadline for examples: on shared cores they may be slow.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")

CLONE = "MEGATRON_LM_DIR"
SECONDS = 120
FULL_SECONDS = 600
NOT_CHOSEN = "full tier: needs --full"
SYSTEM = Path(__file__).parent / "system"
# Files of tests/system that need no cluster, browser or network lab, and take no minutes.
QUICK_SYSTEM_FILES = {
    "test_plan_check.py",
    "test_quickstart_parts.py",
    "test_slurm_parts.py",
    "test_support.py",
    "test_unreadable_paths.py",
}
# The slowest files, which run first so that none starts last when files run in parallel.
SLOWEST_FILES = (
    "test_hub_runs.py",
    "test_hub_checkpoints.py",
    "test_docs.py",
    "test_checkpoints.py",
    "test_resume.py",
    "test_lost_replica.py",
    "test_stop_combinations.py",
    "test_overlap.py",
    "test_stops.py",
    "test_every_strategy.py",
    "test_cpu_backend.py",
    "test_strategies.py",
    "test_aedit.py",
    "test_wire.py",
    "test_sync.py",
    "test_elastic.py",
    "test_degenerate.py",
    "test_strategies_wire.py",
    "test_monitor_mishaps.py",
    "test_monitor.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all tests, also those marked `full`")
    parser.addoption("--system", action="store_true", help="run the system tier alone")
    parser.addoption(
        "--full-share",
        type=Share.parse,
        metavar="K/N",
        help="also run share K of N of the tests marked `full`, those of this tier",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Run all tests on the CPU, and let pytest-xdist keep our order of files."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # an unusable GPU would be refused
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def is_system(item: pytest.Item) -> bool:
    """Return whether a test belongs to the system tier, by its file or its mark."""
    is_there = item.path.parent == SYSTEM and item.path.name not in QUICK_SYSTEM_FILES
    return is_there or item.get_closest_marker("system") is not None


def _position(item: pytest.Item) -> int:
    name = item.path.name
    return SLOWEST_FILES.index(name) if name in SLOWEST_FILES else len(SLOWEST_FILES)


def _selected_full_tests(config: pytest.Config, items: list[pytest.Item]) -> set[str]:
    """Return the ids of the tests marked `full` that are selected."""
    full = [item.nodeid for item in items if item.get_closest_marker("full") is not None]
    share: Share | None = config.getoption("--full-share")
    if config.getoption("--full"):
        return set(full)
    if share is None:
        return set()
    return {name for name, number in share_of_each(full, share.count).items()
            if number == share.number}  # fmt: skip


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print how many tests of the share of the full tier have run, if there is a share."""
    share: Share | None = config.getoption("--full-share")
    if share is None:
        return
    reports = [report for reports in terminalreporter.stats.values() for report in reports
               if isinstance(report, pytest.TestReport) and "full" in report.keywords]  # fmt: skip
    skipped = {report.nodeid for report in reports if NOT_CHOSEN in str(report.longrepr)}
    num_cases = len({report.nodeid for report in reports} - skipped)
    terminalreporter.write_line(f"full tier: share {share}, {num_cases} of its cases in this part")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_full = pytest.mark.skip(reason=NOT_CHOSEN)
    chosen = _selected_full_tests(config, items)
    no_clone = pytest.mark.skip(reason=f"needs a clone of Megatron-LM in {CLONE}")
    words = [word for word in config.invocation_params.args if not str(word).startswith("-")]
    is_named = any(".py" in word for word in words)
    if not (is_named or config.getoption("--full")):
        wanted = config.getoption("--system")
        other = [item for item in items if is_system(item) != wanted]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if is_system(item) == wanted]
    items.sort(key=_position)
    for item in items:
        is_full = item.get_closest_marker("full") is not None
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(FULL_SECONDS if is_full else SECONDS))
        if is_full and item.nodeid not in chosen:
            item.add_marker(no_full)
        if item.get_closest_marker("clone") and not os.environ.get(CLONE):
            item.add_marker(no_clone)


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Restore SIGINT, which background jobs of shells ignore; child processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks() -> Iterator[None]:
    """Shut down the server of ranks at the end. The first test that needs ranks starts it."""
    yield
    shut_down()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with its own file system of 1 MiB."""
    from tests.harness.disk import mounted

    with mounted(tmp_path / "disk", 1 << 20) as folder:
        yield folder


@pytest.fixture(scope="session")
def megatron_clone() -> Path:
    """Return the clone of Megatron-LM, for tests marked `clone`."""
    return Path(os.environ[CLONE])
