"""`megatron-edit plan` takes what `megatron-edit check` accepts, except for a list of cases."""

from __future__ import annotations

import pytest

from tests.harness.command_lines import outputs_of
from tests.harness.launch import REPOSITORY

SCRIPT = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 127 "
    "--max-position-embeddings 32 --position-embedding-type rope --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters 8 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--eval-interval 8 --eval-iters 0 --bf16 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --use-edit --edit-num-replicas 2 --edit-warmup-steps 2 "
    "--edit-sync-interval 3"
)
FP8 = "--fp8-format hybrid --fp8-param-gather --transformer-impl transformer_engine"
AWARE = "--use-precision-aware-optimizer"
# Flags of which both commands say the same.
ALIKE = {
    "": True,
    "--fp8-format hybrid": True,
    FP8: True,
    f"{FP8} --fp8-recipe tensorwise --first-last-layers-bf16": True,
    f"{FP8} --fp8-recipe blockwise": True,
    "--fp4-format e2m1 --fp4-param-gather": False,
    "--num-distributed-optimizer-instances 2": True,
    AWARE: True,
    f"{AWARE} --optimizer-cpu-offload": True,
    "--tensor-model-parallel-size 2 --sequence-parallel": True,
    "--pipeline-model-parallel-size 2": True,
    "--context-parallel-size 2": True,
    "--tensor-model-parallel-size 3": False,
    "--global-batch-size 7": False,
    "--optimizer sgd": False,
    "--swiglu --normalization RMSNorm --disable-bias-linear --qk-layernorm": True,
    "--group-query-attention --num-query-groups 2": True,
    "--untie-embeddings-and-output-weights": True,
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": True,
    "--ddp-num-buckets 2": True,
    "--grad-reduce-in-bf16": True,
    "--use-megatron-fsdp": False,
    "--use-torch-fsdp2": False,
    "--mtp-num-layers 1": False,  # not in this script; planned with none
    "--optimizer dist_muon": False,
    "--edit-sync-interval 0": False,
    "--edit-strategy a-edit": False,  # with --edit-sync-interval
    "--edit-offload --edit-sync-dtype int8": True,
    "--edit-check-commits": True,
    "--edit-replica-id 1 --edit-rendezvous node0:29400": True,
}
_UNITS = "its units and shards have other sizes, which plan does not compute"
_READ = "plan reads only the flags that it needs"
_SHARE = "plan counts a complete offload only"
_STAGES = "its stages hold other layers, which plan does not compute"
# Flags that `check` accepts and `plan` refuses, and why.
NOT_PLANNED = {
    "--num-experts 4": _UNITS,
    "--num-experts 4 --expert-model-parallel-size 2": _UNITS,
    "--multi-latent-attention": _UNITS,
    "--attention-output-gate": _UNITS,
    "--hybrid-override-pattern M*-": _UNITS,
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1": _STAGES,
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2": _STAGES,
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1": _STAGES,
    f"{AWARE} --optimizer-cpu-offload --optimizer-offload-fraction 0.5": _SHARE,
    "--optimizer muon": "plan counts the distributed optimizer with Adam only",
}
# Flags that `plan` takes and `check` refuses, and why.
NOT_CHECKED = {
    f"{AWARE} --main-grads-dtype bf16": "without a GPU Megatron has no such optimizer",
    f"{AWARE} --exp-avg-sq-dtype fp8": "without a GPU Megatron has no such optimizer",
    "--lr -1": _READ,
    f"{FP8} --fp8-recipe mxfp8": _READ,
    f"{FP8} --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag": _READ,
    f"{AWARE} --main-params-dtype fp16": _READ,
    "--no-such-flag": "plan does not know Megatron's flags",
    "--position-embedding-type relative": "plan counts it as without parameters",
}
ALL = {
    **{words: (code, code) for words, code in ALIKE.items()},
    **dict.fromkeys(NOT_PLANNED, (True, False)),
    **dict.fromkeys(NOT_CHECKED, (False, True)),
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, str, str]]:
    """Run both commands with all flags in one process."""
    lines = {}
    for words in ALL:
        line = [SCRIPT, *BASE.split(), *words.split(), "--world-size", "8", "--link", "10Gbit",
                "--step-time", "1"]  # fmt: skip
        lines[f"check {words}"] = ["check", *line]
        lines[f"plan {words}"] = ["plan", *line]
    return outputs_of(lines, tmp_path_factory.mktemp("lines"))


@pytest.mark.parametrize("words", ALL)
def test_plan_and_check_agree(words: str, outputs: dict[str, tuple[object, str, str]]) -> None:
    """Would catch a feature that is trained and cannot be planned, without a listed reason."""
    for command, is_accepted in zip(("check", "plan"), ALL[words], strict=True):
        code, errors, _ = outputs[f"{command} {words}"]
        assert code == (0 if is_accepted else 2), errors
        assert errors.count("\n") == (0 if is_accepted else 1), errors
