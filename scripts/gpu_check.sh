#!/usr/bin/env bash
# What makes sense to check on one machine with CUDA; every feature adds to it.
#
#   scripts/gpu_check.sh [--python INTERPRETER] [--output-dir DIR]
#
# One GPU: two replicas share it. Each is a world of NCCL by itself; between them goes gloo, through
# pinned host memory, as NCCL refuses two ranks on one device. Two GPUs or more: a replica each, over
# NCCL, and once over gloo. Exit code 0 where all checks pass.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python='' out=$(mktemp -d)
while [ $# -gt 0 ]; do
    case $1 in
        --python) python=$2 && shift 2 ;;
        --output-dir) out=$2 && mkdir -p "$out" && shift 2 ;;
        *) echo "gpu_check: $1: unknown option; see the head of this script" >&2 && exit 2 ;;
    esac
done
[ -n "$python" ] || python=$(bash "$root/scripts/setup.sh" --print-python)
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then
    echo "gpu_check: no CUDA device found; on this machine run scripts/test.sh" >&2
    exit 2
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} CUDA_DEVICE_MAX_CONNECTIONS=1

# Plain attention and norms: the check needs neither Transformer Engine nor Apex.
model=(--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 8 --train-iters 60
    --lr 1e-3 --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 1023
    --mock-data --log-interval 10 --eval-iters 0 --eval-interval 1000 --bf16
    --use-distributed-optimizer --transformer-impl local --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --num-workers 0)
edit=(--use-edit --edit-num-replicas 2 --edit-warmup-steps 10 --edit-sync-interval 10
    --edit-digest-interval 1 --edit-device cuda)

launch() { "$python" -m torch.distributed.run "$@"; }

# train NAME RANKS EXTRA...: a single launch of all ranks.
train() {
    local name=$1 ranks=$2
    shift 2
    launch --standalone --nproc-per-node "$ranks" -m megatron_edit "$root/scripts/pretrain_gpt.py" \
        "${model[@]}" "${edit[@]}" --edit-log-dir "$out/$name" "$@" >>"$out/$name.log" 2>&1
}

# train_apart NAME EXTRA...: one launch per replica, so that both find device 0 as their own.
train_apart() {
    local name=$1 port
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    shift
    train "$name" 1 --edit-replica-id 1 --edit-rendezvous "127.0.0.1:$port" "$@" &
    local other=$!
    train "$name" 1 --edit-replica-id 0 --edit-rendezvous "127.0.0.1:$port" "$@"
    wait "$other"
}

# check NAME COMMAND...: train, then compare what the replicas said after every sync.
check() {
    local name=$1 how=$2
    shift 2
    echo "== $name" >&2
    : >"$out/$name.log"
    "$how" "$name" "$@" || { tail -n 30 "$out/$name.log" >&2 && return 1; }
    "$python" - "$out/$name" <<'PY'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
digests = [
    [line["digest"] for line in map(json.loads, path.read_text().splitlines()) if "digest" in line]
    for path in sorted(folder.glob("replica-?.jsonl"))
]
losses = [json.loads(line)["loss"] for line in (folder / "loss.jsonl").read_text().splitlines()]
assert len(digests) == 2 and digests[0] == digests[1] and len(digests[0]) == 5, digests
assert losses[-1] < losses[0], losses
print(f"ok: {len(digests[0])} syncs, replicas equal; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
PY
}

gather=(--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 500000)
hidden=("${gather[@]}" --edit-sync-mode overlap)
late=("${gather[@]}" --edit-delay-steps 5)
if [ "$gpus" -eq 1 ]; then
    check one-gpu-gloo train_apart
    check one-gpu-overlap train_apart "${hidden[@]}"
    check one-gpu-overlap-offload train_apart "${hidden[@]}" --edit-offload
    check one-gpu-delayed train_apart "${late[@]}"
    check one-gpu-delayed-int8 train_apart "${late[@]}" --edit-sync-dtype int8
else
    check nccl-replica-each train 2
    check nccl-overlap train 2 "${hidden[@]}"
    check nccl-overlap-offload train 2 "${hidden[@]}" --edit-offload
    check nccl-delayed-int8 train 2 "${late[@]}" --edit-sync-dtype int8
    check gloo-overlap train 2 "${hidden[@]}" --edit-sync-backend gloo
    if [ "$gpus" -ge 4 ]; then check nccl-two-ranks-each train 4; fi
fi
