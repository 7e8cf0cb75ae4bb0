"""How the scripts of this folder refuse what they cannot work with: one line, exit code 2."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from megatron_edit.errors import EditError
from megatron_edit.tools.cli.common import OneLineParser

__all__ = ["OneLineParser", "exit_code_of"]


def exit_code_of(name: str, body: Callable[[], int]) -> int:
    """Runs `body`; an error of this project becomes one line on stderr and its exit code.

    A request to end is treated like Ctrl-C, so that `body` can clean up after itself.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return body()
    except EditError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
