#!/usr/bin/env bash
# Checks and tests this repository: ruff, mypy, then pytest.
#
#   scripts/test.sh [--full] [pytest arguments]
#
# Without --full the core tier: what runs on a laptop in minutes. Makes the environment first.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
esac
cd "$root"
python=$(bash scripts/setup.sh --print-python)

# A complaint of a linter should not hide the tests' result; it still fails the whole.
failed=()
check() {
    echo "== $*" >&2
    "$python" -m "$@" || failed+=("$1")
}
check ruff check .
check ruff format --check .
check mypy
status=0
"$python" -m pytest "$@" || status=$?
if [ ${#failed[@]} -gt 0 ]; then
    echo "test: these complained before pytest: ${failed[*]}" >&2
    [ "$status" -ne 0 ] || status=1
fi
exit "$status"
