"""The secret that hub and replicas share."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_edit.errors import UsageError

TOKEN_VARIABLE = "EDIT_HUB_TOKEN"
LEAST_TOKEN_BYTES = 16


def read_token(flag: str, file: str | None) -> bytes:
    """The shared token; empty where none is given.

    Args:
        flag: that names the file, for errors.
        file: its file; None takes the environment variable.

    Raises:
        UsageError: the file cannot be read, or the token is too short.
    """
    if file is None:
        token, source = os.environ.get(TOKEN_VARIABLE, "").strip().encode(), TOKEN_VARIABLE
        if not token:
            return b""
    else:
        source = f"{flag} {file}"
        try:
            token = Path(file).read_bytes().strip()
        except OSError as error:
            raise UsageError(
                source, f"cannot be read ({error.strerror})", "name another file"
            ) from None
    if len(token) < LEAST_TOKEN_BYTES:
        raise UsageError(
            source, f"has {len(token)} bytes, needs at least {LEAST_TOKEN_BYTES}",
            "make one, for example with: openssl rand -hex 32",
        )  # fmt: skip
    return token
