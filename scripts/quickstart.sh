#!/usr/bin/env bash
# Compares EDiT with stock Megatron from a fresh clone: five to ten minutes on two CPU cores.
#
#   scripts/quickstart.sh [--output-dir DIR] [--train-iters N]
set -euo pipefail

case ${1:-} in -h | --help) sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;; esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/scripts/setup.sh" --print-python)
exec "$python" "$root/scripts/quickstart.py" "$@"
