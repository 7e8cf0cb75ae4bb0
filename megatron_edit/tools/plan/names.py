"""What can be planned, by name. Without torch, for the command line to know before it works."""

from __future__ import annotations

from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.entries import STOCK

PUBLISHED_DILOCO = "published-diloco"
NAMES = (*STRATEGIES, STOCK, PUBLISHED_DILOCO)
USUAL = ("edit", PUBLISHED_DILOCO, "ddp", STOCK)
