"""Bad arguments in one line, like all other complaints of this project."""

from __future__ import annotations

import argparse
from typing import NoReturn

from megatron_edit.errors import on_one_line


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong without the text of usage, and exit with 2."""
        self.exit(2, on_one_line(f"{self.prog}: {message}; see --help") + "\n")
