"""How the scripts of this folder refuse what they cannot work with: one line, exit code 2."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron_edit.errors import EditError


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others of this project."""

    def error(self, message: str) -> NoReturn:
        """Prints `message` without the usage text and exits 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


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
