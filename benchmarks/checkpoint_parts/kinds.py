"""The compared kinds of training, and what each of them saves.

| kind | training |
|---|---|
| stock-one | stock Megatron with the ranks of one replica |
| stock-all | one stock Megatron job with the ranks of all replicas |
| leader | EDiT with `--edit-inner-state leader`: every checkpoint is taken at a sync |
| all | EDiT with `--edit-inner-state all`: every other checkpoint is taken in mid-round |

All kinds have the same Megatron flags, so that they differ only in what they save. The cost of a
save in the loop is relative to iterations of the same run at the same place in a round without a
save; therefore `leader` saves at every second sync, and `all` every one and a half rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from frame.gpt import Model, edit_flags, flag_words

STOCK_ONE = "stock-one"
STOCK_ALL = "stock-all"
LEADER = "leader"
ALL = "all"
KINDS = (STOCK_ONE, STOCK_ALL, LEADER, ALL)
STOCK = (STOCK_ONE, STOCK_ALL)

SYNC, ASYNC = MODES = "sync", "async"
BF16, FP32 = "bf16", "fp32"
AT_SYNC, MID_ROUND = "at a sync", "in mid-round"
# Never reached: a run is ended as soon as its checkpoints are complete, so that the save at the end
# of training is not measured.
TRAIN_ITERS = 20_000
WARMUP_SAVES = 1  # not timed
# Environment variables of a rank: the file for its notes, and the seconds to sleep.
NOTES_VARIABLE, PAUSE_VARIABLE = "CHECKPOINT_NOTES", "CHECKPOINT_PAUSE"


@dataclass(frozen=True)
class Case:
    """One kind of training that saves.

    Attributes:
        is_async: whether with `--async-save`.
        interval: iterations between two saves; a multiple of 6.
        num_saves: number of timed saves, after the first.
        pause: seconds that each step sleeps, with idle cores as in training on GPUs.
        async_pause: the same with asynchronous saves.
        is_asked_late: leader only: whether saves are requested in mid-round, and so delayed.
    """

    kind: str
    precision: str
    is_async: bool
    num_replicas: int
    ranks_per_replica: int
    model: Model
    interval: int
    num_saves: int
    pause: float
    async_pause: float
    is_asked_late: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of a launch."""
        return self.ranks_per_replica * (1 if self.kind == STOCK_ONE else self.num_replicas)

    @property
    def tau(self) -> int:
        """EDiT's interval, and for all kinds the period of comparable iterations."""
        if self.is_asked_late:
            return 2 * self.interval
        return 2 * self.interval // 3 if self.kind == ALL else self.interval // 2

    @property
    def span(self) -> int:
        """Iterations that the cost of a save is measured over: its own, and some after it."""
        return self.interval // 3

    def is_same_place(self, one: int, other: int) -> bool:
        """Return whether two iterations have the same place in a round."""
        return (one - other) % self.tau == 0

    @property
    def warmup_steps(self) -> int:
        """EDiT's warm-up: none, or so many steps that no sync coincides with a save."""
        return self.interval // 2 if self.is_asked_late else 0

    @property
    def name(self) -> str:
        """Name of the case."""
        late = " (asked in mid-round)" if self.is_asked_late else ""
        return (
            f"{self.kind}{late}, {self.precision}, {self.num_replicas} x {self.ranks_per_replica} "
            f"ranks, {'async' if self.is_async else 'sync'}"
        )

    def flags(self, folder: str) -> list[str]:
        """Return all flags of the training script."""
        flags = self.model.flags(self.world_size, train_iters=TRAIN_ITERS, log_interval=TRAIN_ITERS)
        values = {
            "save": f"{folder}/checkpoints",
            "save-interval": self.interval,
            "ckpt-format": "torch_dist",
        }
        flags += flag_words(values)
        if self.precision == BF16:
            flags.append("--bf16")
        if self.is_async:
            flags += ["--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker"]
        if self.kind in STOCK:
            return flags
        return [
            *flags,
            *edit_flags(self.num_replicas, warmup_steps=self.warmup_steps, log_dir=f"{folder}/log"),
            *("--edit-sync-interval", str(self.tau)),
            *("--edit-inner-state", self.kind),
        ]


def timed_cases(base: Case, kinds: Sequence[str], modes: Sequence[str] = MODES) -> list[Case]:
    """Return the cases of one repeat, with the sizes of `base`."""
    return [
        replace(base, kind=kind, is_async=mode == ASYNC)
        for mode in MODES
        if mode in modes
        for kind in kinds
    ]


def weighed_cases(
    base: Case, kinds: Sequence[str], *, precisions: Sequence[str], replicas: Sequence[int]
) -> list[Case]:
    """Return the cases that measure only bytes: other precisions, more replicas, a delayed save.

    Each makes two checkpoints, so that `all` makes one at a sync and one in mid-round.
    """
    once = replace(base, is_async=False, num_saves=1)
    cases = [
        replace(once, kind=kind, precision=precision)
        for precision in precisions
        for kind in kinds
        if kind != STOCK_ALL
    ]
    cases += [
        replace(once, kind=kind, num_replicas=count)
        for count in replicas
        for kind in kinds
        if kind not in STOCK
    ]
    if LEADER in kinds:
        cases.append(replace(once, kind=LEADER, is_asked_late=True))
    return cases
