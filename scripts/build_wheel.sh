#!/usr/bin/env bash
# Builds the wheel into the directory that is named, and compares its files with those that git tracks.
#
#   PYTHON=/path/to/python3.11   the interpreter (otherwise the first 3.11 or 3.12 on the PATH)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

[[ $# -eq 1 ]] || die "name the directory for the wheel"
python=$(find_python)
"$python" -m pip wheel -q --no-deps --wheel-dir "$1" .
wheels=("$1"/embodrl-*.whl)
[[ ${#wheels[@]} -eq 1 ]] || die "$1 holds several wheels of embodrl"

# What the wheel has beside its own metadata, and what the package consists of.
built=$("$python" -m zipfile -l "${wheels[0]}" | tail -n +2 | cut -d' ' -f1 | grep -vE '^embodrl-[^/]+\.dist-info/' | sort)
tracked=$( (git ls-files embodrl && git ls-files configs | sed 's,^,embodrl/,') | sort)
if ! diff <(echo "$tracked") <(echo "$built"); then
    die "the wheel differs from the files that git tracks: < is missing in the wheel, > does not belong into it"
fi
say "$(basename "${wheels[0]}") has the $(wc -l <<<"$built") files that git tracks"
