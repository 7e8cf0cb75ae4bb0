#!/usr/bin/env bash
# Builds the site of docs/ in build/site; a broken link or an unknown name is an error.
#
#   scripts/docs.sh [arguments of mkdocs build]
#
# Needs the extra `docs`: pip install '.[docs]'.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case "${1:-}" in
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
esac
cd "$root"
python=$(bash scripts/setup.sh --print-python)
if ! "$python" -c 'import mkdocs, material, mkdocstrings_handlers.python' 2>/dev/null; then
    echo "docs: mkdocs-material or mkdocstrings is not installed; pip install '.[docs]'" >&2
    exit 2
fi
export NO_MKDOCS_2_WARNING=1
exec "$python" -m mkdocs build --strict "$@"
