"""The text of a corpus: its files, and their documents."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_edit.errors import UsageError

# A longer file is split into several documents, so that a part of it can be held out.
MAX_DOCUMENT_CHARS = 65536

# Tests are half of the library and repetitive; the other folders are generated or belong to other
# projects.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests"})
_SKIPPED_PREFIX = "_sysconfigdata"  # build settings of one machine


def standard_library_files() -> list[Path]:
    """Return the Python files of the running interpreter's standard library.

    They are ordered by the hash of their names, so that a size limit takes a random sample of the
    library, and the order is the same on every machine.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not _SKIPPED_FOLDERS.intersection(relative.parts[:-1]) and not path.name.startswith(
            _SKIPPED_PREFIX
        ):
            names.append(relative.as_posix())
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return [root / name for name in names]


def named_files(inputs: Sequence[str]) -> list[tuple[Path, bool]]:
    """Return the files of the given names, each with whether it was named itself.

    Raises:
        UsageError: a name does not exist, or is neither a file nor a folder.
    """
    files: list[tuple[Path, bool]] = []
    for name in inputs:
        path = Path(name)
        if path.is_file():
            files.append((path, True))
        elif path.is_dir():
            files.extend((found, False) for found in _walk(path))
        else:
            raise UsageError(f"--input {name}", "no such file or folder", "give a path that exists")
    return files


def _walk(root: Path) -> Iterator[Path]:
    """Yield the visible files under `root`, in sorted order."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def read_text(path: Path, *, is_named: bool) -> str | None:
    """Return the text of a file; None for a binary file that was only found in a folder.

    Raises:
        UsageError: a file that the user named cannot be read, or is not UTF-8 text.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if not is_named:
            return None
        rule = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        raise UsageError(f"--input {path}", rule, "give readable UTF-8 text files") from error
    return None if "\0" in text and not is_named else text


def split_document(text: str) -> Iterator[str]:
    """Split text into documents of at most MAX_DOCUMENT_CHARS, at line ends where possible."""
    start = 0
    while start < len(text):
        end = start + MAX_DOCUMENT_CHARS
        if end < len(text):
            line_end = text.rfind("\n", start, end)
            end = line_end + 1 if line_end > start else end
        yield text[start:end]
        start = end


def read_documents(files: Sequence[tuple[Path, bool]], *, max_bytes: int) -> Iterator[str]:
    """Yield distinct documents that are not blank, until the next one would exceed `max_bytes`.

    Copies are skipped, so that training and held-out part share no document.
    """
    seen: set[bytes] = set()
    total = 0
    for path, is_named in files:
        for document in split_document(read_text(path, is_named=is_named) or ""):
            data = document.encode("utf-8")
            digest = hashlib.sha256(data).digest()
            if not document.strip() or digest in seen:
                continue
            if total + len(data) > max_bytes:
                return
            seen.add(digest)
            total += len(data)
            yield document


def is_held_out(document: str, *, percent: float) -> bool:
    """Return whether a document is held out; by its hash, so the same in every run."""
    first = hashlib.sha256(document.encode("utf-8")).digest()[:8]
    return int.from_bytes(first, "big") < percent / 100 * 2**64
