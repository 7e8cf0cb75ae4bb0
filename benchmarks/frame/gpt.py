"""The GPT that the benchmarks train, its flags, and which iterations of a run are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


def flag_words(values: Mapping[str, object], switches: Iterable[str] = ()) -> list[str]:
    """Return the words of a command line; `values` and `switches` are named without dashes."""
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return words + [f"--{name}" for name in switches]


def link_name(rate: float | None) -> str:
    """Return a rate in bits per second as a short text; None is no limit."""
    if rate is None:
        return "no limit"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


@dataclass(frozen=True)
class Link:
    """A link in one repeat: the configured rate, and the measured payload bits per second."""

    rate: float | None
    repeat: int
    bandwidth: float


@dataclass(frozen=True)
class Model:
    """Sizes of the GPT."""

    num_layers: int = 4
    hidden_size: int = 256
    num_attention_heads: int = 4
    seq_length: int = 128
    vocab_size: int = 8192
    micro_batch_size: int = 1
    bucket_numel: int = 800_000

    @property
    def estimated_bytes(self) -> float:
        """Approximate size of the fp32 parameters; the bytes on the wire are measured."""
        return 4.0 * self.hidden_size * (12 * self.num_layers * self.hidden_size + self.vocab_size)

    @property
    def tokens_per_replica(self) -> int:
        """Tokens of one replica in a step."""
        return self.micro_batch_size * self.seq_length

    def flags(self, world_size: int, *, train_iters: int, log_interval: int) -> list[str]:
        """Return Megatron's flags for a training on the CPU, with one micro-batch on each rank.

        Args:
            world_size: ranks of the job.
            train_iters: steps.
            log_interval: steps between two lines on the console.
        """
        model = {
            "num-layers": self.num_layers,
            "hidden-size": self.hidden_size,
            "num-attention-heads": self.num_attention_heads,
            "seq-length": self.seq_length,
            "max-position-embeddings": self.seq_length,
            "micro-batch-size": self.micro_batch_size,
            "ddp-bucket-size": self.bucket_numel,
            "tokenizer-type": "NullTokenizer",
            "vocab-size": self.vocab_size - 1,  # the tokenizer adds the end-of-document token
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "lr": 1e-4,
            "lr-decay-style": "constant",
            "num-workers": 0,
            "eval-iters": 0,
            "eval-interval": 1_000_000,
        }
        switches = ("mock-data", "use-distributed-optimizer", "overlap-grad-reduce",
                    "overlap-param-gather")  # fmt: skip
        training = {
            "edit-device": "cpu",
            "global-batch-size": self.micro_batch_size * world_size,
            "train-iters": train_iters,
            "log-interval": log_interval,
        }
        return flag_words(model, switches) + flag_words(training)


def edit_flags(num_replicas: int, *, warmup_steps: int, log_dir: str) -> list[str]:
    """Return the flags common to all trainings with EDiT."""
    values = {"num-replicas": num_replicas, "warmup-steps": warmup_steps, "log-dir": log_dir}
    return ["--use-edit", *flag_words({f"edit-{name}": value for name, value in values.items()})]


@dataclass(frozen=True)
class Window:
    """The measured iterations of a run: first + 1 .. last.

    Attributes:
        log_interval: steps between two lines of Megatron; divides `first` and `last`.
        train_iters: of the run; larger than `last`, so that its end is not measured.
    """

    first: int
    last: int
    log_interval: int
    train_iters: int

    @classmethod
    def of_rounds(cls, tau: int, rounds: int) -> Window:
        """Return the window from the middle of the second round to the middle of a later one.

        In no mode is an exchange in flight at either end, and there are as many syncs as rounds
        inside. The first round is left out: its sync waits for the host that started last.
        """
        interval = tau // 4 if tau % 4 == 0 else 1
        first = tau + (2 * interval if interval > 1 else tau // 2)
        last = first + rounds * tau
        return cls(first, last, interval, last + interval)
