"""SIGKILL during a save: the newest complete checkpoint can always be loaded."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint.folder import CheckpointFolder
from tests.harness import Flags, TrainResult, run_ranks
from tests.harness.launch import REPOSITORY
from tests.harness.training import parse_console
from tests.host.runs import edit_flags

SPY = "tests.host.spy_kill:"
ASYNC = {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}
_COMPLETE = re.compile(r"checkpoint of iteration (\d+) is complete")
_GOING_ON = re.compile(r"resuming from \S+/iter_(\d+),")


def run(
    folder: Path, world: int, hook: str, env: dict[str, Any] | None = None, **flags: Any
) -> TrainResult:
    """Train from the checkpoint in the folder; with `save`, save every two steps."""
    values = {"save_interval": 2, "train_iters": 1000, "load": folder / "ck", **flags}
    argv = edit_flags(2, **values)
    given: Flags = {name: str(value) for name, value in (env or {}).items()}
    ranks = run_ranks(
        "tests.harness.ranks:train_main",
        world,
        (str(REPOSITORY / "scripts/pretrain_gpt.py"), argv, SPY + hook),
        env={"SPY_DIR": str(folder), **given},
        timeout=120,
        grace=1,
    )
    return parse_console(ranks)


@dataclass
class Chain:
    """A sequence of runs in one folder, each of which is killed.

    Attributes:
        folder: records of the spies; checkpoints are in `ck`.
        world: number of ranks.
        flags: flags of every run.
        hook: name of the hook that kills.
        losses: losses so far by iteration. A repeated iteration must give the same loss.
        announced: the last checkpoint that a run reported as complete.
        begun: iterations of the saves that began after it.
    """

    folder: Path
    world: int
    flags: Flags
    hook: str = "kill_in_save"
    losses: dict[int, float] = field(default_factory=dict)
    announced: int = 0
    begun: list[int] = field(default_factory=list)

    def start(self) -> None:
        """Run undisturbed, and measure how long a save takes."""
        result = run(
            self.folder, self.world, self.hook, save=self.folder / "ck", exit_interval=6,
            **self.flags,
        )  # fmt: skip
        self._assert_ended(result, "the first run")
        self._note(result)
        assert self.announced == 6

    def kill(self, seed: str) -> None:
        """Resume from the newest or an earlier checkpoint, and kill the run in a save."""
        rng = random.Random(seed)
        all_ranks = range(self.world)
        victims = rng.choice([all_ranks, all_ranks, [0], [self.world - 1]])
        env: dict[str, Any] = {
            "SPY_SAVE": rng.choice([1, 2]),
            "SPY_FRACTION": rng.uniform(0, 1.1),
            "SPY_VICTIMS": ",".join(map(str, victims)),
        }
        step = self._earlier(rng) if rng.random() < 0.25 else None
        (self.folder / "begun").unlink(missing_ok=True)
        result = run(
            self.folder, self.world, self.hook, env, save=self.folder / "ck", ckpt_step=step,
            **self.flags,
        )  # fmt: skip
        what = f"seed {seed}, {env}, --ckpt-step {step}"
        for victim in victims:
            assert result.ranks[victim].returncode == -9, self._tails(result, what)
        self._check(result, what, step)

    def end(self) -> None:
        """Train two steps in a last run that is not killed."""
        result = run(self.folder, self.world, self.hook, exit_interval=2, **self.flags)
        self._assert_ended(result, "the last run")
        self._check(result, "the last run", None)
        assert result.losses

    def _check(self, result: TrainResult, what: str, step: int | None) -> None:
        """Check that the loaded checkpoint and the losses continue the previous run."""
        loaded = _GOING_ON.search(result.ranks[0].stdout)
        assert loaded is not None, self._tails(result, what)
        allowed = [step] if step is not None else [self.announced, *self.begun]
        assert int(loaded[1]) in allowed, f"{what}: loaded {loaded[1]}, not of {allowed}"
        # After a load, Megatron prints the mean of the first two losses at the second step.
        result.losses.pop(int(loaded[1]) + 2, None)
        for iteration, loss in result.losses.items():
            expected = self.losses.get(iteration, loss)
            assert loss == expected, f"{what}: loss of iteration {iteration}, from {loaded[1]}"
        self._note(result)

    def _note(self, result: TrainResult) -> None:
        self.losses |= result.losses
        file = self.folder / "begun"
        begun = [int(line) for line in file.read_text().split()] if file.exists() else []
        if complete := _COMPLETE.findall(result.ranks[0].stdout):
            self.announced = int(complete[-1])
            self.begun = []
        self.begun += begun[begun.index(self.announced) + 1 :] if complete else begun

    def _earlier(self, rng: random.Random) -> int | None:
        folder = CheckpointFolder(self.folder / "ck")
        steps = [step for step in range(2, self.announced) if folder.at(step) is not None]
        return rng.choice(steps[-3:]) if steps else None

    def _assert_ended(self, result: TrainResult, what: str) -> None:
        assert not any(rank.returncode for rank in result.ranks), self._tails(result, what)

    def _tails(self, result: TrainResult, what: str) -> str:
        errors = "\n".join(f"{r.rank}: {r.returncode} {r.stderr[-2000:]}" for r in result.ranks)
        return f"{what}\n{errors}"


@pytest.mark.parametrize(
    ("world", "seeds", "flags"),
    [
        pytest.param(
            2, range(3), {}, marks=[pytest.mark.system, pytest.mark.timeout(300)], id="few"
        ),
        pytest.param(2, range(100, 125), {}, marks=pytest.mark.full, id="many"),
        pytest.param(
            2, range(200, 205), {"save_retain_interval": 8}, marks=pytest.mark.full, id="retain"
        ),
        pytest.param(2, range(300, 315), ASYNC, marks=pytest.mark.full, id="async"),
        pytest.param(4, range(400, 405), {}, marks=pytest.mark.full, id="two-ranks-each"),
    ],
)
def test_kill_at_random_time_in_save(
    tmp_path: Path, world: int, seeds: range, flags: Flags
) -> None:
    """One rank or all are killed at a random time, in repeated runs in one folder. Would catch a
    checkpoint that counts as complete too early or too late, one mixed from two saves, and
    leftover files that disturb the next run."""
    hook = "kill_in_async_save" if "async_save" in flags else "kill_in_save"
    chain = Chain(tmp_path, world, flags, hook)
    chain.start()
    for seed in seeds:
        chain.kill(str(seed))
    chain.end()


# Iteration from which the killed run starts, and iterations that may be loaded after it.
PLACES: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "new": (None, (6, 8)),
    "again": (2, (4, 6)),
}
