#!/usr/bin/env bash
# Checks EDiT on this machine's GPUs in under ten minutes; see docs/dev/gpu.md.
#
#   scripts/gpu_check.sh [--python INTERPRETER] [--output FILE.json] [--budget SECONDS] [--list]
#                        [--cases NAMES] [--devices N] [--nccl LIBRARY] [--device cuda|cpu]
#
# The most valuable cases come first (--list prints them), and one begins only if it should end within
# --budget (default: 500 seconds in all). Writes a JSON file (default: benchmarks/out/gpu_check.json)
# after each case, at the end a page and a picture, and traces next to it. INTERPRETER needs torch,
# megatron-core and our requirements; our package is imported from this repository. LIBRARY is an
# NCCL to use instead of torch's. Exit code 0 where all checks pass, 1 where one failed, 2 without a
# GPU.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python='' arguments=() output=(--output "$root/benchmarks/out/gpu_check.json")
while [ $# -gt 0 ]; do
    case $1 in
        --python)
            [ $# -ge 2 ] || { echo "gpu_check: --python: needs an interpreter" >&2 && exit 2; }
            python=$2 && shift 2
            ;;
        -h | --help) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
        --output | --output=*) output=() && arguments+=("$1") && shift ;;
        *) arguments+=("$1") && shift ;;
    esac
done
[ -n "$python" ] || python=$(bash "$root/scripts/setup.sh" --print-python)
export PYTHONPATH=$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$root/benchmarks/gpu_check.py" "${output[@]}" "${arguments[@]}"
