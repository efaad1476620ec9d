#!/usr/bin/env bash
# Every check that needs no test run. All of them run, so that one report shows all that is wrong.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=.venv/bin
status=0

check() {
    printf '== %s\n' "$*"
    "$@" || status=1
}

checked=()
for directory in embodrl tests scripts benchmarks examples; do
    if [[ -d $directory ]]; then checked+=("$directory"); fi
done
check $bin/ruff check "${checked[@]}"
check $bin/ruff format --check "${checked[@]}"
check $bin/pyright
check $bin/lint-imports --no-cache
check $bin/python scripts/check_sizes.py
check $bin/python scripts/check_text.py
exit $status
