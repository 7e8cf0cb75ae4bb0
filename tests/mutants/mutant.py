"""What a mutant is, and how it is applied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = "megatron_edit"


class SnippetError(Exception):
    """The snippet of a mutant is not found exactly once, as the code has changed."""


@dataclass(frozen=True)
class Mutant:
    """One bug that can be inserted into the package.

    Attributes:
        id: ``area/what``; the area is that of the code, as in `catalog`.
        bug: what goes wrong, in one sentence.
        file: path in the package's folder.
        old: snippet of that file, found in it exactly once.
        new: its replacement in the mutant.
        test: node id, from the folder `tests`, of the test of the core tier that should fail.
        full: node id of the test of the full tier that fails, where no test of the core tier does.
        why: of a mutant that survives the core tier: why that is accepted.
    """

    id: str
    bug: str
    file: str
    old: str
    new: str
    test: str
    full: str = ""
    why: str = ""

    @property
    def area(self) -> str:
        """The area of the package, the first part of `id`."""
        return self.id.partition("/")[0]

    def text(self, root: Path) -> str:
        """Return the mutated text of its file.

        Args:
            root: of the repository, or of a copy.

        Raises:
            SnippetError: the snippet is not found exactly once, or nothing would change.
        """
        path = root / PACKAGE / self.file
        if not path.is_file():
            raise SnippetError(f"{self.id}: {self.file} is not there")
        source = path.read_text(encoding="utf-8")
        count = source.count(self.old)
        if count != 1 or self.old == self.new:
            raise SnippetError(f"{self.id}: {self.file} has the snippet {count} times, not once")
        return source.replace(self.old, self.new)
