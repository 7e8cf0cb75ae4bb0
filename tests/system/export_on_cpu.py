"""A script that runs Megatron-LM's export to Hugging Face without Transformer Engine.

The export uses its norms, of which Megatron has an equal one of torch. Afterwards it writes the
model's logits for `TOKENS` to the file LOGITS.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

TOKENS = torch.arange(32).unsqueeze(0)
SCRIPT = "examples/post_training/modelopt/export.py"


def main() -> None:
    """Run the export of the clone in MEGATRON_LM_DIR with this program's arguments."""
    clone = Path(os.environ["MEGATRON_LM_DIR"])
    sys.path.insert(0, str(clone))
    from megatron.core.post_training.modelopt.gpt import model_specs
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    model_specs.Norm = WrappedTorchNorm
    model = runpy.run_path(str(clone / SCRIPT), run_name="__main__")["unwrapped_model"]
    length = TOKENS.shape[1]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model.eval()(TOKENS, torch.arange(length).unsqueeze(0), hidden)
    torch.save(logits, os.environ["LOGITS"])


if __name__ == "__main__":
    main()
