"""The contents of `run.json`, checked before anything is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_edit.constants import FIXED
from megatron_edit.errors import to_one_line
from megatron_edit.method.strategy import STRATEGIES, Strategy
from megatron_edit.observe.records import as_count, as_number
from megatron_edit.tools.compare.flags import int_flag

USUAL_EVAL_ITERS = 100  # Megatron's
MAX_REPLICAS = 100_000  # far above any real run; each takes some kilobytes of memory
_USED_SETTINGS: Mapping[str, Callable[[Any], Any]] = {
    "sync_interval": as_count, "sync_seconds": as_number, "delay_steps": as_count,
    "anomaly_threshold": as_number, "no_anomaly": bool, "no_clip": bool,
}  # fmt: skip


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumed from."""

    iteration: int  # under A-EDiT the step of replica 0
    samples: int  # consumed by all replicas


@dataclass(frozen=True)
class Facts:
    """The contents of `run.json`. Sizes are None in files of older versions."""

    config: Mapping[str, Any]  # those that `--edit-auto` chose last are as chosen
    strategy: Strategy
    num_replicas: int  # in an elastic run how many it begins with
    ranks_per_replica: int
    device: str
    host: str
    warmup_steps: int  # 0 where the warm-up never ends
    num_choices: int | None  # how often `--edit-auto` has chosen settings; None without it
    versions: Mapping[str, str]
    argv: tuple[str, ...]
    train_iters: int | None
    last_local_step: int | None  # before the final synchronous phase; None without one
    batch_size: int | None
    seq_length: int | None
    inside_bytes: float | None  # sent inside a replica per step
    has_segment: bool  # such runs also write end records
    resumed_from: ResumePoint | None

    @property
    def sync_interval(self) -> int:
        """tau, steps."""
        return int(self.config["sync_interval"])

    @property
    def delay_steps(self) -> int:
        """d, steps."""
        return int(self.config["delay_steps"])

    @property
    def is_elastic(self) -> bool:
        """Whether the run has a hub: replicas have names, and come and go."""
        return self.config.get("hub") is not None

    @property
    def has_unequal_steps(self) -> bool:
        """Whether replicas make unequal numbers of steps, so that samples give the position."""
        return self.strategy.is_timed or self.is_elastic

    @property
    def has_one_loss_per_round(self) -> bool:
        """Whether `loss.jsonl` has one line for each round after the warm-up."""
        return self.has_unequal_steps or self.config.get("interval", FIXED) != FIXED

    @property
    def is_plotted_by_samples(self) -> bool:
        """Whether charts are by samples of all replicas; older files do not have them."""
        return self.has_unequal_steps and self.has_segment

    @property
    def batch_tokens(self) -> int | None:
        """Tokens of an iteration of all replicas."""
        known = self.batch_size and self.seq_length
        return self.batch_size * self.seq_length if known else None  # type: ignore[operator]

    @property
    def eval_iters(self) -> int:
        """Batches of an evaluation."""
        try:
            return int_flag(self.argv, "--eval-iters")
        except (KeyError, ValueError):
            return USUAL_EVAL_ITERS

    @classmethod
    def of(cls, text: str) -> Facts:
        """Parse the text of the file.

        Raises:
            ValueError: not a `run.json` of this package; the message names the field.
        """
        try:
            found = _mapping(json.loads(text))
        except RecursionError:
            raise ValueError("nested too deeply") from None
        config, topology, versions = (
            _get(found, name, _mapping) for name in ("config", "topology", "versions")
        )
        choices = _get({"choices": [], **found}, "choices", _choices)
        config = {**config, **(choices[-1] if choices else {})}
        config |= {name: _get(config, name, read) for name, read in _USED_SETTINGS.items()}
        sizes = _get({"training": {}, **found}, "training", _mapping)
        strategy = _get(config, "strategy", _strategy)
        last_local_step = _get_or_none(sizes, "last_local_step", as_count)
        return cls(
            config=config,
            strategy=strategy,
            num_replicas=_get(topology, "num_replicas", _num_replicas),
            ranks_per_replica=_get(topology, "ranks_per_replica", partial(as_count, least=1)),
            device=_get(topology, "device", _text),
            host=_text(topology.get("host", "unknown")),
            warmup_steps=0 if strategy.endless_warmup else _get(config, "warmup_steps", as_count),
            num_choices=len(choices) if config.get("auto") else None,
            versions={name: _text(version) for name, version in versions.items()},
            argv=_get(found, "argv", _words),
            train_iters=_get_or_none(sizes, "train_iters", as_count),
            last_local_step=last_local_step if config.get("final_sync_fraction") else None,
            batch_size=_get_or_none(sizes, "global_batch_size", as_count),
            seq_length=_get_or_none(sizes, "seq_length", as_count),
            inside_bytes=_get_or_none(sizes, "inside_bytes_per_step", as_number),
            has_segment=found.get("segment") is not None,
            resumed_from=_get_or_none(found, "segment", _resumed_from),
        )


def _get[T](found: Mapping[str, Any], name: str, read: Callable[[Any], T]) -> T:
    if name not in found:
        raise ValueError(f"no {name}")
    try:
        return read(found[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _get_or_none[T](found: Mapping[str, Any], name: str, read: Callable[[Any], T]) -> T | None:
    return None if found.get(name) is None else _get(found, name, read)


def _resumed_from(value: Any) -> ResumePoint | None:
    point = _mapping(value).get("resumed_from")
    if point is None:
        return None
    return ResumePoint(
        *(_get(_mapping(point), name, as_count) for name in ("iteration", "samples"))
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("no list")
    return value


def _choices(value: Any) -> list[Mapping[str, Any]]:
    """Return the settings that `--edit-auto` has chosen, in this order."""
    return [_get(_mapping(choice), "settings", _mapping) for choice in _list(value)]


def _words(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, _list(value)))


def _strategy(value: Any) -> Strategy:
    if not isinstance(value, str) or value not in STRATEGIES:
        raise ValueError("unknown strategy")
    return STRATEGIES[value]


def _num_replicas(value: Any) -> int:
    if (number := as_count(value, 1)) > MAX_REPLICAS:
        raise ValueError(f"above {MAX_REPLICAS}")
    return number


def _text(value: Any) -> str:
    """Return text that can be shown: surrogate escapes of invalid bytes are replaced."""
    return to_one_line(str(value))
