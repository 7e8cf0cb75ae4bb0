#!/usr/bin/env bash
# Checks and tests this repository: ruff, mypy, then pytest.
#
#   scripts/test.sh [--rotating] [--system | --full] [pytest arguments]
#
# Without an option it runs the core tier: ten minutes on a laptop, two files in parallel. --system:
# SLURM, a browser, a network lab, launches, documents, benchmarks' smoke tests, each where the
# machine supports it. --full: everything. --rotating: adds to the core or the system tier one of
# eight shares of the tests marked `full`, chosen by the commit. Makes the environment first.
#
# Environment: MEGATRON_EDIT_TEST_JOBS  files that run in parallel, where they need no quiet machine
#                                       (default: 2)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in
    -h | --help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
esac
cd "$root"
python=$(bash scripts/setup.sh --print-python)

# Run the tests even after a linter has failed; the exit code still reports the failure.
failed=()
check() {
    echo "== $*" >&2
    "$python" -m "$@" || failed+=("$1")
}
check ruff check .
check ruff format --check .
check mypy
# Without a commit, as in an unpacked archive, the first share is chosen.
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
parallel=(-n "${MEGATRON_EDIT_TEST_JOBS:-2}" --dist loadfile)
case " $* " in
    *" --full "* | *" -n "* | *" tests/"* | *.py*) run "$@" ;;
    *" --system "*)
        run "${parallel[@]}" "$@" tests/pure tests/distributed tests/host
        # The others use a cluster, a browser, a network lab or clocks: one after the other.
        together=(tests/system/test_{docs,elastic_docs,launch,package,telemetry,setup,compare}.py
            tests/system/test_{recipes,check_output,check_verdicts,plan_agreement}.py
            tests/system/test_{corpus,wrong_inputs,gpu_check_run,gpu_check_flags}.py)
        run "${parallel[@]}" "$@" "${together[@]}"
        run "$@" "${together[@]/#/--ignore=}" tests/system
        ;;
    *) run "${parallel[@]}" "$@" ;;
esac
if [ ${#failed[@]} -gt 0 ]; then
    echo "test: failed before pytest: ${failed[*]}" >&2
    [ "$status" -ne 0 ] || status=1
fi
exit "$status"
