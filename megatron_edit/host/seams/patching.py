"""Reversible replacement of attributes, by which this package changes Megatron's code.

A `Patcher` refuses to replace missing attributes, so that a changed Megatron causes an error and
never a silent no-op, and restores all of them, newest first. Changes of other kinds (arguments,
the environment, the class of an optimizer) are listed in docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

from megatron_edit.errors import HostVersionError

_ABSENT: object = object()


@dataclass(frozen=True)
class _Replaced:
    owner: object
    name: str
    original: object  # `_ABSENT` if the owner's own `__dict__` did not have the name


@dataclass
class Patcher:
    """A stack of attribute replacements on modules, classes and instances.

    Attributes:
        host: name and version of the patched software in error messages.
    """

    host: str
    _undo: list[_Replaced] = field(default_factory=list)

    def replace(self, owner: object, name: str, new: object) -> None:
        """Set ``owner.name = new`` and record the original.

        Raises:
            HostVersionError: `owner` has no attribute `name`.
        """
        if not hasattr(owner, name):
            raise missing_symbol(self.host, owner, name)
        self.add(owner, name, new)

    def add(self, owner: object, name: str, new: object) -> None:
        """Like `replace`, but the attribute may be absent; it is then deleted by `undo`."""
        original = vars(owner).get(name, _ABSENT)
        self._undo.append(_Replaced(owner, name, original))
        setattr(owner, name, new)

    def wrap[F](self, owner: object, name: str, around: Callable[[F], object]) -> None:
        """Replace a callable by ``around(original)``."""
        if not hasattr(owner, name):
            raise missing_symbol(self.host, owner, name)
        self.add(owner, name, around(getattr(owner, name)))

    def set_default(self, environment: MutableMapping[str, str], name: str, value: str) -> None:
        """Set an environment variable unless it is set already."""
        if name not in environment:
            environment[name] = value
            self._undo.append(_Replaced(environment, name, _ABSENT))

    def undo(self) -> None:
        """Restore all originals, newest first. Idempotent."""
        while self._undo:
            entry = self._undo.pop()
            if isinstance(entry.owner, MutableMapping):
                entry.owner.pop(entry.name, None)
            elif entry.original is _ABSENT:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.original)


def missing_symbol(host: str, owner: object, name: str) -> HostVersionError:
    """Make the error for a missing symbol that this package uses."""
    where = getattr(owner, "__name__", None) or type(owner).__name__
    return HostVersionError(
        f"{host}",
        f"{where}.{name} is missing, and megatron_edit needs it",
        "use a version that docs/support.md names, or report this one",
    )
