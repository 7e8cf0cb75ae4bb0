"""Reversible attribute replacement: how this package changes what its host's code does.

Every wrapped symbol goes through a `Patcher`, which refuses to replace what is not there
(a probe, so that a host that moved on is an error and never a silent no-op) and puts all of
it back, newest first. What is changed in another way (arguments, the environment, the class of an
optimizer) is listed in docs/design.md.
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
    original: object  # `_ABSENT` where the owner's own `__dict__` did not hold the name


@dataclass
class Patcher:
    """A stack of attribute replacements on modules, classes and instances.

    Attributes:
        host: how the patched thing is called in error messages, with its version.
    """

    host: str
    _undo: list[_Replaced] = field(default_factory=list)

    def replace(self, owner: object, name: str, new: object) -> None:
        """Set ``owner.name = new`` and remember what was there.

        Raises:
            HostVersionError: `owner` has no attribute `name`.
        """
        if not hasattr(owner, name):
            raise missing_symbol(self.host, owner, name)
        self.add(owner, name, new)

    def add(self, owner: object, name: str, new: object) -> None:
        """Like `replace`, where the attribute may be absent; undone by deleting it again."""
        original = vars(owner).get(name, _ABSENT)
        self._undo.append(_Replaced(owner, name, original))
        setattr(owner, name, new)

    def wrap[F](self, owner: object, name: str, around: Callable[[F], object]) -> None:
        """Replace a callable by ``around(original)``."""
        if not hasattr(owner, name):
            raise missing_symbol(self.host, owner, name)
        self.add(owner, name, around(getattr(owner, name)))

    def set_default(self, environment: MutableMapping[str, str], name: str, value: str) -> None:
        """Set an environment variable that is not set yet."""
        if name not in environment:
            environment[name] = value
            self._undo.append(_Replaced(environment, name, _ABSENT))

    def undo(self) -> None:
        """Put every original back, newest first. Idempotent."""
        while self._undo:
            entry = self._undo.pop()
            if isinstance(entry.owner, MutableMapping):
                entry.owner.pop(entry.name, None)
            elif entry.original is _ABSENT:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.original)


def missing_symbol(host: str, owner: object, name: str) -> HostVersionError:
    """The error for a host that lacks a symbol we stand on."""
    where = getattr(owner, "__name__", None) or type(owner).__name__
    return HostVersionError(
        f"{host}",
        f"{where}.{name} is missing, and megatron_edit stands on it",
        "use a version that docs/support.md names, or report this one",
    )
