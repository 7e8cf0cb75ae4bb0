"""The manifest of a checkpoint: it is read bit for bit as written, or refused in one line."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields, replace

from megatron_edit.checkpoint import files as on_disk
from megatron_edit.checkpoint.files import FileRecord
from megatron_edit.checkpoint.folder import manifest_path
from megatron_edit.checkpoint.manifest import OLDEST, VERSION, Manifest, read_manifest
from megatron_edit.errors import UsageError
from megatron_edit.saved_state import Ledger, PendingSync, ReplicaEntry

repeatable = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # each example writes a new file
)
WHOLE = st.integers(0, 2**63 - 1)
REAL = st.floats(allow_nan=False, allow_infinity=False)
RANGES = st.lists(st.tuples(WHOLE, WHOLE), max_size=3).map(tuple)
LATER = {field.name: ... for field in fields(ReplicaEntry) if field.default is not NODEFAULT}
ANY_REAL = st.floats(allow_nan=True)
TABLE = st.lists(st.lists(ANY_REAL, max_size=2), max_size=2)
PENDING = st.builds(
    PendingSync,
    due=st.none() | WHOLE,
    units=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    landing=st.fixed_dictionaries({"delay": WHOLE, "mix": REAL, "keeps_progress": st.booleans()}),
    inner_lr=REAL,
    tables=st.fixed_dictionaries({"norms": TABLE, "rollback": st.lists(ANY_REAL, max_size=2)}),
)
ENTRIES = st.builds(  # every field, also those with defaults
    ReplicaEntry,
    **LATER
    | {
        "phase_seconds": REAL,
        "last_step_seconds": REAL,
        "pending": st.lists(PENDING, max_size=2).map(tuple),
    },
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draw any manifest that a run can write."""
    num, units = draw(st.integers(1, 3)), draw(st.lists(st.text(max_size=5), max_size=2))
    row: dict[str, Any] = {"min_size": len(units), "max_size": len(units)}
    table: dict[str, Any] = {"min_size": num, "max_size": num}
    names, values = ("mean", "variance", "updates", "accepted", "rejected"), (REAL, WHOLE)
    return Manifest(
        iteration=draw(WHOLE),
        form=draw(st.sampled_from(["all", "leader"])),
        strategy=draw(st.text(max_size=8)),
        num_replicas=num,
        ranks_per_replica=draw(WHOLE),
        parallel=draw(st.dictionaries(st.text(max_size=4), WHOLE, max_size=2)),
        model=draw(st.dictionaries(st.text(max_size=4), st.none() | WHOLE | REAL, max_size=2)),
        units=tuple(units),
        is_warmup=draw(st.booleans()),
        round=draw(WHOLE),
        replicas=tuple(draw(st.lists(ENTRIES, **table))),
        detectors={
            name: draw(st.lists(st.lists(values[i > 1], **row), **table))
            for i, name in enumerate(names)
        },
        batch=draw(WHOLE),
        chunk=draw(WHOLE),
        ledger=draw(st.none() | st.builds(Ledger)),
        order_start=draw(WHOLE),
        displaced=draw(RANGES),
        has_anchor=draw(st.booleans()),
        replicas_identical=draw(st.booleans()),
        unit_steps=draw(st.lists(st.lists(WHOLE, max_size=2), max_size=2)),
        wire=draw(st.text(max_size=4)),
        files={"a/b": FileRecord(draw(WHOLE), "00ff")},
        written_by={"megatron_edit": draw(st.text(max_size=5))},
        settings=draw(st.dictionaries(st.text(max_size=4), st.none() | WHOLE, max_size=2)),
        loss_history={"mean": draw(st.lists(REAL, **table))},
        choice=draw(st.none() | st.dictionaries(st.text(max_size=4), WHOLE | REAL, max_size=2)),
        exposed=tuple(draw(st.lists(REAL, max_size=3))),
        leaves_prediction=draw(st.booleans()),
    )


SMALL = Manifest(
    iteration=128,
    form="all",
    strategy="a-edit",
    num_replicas=2,
    ranks_per_replica=1,
    parallel={"tensor": 1},
    model={"layers": 2, "eps": 1e-05},
    units=("u",),
    is_warmup=False,
    round=3,
    replicas=(ReplicaEntry(9, 1, 72, 140, (math.nan, 2.5), 9, 0.1), ReplicaEntry(8, 0, 64, 136)),
    detectors={"mean": [[0.1], [2.0]], "updates": [[3], [4]]},
    batch=16,
    chunk=4,
    ledger=Ledger(100, 20, (4, 7), None),
    order_start=32,
    displaced=((8, 16),),
    files={"common.pt": FileRecord(5, "ab")},
)
PARTS: tuple[Callable[[Any], Any], ...] = (
    lambda body: body,
    lambda body: body["replicas"][0],
    lambda body: body["ledger"],
    lambda body: body["files"]["common.pt"],
)  # parts of `SMALL`, as JSON


def bits(value: Any) -> Any:
    """Return a value that is equal only if every bit is; all NaNs are equal."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    if isinstance(value, Struct):
        return [(field.name, bits(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, dict):
        return [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value), *map(bits, value)]
    return type(value), value


def reading(checkpoint: Path, text: str | bytes) -> Manifest:
    """Write a text and read it as a manifest; errors must be one line that names the file."""
    path = manifest_path(checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    try:
        return read_manifest(checkpoint)
    except UsageError as error:
        assert str(path) in str(error) and error.remedy and "\n" not in str(error)
        raise


def sealed(change: Callable[[dict[str, Any]], Any]) -> str:
    """Return the text of `SMALL` with a change and a valid checksum."""
    body = json.loads(SMALL.text())
    del body["sha256"]
    change(body)
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": checksum})


@repeatable
@given(manifest=manifests())
def test_manifest_round_trips_bit_for_bit(tmp_path: Path, manifest: Manifest) -> None:
    """Would catch rounding, and non-finite losses that are changed."""
    read = reading(tmp_path, manifest.text())
    assert bits(read) == bits(manifest) and read.text() == manifest.text()


def test_nonfinite_losses_are_stored_as_valid_json(tmp_path: Path) -> None:
    """Standard JSON has no NaN or infinity; the text must still be valid JSON."""
    losses = (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308, 0.1)
    manifest = replace(
        SMALL, replicas=tuple(replace(entry, losses=losses) for entry in SMALL.replicas)
    )
    read = reading(tmp_path, manifest.text())
    assert [bits(entry.losses) for entry in read.replicas] == [bits(losses)] * 2
    json.loads(manifest.text(), parse_constant=pytest.fail)


def test_text_and_numbers_of_subclasses_are_stored(tmp_path: Path) -> None:
    """As the version of torch and the numbers of NumPy are: would catch saves that fail."""

    class Text(str):
        """As `torch.__version__`."""

    manifest = replace(SMALL, written_by={"torch": Text("2")}, round_seconds=np.float64(0.1))
    read = reading(tmp_path, manifest.text())
    assert (read.written_by, read.round_seconds) == ({"torch": "2"}, 0.1)


def test_flipped_bit_is_refused_or_harmless(tmp_path: Path) -> None:
    """Would catch a part that the checksum does not cover."""
    whole = SMALL.text().encode()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 7
        try:
            read = reading(tmp_path, bytes(damaged))
        except UsageError:
            continue
        assert bits(read) == bits(SMALL), damaged[position - 20 : position + 20]


def test_truncated_manifest_is_refused(tmp_path: Path) -> None:
    """At any length; only the final line break may be missing."""
    whole = SMALL.text()
    for length in range(len(whole) - 1):
        with pytest.raises(UsageError):
            reading(tmp_path, whole[:length])
    assert bits(reading(tmp_path, whole[:-1])) == bits(SMALL)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"), ("{", "not JSON"), (b"\xff\xfe", "not JSON"), (b"\0" * 99, "not JSON"),
        ("[]", "not the manifest"), ("null", "not the manifest"), ('"text"', "not the manifest"),
        ("{}", "not the manifest"), ('{"format": "another"}', "not the manifest"),
        ("1" * 5000, "not JSON"), ("[" * 100_000, "not JSON"),
    ],
    ids=lambda value: str(value[:20]),
)  # fmt: skip
def test_file_that_is_no_manifest_is_refused(tmp_path: Path, text: str | bytes, words: str) -> None:
    """Would catch an exception of the JSON parser that reaches the user."""
    with pytest.raises(UsageError, match=words):
        reading(tmp_path, text)


def test_missing_manifest_is_refused(tmp_path: Path) -> None:
    """A missing file, or a folder in its place: the error of the system in one line."""
    for _ in range(2):
        with pytest.raises(UsageError, match=r"edit\.json.*cannot be read"):
            read_manifest(tmp_path)
        manifest_path(tmp_path).mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("version", [VERSION + 1, 99, None, "1", 1.5, [], -1, OLDEST - 1])
def test_other_manifest_versions_are_refused(tmp_path: Path, version: Any) -> None:
    """For a newer version the error names the remedy, even if the checksum differs."""
    body = json.loads(SMALL.text()) | {"version": version, "sha256": "of a newer program"}
    is_newer = isinstance(version, int) and version > VERSION
    words = "install a newer megatron_edit" if is_newer else None
    with pytest.raises(UsageError, match=words):
        reading(tmp_path, json.dumps(body))


SINCE_VERSION_2 = {"is_level", "unit_steps", "wire"}
SINCE_VERSION_3 = {"settings"}
SINCE_VERSION_4 = {"is_final_phase", "first_loss", "loss_history", "common_steps"}
SINCE_VERSION_5 = {"members", "digest"}
SINCE_VERSION_6 = {"choice", "exposed", "leaves_prediction", "gradient_wire", "late"}
DEFAULTS = {
    "ledger", "order_start", "has_anchor", "round_seconds", "written_by", *SINCE_VERSION_2,
    *SINCE_VERSION_3, *SINCE_VERSION_4, *SINCE_VERSION_5, *SINCE_VERSION_6,
    *LATER,
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=["manifest", "replica", "ledger", "file"])
def test_missing_field_is_refused(tmp_path: Path, part: Callable[[Any], Any]) -> None:
    """Each field without a default: would catch a field that is read unchecked."""
    for name in set(part(json.loads(SMALL.text()))) - {"format", "version", *DEFAULTS}:
        if (part, name) != (PARTS[0], "sha256"):  # restored by `sealed`
            with pytest.raises(UsageError):
                reading(tmp_path, sealed(partial(_without, part, name)))


def _without(part: Callable[[Any], Any], name: str, body: dict[str, Any]) -> None:
    del part(body)[name]


@pytest.mark.parametrize("part", PARTS, ids=["manifest", "replica", "ledger", "file"])
def test_unknown_field_is_refused(tmp_path: Path, part: Callable[[Any], Any]) -> None:
    """Unknown fields are never ignored."""
    with pytest.raises(UsageError, match="momentum"):
        reading(tmp_path, sealed(lambda body: part(body).update(momentum=1)))


def test_replicas_identical_is_stored_as_is_level(tmp_path: Path) -> None:
    """Would catch checkpoints that other versions cannot read, or that are read as the default."""
    unequal = replace(SMALL, replicas_identical=False)
    body = json.loads(unequal.text())
    assert body["is_level"] is False and "replicas_identical" not in body
    assert not reading(tmp_path, unequal.text()).replicas_identical
    with pytest.raises(UsageError, match="replicas_identical"):
        reading(tmp_path, sealed(lambda body: body.update(replicas_identical=True)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
NAMES = sorted(json.loads(SMALL.text()).keys() - {"sha256"})


@settings(repeatable, max_examples=100)
@given(name=st.sampled_from(NAMES), value=JSON)
def test_any_field_value_is_read_or_refused(tmp_path: Path, name: str, value: Any) -> None:
    """Any value for any field, with a valid checksum, raises no other exception."""
    try:
        reading(tmp_path, sealed(lambda body: body.update({name: value})))
    except UsageError as error:
        assert "broken" in error.rule or name in ("format", "version")


HUGE = json.loads(SMALL.text())["replicas"][0] | {"losses": [10**400]}


@pytest.mark.parametrize(
    "changes",
    [
        {"form": "some"}, {"num_replicas": 3}, {"replicas": []}, {"replicas": [HUGE, HUGE]},
        {"displaced": [[1]]}, {"displaced": [[math.inf, 1]]},
    ],
)  # fmt: skip
def test_contradictory_manifest_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Would catch missing replicas, an unknown form, and an overflow."""
    with pytest.raises(UsageError, match="broken"):
        reading(tmp_path, sealed(lambda body: body.update(changes)))


def test_is_mid_round_follows_replica_steps() -> None:
    """Would catch a warm-up that counts as the middle of a round."""
    assert SMALL.is_mid_round and SMALL.samples == 136
    assert not replace(SMALL, is_warmup=True).is_mid_round
    assert not replace(SMALL, replicas=SMALL.replicas[1:] * 2).is_mid_round
    # At a sync with state of each replica's own, the replicas differ even with equal steps.
    assert replace(SMALL, replicas=SMALL.replicas[1:] * 2, replicas_identical=False).is_mid_round


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """For each kind of damage: would catch a check of the size only."""
    names = ["a.pt", "edit/outer/b", "edit/random/c"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"hello")
    assert on_disk.files_under(tmp_path) == [tmp_path / name for name in names]
    assert on_disk.files_under(tmp_path, ["edit"]) == [tmp_path / "a.pt"]
    assert len(on_disk.files_under(tmp_path, ["edit/outer"])) == 2
    assert on_disk.files_under(tmp_path / "none") == []
    records = {name: on_disk.record_of(tmp_path / name) for name in names}
    assert records["a.pt"] == FileRecord(5, hashlib.sha256(b"hello").hexdigest())
    on_disk.check_sizes(tmp_path, records)
    (tmp_path / "a.pt").write_bytes(b"hallo")
    on_disk.check_sizes(tmp_path, records)
    with pytest.raises(UsageError, match=r"a\.pt.*checksum differs"):
        on_disk.check_content(tmp_path, "a.pt", records["a.pt"])
    damage: Callable[[Path], object]
    for damage, size, content in (
        (lambda path: path.write_bytes(b"hell"), "must have 5 bytes, has 4", "checksum differs"),
        (lambda path: path.unlink(), "is missing", "cannot be read"),
        (lambda path: path.mkdir(), "is missing", "cannot be read"),
    ):
        damage(tmp_path / "a.pt")
        with pytest.raises(UsageError, match=rf"a\.pt.*{size}"):
            on_disk.check_sizes(tmp_path, records)
        with pytest.raises(UsageError, match=rf"a\.pt.*{content}"):
            on_disk.check_content(tmp_path, "a.pt", records["a.pt"])
        on_disk.check_content(tmp_path, names[1], records[names[1]])
