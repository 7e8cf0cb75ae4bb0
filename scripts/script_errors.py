"""Error handling of the scripts in this folder: one line and an exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from megatron_edit.errors import EditError, UsageError
from megatron_edit.tools.cli.words import OneLineParser

__all__ = ["OneLineParser", "exit_code_of"]


def exit_code_of(name: str, body: Callable[[], int]) -> int:
    """Run `body`; an error of this project, and a missing package, give one line.

    Returns the exit code. SIGTERM is treated like Ctrl-C, so that `body` can clean up.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return body()
    except EditError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if str(error.name).startswith("megatron_edit"):
            raise
        print(
            f"{name}: {error.name}: is not installed; pip install 'megatron_edit[megatron,report]'"
            ", or add a clone of Megatron-LM to PYTHONPATH",
            file=sys.stderr,
        )
        return UsageError.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
