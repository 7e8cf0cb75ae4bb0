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


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumed from.

    Attributes:
        iteration: of the checkpoint; under A-EDiT the step of replica 0.
        samples: consumed by all replicas together until then.
    """

    iteration: int
    samples: int


@dataclass(frozen=True)
class Facts:
    """The contents of `run.json`. Sizes are None in files of older versions.

    Attributes:
        config: all settings; those that `--edit-auto` chose last are as chosen.
        strategy: the sync strategy.
        num_replicas: N; in an elastic run how many it begins with.
        is_elastic: whether the run has a hub: replicas have names, and come and go.
        ranks_per_replica: K.
        device: of the parameters.
        host: name of a machine.
        warmup_steps: W; 0 where the warm-up never ends.
        sync_interval: tau, steps.
        sync_seconds: tau_time.
        delay_steps: d.
        anomaly_threshold: delta, standard deviations.
        num_choices: how often `--edit-auto` has chosen settings; None where they are given.
        has_varying_rounds: whether the sync interval changes during training.
        has_anomaly, has_clip: whether replicas can be left out, and averages clipped.
        versions: of the packages that affect the numbers.
        argv: the command line.
        eval_iters: batches of an evaluation, Megatron's default where not given.
        train_iters: `--train-iters`.
        last_local_step: the last step before the final synchronous phase; None where there is no
            such phase.
        batch_size: global, samples.
        seq_length: tokens of a sample.
        inside_bytes: bytes sent inside a replica per step.
        has_segment: whether the file has `segment`; such runs also write end records.
        resumed_from: None for a run that was not resumed, or an older file.
    """

    config: Mapping[str, Any]
    strategy: Strategy
    num_replicas: int
    is_elastic: bool
    ranks_per_replica: int
    device: str
    host: str
    warmup_steps: int
    sync_interval: int
    sync_seconds: float
    delay_steps: int
    anomaly_threshold: float
    num_choices: int | None
    has_varying_rounds: bool
    has_anomaly: bool
    has_clip: bool
    versions: Mapping[str, str]
    argv: tuple[str, ...]
    eval_iters: int
    train_iters: int | None
    last_local_step: int | None
    batch_size: int | None
    seq_length: int | None
    inside_bytes: float | None
    has_segment: bool
    resumed_from: ResumePoint | None

    @property
    def has_unequal_steps(self) -> bool:
        """Whether replicas make unequal numbers of steps, so that samples give the position."""
        return self.strategy.is_timed or self.is_elastic

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
        sizes = _get({"training": {}, **found}, "training", _mapping)
        strategy = _get(config, "strategy", _strategy)
        positive = partial(as_count, least=1)
        return cls(
            config=config,
            strategy=strategy,
            num_replicas=_get(topology, "num_replicas", _num_replicas),
            is_elastic=config.get("hub") is not None,
            ranks_per_replica=_get(topology, "ranks_per_replica", positive),
            device=_get(topology, "device", _text),
            host=_text(topology.get("host", "unknown")),
            warmup_steps=0 if strategy.endless_warmup else _get(config, "warmup_steps", as_count),
            sync_interval=_get(config, "sync_interval", as_count),
            sync_seconds=_get(config, "sync_seconds", as_number),
            delay_steps=_get(config, "delay_steps", as_count),
            anomaly_threshold=_get(config, "anomaly_threshold", as_number),
            num_choices=len(choices) if config.get("auto") else None,
            has_varying_rounds=config.get("interval", FIXED) != FIXED,
            has_anomaly=not _get(config, "no_anomaly", bool),
            has_clip=not _get(config, "no_clip", bool),
            versions={name: _text(version) for name, version in versions.items()},
            argv=_get(found, "argv", _words),
            eval_iters=_eval_iters(_get(found, "argv", _words)),
            train_iters=_size(sizes, "train_iters", as_count),
            last_local_step=(
                _size(sizes, "last_local_step", as_count)
                if config.get("final_sync_fraction")
                else None
            ),
            batch_size=_size(sizes, "global_batch_size", as_count),
            seq_length=_size(sizes, "seq_length", as_count),
            inside_bytes=_size(sizes, "inside_bytes_per_step", as_number),
            has_segment=found.get("segment") is not None,
            resumed_from=_size(found, "segment", _resumed_from),
        )


def _resumed_from(value: Any) -> ResumePoint | None:
    point = _mapping(value).get("resumed_from")
    if point is None:
        return None
    return ResumePoint(
        *(_get(_mapping(point), name, as_count) for name in ("iteration", "samples"))
    )


def _get[T](found: Mapping[str, Any], name: str, read: Callable[[Any], T]) -> T:
    if name not in found:
        raise ValueError(f"no {name}")
    try:
        return read(found[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _size[T](sizes: Mapping[str, Any], name: str, read: Callable[[Any], T]) -> T | None:
    return None if sizes.get(name) is None else _get(sizes, name, read)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _choices(value: Any) -> list[Mapping[str, Any]]:
    """Return the settings that `--edit-auto` has chosen, in this order."""
    if not isinstance(value, list):
        raise ValueError("no list")
    return [_get(_mapping(choice), "settings", _mapping) for choice in value]


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("no list")
    return tuple(_text(word) for word in value)


def _eval_iters(argv: tuple[str, ...]) -> int:
    try:
        return int_flag(argv, "--eval-iters")
    except (KeyError, ValueError):
        return USUAL_EVAL_ITERS


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
