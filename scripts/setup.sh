#!/usr/bin/env bash
# Makes the environment of this repository: a virtual environment with all requirements.
#
#   scripts/setup.sh                  makes or updates it; fast when nothing changed
#   scripts/setup.sh --print-python   also prints the path of its interpreter on stdout
#
# Environment: MEGATRON_EDIT_VENV   its folder (default: .venv in the repository)
#              MEGATRON_EDIT_TORCH  the version of torch (default: the one that constraints.txt pins)
#              PYTHON               the interpreter to make it with (default: any >= 3.12 found)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${MEGATRON_EDIT_VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
stamp=$venv/.megatron_edit_stamp
log=$venv/setup.log

say() { echo "setup: $*" >&2; }

# works PYTHON: runs it, as a version manager's shim exists even for a missing version. Checks for
# modules that some systems package separately.
works() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

candidates() {
    printf '%s\n' python3.12 python3.13 python3
    for versions in "${PYENV_ROOT:-$HOME/.pyenv}/versions" "$HOME/.pyenv/versions"; do
        printf '%s\n' "$versions"/3.12*/bin/python
    done
    if command -v uv >/dev/null; then uv python find 3.12 2>/dev/null || true; fi
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        works "$PYTHON" && echo "$PYTHON" && return
        say "PYTHON=$PYTHON: is not a working Python >= 3.12 with venv;" \
            "unset it to search for one, or name another"
        return 2
    fi
    while IFS= read -r python; do
        works "$python" && echo "$python" && return
    done < <(candidates)
    say "no Python >= 3.12 with the venv module: megatron-core needs it;" \
        "install python3.12 and python3.12-venv (or: uv python install 3.12; pyenv install 3.12)," \
        "or set PYTHON to one"
    return 2
}

# Hash of the requirements and of the path of the clone, which an editable install refers to.
fingerprint() {
    "$venv/bin/python" - "$root" <<'PY'
import hashlib, os, pathlib, sys
root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(str(root).encode())
for name in ("setup.py", "pyproject.toml", "constraints.txt"):
    digest.update((root / name).read_bytes())
digest.update(os.environ.get("MEGATRON_EDIT_TORCH", "").encode())
print(digest.hexdigest())
PY
}

install() {
    local start=$SECONDS python
    if ! works "$venv/bin/python"; then
        python=$(find_python) || exit 2
        say "making $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv"
    fi
    if [ -n "${MEGATRON_EDIT_TORCH:-}" ]; then
        echo "torch==$MEGATRON_EDIT_TORCH"
    else
        cat "$root/constraints.txt"
    fi >"$venv/constraints.txt"
    say "installing the requirements (a minute or two; log: $log)"
    if ! (cd "$root" && PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$venv/bin/python" -m pip install -e '.[test,report,muon]' -c "$venv/constraints.txt") >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        say "pip failed; all of its output: $log"
        exit 1
    fi
    fingerprint >"$stamp"
    say "ready after $((SECONDS - start)) s"
}

is_current() {
    works "$venv/bin/python" && [ -f "$stamp" ] && [ "$(fingerprint)" = "$(cat "$stamp")" ]
}

print_python=false
case "${1:-}" in
    "") ;;
    --print-python) print_python=true ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) say "$1: unknown option; the only one is --print-python" && exit 2 ;;
esac
is_current || install
if $print_python; then echo "$venv/bin/python"; else say "environment: $venv"; fi
