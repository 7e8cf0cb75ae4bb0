#!/usr/bin/env bash
# Makes the environment of this repository: a virtual environment with all requirements.
#
#   scripts/setup.sh                  makes or updates it; fast when nothing changed
#   scripts/setup.sh --print-python   also prints the path of its interpreter on stdout
#
# Environment: MEGATRON_EDIT_VENV   its folder (default: .venv in the repository)
#              MEGATRON_EDIT_TORCH  the version of torch (default: the one that constraints.txt pins)
#              MEGATRON_EDIT_TORCH_INDEX
#                                   the package index to take torch from; empty for that of pip
#                                   (default: PyTorch's index of CPU builds where it can be reached,
#                                   on Linux without an NVIDIA driver, if pip has no index configured)
#              PYTHON               the interpreter to make it with (default: any >= 3.12 found)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${MEGATRON_EDIT_VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
stamp=$venv/.megatron_edit_stamp
log=$venv/setup.log
cpu_index=https://download.pytorch.org/whl/cpu
# Megabytes of a new environment and of pip's downloads: with CUDA measured, with torch 2.14.1 on
# Linux x86_64; without it less NVIDIA's libraries and the difference of the two builds of torch.
cuda_mb=(6300 3300)
cpu_mb=(2400 800)

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
for name in ("pyproject.toml", "constraints.txt"):
    digest.update((root / name).read_bytes())
digest.update(os.environ.get("MEGATRON_EDIT_TORCH", "").encode())
print(digest.hexdigest())
PY
}

pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip "$@"; }

# run_pip ARGUMENTS: exits if it fails.
run_pip() {
    pip "$@" >>"$log" 2>&1 && return
    tail -n 20 "$log" >&2
    say "pip failed; all of its output: $log"
    exit 1
}

has_torch() {
    "$venv/bin/python" - "$1" <<'PY' 2>/dev/null
import importlib.metadata, sys
sys.exit(importlib.metadata.version("torch").partition("+")[0] != sys.argv[1])
PY
}

# has_cpu_build VERSION [options of pip]: whether pip would find one; waits for seconds only.
has_cpu_build() {
    local version=${1//./\\.}
    shift
    grep -Eq "[ (]$version\+cpu([,)]|\$)" \
        <<<"$(pip index versions torch --timeout 3 --retries 0 "$@" 2>/dev/null)"
}

# torch_index VERSION: the index to take torch from; nothing for pip's own.
torch_index() {
    if [ -n "${MEGATRON_EDIT_TORCH_INDEX+set}" ]; then
        echo "$MEGATRON_EDIT_TORCH_INDEX"
    elif [ "$(uname -sm)" = "Linux x86_64" ] && [ ! -e /proc/driver/nvidia/version ] &&
        ! grep -Eq '[.](index-url|no-index)=' <<<"$(pip config list)" &&
        has_cpu_build "$1" --index-url "$cpu_index"; then
        echo "$cpu_index"
    fi
}

gb() { awk -v mb="$1" 'BEGIN { printf "%.1f GB", mb / 1000 }'; }
free_mb() { df -Pk "$1" | awk 'NR == 2 { print int($4 * 1024 / 1e6) }'; }
file_system() { df -Pk "$1" | awk 'NR == 2 { print $NF }'; }

# check_disk WHAT ENVIRONMENT_MB DOWNLOADS_MB
check_disk() {
    local tmp=${TMPDIR:-/tmp} needed=$2
    say "$1: needs $(gb "$2") in $venv ($(gb "$(free_mb "$venv")") free)" \
        "and $(gb "$3") for downloads in $tmp ($(gb "$(free_mb "$tmp")") free)"
    if [ "$(file_system "$venv")" = "$(file_system "$tmp")" ]; then
        needed=$((needed + $3))
    elif (($(free_mb "$tmp") < $3)); then
        say "$tmp: has less than $(gb "$3") free; free some, or set TMPDIR to another folder"
        return 2
    fi
    (($(free_mb "$venv") < needed)) || return 0
    say "$venv: has less than $(gb "$needed") free;" \
        "free some, or set MEGATRON_EDIT_VENV to a folder on another disk"
    return 2
}

install_torch() {
    local version=$1 index
    index=$(torch_index "$version")
    if [ -n "$index" ]; then set -- --index-url "$index"; else set --; fi
    if [ "$(uname -s)" = Darwin ] || has_cpu_build "$version" "$@"; then
        check_disk "CPU build of torch $version" "${cpu_mb[@]}"
    else
        check_disk "torch $version with CUDA" "${cuda_mb[@]}"
    fi || exit 2
    run_pip install "torch==$version" "$@"
}

install() {
    local start=$SECONDS python version
    if ! works "$venv/bin/python"; then
        python=$(find_python) || exit 2
        say "making $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv"
    fi
    say "installing the requirements (a minute or two; log: $log)"
    : >"$log"
    version=${MEGATRON_EDIT_TORCH:-$(sed -n 's/^torch==//p' "$root/constraints.txt")}
    has_torch "$version" || install_torch "$version"
    echo "torch==$version" >"$venv/constraints.txt"
    # A CPU build has this version, too, so that pip keeps it.
    (cd "$root" &&
        run_pip install -e '.[megatron,older-megatron,test,report,muon,metrics,mlflow,docs]' -c "$venv/constraints.txt")
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
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) say "$1: unknown option; the only one is --print-python" && exit 2 ;;
esac
is_current || install
if $print_python; then echo "$venv/bin/python"; else say "environment: $venv"; fi
