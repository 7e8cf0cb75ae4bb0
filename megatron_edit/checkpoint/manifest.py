"""The manifest of a checkpoint, `edit/edit.json`: everything that is not a tensor, and checksums.

Numbers that affect training are written so that they are restored bit for bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_edit.checkpoint.files import REMEDY, FileRecord
from megatron_edit.checkpoint.folder import manifest_path
from megatron_edit.constants import CHECKPOINT_FORMS, FP32
from megatron_edit.errors import UsageError
from megatron_edit.saved_state import PendingSync, ReplicaEntry

# 2: syncs that land late, wire types; 3: settings; 4: a final phase, exchanged moments,
# loss history; 5: names of replicas, digest; 6: chosen settings, wire type of gradients.
FORMAT, VERSION = "megatron_edit checkpoint", 6
KEYS = {"replicas_identical": "is_level"}  # fields with another name in the file


@dataclass(frozen=True)
class Ledger:
    """The saved fields of `method.ledger.BlockAssignment`."""

    target: int
    frontier: int
    holes: tuple[int, ...]
    quotas: tuple[int, ...] | None


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint that is not a tensor.

    Attributes:
        iteration: in complete global batches.
        form: `all`, or `leader`.
        strategy: of the run that saved.
        num_replicas: N. `ranks_per_replica`: K.
        parallel: sizes of Megatron's parallel groups of a replica.
        model: arguments that must be equal on resume (`host.checkpoint.choosing`).
        units: names, in forward order.
        is_warmup: whether gradients were averaged at every step: there is no outer state.
        is_final_phase: whether this was in the final synchronous phase, not in the warm-up.
        first_loss: F_0 of `method.schedule.RoundStart`; None where it is not used.
        common_steps: Adam's steps before the first local one; None where beta2 is not scaled.
        replicas: one entry per replica.
        detectors: fields of `method.detector.DetectorState`, lists [N][U].
        round_seconds: length of the last round; timeouts follow from it.
        ledger: of a strategy with timed rounds (A-EDiT); else None.
        batch: samples of one step of all replicas; `chunk`: of one micro-batch of a replica.
        order_start: fields of `method.ledger.SampleOrder`, with `displaced`.
        has_anchor: whether the anchor is stored; at a sync it equals the parameters.
        replicas_identical: whether all replicas held the anchor in all units when the round began.
        unit_steps: lists [N][U], steps since a unit's own last sync, as of the last meeting.
        wire: type on the wire. Error-feedback residuals of a lossy one are kept for each replica
            in form `all`.
        gradient_wire: the same for averaged gradients; their residuals are kept for each replica
            while gradients are averaged.
        files: size and checksum by path, from the checkpoint's folder.
        settings: of the run that wrote it, by the names of `EditConfig`'s fields; only to report
            which have changed. Empty where an older version wrote it.
        loss_history: fields of `method.loss_check.LossHistory`, lists [N]. Empty where an older
            version wrote it.
        members: names of the replicas; empty where an older version wrote it.
        digest: of anchor and momentum in an elastic run, as its hub recorded it; else empty.
        choice: fields of `method.auto.AutoChoice`; None where nothing was chosen.
        exposed, leaves_prediction: see `engine.plan.RoundState`.
    """

    iteration: int
    form: str
    strategy: str
    num_replicas: int
    ranks_per_replica: int
    parallel: Mapping[str, int]
    model: Mapping[str, Any]
    units: tuple[str, ...]
    is_warmup: bool
    round: int
    replicas: tuple[ReplicaEntry, ...]
    detectors: Mapping[str, list[list[float]]]
    batch: int
    chunk: int
    ledger: Ledger | None = None
    order_start: int = 0
    displaced: tuple[tuple[int, int], ...] = ()
    has_anchor: bool = False
    round_seconds: float = 0.0
    replicas_identical: bool = True
    unit_steps: tuple[tuple[int, ...], ...] = ()
    wire: str = FP32
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    written_by: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_final_phase: bool = False
    first_loss: float | None = None
    common_steps: int | None = None
    loss_history: Mapping[str, list[float]] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    digest: str = ""
    choice: Mapping[str, Any] | None = None
    exposed: tuple[float, ...] = ()
    leaves_prediction: bool = False
    gradient_wire: str = FP32

    @property
    def is_mid_round(self) -> bool:
        """Whether the replicas differed: they had made steps since the last sync of all units, or
        that sync had not set their parameters to the anchor."""
        has_steps = any(entry.inner_steps for entry in self.replicas)
        return not self.is_warmup and (has_steps or not self.replicas_identical)

    @property
    def samples(self) -> int:
        """Samples consumed by all replicas together."""
        return sum(entry.samples for entry in self.replicas)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by their names in the file."""
        return {KEYS.get(name, name): value for name, value in dataclasses.asdict(self).items()}

    def text(self) -> str:
        """Return the manifest as JSON, with its checksum."""
        body = _without_nan({"format": FORMAT, "version": VERSION, **self.as_dict()})
        return json.dumps({**body, "sha256": _checksum(body)}, indent=1) + "\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        UsageError: it is missing, damaged, of another program or of a newer format.
    """
    path = manifest_path(checkpoint)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(str(path), f"cannot be read ({error.strerror})", REMEDY) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(str(path), "is broken: it is not JSON", REMEDY) from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UsageError(str(path), f"is not the manifest of a {FORMAT}", REMEDY)
    version = body.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise UsageError(
            str(path),
            f"is of format version {version}, this program reads up to {VERSION}",
            "install a newer megatron_edit",
        )
    if body.pop("sha256", None) != _checksum(body):
        raise UsageError(str(path), "is not what was saved (its checksum differs)", REMEDY)
    try:
        return _manifest({k: v for k, v in body.items() if k not in ("format", "version")})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UsageError(str(path), f"is broken: {_one_line(error)}", REMEDY) from error


def _manifest(body: dict[str, Any]) -> Manifest:
    ledger = body.get("ledger")
    if ledger is not None:
        quotas = ledger["quotas"]
        ledger = Ledger(
            **ledger
            | {"holes": tuple(ledger["holes"]), "quotas": None if quotas is None else tuple(quotas)}
        )
    body = {k: v for k, v in body.items() if k not in ("pending", "residuals")}  # of version 1
    if unknown := KEYS.keys() & body.keys():
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
    body |= {name: body.pop(key) for name, key in KEYS.items() if key in body}
    replicas = tuple(
        ReplicaEntry(
            **entry
            | {
                "losses": tuple(_numbers(entry["losses"])),
                "pending": tuple(_pending(each) for each in entry.get("pending", ())),
            }
        )
        for entry in body["replicas"]
    )
    manifest = Manifest(
        **body
        | {
            "ledger": ledger,
            "replicas": replicas,
            "units": tuple(body["units"]),
            "settings": dict(body.get("settings", {})),
            "displaced": tuple((int(a), int(b)) for a, b in body["displaced"]),
            "unit_steps": tuple(map(tuple, body.get("unit_steps", ()))),
            "members": tuple(body.get("members", ())),
            "exposed": tuple(_numbers(body.get("exposed", ()))),
            "files": {name: FileRecord(**record) for name, record in body["files"].items()},
        }
    )
    if manifest.form not in CHECKPOINT_FORMS or len(replicas) != manifest.num_replicas:
        raise ValueError(
            f"form {manifest.form}, {len(replicas)} of {manifest.num_replicas} replicas"
        )
    return manifest


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _without_nan(value: Any) -> Any:
    """Replace NaN by None and infinities by strings: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def _numbers(values: list[Any]) -> list[Any]:
    """Inverse of `_without_nan` for lists of floats, including nested ones."""
    return [
        _numbers(value) if isinstance(value, list) else math.nan if value is None else float(value)
        for value in values
    ]


def _pending(entry: dict[str, Any]) -> PendingSync:
    lists = {name: tuple(entry[name]) for name in ("units", "excluded", "inner_steps", "samples")}
    tables = {name: _numbers(table) for name, table in entry["tables"].items()}
    moments = {"moments": tuple(entry.get("moments", ()))}
    return PendingSync(**entry | lists | moments | {"tables": tables})


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__} {error}".splitlines()[0]
