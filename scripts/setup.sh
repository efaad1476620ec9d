#!/usr/bin/env bash
# Makes .venv with embodrl and all that training and the tests need. A second run finds nothing to do.
#
#   PYTHON=/path/to/python3.11   the interpreter (otherwise the first 3.11 or 3.12 on the PATH)
#   EMBODRL_TORCH=cpu|cuda       the kind of torch (otherwise cuda where an NVIDIA GPU answers)
#   EMBODRL_YES=1                install system packages without asking
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh
# venv --clear follows links.
[[ ! -L .venv ]] || die ".venv is a link: setting it up would clear the environment it leads to" "rm .venv"

torch_version=$(sed -n 's/^torch==//p' constraints.txt)
venv_python=.venv/bin/python
stamp=.venv/embodrl-setup
describe_python='import sys; print(sys.version, sys.base_prefix)'

# Whether .venv is whole, of that interpreter, and has not been moved here from elsewhere: its scripts name their directory.
venv_is_usable() {
    [[ "$($venv_python -c "$describe_python" 2>/dev/null)" == "$("$1" -c "$describe_python")" ]] &&
        $venv_python -c 'import pip' 2>/dev/null && grep -qF "$PWD/.venv" .venv/bin/activate
}

main() {
    local python kind key
    python=$(find_python)
    kind=$(torch_kind)
    scripts/install_system_packages.sh --python "$python"
    key=$(setup_key "$python" "$kind")
    if [[ -f $stamp && "$(cat $stamp)" == "$key" ]] && $venv_python -c '' 2>/dev/null; then
        return
    fi
    say "setting up .venv with $("$python" --version) and torch $torch_version ($kind); this takes a few minutes"
    rm -f "$stamp"
    # What is installed already stays, so that a changed dependency costs seconds.
    if ! venv_is_usable "$python"; then
        "$python" -m venv --clear .venv
    fi
    "install_${kind}_torch" .venv
    say "installing embodrl and its dependencies"
    $venv_python -m pip install -q -c constraints.txt -e '.[maniskill,datasets,wandb,lora,serve,dev]'
    $venv_python scripts/check_install.py "$kind"
    printf '%s\n' "$key" >"$stamp"
    say "done; activate it with 'source .venv/bin/activate', or run .venv/bin/embodrl"
}

main
