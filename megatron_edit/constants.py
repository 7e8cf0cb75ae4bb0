"""Choices and numbers that more than one part of the package goes by, each written once.

It imports nothing: settings can be read without torch, and the engine without settings.
"""

from __future__ import annotations

# What `--edit-sync-backend` and `--edit-sync-dtype` can be, besides auto.
SYNC_BACKENDS = ("nccl", "gloo")
SYNC_DTYPES = ("fp32", "bf16", "int8", "int4")
# Seconds: nobody is given up sooner, unless the user says so (`--edit-timeout-seconds auto`).
LEAST_TIMEOUT_SECONDS = 600.0
