"""`megatron-edit check` with the flags of Megatron's own examples, on a machine without a GPU.

Would catch a common flag of fp8 training that is refused without need.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.command_lines import Outcome, outcomes_of
from tests.harness.launch import REPOSITORY

SCRIPT = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
EDIT = "--world-size 16 --use-edit --edit-num-replicas 2"
COMMON = """
--use-mcore-models --bf16 --micro-batch-size 1 --global-batch-size 128 --seq-length 8192
--max-position-embeddings 8192 --position-embedding-type rope --rotary-percent 1.0
--group-query-attention --num-query-groups 8 --disable-bias-linear
--untie-embeddings-and-output-weights --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --sequence-parallel --tensor-model-parallel-size 1
--context-parallel-size 1 --fp8-format hybrid --fp8-amax-history-len 1024
--fp8-amax-compute-algo max --fp8-param-gather --mock-data --tokenizer-type NullTokenizer
--vocab-size 128256 --tiktoken-pattern v2 --split 99,1,0 --no-mmap-bin-files --num-workers 1
--no-create-attention-mask-in-dataloader --log-interval 1 --log-throughput --save saves
--tensorboard-dir tensorboard
"""
# Added by examples/llama/train_llama3_8b_h100_fp8.sh for a dense model of 8B parameters.
LLAMA = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--kv-channels 128 --rotary-base 1000000 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --lr-warmup-samples 3906252
--lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --adam-beta1 0.9
--adam-beta2 0.95 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
--manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 --eval-iters 32
--eval-interval 100 --save-interval 1000 --profile --profile-step-start 4 --profile-step-end 6
--ckpt-format torch_dist --distributed-timeout-minutes 60 --load saves
"""
# Added by examples/gptoss/02_train.sh for a mixture of experts on eight pipeline stages.
GPT_OSS = """
--no-masked-softmax-fusion --transformer-impl transformer_engine --no-rope-fusion
--normalization RMSNorm --hidden-size 512 --ffn-hidden-size 2048
--num-attention-heads 64 --rope-type rope --rotary-base 10000 --no-bias-gelu-fusion
--export-force-local-attention --no-bias-dropout-fusion --quick-geglu --glu-linear-offset 1.0
--softmax-type learnable --window-attn-skip-freq 2 --activation-func-clamp-value 7.0
--window-size 128,0 --enable-gpt-oss --num-experts 4 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 2048 --moe-router-dtype fp32
--moe-z-loss-coeff 1e-3 --moe-permute-fusion --lr 1.0e-5 --min-lr 1.0e-6 --lr-warmup-fraction 0.05
--use-flash-attn --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32
--disable-bf16-reduced-precision-matmul --recompute-activations --pipeline-model-parallel-size 8
--expert-model-parallel-size 1 --save-interval 10000 --eval-interval 50000000 --eval-iters 0
--moe-per-layer-logging --no-load-optim --no-load-rng
"""
# Flags that Megatron-LM's pretrain_gpt.py adds; the wheel's parser does not have them.
OWN_FLAGS = """
from megatron.training.arguments import parse_and_validate_args
import megatron.training


def add(parser):
    parser.add_argument("--export-force-local-attention", action="store_true")
    parser.add_argument("--enable-gpt-oss", action="store_true")
    return parser


parse_and_validate_args(extra_args_provider=add)
megatron.training.pretrain(None, None, None, None)
"""
PRECISION = "--use-precision-aware-optimizer --fp8-recipe tensorwise"
OFFLOAD = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5"
CASES = {
    "llama": COMMON + LLAMA,
    "llama, precision-aware": COMMON + LLAMA + PRECISION,
    "llama, offload": COMMON.replace("--fp8-param-gather", "") + LLAMA + OFFLOAD,
    "gpt-oss": COMMON + GPT_OSS + "--num-layers 16",
    "gpt-oss, 12 layers": COMMON + GPT_OSS + "--num-layers 12",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Run `check` for all cases, with Megatron's own parser and validation."""
    folder: Path = tmp_path_factory.mktemp("examples")
    own = folder / "own_flags.py"
    own.write_text(OWN_FLAGS)
    lines = {
        name: ["check", str(own) if "oss" in name else SCRIPT, *f"{EDIT} {flags}".split()]
        for name, flags in CASES.items()
    }
    return outcomes_of(lines, folder)


@pytest.mark.parametrize("name", [name for name in CASES if "12 layers" not in name])
def test_megatron_examples_are_accepted(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name] == (0, "")


def test_indivisible_layers_are_refused_by_megatron(outcomes: dict[str, Outcome]) -> None:
    """The unchanged example: Megatron itself refuses 12 layers on 8 stages."""
    code, message = outcomes["gpt-oss, 12 layers"]
    assert code == 2 and message.count("\n") == 1 and "Megatron's validation fails" in message
