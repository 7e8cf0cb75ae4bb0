"""The manifest of a checkpoint, `edit/edit.json`: everything that is not a tensor, and checksums.

Numbers that affect training are written so that they are restored bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_edit.checkpoint.files import REMEDY, FileRecord
from megatron_edit.checkpoint.folder import manifest_path
from megatron_edit.constants import CHECKPOINT_FORMS, FP32
from megatron_edit.errors import UsageError
from megatron_edit.saved_state import ReplicaEntry, SavedRounds, to_builtins

# 2: syncs that land late, wire types; 3: settings; 4: a final phase, exchanged moments,
# loss history; 5: names of replicas, digest; 6: chosen settings, wire type of gradients.
FORMAT, VERSION = "megatron_edit checkpoint", 6
OLDEST = 2  # no release has written version 1


class Manifest(SavedRounds, frozen=True):
    """Everything about a checkpoint that is not a tensor.

    A field with a default may be missing in the file of an older version.

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
        common_steps: Adam's steps before the first local one; None where beta2 is not scaled.
        replicas: one entry per replica.
        round_seconds: length of the last round; timeouts follow from it.
        batch: samples of one step of all replicas; `chunk`: of one micro-batch of a replica.
        order_start: fields of `method.ledger.SampleOrder`, with `displaced`.
        has_anchor: whether the anchor is stored; at a sync it equals the parameters.
        wire: type on the wire, fp32 with a hub. Error-feedback residuals of a lossy one are kept
            for each replica in form `all`.
        gradient_wire: the same for averaged gradients; their residuals are kept for each replica
            while gradients are averaged.
        files: size and checksum by path, from the checkpoint's folder.
        settings: of the run that wrote it, by the names of `EditConfig`'s fields; only to report
            which have changed; empty before version 3.
        digest: of anchor and momentum in an elastic run, as its hub recorded it; else empty.
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
    replicas: tuple[ReplicaEntry, ...]
    batch: int
    chunk: int
    displaced: tuple[tuple[int, int], ...]
    files: Mapping[str, FileRecord]
    order_start: int = 0
    has_anchor: bool = False
    round_seconds: float = 0.0
    wire: str = FP32
    written_by: Mapping[str, str] = {}
    settings: Mapping[str, Any] = {}
    is_final_phase: bool = False
    common_steps: int | None = None
    digest: str = ""
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
        fields: dict[str, Any] = to_builtins(self)
        return fields

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
    if not isinstance(version, int) or not OLDEST <= version <= VERSION:
        raise UsageError(
            str(path),
            f"is of format version {version}, this program reads {OLDEST} to {VERSION}",
            "install a newer megatron_edit" if version not in range(OLDEST) else REMEDY,
        )
    if body.pop("sha256", None) != _checksum(body):
        raise UsageError(str(path), "is not what was saved (its checksum differs)", REMEDY)
    try:
        return _manifest({k: v for k, v in body.items() if k not in ("format", "version")})
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        msgspec.ValidationError,
    ) as error:
        rule = f"is broken: {type(error).__name__} {error}".splitlines()[0]
        raise UsageError(str(path), rule, REMEDY) from error


def _manifest(body: dict[str, Any]) -> Manifest:
    for entry in body["replicas"]:
        entry["losses"] = _numbers(entry["losses"])
        for sync in entry.get("pending", ()):
            sync["tables"] = {name: _numbers(table) for name, table in sync["tables"].items()}
    manifest = msgspec.convert(body, Manifest)
    num_replicas = len(manifest.replicas)
    if manifest.form not in CHECKPOINT_FORMS or num_replicas != manifest.num_replicas:
        raise ValueError(
            f"form {manifest.form}, {num_replicas} of {manifest.num_replicas} replicas"
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
