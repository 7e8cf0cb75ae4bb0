"""Export of a checkpoint to Hugging Face by Megatron-LM's own script (docs/checkpoints.md).

Skipped without transformers and nvidia-modelopt.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.harness import Flags, tiny_gpt, train
from tests.harness.launch import REPOSITORY
from tests.harness.pages import commands
from tests.harness.ports import free_ports
from tests.system.export_on_cpu import SCRIPT, TOKENS

pytestmark = [pytest.mark.full, pytest.mark.clone, pytest.mark.timeout(400)]
# A Llama of Hugging Face's, as docs/checkpoints.md says.
LLAMA: Flags = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 176, "num_attention_heads": 4,
    "group_query_attention": True, "num_query_groups": 2, "swiglu": True,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
EDIT: Flags = {
    "use_edit": True, "edit_num_replicas": 2, "edit_warmup_steps": 2, "edit_sync_interval": 4,
    "train_iters": 10, "save": "run", "save_interval": 10,
}  # fmt: skip
TRAINED = "iter_0000010"
BF16 = 2.0**-8  # relative error of rounding to bf16; the script exports in it


def export(folder: Path, clone: Path) -> None:
    """Run the documented command in a folder with the checkpoint, on the CPU."""
    (command,) = commands(SCRIPT)
    words = command.words[command.words.index(f"PATH_TO_MEGATRON_LM/{SCRIPT}") + 1 :]
    words = [word for word in words if word != "$FLAGS"]
    words += [*tiny_gpt(**LLAMA), "--export-force-local-attention"]
    env = os.environ | {
        "PYTHONPATH": str(REPOSITORY), "MEGATRON_LM_DIR": str(clone), "RANK": "0",
        "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(free_ports(1)[0]), "GLOO_SOCKET_IFNAME": "lo", "LOGITS": "logits.pt",
    }  # fmt: skip
    script = str(REPOSITORY / "tests" / "system" / "export_on_cpu.py")
    argv = [sys.executable, "-m", "megatron_edit", script, *words]
    done = subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def saved(path: Path, name: str) -> torch.Tensor:
    """Read a tensor of a checkpoint, without Megatron."""
    metadata: Any = dcp.FileSystemReader(path).read_metadata().state_dict_metadata[name]
    state = {name: torch.empty(metadata.size, dtype=metadata.properties.dtype)}
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state[name]


def test_exported_model_computes_the_same(tmp_path: Path, megatron_clone: Path) -> None:
    """Would catch a checkpoint that Megatron's converters do not understand, and parameters of
    another replica or another time."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("modelopt.torch.export")
    train(tiny_gpt(**(LLAMA | EDIT)), 2, cwd=tmp_path, timeout=200)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        rms_norm_eps=1e-5, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "llama_config")
    export(tmp_path, megatron_clone)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", dtype=torch.float32
    )
    with torch.no_grad():
        ours, theirs = torch.load(tmp_path / "logits.pt"), model.eval()(TOKENS).logits
    assert (ours - theirs).abs().max() < 2 * BF16 * ours.abs().max()
    checkpoint = tmp_path / "run" / TRAINED
    for name, weight in {
        "embedding.word_embeddings.weight": model.model.embed_tokens.weight,
        "output_layer.weight": model.lm_head.weight,
    }.items():
        assert torch.equal(saved(checkpoint, name).bfloat16().float(), weight), name
