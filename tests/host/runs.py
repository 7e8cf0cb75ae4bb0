"""Runs of EDiT and of stock Megatron, shared by tests, and access to the files they write."""

from __future__ import annotations

import atexit
import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.tools.compare.flags import read_flags
from tests.harness import Flags, TrainResult, tiny_gpt, train

PENALTY_OFF: Flags = {"edit_no_anomaly": True, "edit_no_weighting": True, "edit_no_clip": True}


@dataclass
class EditRun:
    """A finished run with `--edit-log-dir`."""

    result: TrainResult
    folder: Path

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Read the lines of one event file."""
        text = (self.folder / name).read_text()
        return [json.loads(line) for line in text.splitlines()]

    @property
    def syncs(self) -> list[dict[str, Any]]:
        """Lines of `sync.jsonl`."""
        return self.lines("sync.jsonl")

    def digests(self, replica: int) -> list[str | None]:
        """Return the digest that one replica recorded at each sync."""
        return [x["digest"] for x in self.lines(f"replica-{replica}.jsonl") if "digest" in x]


def recommended() -> Flags:
    """Return the flags of `configs/edit_quality.args`, with a final phase suited to a few steps."""
    words = read_flags(Path(__file__).parents[2] / "configs" / "edit_quality.args")
    flags: Flags = {}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            flags[name] = True
        else:
            flags[name] = word
    return flags | {"edit_final_sync_fraction": 0.25}


def edit_flags(num_replicas: int, **overrides: Any) -> list[str]:
    """Return flags of a tiny EDiT run: warm-up of two steps, sync every three, always digests."""
    values: Flags = {
        "use_edit": True,
        "edit_num_replicas": num_replicas,
        "edit_warmup_steps": 2,
        "edit_sync_interval": 3,
        "edit_digest_interval": 1,
    }
    return tiny_gpt(**(values | overrides))


def run_edit(
    folder: Path,
    world_size: int,
    num_replicas: int,
    *,
    before: str | None = None,
    env: dict[str, str] | None = None,
    check: bool = True,
    timeout: float = 120,
    grace: float = 15,
    **flags: Any,
) -> EditRun:
    """Train a tiny GPT with EDiT; event files and spies' records go to `folder`, a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    environment: dict[str, str | None] = {
        "SPY_DIR": str(folder),
        "SPY_REPLICAS": str(num_replicas),
        **(env or {}),
    }
    argv = edit_flags(num_replicas, edit_log_dir=folder, **flags)
    result = train(
        argv, world_size, before=before, env=environment, check=check, timeout=timeout, grace=grace
    )
    return EditRun(result, folder)


@functools.cache
def _cache_folder() -> Path:
    """Return the folder in which this process keeps cached runs."""
    folder = tempfile.TemporaryDirectory(prefix="cached-runs-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


_CACHE: dict[str, EditRun] = {}


def cached_run(run: Callable[..., EditRun], *args: Any, **flags: Any) -> EditRun:
    """Return ``run(folder, *args, **flags)``, cached in this process, for tests to compare with.

    Tests must not change its files. With `save_interval` it saves to the folder `saves` in its own.
    """
    key = repr((run.__qualname__, args, sorted(flags.items())))
    if key not in _CACHE:
        folder = _cache_folder() / str(len(_CACHE))
        folder.mkdir()
        if "save_interval" in flags:
            flags["save"] = folder / "saves"
        _CACHE[key] = run(folder, *args, **flags)
    return _CACHE[key]


def stock_run(folder: Path, world_size: int, **flags: Any) -> EditRun:
    """Call `run_stock` in the form that `cached_run` takes."""
    return EditRun(run_stock(folder, world_size, **flags), folder)


def run_stock(folder: Path, world_size: int, **flags: Any) -> TrainResult:
    """Train the same GPT through the launcher, without `--use-edit`, recording it."""
    folder.mkdir(parents=True, exist_ok=True)
    return train(
        tiny_gpt(**flags), world_size, before="tests.host.spy:record", env={"SPY_DIR": str(folder)}
    )
