"""The cases: small trainings in every mode for checks, and larger ones for measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from frame.gpt import Model, edit_flags, flag_words

WARMUP, TAU = 10, 10
STEPS, LARGE_STEPS, A_EDIT_STEPS = 60, 50, 200
# Traced from the forward pass of one step until that of another, with one sync in between, which
# lands in the forward pass of step 41 in overlap mode.
TRACED = (39, 42)
RESUME_STEP = 35  # in the middle of a round
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
# Plain attention and norms, so that neither Transformer Engine nor Apex is needed. Parameters are
# initialized on the CPU, so that they are the same on all devices, and losses are comparable.
PLAIN = ("use-cpu-initialization", "no-bias-gelu-fusion", "no-persist-layer-norm",
         "no-gradient-accumulation-fusion", "no-masked-softmax-fusion")  # fmt: skip
DETERMINISTIC = ("deterministic-mode",)
BF16 = ("--bf16",)
OVERLAP = ("--edit-sync-mode", "overlap")
OFFLOAD = (*OVERLAP, "--edit-offload")
INT8 = ("--edit-sync-dtype", "int8")
DELAYED = ("--edit-delay-steps", "5")
GLOO = ("--edit-sync-backend", "gloo")
# Steps on a GPU take milliseconds: a few rounds take a few seconds.
# Of the committed losses, which are older than presets by interval.
OUTER: dict[str, float | int] = {"edit-outer-lr": 0.8, "edit-outer-momentum": 0.85}
A_EDIT = ("--edit-strategy", "a-edit", "--edit-sync-seconds", "0.5", "--edit-min-round-steps", "8")
# Mean relative distance from the CPU's losses. On the CPU, bf16 instead of fp32 moves them by 2e-4,
# int8 instead of fp32 on the wire by 5e-5, a delay of five steps by 2e-2.
CLOSE, BF16_CLOSE = 0.0005, 0.002
# Coarse wire types amplify such differences.
COARSE_CLOSE = 0.02


@dataclass(frozen=True)
class Case:
    """A training to check or measure.

    Attributes:
        name: of the case.
        words: flags in addition to those of all cases.
        size: of the model.
        num_replicas: 1 is stock Megatron.
        ranks: of a replica.
        steps: of the training.
        is_timed: whether replicas sync by time.
        tolerance: largest accepted mean relative distance from the losses of the CPU; None where
            the losses depend on the clock, or are only those of the second launch.
        is_traced: whether a sync is traced by torch's profiler.
        fragments: groups of units that sync at steps of their own.
        resumes_at: step after which it ends, with a checkpoint, and starts again; 0 for none. The
            second launch is measured.
        twin: name of a case with the same parameters after the same syncs, bit for bit.
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
    fragments: int = 1
    resumes_at: int = 0
    twin: str | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.num_replicas * self.ranks

    @property
    def least_steps(self) -> int:
        """Fewest steps of replica 0 in the last launch; in timed rounds others may make more."""
        return self.steps // 2 if self.is_timed else self.steps - self.resumes_at

    @property
    def is_stock(self) -> bool:
        """Whether this is stock Megatron."""
        return self.num_replicas == 1

    @property
    def num_syncs(self) -> int | None:
        """Expected number of syncs of the last launch, one at the end included; None where rounds
        are timed."""
        if self.is_timed:
            return None
        before = max(0, self.resumes_at - WARMUP) // TAU
        rounds = math.ceil((self.steps - WARMUP) / TAU) - before
        return 0 if self.is_stock else rounds * self.fragments

    def flags(self, device: str, log_dir: str) -> list[str]:
        """Return the flags of every rank.

        Args:
            device: `cuda` or `cpu`.
            log_dir: of the event files.
        """
        model = MODELS[self.size]
        words = model.flags(self.num_ranks, train_iters=self.steps, log_interval=1)
        words += flag_words({"lr": 1e-3, "transformer-impl": "local", "edit-device": device}, PLAIN)
        words += flag_words({}, DETERMINISTIC) if self.size == SMALL else []
        if self.is_stock:
            return [*words, *self.words]
        edit = edit_flags(self.num_replicas, warmup_steps=WARMUP, log_dir=log_dir)
        every: dict[str, float | int] = {
            "edit-digest-interval": 1, "edit-fragments": self.fragments
        }  # fmt: skip
        if not self.is_timed:
            every |= {"edit-sync-interval": TAU} | OUTER
        return [*words, *edit, *flag_words(every), *self.words]


def small_cases() -> list[Case]:
    """Return small trainings in every mode, which check correctness."""
    return [
        Case("stock", BF16, num_replicas=1),
        Case("blocking", (*BF16, "--edit-sync-mode", "blocking")),
        Case("overlap", (*BF16, *OVERLAP), twin="blocking"),
        Case("overlap-fp32", OVERLAP, tolerance=CLOSE),
        Case("overlap-offload", (*BF16, *OFFLOAD), twin="blocking"),
        Case("resumed", (*BF16, *OVERLAP), tolerance=None, resumes_at=RESUME_STEP, twin="blocking"),
        Case("overlap-int8", (*BF16, *OVERLAP, *INT8)),
        Case("delayed", (*BF16, *DELAYED)),
        Case("delayed-int8", (*BF16, *DELAYED, *INT8)),
        Case("a-edit", (*BF16, *A_EDIT), steps=A_EDIT_STEPS, is_timed=True, tolerance=None),
    ]


def cases_of_wires_and_rules() -> list[Case]:
    """Return small trainings with the other wire types, and with what else a sync can do."""
    words = (*BF16, *OVERLAP)
    rules = {
        "overlap-moments": ("--edit-average-moments", "both"),
        "warmup-int8": ("--edit-warmup-dtype", "int8"),
    }
    coarse = {f"overlap-{name}": ("--edit-sync-dtype", name)
              for name in ("int4", "int2", "ternary", "sign")}  # fmt: skip
    cases = [Case(name, (*words, *more)) for name, more in rules.items()]
    blocking = ("--edit-sync-mode", "blocking", "--edit-check-commits")
    cases += [Case("overlap-fragments", words, fragments=2)]
    cases += [Case("checked-commits", (*BF16, *blocking), twin="blocking")]
    return cases + [Case(name, (*words, *more), tolerance=COARSE_CLOSE)
                    for name, more in coarse.items()]  # fmt: skip


def cases_of_several_devices(count: int) -> list[Case]:
    """Return cases that need several devices: gloo between GPUs, and replicas of several ranks."""
    cases = [Case("overlap-gloo", (*BF16, *OVERLAP, *GLOO))] if count >= 2 else []
    if count >= 4:
        # Tied embeddings on two stages: a regression case of a deadlock of two messages on a queue.
        pipeline, tensor = (f"--{kind}-model-parallel-size" for kind in ("pipeline", "tensor"))
        cases += [
            Case("overlap-two-ranks", (*BF16, *OVERLAP), ranks=2),
            Case("overlap-tp2", (*BF16, *OVERLAP, tensor, "2"), ranks=2),
            Case("overlap-pp2-tied", (*BF16, *OVERLAP, pipeline, "2"), ranks=2),
        ]
    return cases


def large_cases() -> list[Case]:
    """Return trainings of 134 million parameters that measure the cost of a sync."""
    words = (*BF16, "--lr", "1e-4")
    stock = Case("large-stock", words, LARGE, num_replicas=1, steps=LARGE_STEPS, tolerance=None)
    edit = replace(stock, num_replicas=2)
    blocking, overlap = ("--edit-sync-mode", "blocking"), OVERLAP
    int2 = ("--edit-sync-dtype", "int2")
    return [
        stock,
        replace(edit, name="large-blocking", words=(*words, *blocking), is_traced=True),
        replace(edit, name="large-overlap", words=(*words, *overlap), is_traced=True),
        replace(edit, name="large-offload", words=(*words, *OFFLOAD)),
        replace(edit, name="large-delayed", words=(*words, *DELAYED)),
        replace(edit, name="large-int2", words=(*words, *overlap, *int2), is_traced=True),
    ]


def cases_for(device: str, count: int) -> list[Case]:
    """Return all cases that a machine can run, the most important first."""
    large = large_cases() if device == "cuda" else []
    return small_cases() + cases_of_several_devices(count) + large + cases_of_wires_and_rules()


def chosen(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Return the cases with these names, in their order.

    Raises:
        ValueError: no case has one of the names.
    """
    known = {case.name: case for case in cases}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]}: must be of {', '.join(known)}")
    return [known[name] for name in names]
