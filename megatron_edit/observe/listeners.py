"""What receives the records of a training beside the event files, and how it is ended in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from megatron_edit.engine import SyncReport
from megatron_edit.errors import UsageError
from megatron_edit.observe.console import warn
from megatron_edit.observe.records import Ending, Evaluation, Iteration

METRICS_EXTRA = "megatron_edit[metrics]"


class Listener:
    """Receives the records of one rank. Each method does nothing unless it is overridden."""

    def on_iteration(self, iteration: Iteration) -> None:
        """Handle a finished inner iteration."""

    def on_sync(self, report: SyncReport) -> None:
        """Handle a finished sync; `step` is its iteration in the event files."""

    def on_losses(self, first_step: int, losses: Sequence[float]) -> None:
        """Handle mean losses over the replicas, of steps `first_step`, `first_step` + 1, ..."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Handle an evaluation of all replicas."""

    def on_end(self, ending: Ending) -> None:
        """Handle the end of training."""

    def close(self) -> None:
        """Write what remains. Idempotent."""


def require_package(value: str, module: str, package: str) -> None:
    """Check that an optional package is installed.

    Args:
        value: of the user, which needs it.
        module: of the package.
        package: to install.

    Raises:
        UsageError: it is not.
    """
    try:
        is_installed = find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        is_installed = False
    if not is_installed:
        raise UsageError(
            value,
            f"needs the package {module.replace('.', '-')}, which is not installed",
            f"pip install '{package}', or drop the flag",
        )


def finish_within(seconds: float, finish: Callable[[], None], what: str) -> None:
    """Send what remains at the end of training, and warn where that fails or takes too long.

    Args:
        seconds: at most, however long the call takes.
        finish: sends it.
        what: is sent, for the warning.
    """
    errors = ["no answer"]

    def run() -> None:
        try:
            finish()
            errors.clear()
        except Exception as error:  # logging must not fail a training, whatever the error
            errors[:] = [f"{type(error).__name__}: {error}".splitlines()[0]]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        warn(f"the last {what} could not be sent in {seconds:g} s ({errors[0]}), and is lost")
