"""kill -9 in the middle of a save: the newest complete checkpoint loads every time."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.checkpoint.files import check_content
from megatron_edit.checkpoint.folder import CheckpointFolder
from megatron_edit.checkpoint.manifest import read_manifest
from tests.harness import Flags, TrainResult, run_ranks
from tests.harness.launch import REPOSITORY
from tests.harness.training import parse_console
from tests.host.runs import edit_flags
from tests.host.spy_kill import moments_of

SPY = "tests.host.spy_kill:"
ASYNC = {"async_save": True, "use_persistent_ckpt_worker": True, "async_strategy": "mcore"}
_COMPLETE = re.compile(r"checkpoint of iteration (\d+) is complete")
_GOING_ON = re.compile(r"going on from \S+/iter_(\d+),")


def run(
    folder: Path, world: int, hook: str, env: dict[str, Any] | None = None, **flags: Any
) -> TrainResult:
    """Train from what is in the folder; saves at every other step where `save` is given."""
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
    """Runs that are killed, one after another, in one folder.

    Attributes:
        folder: of the spies; checkpoints are in `ck`.
        world: ranks.
        flags: of every run.
        hook: that kills.
        losses: of the iterations so far. One that is made again must give the same.
        announced: the last checkpoint of which a run said that it is complete.
        begun: saves begun after that one.
    """

    folder: Path
    world: int
    flags: Flags
    hook: str = "kill_in_save"
    losses: dict[int, float] = field(default_factory=dict)
    announced: int = 0
    begun: list[int] = field(default_factory=list)

    def start(self) -> None:
        """An undisturbed run, which measures how long a save takes."""
        result = run(
            self.folder, self.world, self.hook, save=self.folder / "ck", exit_interval=6,
            **self.flags,
        )  # fmt: skip
        self._assert_ended(result, "the first run")
        self._note(result)
        assert self.announced == 6

    def kill(self, seed: str) -> None:
        """Go on, from the newest or an earlier checkpoint, and die in a save."""
        rng = random.Random(seed)
        everybody = range(self.world)
        victims = rng.choice([everybody, everybody, [0], [self.world - 1]])
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
        self._judge(result, what, step)

    def end(self) -> None:
        """A last run, which trains two steps and ends by itself."""
        result = run(self.folder, self.world, self.hook, exit_interval=2, **self.flags)
        self._assert_ended(result, "the last run")
        self._judge(result, "the last run", None)
        assert result.losses

    def _judge(self, result: TrainResult, what: str, step: int | None) -> None:
        """What was loaded is what the run before has left."""
        loaded = _GOING_ON.search(result.ranks[0].stdout)
        assert loaded is not None, self._tails(result, what)
        allowed = [step] if step is not None else [self.announced, *self.begun]
        assert int(loaded[1]) in allowed, f"{what}: loaded {loaded[1]}, not of {allowed}"
        # Megatron prints the mean of the first two losses after a load as the second.
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
def test_a_kill_at_a_random_moment_of_a_save(
    tmp_path: Path, world: int, seeds: range, flags: Flags
) -> None:
    """One rank or all die at a random moment, run after run in the same folder: catches a
    checkpoint that counts as complete too early or too late, one mixed from two saves, and
    leftovers that are in the way of the next run."""
    hook = "kill_in_async_save" if "async_save" in flags else "kill_in_save"
    chain = Chain(tmp_path, world, flags, hook)
    chain.start()
    for seed in seeds:
        chain.kill(str(seed))
    chain.end()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the iterations 2, 4 and 6, and one that was cut off in another job."""
    folder = tmp_path_factory.mktemp("kill")
    Chain(folder, 2, {}).start()
    left = CheckpointFolder(folder / "ck").partial(8, "0000")
    shutil.copytree(folder / "ck" / "iter_0000002" / "edit" / "random", left / "edit" / "random")
    return folder


# Where the run that dies starts, and what may be loaded after it.
PLACES: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "new": (None, (6, 8)),
    "again": (2, (4, 6)),
}


def save_once(folder: Path, place: str, call: str) -> TrainResult:
    """Save 8, or go back to 2 and save 4 in the place of the old one; remove 6; die at a call."""
    step, results = PLACES[place]
    return run(
        folder, 2, "kill_at_call", {"SPY_SAVE": 1, "SPY_CALL": call, "SPY_VICTIMS": "0,1"},
        save=folder / "ck", ckpt_step=step, save_retain_interval=4,
        exit_interval=(results[-1] if step is None else results[0]) if call == "none" else None,
    )  # fmt: skip


def assert_loads(folder: Path, place: str, call: str) -> None:
    """A run finds a checkpoint, trains, and ends with 0; what was complete once still is."""
    result = run(folder, 2, "kill_in_save", exit_interval=2)
    ends = [f"{rank.returncode} {rank.stderr[-2000:]}" for rank in result.ranks]
    assert all(end.startswith("0 ") for end in ends), f"{call}: {ends}"
    loaded = _GOING_ON.search(result.ranks[0].stdout)
    assert loaded is not None and int(loaded[1]) in PLACES[place][1], call
    for iteration in (2, 4):
        found = CheckpointFolder(folder / "ck").at(iteration)
        assert found is not None, f"{call}: {iteration} is gone"
        for name, record in read_manifest(found.path).files.items():
            check_content(found.path, name, record)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("new", "write 1"),
        ("again", "rename 2"),
        pytest.param("again", "rename 1", marks=pytest.mark.full),
        pytest.param("new", "replace 1", marks=pytest.mark.full),
    ],
)
def test_a_kill_at_a_chosen_moment(saved: Path, tmp_path: Path, place: str, call: str) -> None:
    """While the manifest is written, before and between the renames, and before the tracker: the
    moments that last too short for chance to find them."""
    folder = shutil.copytree(saved, tmp_path / "run")
    result = save_once(folder, place, call)
    assert [rank.returncode for rank in result.ranks] == [-9, -9]
    assert_loads(folder, place, call)


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_every_call(saved: Path, tmp_path: Path, place: str) -> None:
    """Before every change that completing a checkpoint makes on the disk: catches an order of
    them that leaves nothing to load, or something broken, for a moment."""
    whole = shutil.copytree(saved, tmp_path / "whole")
    save_once(whole, place, "none")
    broken = []
    for number, call in enumerate(moments_of(whole)):
        folder = shutil.copytree(saved, tmp_path / str(number))
        result = save_once(folder, place, call)
        assert [rank.returncode for rank in result.ranks] == [-9, -9], call
        try:
            assert_loads(folder, place, call)
        except AssertionError as error:
            broken.append(f"{call}: {error}")
        shutil.rmtree(folder)
    assert not broken, "\n".join(broken)
