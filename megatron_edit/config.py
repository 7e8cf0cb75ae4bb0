"""Every setting of the plugin: name, default, range and flag, each written once.

`EditConfig` is the resolved configuration. Its fields carry the text of their flags, from which
`add_arguments` builds the `--edit-*` group, for our own parser (`command_line`) and Megatron's.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_edit.errors import UsageError
from megatron_edit.method.strategy import STRATEGIES

AUTO = "auto"
_WITHOUT_DEFAULT = ("num_replicas", "replica_id")
# Settings that only one strategy, or all but one, look at.
_ONLY_TIMED = ("sync_seconds", "min_round_steps", "step_weight")
_ONLY_COUNTED = ("sync_interval",)


def _auto_or_float(text: str) -> float | None:
    return None if text == AUTO else float(text)


def _setting(default: Any, doc: str, *, kind: Any = None, only: Iterable[Any] | None = None) -> Any:
    """A field with its flag.

    Args:
        default: the value when the flag is not given.
        doc: help text, with unit and range.
        kind: converter of the flag's text; None for a switch.
        only: the values that this version supports; any other is refused, never ignored.
    """
    metadata = {"doc": doc, "kind": kind, "only": None if only is None else tuple(only)}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EditConfig:
    """Settings of EDiT. Construction checks ranges and relations.

    Raises:
        UsageError: a value is out of range or not supported by this version.
    """

    use_edit: bool = _setting(False, "train with EDiT replicas")
    num_replicas: int | None = _setting(
        None, "N, replicas of the model (default: nodes of the launch, if more than 1)", kind=int
    )
    replica_id: int | None = _setting(
        None, "which replica this launch is, 0..N-1 (one launch per replica)", kind=int
    )
    rendezvous: str | None = _setting(
        None, "HOST:PORT where replica 0 listens for the others (one launch per replica)", kind=str
    )
    strategy: str = _setting("edit", "how replicas are synchronised", kind=str, only=STRATEGIES)
    warmup_steps: int = _setting(
        1000, "W, synchronous steps before the replicas part; >= 0", kind=int
    )
    sync_interval: int = _setting(128, "tau, inner steps between two syncs; >= 1", kind=int)
    sync_seconds: float = _setting(
        600.0, "a-edit: tau_time, seconds between two syncs; > 0", kind=float
    )
    min_round_steps: int = _setting(
        100, "a-edit: steps of all replicas below which a round is extended; >= 0", kind=int
    )
    step_weight: float = _setting(
        0.0, "a-edit: rho, share of the step counts in the weights; in [0, 1]", kind=float
    )
    outer_lr: float = _setting(0.8, "nu, outer learning rate; > 0", kind=float)
    outer_momentum: float = _setting(0.85, "mu_o, outer Nesterov momentum; in [0, 1)", kind=float)
    anomaly_threshold: float = _setting(
        3.0, "delta, standard deviations above the mean norm; > 0", kind=float
    )
    anomaly_alpha: float = _setting(
        0.02, "weight of the newest norm in the statistics; in (0, 1]", kind=float
    )
    anomaly_warmup_syncs: int = _setting(
        20, "accepted syncs before a detector is armed; >= 0", kind=int
    )
    anomaly_patience: int = _setting(
        3, "rejections in a row before a norm is accepted again; >= 0", kind=int
    )
    clip: float = _setting(10.0, "phi, largest norm of a unit's averaged update; > 0", kind=float)
    weight_temperature: float | None = _setting(
        None, "T of the weights softmax(-norm / T); > 0, or auto", kind=_auto_or_float
    )
    no_anomaly: bool = _setting(
        False, "switch anomaly elimination off (norms that are not finite are still left out)"
    )
    no_weighting: bool = _setting(False, "weigh all accepted replicas alike")
    no_clip: bool = _setting(False, "switch the clip off")
    sync_mode: str = _setting(
        AUTO,
        "where the exchange happens: auto, overlap (in the forward pass), blocking",
        kind=str,
        only=(AUTO, "overlap", "blocking"),
    )
    prefetch_units: int = _setting(2, "units staged ahead (gloo sends one at a time)", kind=int)
    fragments: int = _setting(
        1, "F, groups of units synced at staggered steps", kind=int, only=(1,)
    )
    delay_steps: int = _setting(
        0, "d, steps between the start of a sync and its landing", kind=int, only=(0,)
    )
    mix: float = _setting(
        0.0, "share of the local parameters kept at a delayed landing", kind=float, only=(0.0,)
    )
    offload: bool = _setting(False, "keep anchor and momentum in (pinned) host memory")
    sync_dtype: str = _setting("fp32", "type on the wire", kind=str, only=("fp32",))
    digest_interval: int = _setting(10, "syncs between two drift checks; >= 1", kind=int)
    log_dir: str | None = _setting(None, "folder of the event files", kind=str)
    inner_state: str = _setting(
        "all",
        "whose inner optimizer state a checkpoint holds: all (every replica's: resume is exact), "
        "leader (replica 0's; saves wait for a sync), reset (like leader; moments start anew)",
        kind=str,
        only=("all", "leader", "reset"),
    )
    timeout_seconds: float | None = _setting(
        None,
        "longest wait at a sync, seconds; > 0, or auto = max(600, 4 x the last round)",
        kind=_auto_or_float,
    )
    interval: str = _setting("fixed", "schedule of the sync interval", kind=str, only=("fixed",))
    qsr_a: float | None = _setting(None, "a of the qsr schedule", kind=float, only=(None,))
    co2_gap: float = _setting(1.0, "Lambda of co2", kind=float, only=(1.0,))
    co2_clip: float | None = _setting(None, "phi_m of co2", kind=float, only=(None,))
    device: str = _setting(
        AUTO,
        "auto, cpu or cuda; auto takes CUDA where there is one",
        kind=str,
        only=(AUTO, "cpu", "cuda"),
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            _check_supported(spec, getattr(self, spec.name))
        self._check_ranges()
        self._check_strategy()
        self._check_launch()

    def _check_ranges(self) -> None:
        _at_least("num_replicas", self.num_replicas, 1)
        _at_least("replica_id", self.replica_id, 0)
        _at_least("warmup_steps", self.warmup_steps, 0)
        _at_least("sync_interval", self.sync_interval, 1)
        _at_least("min_round_steps", self.min_round_steps, 0)
        _at_least("digest_interval", self.digest_interval, 1)
        _at_least("prefetch_units", self.prefetch_units, 1)
        _at_least("anomaly_warmup_syncs", self.anomaly_warmup_syncs, 0)
        _at_least("anomaly_patience", self.anomaly_patience, 0)
        for name in ("sync_seconds", "outer_lr", "anomaly_threshold", "clip",
                     "weight_temperature", "timeout_seconds"):  # fmt: skip
            _within(name, getattr(self, name), "above 0", lambda x: x > 0)
        _within("step_weight", self.step_weight, "in [0, 1]", lambda x: 0 <= x <= 1)
        _within("outer_momentum", self.outer_momentum, "in [0, 1)", lambda x: 0 <= x < 1)
        _within("anomaly_alpha", self.anomaly_alpha, "in (0, 1]", lambda x: 0 < x <= 1)

    def _check_strategy(self) -> None:
        is_timed = STRATEGIES[self.strategy].is_timed
        for name in _ONLY_COUNTED if is_timed else _ONLY_TIMED:
            value = getattr(self, name)
            if value != self.__dataclass_fields__[name].default:
                raise UsageError(
                    f"{flag(name)} {value}",
                    f"has no effect with {flag('strategy')} {self.strategy}",
                    f"use {flag('strategy')} {'edit' if is_timed else 'a-edit'}, or drop the flag",
                )

    def _check_launch(self) -> None:
        if (self.replica_id is None) != (self.rendezvous is None):
            given, missing = ("replica_id", "rendezvous")
            if self.replica_id is None:
                given, missing = missing, given
            raise UsageError(
                f"{flag(given)} {getattr(self, given)}",
                f"one launch per replica also needs {flag(missing)}",
                f"add {flag(missing)}, or drop {flag(given)} for a single launch of all replicas",
            )
        if self.replica_id is not None and self.num_replicas is None:
            raise UsageError(
                f"{flag('replica_id')} {self.replica_id}",
                f"one launch per replica also needs {flag('num_replicas')}",
                f"add {flag('num_replicas')} N",
            )
        if self.replica_id is not None and self.replica_id >= (self.num_replicas or 0):
            raise UsageError(
                f"{flag('replica_id')} {self.replica_id}",
                f"must be below {flag('num_replicas')} {self.num_replicas}",
                "number the launches from 0",
            )
        if self.rendezvous is not None:
            parse_endpoint(self.rendezvous)


def flag(name: str) -> str:
    """The command-line flag of a field of `EditConfig`."""
    return "--use-edit" if name == "use_edit" else "--edit-" + name.replace("_", "-")


def attribute(name: str) -> str:
    """The attribute that argparse gives a field of `EditConfig`."""
    return flag(name)[2:].replace("-", "_")


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``.

    Raises:
        UsageError: it is not of that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{flag('rendezvous')} {text}", "must be HOST:PORT", "give e.g. node0:29400"
        )
    return host, int(port)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--use-edit` and `--edit-*` flags to a parser and return it."""
    group = parser.add_argument_group("EDiT (megatron_edit)")
    for spec in dataclasses.fields(EditConfig):
        doc = f"{spec.metadata['doc']} (default: {shown(spec.default)})".replace("%", "%%")
        if spec.metadata["kind"] is None:
            group.add_argument(flag(spec.name), action="store_true", help=doc)
        else:
            group.add_argument(
                flag(spec.name), type=spec.metadata["kind"], default=spec.default, help=doc
            )
    return parser


def _check_supported(spec: dataclasses.Field[Any], value: Any) -> None:
    only = spec.metadata["only"]
    if only is None or value in only:
        return
    allowed = ", ".join(shown(v) for v in only)
    raise UsageError(
        f"{flag(spec.name)} {shown(value)}",
        f"this version supports only: {allowed}",
        f"use one of these, or leave {flag(spec.name)} out",
    )


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        remedy = "give a larger value" if name in _WITHOUT_DEFAULT else _default_of(name)
        raise UsageError(f"{flag(name)} {value}", f"must be at least {least}", remedy)


def _within(name: str, value: float | None, rule: str, holds: Any) -> None:
    if value is not None and not (math.isfinite(value) and holds(value)):
        raise UsageError(
            f"{flag(name)} {value}", f"must be a finite number {rule}", _default_of(name)
        )


def _default_of(name: str) -> str:
    default = EditConfig.__dataclass_fields__[name].default
    return f"the default is {shown(default)}"


def shown(value: Any) -> str:
    """A value as people write it on the command line."""
    return AUTO if value is None else str(value)
