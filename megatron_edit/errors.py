"""What can go wrong, and the exit code of each kind.

Exit codes of a rank process: 0 finished, 2 unusable arguments or environment, 3 drift
found, 4 a replica lost. Library code raises; only the launcher turns an error into an exit.
"""

from __future__ import annotations

from collections.abc import Sequence


def on_one_line(text: str) -> str:
    """The text with line breaks and everything else that does not print escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class EditError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        exit_code: what the process exits with when nobody handles the error.
    """

    exit_code = 1


class UsageError(EditError):
    """Arguments or an environment that training cannot start with. One line, before training.

    Args:
        value: what the user gave, as they gave it (``"--edit-sync-interval 0"``).
        rule: the rule that it breaks, without a full stop.
        remedy: what to do about it, without a full stop.
        is_local: whether some ranks may see it and others not, so that each must speak for itself.
    """

    exit_code = 2

    def __init__(self, value: str, rule: str, remedy: str, *, is_local: bool = False) -> None:
        self.value, self.rule, self.remedy = value, rule, remedy
        self.is_local = is_local
        super().__init__(on_one_line(f"{value}: {rule}; {remedy}"))


class HostVersionError(UsageError):
    """This Megatron is outside the supported range, or lacks a symbol that we stand on."""


class DriftError(EditError):
    """Replicas that must be equal are not. The message names the unit and the round."""

    exit_code = 3

    @classmethod
    def in_units(cls, units: Sequence[str], when: str) -> DriftError:
        """Of some units, seen at some time."""
        more = f" and {len(units) - 1} more" if len(units) > 1 else ""
        return cls(f"the replicas differ {when} in unit {units[0]}{more}")


class ReplicaLostError(EditError):
    """A replica did not come to a meeting in time, or died in it."""

    exit_code = 4
    has_context = False
    lost: Sequence[int] = ()  # replicas, where this is known already

    def placed(self, lost: Sequence[int], where: str, *, has_come: bool) -> ReplicaLostError:
        """The same error with the replicas that were lost, and where.

        Args:
            lost: replicas; empty where nobody knows.
            where: in what.
            has_come: whether they came there, and were lost later.
        """
        how = "was lost in" if has_come else "did not come to"
        who = f"replica {', '.join(map(str, lost))} {how}" if lost else "broke off in"
        error = ReplicaLostError(f"{who} {where}: {self}")
        error.has_context = True
        return error


class SyncProtocolError(EditError):
    """Our own ranks disagree about what to do next: a bug, never the user's mistake."""


def outcome_of(error: BaseException | None) -> tuple[int, str | None]:
    """Exit code of a process that ends with an error, and the reason on one line.

    Args:
        error: None, or `SystemExit` without a code, is a good end without a reason.
    """
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return 0, None
    if isinstance(error, EditError):
        return error.exit_code, str(error)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return code, f"the script exited with {error.code}"
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    return code, on_one_line(f"{type(error).__name__}: {error}")
