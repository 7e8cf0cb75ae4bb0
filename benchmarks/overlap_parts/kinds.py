"""The compared kinds of training, and which iterations of a run are measured.

| kind | training |
|---|---|
| ideal | every host alone, as stock Megatron with one rank, without exchange |
| stock | one stock Megatron job over all hosts, with the overlaps of its distributed optimizer |
| stock-instances | the same with a distributed optimizer instance on each host |
| blocking, overlap | EDiT with that `--edit-sync-mode`, one replica per host |
| a key of `variants` | another strategy, a delayed sync or a wire dtype, in overlap mode |

All kinds have the same Megatron flags, so that they differ only in their exchange.
`stock-instances` all-reduces gradients between hosts, and gathers parameters inside a host only. On
the CPU its all-reduces block the backward pass: Megatron overlaps them by CUDA streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from frame.gpt import Model, Window, edit_flags

IDEAL = "ideal"
STOCK = "stock"
STOCK_INSTANCES = "stock-instances"
STOCKS = (STOCK, STOCK_INSTANCES)  # they exchange at every step
MIN_STOCK_ITERATIONS = 3
# Observed exchange time of stock Megatron over that of the bytes it must send, and the time of a
# step without exchange. Only used to choose the number of iterations.
STOCK_EXCESS = 2.0
ESTIMATED_STEP_SECONDS = 0.15
TIMED_STEP_SECONDS = 0.12  # sets A-EDiT's interval: a round lasts tau such steps

BLOCKING, OVERLAP = "blocking", "overlap"


def variants(tau: int, num_layers: int = 4) -> dict[str, list[str]]:
    """Return the flags of EDiT's other kinds by name, for a sync interval and number of layers."""
    delayed = ["--edit-delay-steps", str(tau * 3 // 4)]
    # The smallest delay that should hide the largest unit at 100 Mbit/s, as delay costs loss. That
    # unit is the embedding, alone in its group but for the final norm.
    groups = min(num_layers + 1, tau)
    staggered = ["--edit-fragments", f"{groups}", "--edit-delay-steps", f"{tau // 5}"]
    strategies = ("local-sgd", "post-local-sgd", "slowmo", "diloco", "co2", "sparse-loco")
    named = {name: ["--edit-strategy", name] for name in strategies}
    return named | {
        "streaming-diloco": ["--edit-strategy", "streaming-diloco"],
        "a-edit": ["--edit-strategy", "a-edit",
                   "--edit-sync-seconds", f"{tau * TIMED_STEP_SECONDS:g}",
                   "--edit-min-round-steps", str(tau)],
        "delayed": delayed,
        "delayed-bf16": [*delayed, "--edit-sync-dtype", "bf16"],
        "delayed-int8": [*delayed, "--edit-sync-dtype", "int8"],
        "delayed-int4": [*delayed, "--edit-sync-dtype", "int4"],
        "int8": ["--edit-sync-dtype", "int8"],
        "staggered": staggered,
        "staggered-int8": [*staggered, "--edit-sync-dtype", "int8"],
    }  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One kind of training on a number of hosts.

    Attributes:
        kind: see the module's table.
        tau: sync interval of EDiT.
        rounds: number of measured rounds.
        stock_seconds: approximate measured time of stock Megatron.
    """

    kind: str
    model: Model
    num_hosts: int
    tau: int
    rounds: int
    stock_seconds: float

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens per iteration of all hosts together; the same for all kinds."""
        return self.num_hosts * self.model.tokens_per_replica

    @property
    def is_apart(self) -> bool:
        """Whether each host is a Megatron job of its own, with its own console lines."""
        return self.kind == IDEAL

    @property
    def world_size(self) -> int:
        """Ranks of a launch."""
        return 1 if self.is_apart else self.num_hosts

    @property
    def logging_host(self) -> int:
        """The host whose console is followed: Megatron prints on the last rank of a world."""
        return self.num_hosts - 1 if self.kind in STOCKS else 0

    def window(self, rate: float | None) -> Window:
        """Return the iterations to measure on links of a rate (bits per second; None: no limit)."""
        if self.kind in STOCKS:
            return self._stock_window(rate)
        return Window.of_rounds(self.tau, self.rounds)

    def _stock_window(self, rate: float | None) -> Window:
        seconds = ESTIMATED_STEP_SECONDS
        if rate is not None:
            seconds += STOCK_EXCESS * self.model.estimated_bytes * 8 / rate
        target = min(self.stock_seconds / seconds, self.rounds * self.tau)
        every = max(1, int(target) // 8)  # a console line costs a barrier: not at every iteration
        count = max(MIN_STOCK_ITERATIONS, round(target / every)) * every
        return Window(2 * every, 2 * every + count, every, 3 * every + count)

    def flags(self, window: Window, log_dir: str) -> list[str]:
        """Return all flags of the training script."""
        flags = self.model.flags(
            self.world_size, train_iters=window.train_iters, log_interval=window.log_interval
        )
        if self.kind in (IDEAL, STOCK):
            return flags
        if self.kind == STOCK_INSTANCES:
            return [*flags, "--num-distributed-optimizer-instances", str(self.num_hosts)]
        mode = BLOCKING if self.kind == BLOCKING else OVERLAP
        # No warm-up: its steps equal those of stock data parallelism, which is measured separately.
        return [
            *flags,
            *edit_flags(self.num_hosts, warmup_steps=0, log_dir=log_dir),
            # A-EDiT's rounds are timed.
            *(() if self.kind == "a-edit" else ("--edit-sync-interval", str(self.tau))),
            *("--edit-sync-mode", mode),
            *variants(self.tau, self.model.num_layers).get(self.kind, []),
        ]
