#!/usr/bin/env bash
# Checks and tests this repository: ruff, mypy, then pytest.
#
#   scripts/test.sh [--rotating] [--system | --full] [pytest arguments]
#
# Without an option the core tier, which runs on a laptop in ten minutes, two files side by side.
# --system: SLURM, a browser, a network lab, launches, documents, benchmarks' smoke tests, where the
# machine has what they need. --full: everything. --rotating: to the core or the system tier adds
# one of eight shares of the tests marked `full`, chosen by the commit. Makes the environment first.
#
# Environment: MEGATRON_EDIT_TEST_JOBS  files that run side by side, outside of tests/system
#                                       (default: 2)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in
    -h | --help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
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
# Where there is no commit, as in an unpacked archive, the share is the first.
choose_share() {
    local count=8 number=1 commit reason="as there is no commit to choose it by"
    if [ -e .git ] && commit=$(git rev-parse --verify --quiet HEAD); then
        number=$((0x${commit:0:8} % count + 1))
        reason="chosen by commit ${commit:0:7}"
    fi
    echo "== full tier: share $number of $count, $reason" >&2
    share=$number/$count
}

if [ "${1:-}" = --rotating ]; then
    shift
    choose_share
    set -- --full-share "$share" "$@"
fi
status=0
run() { "$python" -m pytest "$@" || status=$?; }
beside=(-n "${MEGATRON_EDIT_TEST_JOBS:-2}" --dist loadfile)
case " $* " in
    *" --full "* | *" -n "* | *" tests/"* | *.py*) run "$@" ;;
    *" --system "*)
        # A cluster, a browser, a network lab: one at a time. The rest is as in the core tier.
        run "${beside[@]}" "$@" tests/pure tests/distributed tests/host
        run "$@" tests/system
        ;;
    *) run "${beside[@]}" "$@" ;;
esac
if [ ${#failed[@]} -gt 0 ]; then
    echo "test: these complained before pytest: ${failed[*]}" >&2
    [ "$status" -ne 0 ] || status=1
fi
exit "$status"
