#!/usr/bin/env bash
# Installs the system libraries that rendering needs, after showing what it will run and asking.
# Usage: install_system_packages.sh [--python PYTHON] [--dry-run]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

python="" options=()
while [[ $# -gt 0 ]]; do
    case "$1" in
    --python) python="$2"; shift 2 ;;
    --dry-run) options+=(--dry-run); shift ;;
    *) die "unknown option $1" "--python PYTHON, --dry-run" ;;
    esac
done
exec "${python:-$(find_python)}" -I scripts/system_packages.py "${options[@]}"
