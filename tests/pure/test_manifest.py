"""The manifest of a checkpoint: bit for bit what was written, or refused in one line."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_edit.checkpoint import files as on_disk
from megatron_edit.checkpoint.files import FileRecord
from megatron_edit.checkpoint.folder import manifest_of
from megatron_edit.checkpoint.manifest import VERSION, Ledger, Manifest, read_manifest
from megatron_edit.errors import UsageError
from megatron_edit.saved_state import PendingSync, ReplicaEntry

repeatable = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # each example writes it anew
)
WHOLE = st.integers(0, 2**63 - 1)
REAL = st.floats(allow_nan=False, allow_infinity=False)
RANGES = st.lists(st.tuples(WHOLE, WHOLE), max_size=3).map(tuple)
LATER = {field.name: ... for field in fields(ReplicaEntry) if field.default is not MISSING}
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
ENTRIES = st.builds(  # every field, also those that have defaults; any losses
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
    """Any manifest that a run can write."""
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
        unit_steps=tuple(draw(st.lists(st.lists(WHOLE, max_size=2).map(tuple), max_size=2))),
        wire=draw(st.text(max_size=4)),
        files={"a/b": FileRecord(draw(WHOLE), "00ff")},
        written_by={"megatron_edit": draw(st.text(max_size=5))},
        settings=draw(st.dictionaries(st.text(max_size=4), st.none() | WHOLE, max_size=2)),
        loss_history={"mean": draw(st.lists(REAL, **table))},
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
)  # of the small manifest, as JSON


def bits(value: Any) -> Any:
    """A value whose equality is that of every bit; all NaNs are one."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    if is_dataclass(value):
        return [(field.name, bits(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, dict):
        return [(key, bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value), *map(bits, value)]
    return type(value), value


def reading(checkpoint: Path, text: str | bytes) -> Manifest:
    """What is made of a text. Only an error that names the file may end it."""
    path = manifest_of(checkpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    try:
        return read_manifest(checkpoint)
    except UsageError as error:
        assert str(path) in str(error) and error.remedy and "\n" not in str(error)
        raise


def sealed(change: Callable[[dict[str, Any]], Any]) -> str:
    """The small manifest, changed, with a checksum that fits: what only a program could write."""
    body = json.loads(SMALL.text())
    del body["sha256"]
    change(body)
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": checksum})


@repeatable
@given(manifest=manifests())
def test_round_trip(tmp_path: Path, manifest: Manifest) -> None:
    """Every number bit for bit: would catch rounding, and losses that are no numbers."""
    read = reading(tmp_path, manifest.text())
    assert bits(read) == bits(manifest) and read.text() == manifest.text()


def test_strange_losses(tmp_path: Path) -> None:
    """JSON has no word for some of them; the text must still be JSON that any program reads."""
    losses = (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308, 0.1)
    manifest = replace(
        SMALL, replicas=tuple(replace(entry, losses=losses) for entry in SMALL.replicas)
    )
    read = reading(tmp_path, manifest.text())
    assert [bits(entry.losses) for entry in read.replicas] == [bits(losses)] * 2
    json.loads(manifest.text(), parse_constant=pytest.fail)


def test_a_flipped_bit(tmp_path: Path) -> None:
    """One wrong bit anywhere is refused or changes nothing: would catch a part unchecked."""
    whole = SMALL.text().encode()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 7
        try:
            read = reading(tmp_path, bytes(damaged))
        except UsageError:
            continue
        assert bits(read) == bits(SMALL), damaged[position - 20 : position + 20]


def test_a_truncated_manifest(tmp_path: Path) -> None:
    """Cut off at every length: only the line break at the end may be missing."""
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
def test_something_else(tmp_path: Path, text: str | bytes, words: str) -> None:
    """Would catch an exception of the JSON reader that goes through to the user."""
    with pytest.raises(UsageError, match=words):
        reading(tmp_path, text)


def test_no_manifest(tmp_path: Path) -> None:
    """Not there, or a folder: the system's own word, in one line."""
    for _ in range(2):
        with pytest.raises(UsageError, match=r"edit\.json.*cannot be read"):
            read_manifest(tmp_path)
        manifest_of(tmp_path).mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("version", [VERSION + 1, 99, None, "1", 1.5, [], -1, 0])
def test_another_version(tmp_path: Path, version: Any) -> None:
    """A newer one says so even where its checksum is computed otherwise: what to install."""
    body = json.loads(SMALL.text()) | {"version": version, "sha256": "of a newer program"}
    is_newer = isinstance(version, int) and version > VERSION
    words = "install a newer megatron_edit" if is_newer else None
    with pytest.raises(UsageError, match=words):
        reading(tmp_path, json.dumps(body))


SINCE_VERSION_2 = {"is_level", "unit_steps", "wire"}
SINCE_VERSION_3 = {"settings"}
SINCE_VERSION_4 = {"is_final_phase", "first_loss", "loss_history", "common_steps"}
DEFAULTS = {
    "ledger", "order_start", "has_anchor", "round_seconds", "written_by", *SINCE_VERSION_2,
    *SINCE_VERSION_3, *SINCE_VERSION_4, *LATER,
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=["manifest", "replica", "ledger", "file"])
def test_a_missing_field(tmp_path: Path, part: Callable[[Any], Any]) -> None:
    """Each in turn, but those with defaults: would catch one that is read unchecked."""
    for name in set(part(json.loads(SMALL.text()))) - {"format", "version", *DEFAULTS}:
        if (part, name) != (PARTS[0], "sha256"):  # put back by `sealed`
            with pytest.raises(UsageError):
                reading(tmp_path, sealed(partial(_without, part, name)))


def _without(part: Callable[[Any], Any], name: str, body: dict[str, Any]) -> None:
    del part(body)[name]


@pytest.mark.parametrize("part", PARTS, ids=["manifest", "replica", "ledger", "file"])
def test_an_unknown_field(tmp_path: Path, part: Callable[[Any], Any]) -> None:
    """What is not understood is refused, never ignored."""
    with pytest.raises(UsageError, match="momentum"):
        reading(tmp_path, sealed(lambda body: part(body).update(momentum=1)))


def test_a_name_of_its_own_in_the_file(tmp_path: Path) -> None:
    """Would catch checkpoints that others cannot read, and one that is read as the default."""
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
def test_wrong_types(tmp_path: Path, name: str, value: Any) -> None:
    """Any value for any field, under a checksum that fits: read or refused, no other exception."""
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
def test_contradictions(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Would catch replicas that are missing, a form that nobody can load, and an overflow."""
    with pytest.raises(UsageError, match="broken"):
        reading(tmp_path, sealed(lambda body: body.update(changes)))


def test_where_the_replicas_stood() -> None:
    """A loader decides by it: would catch a warm-up that is taken for the middle of a round."""
    assert SMALL.is_mid_round and SMALL.samples == 136
    assert not replace(SMALL, is_warmup=True).is_mid_round
    assert not replace(SMALL, replicas=SMALL.replicas[1:] * 2).is_mid_round
    # At a sync that kept something of each replica's own, they differ all the same.
    assert replace(SMALL, replicas=SMALL.replicas[1:] * 2, replicas_identical=False).is_mid_round


def test_files(tmp_path: Path) -> None:
    """Each kind of damage is told with the file's name: would catch a look at the size alone."""
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
