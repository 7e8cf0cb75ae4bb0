"""What is checked: small trainings in every mode, and larger ones that are measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from frame.gpt import Model, edit_flags, flag_words

WARMUP, TAU = 10, 10
STEPS, LARGE_STEPS, A_EDIT_STEPS = 60, 50, 200
# From the forward pass of one step to that of another, with one sync in between; in overlap mode it
# lands in the forward pass of step 41.
TRACED = (39, 42)
SMALL, LARGE = "small", "large"
MODELS = {
    SMALL: Model(
        hidden_size=128, seq_length=64, vocab_size=1024, micro_batch_size=2, bucket_numel=200_000
    ),
    LARGE: Model(
        num_layers=8, hidden_size=1024, num_attention_heads=16, seq_length=512, vocab_size=32768,
        micro_batch_size=4, bucket_numel=20_000_000,
    ),
}  # fmt: skip
# Plain attention and norms: the check needs neither Transformer Engine nor Apex. Parameters are
# drawn on the CPU: they are the same on all devices, and losses can be compared.
PLAIN = ("use-cpu-initialization", "no-bias-gelu-fusion", "no-persist-layer-norm",
         "no-gradient-accumulation-fusion", "no-masked-softmax-fusion")  # fmt: skip
BF16 = ("--bf16",)
OVERLAP = ("--edit-sync-mode", "overlap")
OFFLOAD = (*OVERLAP, "--edit-offload")
INT8 = ("--edit-sync-dtype", "int8")
DELAYED = ("--edit-delay-steps", "5")
GLOO = ("--edit-sync-backend", "gloo")
# Steps of a GPU take milliseconds: a few rounds in a few seconds.
A_EDIT = ("--edit-strategy", "a-edit", "--edit-sync-seconds", "0.5", "--edit-min-round-steps", "8")
# Mean relative distance from the CPU's losses. On the CPU, bf16 instead of fp32 moves them by 2e-4,
# int8 instead of fp32 on the wire by 5e-5, a delay of five steps by 2e-2.
CLOSE, BF16_CLOSE = 0.0005, 0.002


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        name: of the case.
        words: flags besides those of all cases.
        size: of the model.
        num_replicas: 1 is stock Megatron.
        ranks: of a replica.
        steps: of the training.
        is_timed: whether a clock tells when replicas sync.
        tolerance: mean distance from the losses of the CPU, relative to them, beyond which the case
            fails; None where the losses depend on the clock.
        is_traced: whether a sync is written down by torch's profiler.
    """

    name: str
    words: tuple[str, ...] = ()
    size: str = SMALL
    num_replicas: int = 2
    ranks: int = 1
    steps: int = STEPS
    is_timed: bool = False
    tolerance: float | None = BF16_CLOSE
    is_traced: bool = False

    @property
    def num_ranks(self) -> int:
        """Of all replicas."""
        return self.num_replicas * self.ranks

    @property
    def is_stock(self) -> bool:
        """Whether Megatron trains alone."""
        return self.num_replicas == 1

    @property
    def num_syncs(self) -> int | None:
        """How many there are to be; None where a clock tells. Training ends with one."""
        if self.is_timed:
            return None
        return 0 if self.is_stock else math.ceil((self.steps - WARMUP) / TAU)

    def flags(self, device: str, log_dir: str) -> list[str]:
        """Of every rank.

        Args:
            device: `cuda` or `cpu`.
            log_dir: of the event files.
        """
        model = MODELS[self.size]
        words = model.flags(self.num_ranks, train_iters=self.steps, log_interval=1)
        words += flag_words({"lr": 1e-3, "transformer-impl": "local", "edit-device": device}, PLAIN)
        if self.is_stock:
            return [*words, *self.words]
        edit = edit_flags(self.num_replicas, warmup_steps=WARMUP, log_dir=log_dir)
        every = {"edit-digest-interval": 1}
        if not self.is_timed:
            every |= {"edit-sync-interval": TAU}
        return [*words, *edit, *flag_words(every), *self.words]


def small_cases() -> list[Case]:
    """Whether training is right: every mode."""
    return [
        Case("stock", BF16, num_replicas=1),
        Case("blocking", (*BF16, "--edit-sync-mode", "blocking")),
        Case("overlap", (*BF16, *OVERLAP)),
        Case("overlap-fp32", OVERLAP, tolerance=CLOSE),
        Case("overlap-offload", (*BF16, *OFFLOAD)),
        Case("overlap-int8", (*BF16, *OVERLAP, *INT8)),
        Case("delayed", (*BF16, *DELAYED)),
        Case("delayed-int8", (*BF16, *DELAYED, *INT8)),
        Case("a-edit", (*BF16, *A_EDIT), steps=A_EDIT_STEPS, is_timed=True, tolerance=None),
    ]


def cases_of_several_devices(count: int) -> list[Case]:
    """What one device cannot show: a second transport, and replicas of several ranks."""
    cases = [Case("overlap-gloo", (*BF16, *OVERLAP, *GLOO))] if count >= 2 else []
    if count >= 4:
        # Tied embeddings on two stages: two messages on one queue were a deadlock once.
        pipeline, tensor = (f"--{kind}-model-parallel-size" for kind in ("pipeline", "tensor"))
        cases += [
            Case("overlap-two-ranks", (*BF16, *OVERLAP), ranks=2),
            Case("overlap-tp2", (*BF16, *OVERLAP, tensor, "2"), ranks=2),
            Case("overlap-pp2-tied", (*BF16, *OVERLAP, pipeline, "2"), ranks=2),
        ]
    return cases


def large_cases() -> list[Case]:
    """What a sync takes: 134 million parameters, most of them in matrices."""
    words = (*BF16, "--lr", "1e-4")
    stock = Case("large-stock", words, LARGE, num_replicas=1, steps=LARGE_STEPS, tolerance=None)
    edit = replace(stock, num_replicas=2)
    blocking, overlap = ("--edit-sync-mode", "blocking"), OVERLAP
    return [
        stock,
        replace(edit, name="large-blocking", words=(*words, *blocking), is_traced=True),
        replace(edit, name="large-overlap", words=(*words, *overlap), is_traced=True),
        replace(edit, name="large-offload", words=(*words, *OFFLOAD)),
    ]


def cases_for(device: str, count: int) -> list[Case]:
    """All that such a machine can run, in order: what matters most comes first."""
    large = large_cases() if device == "cuda" else []
    return small_cases() + cases_of_several_devices(count) + large


def chosen(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Those of some names, in their order.

    Raises:
        ValueError: there is none of such a name.
    """
    known = {case.name: case for case in cases}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]}: must be of {', '.join(known)}")
    return [known[name] for name in names]
