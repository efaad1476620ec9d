#!/usr/bin/env bash
# Makes .venv-simulators with Meta-World and Gymnasium, and LIBERO's own environment, for the tests of these simulators
# beside a .venv that has none of them. A second run finds nothing to do.
#
#   PYTHON=/path/to/python3.11   the interpreter (otherwise the first 3.11 or 3.12 on the PATH)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

venv=.venv-simulators
stamp=$venv/embodrl-setup

packages() { # of the extras; the simulators need neither torch nor embodrl
    "$1" -c '
import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print("\n".join({package: None for extra in ("metaworld", "gymnasium") for package in extras[extra]}))'
}

main() {
    local python key
    python=$(find_python)
    key=$({ "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; printf '%s\n' "$PWD"
            cat pyproject.toml constraints.txt scripts/setup_simulators.sh; } | sha256sum | cut -d' ' -f1)
    if ! [[ -f $stamp && "$(cat $stamp)" == "$key" ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
        say "setting up $venv with Meta-World and Gymnasium"
        rm -f "$stamp"
        "$python" -m venv --clear "$venv"
        packages "$python" >"$venv/requirements.txt"
        "$venv/bin/python" -m pip install -q -c constraints.txt -r "$venv/requirements.txt"
        "$venv/bin/python" -c 'import metaworld, gymnasium, mujoco' ||
            die "the simulators can't be imported" "look at the message above; it says which package does not fit"
        printf '%s\n' "$key" >"$stamp"
    fi
    .venv/bin/embodrl env install libero
}

main
