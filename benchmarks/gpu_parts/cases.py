"""The cases, the most valuable first: small trainings in every mode for checks, larger ones for
measurements, and the calls of a group alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from frame.gpt import Model, edit_flags, flag_words

WARMUP, TAU = 10, 10
STEPS, LARGE_STEPS, A_EDIT_STEPS = 60, 50, 200
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
# Estimated seconds of a launch, from those of an H200 with 16 cores
# (benchmarks/results/gpu_check_h200_202611.json); nearly all of them are its start.
SECONDS = {SMALL: 30.0, LARGE: 30.0}
CALLS_SECONDS = 20.0
# What NCCL needs for several ranks on a GPU, and what tells it to accept them.
SHARED_NCCL, SHARED = (2, 30), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
TE, MUON = "transformer_engine", "emerging_optimizers"
ELASTIC_TORCH = (2, 14)
# Faults: the last rank is stopped for a few seconds in an exchange, or killed in it; or the run is
# elastic, and the hub must commit its rounds.
STOP, KILL, ELASTIC = "stop", "kill", "elastic"


@dataclass(frozen=True)
class Case:
    """A training to check or measure.

    Attributes:
        words: flags in addition to those of all cases.
        size: of the model.
        num_replicas: 1 is stock Megatron.
        ranks: of a replica.
        is_timed: whether replicas sync by time.
        tolerance: largest accepted mean relative distance from the losses of the CPU; None where
            the losses depend on the clock, or are only those of the second launch.
        fragments: groups of units that sync at steps of their own.
        resumes_at: step after which it ends, with a checkpoint, and starts again; 0 for none. The
            second launch is measured.
        twin: name of a case with the same parameters after the same syncs, bit for bit.
        like: name of the case whose losses on the CPU are those of this one; empty for its own.
        special: one of `STOP`, `KILL` and `ELASTIC`; empty for none.
        is_apart: whether each rank is a launch of its own; always on a single device.
        shares_device: whether several ranks communicate over NCCL from a single device.
        packages: modules that it needs.
        without: switches of all cases that it must not have.
        is_training: whether it is one; otherwise all calls of a `Group`.
    """

    name: str
    words: tuple[str, ...] = ()
    size: str = SMALL
    num_replicas: int = 2
    ranks: int = 1
    steps: int = STEPS
    is_timed: bool = False
    tolerance: float | None = BF16_CLOSE
    fragments: int = 1
    resumes_at: int = 0
    twin: str | None = None
    like: str = ""
    special: str = ""
    is_apart: bool = False
    shares_device: bool = False
    packages: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    is_training: bool = True

    @property
    def seconds(self) -> float:
        """Estimated seconds on a GPU."""
        if not self.is_training:
            return CALLS_SECONDS
        return SECONDS[self.size] * (2 if self.resumes_at else 1)

    @property
    def delay(self) -> int:
        """Steps from the start of a sync to its landing."""
        return int(DELAYED[1]) if DELAYED[0] in self.words else 0

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.num_replicas * self.ranks

    @property
    def least_steps(self) -> int:
        """Fewest steps of replica 0 in the last launch; in timed rounds others may make more."""
        return self.steps // 2 if self.is_timed else self.steps - self.resumes_at

    @property
    def has_reading(self) -> bool:
        """Whether it is a training to its end, whose event files are read."""
        return self.is_training and self.special in ("", STOP)

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
        words = [word for word in words if word not in self.without]
        if self.is_stock:
            return [*words, *self.words]
        edit = edit_flags(self.num_replicas, warmup_steps=WARMUP, log_dir=log_dir)
        every: dict[str, float | int] = {"edit-digest-interval": 1}
        if self.special == ELASTIC:
            edit = [word.replace("num-replicas", "nominal-replicas") for word in edit]
        else:
            every |= {"edit-fragments": self.fragments}
        if not self.is_timed:
            every |= {"edit-sync-interval": TAU} | OUTER
        return [*words, *edit, *flag_words(every), *self.words]


# What no training with replicas on one GPU brings to NCCL.
CALLS = Case("group-calls", num_replicas=1, tolerance=None, is_training=False)


def small_cases() -> list[Case]:
    """Return small trainings in every mode, which check correctness."""
    words = (*BF16, *OVERLAP)
    rules = {
        "overlap-moments": ("--edit-average-moments", "both"),
        "warmup-int8": ("--edit-warmup-dtype", "int8"),
    }
    coarse = {f"overlap-{name}": ("--edit-sync-dtype", name)
              for name in ("int4", "int2", "ternary", "sign")}  # fmt: skip
    blocking = ("--edit-sync-mode", "blocking", "--edit-check-commits")
    return [
        Case("blocking", (*BF16, "--edit-sync-mode", "blocking")),
        Case("overlap", words, twin="blocking"),
        Case("overlap-fp32", OVERLAP, tolerance=CLOSE),
        Case("overlap-offload", (*BF16, *OFFLOAD), twin="blocking"),
        Case("overlap-int8", (*words, *INT8)),
        Case("delayed", (*BF16, *DELAYED)),
        Case("delayed-int8", (*BF16, *DELAYED, *INT8)),
        Case("stock", BF16, num_replicas=1),
        Case("checked-commits", (*BF16, *blocking), twin="blocking"),
        Case("a-edit", (*BF16, *A_EDIT), steps=A_EDIT_STEPS, is_timed=True, tolerance=None),
        *(Case(name, (*words, *more)) for name, more in rules.items()),
        Case("overlap-fragments", words, fragments=2),
        *(Case(name, (*words, *more), tolerance=COARSE_CLOSE) for name, more in coarse.items()),
    ]


def resumed() -> list[Case]:
    """Return a training that ends in the middle of a round and is resumed."""
    words = (*BF16, *OVERLAP)
    return [Case("resumed", words, tolerance=None, resumes_at=RESUME_STEP, twin="blocking")]


def cases_over_nccl_on_one_device() -> list[Case]:
    """Return cases of several ranks on a GPU, which NCCL accepts from version 2.30 on."""
    tensor = ("--tensor-model-parallel-size", "2")
    shared = Case("shared", (*BF16, "--edit-sync-backend", "nccl"), shares_device=True)
    two = replace(shared, ranks=2, words=(*shared.words, *tensor), tolerance=None)
    return [
        replace(shared, name="shared-overlap", words=(*shared.words, *OVERLAP), like="overlap"),
        replace(two, name="shared-tp2-overlap", words=(*two.words, *OVERLAP), like="overlap-tp2",
                tolerance=BF16_CLOSE),
        replace(two, name="shared-tp2-int8", words=(*two.words, *OVERLAP, *INT8)),
        replace(two, name="shared-tp2-delayed-int8", words=(*two.words, *DELAYED, *INT8),
                like="delayed-int8-tp2", tolerance=BF16_CLOSE),
    ]  # fmt: skip


def cases_of_several_devices() -> list[Case]:
    """Return cases that need several devices, the most valuable first."""
    words, tensor = (*BF16, *OVERLAP), ("--tensor-model-parallel-size", "2")
    pipeline = ("--pipeline-model-parallel-size", "2")
    engine = ("--transformer-impl", TE)
    two, with_te = Case("", words, ranks=2), Case("", (*words, *engine), packages=(TE,))
    virtual = (*pipeline, "--num-layers-per-virtual-pipeline-stage", "1")
    experts = ("--num-experts", "2", "--expert-model-parallel-size", "2")
    context = ("--context-parallel-size", "2")
    muon = Case("muon", (*BF16, "--optimizer", "muon"), packages=(MUON,), tolerance=COARSE_CLOSE,
                without=("--overlap-param-gather",))  # fmt: skip

    def tried(case: Case, name: str, *more: str, tolerance: float | None = None) -> Case:
        return replace(case, name=name, words=(*case.words, *more), tolerance=tolerance)

    return [
        # With one hardware queue, as all cases.
        Case("delayed-int8-tp2", (*BF16, *DELAYED, *INT8, *tensor), ranks=2),
        Case("stopped", words, twin="overlap", tolerance=None, special=STOP),
        Case("killed", (*words, "--edit-timeout-seconds", "15"), tolerance=None, special=KILL),
        Case("overlap", words, twin="blocking"),
        Case("separate", words, twin="overlap", like="overlap", is_apart=True),
        tried(with_te, "te"),
        tried(with_te, "te-fp8", "--fp8-format", "hybrid", "--fp8-param-gather"),
        tried(with_te, "te-precision-aware", "--use-precision-aware-optimizer"),
        tried(two, "vpp", *virtual, tolerance=BF16_CLOSE),
        tried(two, "ep", *experts, tolerance=COARSE_CLOSE),
        tried(replace(with_te, ranks=2), "cp", *context),
        Case("elastic", BF16, tolerance=None, is_apart=True, special=ELASTIC),
        muon,
    ]


def cases_of_transports_and_layouts() -> list[Case]:
    """Return further cases of several devices: gloo between GPUs, and replicas of two ranks."""
    words, two = (*BF16, *OVERLAP), Case("", ranks=2)
    # Tied embeddings on two stages: a regression case of a deadlock of two messages on a queue.
    kinds = {"two-ranks": (), "tp2": ("--tensor-model-parallel-size", "2"),
             "pp2-tied": ("--pipeline-model-parallel-size", "2")}  # fmt: skip
    layouts = [replace(two, name=f"overlap-{name}", words=(*words, *more))
               for name, more in kinds.items()]  # fmt: skip
    return [Case("overlap-gloo", (*words, *GLOO)), *layouts]


def large_cases() -> list[Case]:
    """Return trainings of 134 million parameters that measure the cost of a sync."""
    words = (*BF16, "--lr", "1e-4")
    stock = Case("large-stock", words, LARGE, num_replicas=1, steps=LARGE_STEPS, tolerance=None)
    edit = replace(stock, num_replicas=2)
    return [
        stock,
        replace(edit, name="large-overlap", words=(*words, *OVERLAP)),
        replace(edit, name="large-delayed", words=(*words, *DELAYED)),
        replace(edit, name="large-offload", words=(*words, *OFFLOAD)),
    ]


def cases_for(device: str, count: int) -> list[Case]:
    """Return all cases for a number of devices, the most valuable first; see `lacking`."""
    if device == "cuda" and count == 1:
        found = [CALLS, *large_cases(), *resumed(), *cases_over_nccl_on_one_device()]
        return found + small_cases()
    several = cases_of_several_devices() if count >= 2 else []
    large = large_cases() if device == "cuda" else []
    found = [CALLS, *several, *large, *resumed()]
    found += [case for case in small_cases() if case.name not in {each.name for each in found}]
    found += cases_of_transports_and_layouts() if count >= 2 else []
    # With `apart`, ranks of a CPU share it.
    return [case for case in found if case.num_ranks <= count or (count == 1 and case.ranks == 1)]


@dataclass(frozen=True)
class Software:
    """What a machine has.

    Attributes:
        device: `cuda` or `cpu`.
        torch: version.
        nccl: version; empty on the CPU.
        has: returns whether a module can be imported.
    """

    device: str
    torch: tuple[int, ...]
    nccl: tuple[int, ...]
    has: Callable[[str], bool]


def lacking(case: Case, software: Software) -> str | None:
    """Return what a case needs that a machine has not; None where it can run."""
    if case.shares_device and software.nccl < SHARED_NCCL:
        return f"NCCL {'.'.join(map(str, SHARED_NCCL))}"
    if case.special == ELASTIC and software.torch < ELASTIC_TORCH:
        return f"torch {'.'.join(map(str, ELASTIC_TORCH))}"
    if software.device == "cpu" and TE in case.packages:
        return "a GPU"
    return next((name for name in case.packages if not software.has(name)), None)


def chosen(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Return the cases with these names, in their order.

    Raises:
        ValueError: no case has one of the names.
    """
    known = {case.name: case for case in cases}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]}: must be of {', '.join(known)}")
    return [known[name] for name in names]
