"""Exceptions of this package and their exit codes.

Exit codes of a rank process: 0 finished, 2 unusable arguments or environment, 3 drift between
replicas, 4 replica lost, 5 fenced: start it again. Library code raises; only the launcher exits.
"""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130  # exit code after Ctrl-C, as of a shell


def to_one_line(text: str) -> str:
    """Return the text with line breaks and all other non-printable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class EditError(Exception):
    """Base class of the errors that this package raises on purpose.

    Attributes:
        exit_code: exit code of the process if the error is not handled.
    """

    exit_code = 1


class UsageError(EditError):
    """Arguments or an environment with which training cannot start. The message is one line.

    Args:
        value: the user's input as given (``"--edit-sync-interval 0"``).
        rule: the violated rule, without a full stop.
        remedy: what to do, without a full stop.
        is_local: whether only some ranks may have the error, so that each must report its own.
    """

    exit_code = 2

    def __init__(self, value: str, rule: str, remedy: str, *, is_local: bool = False) -> None:
        self.value, self.rule, self.remedy = value, rule, remedy
        self.is_local = is_local
        super().__init__(to_one_line(f"{value}: {rule}; {remedy}"))


class HostVersionError(UsageError):
    """The version of Megatron or torch is unsupported, or Megatron lacks a symbol that we use."""


class DriftError(EditError):
    """Replicas that must be equal differ. The message names the unit and the round."""

    exit_code = 3

    @classmethod
    def in_units(cls, units: Sequence[str], when: str) -> DriftError:
        """Make an error that names the first unit, the number of others, and when it was found."""
        more = f" and {len(units) - 1} more" if len(units) > 1 else ""
        return cls(f"the replicas differ {when} in unit {units[0]}{more}")


class ReplicaLostError(EditError):
    """A replica did not join a collective operation in time, or was lost during it."""

    exit_code = 4
    has_context = False
    lost: Sequence[int] = ()  # replicas, if known already

    def with_context(
        self, lost: Sequence[int], where: str, *, has_joined: bool
    ) -> ReplicaLostError:
        """Return the same error with the lost replicas and the operation in the message.

        Args:
            lost: replicas; empty if unknown.
            has_joined: whether they joined the operation and were lost during it.
        """
        verb = "was lost in" if has_joined else "did not reach"
        subject = f"replica {', '.join(map(str, lost))} {verb}" if lost else "failed in"
        error = ReplicaLostError(f"{subject} {where}: {self}")
        error.has_context = True
        return error


class FencedError(EditError):
    """The other replicas of an elastic run go on without this process; started again, its replica
    joins them."""

    exit_code = 5


class SyncProtocolError(EditError):
    """Ranks disagree about the next operation: a bug, never a user error."""


def outcome_of(error: BaseException | None) -> tuple[int, str | None]:
    """Return the exit code of a process that ends with an error, and the reason in one line.

    Args:
        error: None or `SystemExit` without a code gives 0 and no reason.
    """
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return 0, None
    if isinstance(error, EditError):
        return error.exit_code, str(error)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return code, f"the script exited with {error.code}"
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "Ctrl-C"
    return 1, to_one_line(f"{type(error).__name__}: {error}")
