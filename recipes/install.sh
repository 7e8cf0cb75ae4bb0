#!/usr/bin/env bash
# Installs Megatron-LM and megatron_edit into a container image; its torch is not changed.
#
#   recipes/install.sh [PACKAGE]    PACKAGE: what pip installs (default: the folder above this one)
#
# Run by Dockerfile and apptainer.def, as root. The image must have Python >= 3.12 with torch, git,
# make and a C++ compiler, as NVIDIA's PyTorch images do.
#
# Environment: MEGATRON_LM_DIR  where to clone Megatron-LM to (default: /opt/Megatron-LM)
#              MEGATRON_LM_REF  its tag or branch (default: core_v0.19.0)
#              MEGATRON_LM_URL  its repository, or a mirror
set -euo pipefail

case ${1:-} in -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;; esac
package=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
clone=${MEGATRON_LM_DIR:-/opt/Megatron-LM}

version_of_torch() { python -c 'from importlib.metadata import version; print(version("torch"))'; }

before=$(version_of_torch)
git clone --quiet --depth 1 --branch "${MEGATRON_LM_REF:-core_v0.19.0}" \
    "${MEGATRON_LM_URL:-https://github.com/NVIDIA/Megatron-LM}" "$clone"
# Without dependencies, which name torch: an image's own build of it must stay.
python -m pip install --no-cache-dir --no-deps "$package" 'einops>=0.8' 'msgspec>=0.19' \
    'psutil>=6' 'pybind11>=2.13' 'cryptography>=42' 'cffi>=1.16'  # which cryptography needs
# Megatron compiles this helper at the first start, which only the owner of the clone could do.
make --silent -C "$clone/megatron/core/datasets"
[ "$(version_of_torch)" = "$before" ] || {
    echo "install.sh: torch $before has become $(version_of_torch)" >&2
    exit 1
}
PYTHONPATH=$clone python -m megatron_edit check "$clone/pretrain_gpt.py" --help >/dev/null
