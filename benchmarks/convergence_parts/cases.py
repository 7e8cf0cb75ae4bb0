"""Immutable descriptions of the runs of the study, and of the questions that they answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any

from frame.gpt import flag_words

from megatron_edit.command_line import config_from_argv
from megatron_edit.errors import UsageError
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.entries import Entry
from megatron_edit.tools.compare.finished import configuration_hash
from megatron_edit.tools.compare.flags import canonical

from .corruption import Corruption

# Version of configurations and results: a new number invalidates all stored runs. A configuration
# holds only the flags that are given, so a changed default also needs a new number.
FORM = 1
MUON = "muon"  # a value of `--optimizer`


@dataclass(frozen=True)
class Size:
    """The model and the length of a run.

    Attributes:
        micro_batch_size: samples per replica and step.
        train_iters: steps.
        eval_interval: steps between two evaluations.
        eval_samples: of each evaluation, for any number of replicas.
        lr: default peak learning rate.
        lr_warmup_iters: steps until the peak.
    """

    num_layers: int = 2
    hidden_size: int = 192
    num_attention_heads: int = 4
    seq_length: int = 64
    vocab_size: int = 1024
    micro_batch_size: int = 8
    train_iters: int = 960
    eval_interval: int = 240
    eval_samples: int = 512
    lr: float = 2e-3
    lr_warmup_iters: int = 48


@dataclass(frozen=True)
class Stage:
    """A part of a run with one number of replicas, and the step after which it ends."""

    num_replicas: int
    until: int


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        strategy: the value of `--edit-strategy`.
        seed: of the initial weights and the data order.
        stages: one, or several connected by checkpoints.
        size: of the model.
        warmup_steps: W.
        tau: sync interval; for A-EDiT, whose rounds are timed, `flags` set the seconds.
        lr: peak learning rate.
        samples_per_step: of all replicas together.
        flags: additional flags, after all others.
        corruption: bad data of one replica.
    """

    strategy: str
    seed: int
    stages: tuple[Stage, ...]
    size: Size
    warmup_steps: int
    tau: int
    lr: float
    samples_per_step: int
    flags: tuple[str, ...] = ()
    corruption: Corruption | None = None

    @property
    def cost(self) -> int:
        """Steps times replicas, as all replicas share the cores."""
        begins = (0, *(stage.until for stage in self.stages))
        samples = self.samples_per_step // self.size.micro_batch_size
        return samples * (begins[-1] - begins[0])

    @property
    def words(self) -> list[str]:
        """Flags of the training script, the same in all stages; without paths."""
        size = self.size
        values = {
            "num-layers": size.num_layers,
            "hidden-size": size.hidden_size,
            "num-attention-heads": size.num_attention_heads,
            "seq-length": size.seq_length,
            "max-position-embeddings": size.seq_length,
            "position-embedding-type": "rope",
            "tokenizer-type": "NullTokenizer",
            "vocab-size": size.vocab_size,
            "make-vocab-size-divisible-by": 64,
            "micro-batch-size": size.micro_batch_size,
            "global-batch-size": self.samples_per_step,
            "train-iters": size.train_iters,
            "lr": self.lr,
            "min-lr": self.lr / 10,
            "lr-decay-style": "cosine",
            "lr-warmup-iters": size.lr_warmup_iters,
            "weight-decay": 0.1,
            "adam-beta2": 0.95,
            "clip-grad": 1.0,
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "seed": self.seed,
            "eval-interval": size.eval_interval,
            "eval-iters": max(1, size.eval_samples // self.samples_per_step),
            "log-interval": 10,
            "num-workers": 0,
            "edit-device": "cpu",
            "edit-warmup-steps": self.warmup_steps,
            "edit-sync-interval": self.tau,
        }
        switches = ["disable-bias-linear"]
        # With it, Megatron shards Muon layer by layer; a replica of one rank has nothing to shard.
        if MUON not in self.flags:
            switches.append("use-distributed-optimizer")
        common = flag_words(values, switches)
        return Entry(self.strategy, self.flags).words(common)

    def configuration(self, corpus: Mapping[str, Any]) -> dict[str, Any]:
        """Return everything that affects the numbers, without paths, for the hash.

        Args:
            corpus: hashes that identify the corpus.
        """
        flags = canonical(self.words)
        # Stored runs with bad data from before the loss check equal new runs with the check off.
        is_unchecked = flags.pop("--edit-no-loss-check", None) is not None
        has_check = STRATEGIES[self.strategy].has_penalty and not is_unchecked
        checked = {"loss_check": True} if self.corruption and has_check else {}
        return {
            "form": FORM,
            **checked,
            "corpus": dict(corpus),
            "flags": flags,
            "stages": [[stage.num_replicas, stage.until] for stage in self.stages],
            "corruption": self.corruption and self.corruption.configuration,
        }

    def hash(self, corpus: Mapping[str, Any]) -> str:
        """Return the hash of the configuration."""
        return configuration_hash(self.configuration(corpus))

    @property
    def refusal(self) -> str:
        """Why this version of the package cannot run it; "" if it can."""
        return _refusal_of(self)

    def stage_words(self, number: int, checkpoints: str) -> list[str]:
        """Return the flags of one stage, with those of its checkpoints.

        Args:
            number: of the stage, from 0.
            checkpoints: folder of the run's checkpoints.
        """
        words = [*self.words, "--edit-num-replicas", str(self.stages[number].num_replicas)]
        if number:
            words += ["--load", checkpoints]
        if number + 1 < len(self.stages):
            end = str(self.stages[number].until)
            words += ["--save", checkpoints, "--save-interval", end, "--exit-interval", end]
        return words


@cache
def _refusal_of(case: Case) -> str:
    if case.strategy not in STRATEGIES:
        return f"no strategy {case.strategy}"
    try:
        config_from_argv(case.words)
    except UsageError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Member:
    """One line of a question's table.

    Attributes:
        label: in tables.
        cases: one per seed.
        base: label of the member that it is compared with; "" for none.
        series: of a sweep: the curve it belongs to.
        place: of a sweep: x value on the axis.
    """

    label: str
    cases: tuple[Case, ...]
    base: str = ""
    series: str = ""
    place: float = 0.0


@dataclass(frozen=True)
class Question:
    """A question of the study, and the members that are compared.

    Attributes:
        name: on the command line.
        title: on the page.
        members: lines of the table.
        axis: of a sweep: name of the x axis; "" for other questions.
    """

    name: str
    title: str
    members: tuple[Member, ...]
    axis: str = ""

    @property
    def cases(self) -> Iterator[Case]:
        """Yield all runs: all members with the first seed, then with the next."""
        for cases in zip_longest(*(member.cases for member in self.members)):
            yield from (case for case in cases if case is not None)
