#!/usr/bin/env bash
# From a fresh clone to a comparison of EDiT with stock Megatron, on two CPU cores in five to ten minutes.
#
#   scripts/quickstart.sh [--output-dir DIR] [--train-iters N]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/scripts/setup.sh" --print-python)
exec "$python" "$root/scripts/quickstart.py" "$@"
