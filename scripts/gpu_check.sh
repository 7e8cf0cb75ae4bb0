#!/usr/bin/env bash
# Checks EDiT on this machine's GPUs in under a quarter of an hour; see benchmarks/gpu_check.py.
#
#   scripts/gpu_check.sh [--python INTERPRETER] [--output FILE.json] [--cases NAMES] [--device cuda|cpu]
#
# Writes a JSON file (default: benchmarks/out/gpu_check.json) with a page, a picture and traces next
# to it. INTERPRETER needs torch, megatron-core and our requirements; our package is imported from
# this repository. Exit code 0 where all checks pass, 1 where one failed, 2 without a GPU.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python='' arguments=() output=(--output "$root/benchmarks/out/gpu_check.json")
while [ $# -gt 0 ]; do
    case $1 in
        --python)
            [ $# -ge 2 ] || { echo "gpu_check: --python: needs an interpreter" >&2 && exit 2; }
            python=$2 && shift 2
            ;;
        -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
        --output | --output=*) output=() && arguments+=("$1") && shift ;;
        *) arguments+=("$1") && shift ;;
    esac
done
[ -n "$python" ] || python=$(bash "$root/scripts/setup.sh" --print-python)
export PYTHONPATH=$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$root/benchmarks/gpu_check.py" "${output[@]}" "${arguments[@]}"
