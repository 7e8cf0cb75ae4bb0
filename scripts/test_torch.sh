#!/usr/bin/env bash
# Runs the core tests with another version of torch, in a separate environment.
#
#   scripts/test_torch.sh [VERSION [pytest arguments]]
#
# VERSION defaults to 2.11.0. The environment is .venv-torch-VERSION in the repository: some
# gigabytes, made once. Without pytest arguments: tests/pure, tests/distributed, tests/host.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
esac
version=${1:-2.11.0}
shift || true
[ $# -gt 0 ] || set -- tests/pure tests/distributed tests/host
export MEGATRON_EDIT_TORCH=$version MEGATRON_EDIT_VENV=$root/.venv-torch-$version
cd "$root"
python=$(bash scripts/setup.sh --print-python)
"$python" -c 'import torch; print("torch", torch.__version__)'
exec "$python" -m pytest -n "${MEGATRON_EDIT_TEST_JOBS:-2}" --dist loadfile "$@"
