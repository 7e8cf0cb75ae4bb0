"""The GPT that the benchmarks train, its flags, and which iterations of a run are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


def flag_words(values: Mapping[str, object], switches: Iterable[str] = ()) -> list[str]:
    """Words of a command line: names with their values, then names alone; both without dashes."""
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return words + [f"--{name}" for name in switches]


def link_name(rate: float | None) -> str:
    """A rate in bits per second, as people say it; None is no limit."""
    if rate is None:
        return "no limit"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


@dataclass(frozen=True)
class Link:
    """A link in one repeat: the rate asked for, and the payload bits per second measured."""

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
    def guessed_bytes(self) -> float:
        """About what the fp32 parameters need; the number on the wire is measured."""
        return 4.0 * self.hidden_size * (12 * self.num_layers * self.hidden_size + self.vocab_size)

    @property
    def tokens_per_replica(self) -> int:
        """Of one replica in a step."""
        return self.micro_batch_size * self.seq_length

    def flags(self, world_size: int, *, train_iters: int, log_interval: int) -> list[str]:
        """Megatron's flags for a training on the CPU, with one micro-batch on each rank.

        Args:
            world_size: ranks of the job.
            train_iters: steps.
            log_interval: between two lines on the console.
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
            "vocab-size": self.vocab_size - 1,  # the tokenizer adds the end of a document
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
    """Flags of any training with EDiT."""
    values = {"num-replicas": num_replicas, "warmup-steps": warmup_steps, "log-dir": log_dir}
    return ["--use-edit", *flag_words({f"edit-{name}": value for name, value in values.items()})]


@dataclass(frozen=True)
class Window:
    """The iterations first + 1 .. last of a run are measured.

    Attributes:
        log_interval: between two lines of Megatron; divides `first` and `last`.
        train_iters: of the whole run: beyond `last`, so that its end is not measured.
    """

    first: int
    last: int
    log_interval: int
    train_iters: int

    @classmethod
    def of_rounds(cls, tau: int, rounds: int) -> Window:
        """From the middle of a round to the middle of another.

        There is nothing of an exchange in flight at either end, whichever mode it is, and as many
        syncs as rounds are inside. Not the first round: its sync waits for the host that started
        last.
        """
        every = tau // 4 if tau % 4 == 0 else 1
        first = tau + (2 * every if every > 1 else tau // 2)
        last = first + rounds * tau
        return cls(first, last, every, last + every)
