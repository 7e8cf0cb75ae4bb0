"""What is compared: the kinds of training, and what each of them saves.

| kind | what trains |
|---|---|
| stock-one | stock Megatron with as many ranks as one replica |
| stock-all | one stock Megatron job with as many ranks as all replicas together |
| leader | EDiT with `--edit-inner-state leader`: every checkpoint is of a sync |
| all | EDiT with `--edit-inner-state all`: every other checkpoint is of the middle of a round |

All kinds have the same Megatron flags, so that they differ in what they save alone. What a save
costs the loop is seen beside iterations of the same run at the same place in a round, without a
save: so `leader` saves at every second sync, and `all` after one round and a half.
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
# Never reached: a run is ended as soon as its checkpoints are complete. What is saved at the end of
# training is another matter.
TRAIN_ITERS = 20_000
WARMUP_SAVES = 1  # not timed
# How a rank learns where to note what, and how long to sleep.
NOTES_VARIABLE, PAUSE_VARIABLE = "CHECKPOINT_NOTES", "CHECKPOINT_PAUSE"


@dataclass(frozen=True)
class Case:
    """One kind of training that saves.

    Attributes:
        is_async: whether with `--async-save`.
        interval: iterations between two saves; a multiple of 6.
        num_saves: that are timed, after the first.
        pause: seconds that each step sleeps: the cores are idle then, as where GPUs train.
        async_pause: the same with asynchronous saves.
        is_asked_late: leader only: whether saves are asked for in mid-round, and so wait.
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
        """EDiT's interval; after so many iterations any kind is at the same place again."""
        if self.is_asked_late:
            return 2 * self.interval
        return 2 * self.interval // 3 if self.kind == ALL else self.interval // 2

    @property
    def span(self) -> int:
        """Iterations over which the cost of a save is looked for: its own, and those after it."""
        return self.interval // 3

    def is_like(self, one: int, other: int) -> bool:
        """Whether two iterations have the same place in a round."""
        return (one - other) % self.tau == 0

    @property
    def warmup_steps(self) -> int:
        """Of EDiT: none, or so many that no sync falls on a save."""
        return self.interval // 2 if self.is_asked_late else 0

    @property
    def name(self) -> str:
        """For people."""
        late = " (asked in mid-round)" if self.is_asked_late else ""
        return (
            f"{self.kind}{late}, {self.precision}, {self.num_replicas} x {self.ranks_per_replica} "
            f"ranks, {'async' if self.is_async else 'sync'}"
        )

    def flags(self, folder: str) -> list[str]:
        """All flags of the training script."""
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
    """What one turn runs; `base` gives the sizes."""
    return [
        replace(base, kind=kind, is_async=mode == ASYNC)
        for mode in MODES
        if mode in modes
        for kind in kinds
    ]


def weighed_cases(
    base: Case, kinds: Sequence[str], *, precisions: Sequence[str], replicas: Sequence[int]
) -> list[Case]:
    """What is run once, for its bytes: another precision, more replicas, a save that waits.

    Two checkpoints each: `all` then has both of its kinds.
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
