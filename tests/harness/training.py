"""Training of tiny GPTs in tests: command line, run, and parsing of Megatron's output."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.launch import REPOSITORY, RankResult, run_ranks

# Flags of Megatron and EDiT, by their names in `args`.
Flags = dict[str, Any]

_TINY: Flags = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 10,
    "eval_interval": 1000,
    "eval_iters": 0,
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "log_interval": 1,
    "mock_data": True,
    "num_workers": 0,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 127,  # the tokenizer adds one for the end of a document
    "make_vocab_size_divisible_by": 64,
    "use_distributed_optimizer": True,
}
_ITERATION = re.compile(r"^.*?\biteration\s+(\d+)/\s*\d+ \|(.*)$", re.MULTILINE)
_VALIDATION = re.compile(
    r"validation loss at iteration (\d+)[^|]*\| lm loss value: ([-+.\w]+)", re.MULTILINE
)


@dataclass
class TrainResult:
    """Megatron's printed values by iteration, and how each rank ended."""

    ranks: list[RankResult]
    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    lr: dict[int, float] = field(default_factory=dict)
    consumed_samples: dict[int, int] = field(default_factory=dict)
    valid_losses: dict[int, float] = field(default_factory=dict)


def tiny_gpt(**overrides: Any) -> list[str]:
    """Return flags of a tiny GPT in fp32; `overrides` replaces them by name, with underscores.

    True gives a flag without value; False and None drop it; a list gives several values.
    """
    argv = []
    for name, value in (_TINY | overrides).items():
        if value is None or value is False:
            continue
        argv.append("--" + name.replace("_", "-"))
        if value is not True:
            values = value if isinstance(value, list | tuple) else [value]
            argv.extend(str(v) for v in values)
    return argv


def train(
    argv: list[str],
    world_size: int,
    *,
    script: str | Path = "scripts/pretrain_gpt.py",
    before: str | None = None,
    timeout: float = 120,
    grace: float = 15,
    env: dict[str, str | None] | None = None,
    check: bool = True,
    cwd: Path | None = None,
) -> TrainResult:
    """Run a Megatron pretraining script through the launcher, in `world_size` ranks.

    Args:
        argv: the script's flags, as `tiny_gpt` returns them.
        script: path of the script, relative to the repository or absolute.
        before: ``"module:function"``, called first in every rank.
        grace: seconds until the other ranks are killed once a rank has failed.
        check: fail if a rank does not exit with 0.
        cwd: working directory of the ranks; None: a new folder.
    """
    ranks = run_ranks(
        "tests.harness.ranks:train_main",
        world_size,
        (str(REPOSITORY / script), argv, before),
        env=env,
        timeout=timeout,
        grace=grace,
        check=check,
        cwd=cwd,
    )
    return parse_console(ranks)


def parse_console(ranks: list[RankResult]) -> TrainResult:
    """Parse the log lines that Megatron prints."""
    result = TrainResult(ranks)
    series: dict[str, dict[int, float]] = {
        "lm loss": result.losses,
        "grad norm": result.grad_norms,
        "learning rate": result.lr,
    }
    for rank in ranks:
        for iteration, line in _ITERATION.findall(rank.stdout):
            values = dict(part.split(":", 1) for part in line.split("|") if ":" in part)
            values = {name.strip(): value.strip() for name, value in values.items()}
            for name, by_iteration in series.items():
                if name in values:
                    by_iteration[int(iteration)] = float(values[name])
            if "consumed samples" in values:
                result.consumed_samples[int(iteration)] = int(values["consumed samples"])
        for iteration, loss in _VALIDATION.findall(rank.stdout):
            result.valid_losses[int(iteration)] = float(loss)
    return result
