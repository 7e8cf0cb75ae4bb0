"""Whether torch's gloo groups can be formed again with other ranks, as elastic runs need."""

from __future__ import annotations

import torch.distributed as dist

HAS_GROUPS = hasattr(dist.ProcessGroupGloo._Options(), "enable_reconfigure")  # torch >= 2.14
