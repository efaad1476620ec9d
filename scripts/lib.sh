# Functions shared by the set-up scripts. Sourced, never run; needs bash, changes nothing by itself.

say() { printf '== %s\n' "$*" >&2; }

die() {
    printf '\nerror: %s\n' "$1" >&2
    [[ $# -gt 1 ]] && printf '  hint: %s\n' "$2" >&2
    exit 1
}

# Print "3.11" or "3.12" if $1 is an interpreter that runs and has a supported version; fail otherwise.
# A pyenv shim exists on the PATH even where no interpreter stands behind it, so the file alone proves nothing.
supported_version() {
    "$1" -c 'import sys; v = sys.version_info[:2]; print("%d.%d" % v); sys.exit(v not in ((3, 11), (3, 12)))' 2>/dev/null
}

has_venv() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

# Print the interpreter to use: $PYTHON if set, else the first on the PATH that can make virtual environments.
find_python() {
    local candidate without_venv=""
    if [[ -n "${PYTHON:-}" ]]; then
        supported_version "$PYTHON" >/dev/null ||
            die "PYTHON=$PYTHON is not a working Python 3.11 or 3.12" "unset PYTHON, or point it at one"
        has_venv "$PYTHON" || die_without_venv "$PYTHON"
        printf '%s\n' "$PYTHON"
        return
    fi
    while read -r candidate; do
        supported_version "$candidate" >/dev/null || continue
        if has_venv "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv="${without_venv:-$candidate}"
    done < <(type -ap python3 python3.11 python3.12)
    [[ -n "$without_venv" ]] && die_without_venv "$without_venv"
    die "no working Python 3.11 or 3.12 on the PATH" \
        "install one (Debian 12: apt install python3 python3-venv; Ubuntu 24.04: apt install python3.12-venv; Ubuntu 22.04: apt install python3.11-venv), or set PYTHON=/path/to/python3.11"
}

die_without_venv() {
    local version
    version=$(supported_version "$1")
    die "$1 (Python $version) has no venv and ensurepip modules" "apt install python$version-venv"
}

# The kind of torch to install: $EMBODRL_TORCH (cpu or cuda) if set, else cuda where an NVIDIA GPU answers.
torch_kind() {
    case "${EMBODRL_TORCH:-}" in
    cpu | cuda) printf '%s\n' "$EMBODRL_TORCH" ;;
    "") if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo cuda; else echo cpu; fi ;;
    *) die "EMBODRL_TORCH=$EMBODRL_TORCH" "set it to cpu or cuda, or unset it" ;;
    esac
}

# A key that changes whenever the environment has to be rebuilt or completed.
# Arguments: interpreter, kind of torch. The directory counts because a virtual environment can't be moved.
setup_key() {
    { "$1" -c 'import sys; print(sys.version, sys.base_prefix)'; printf '%s\n' "$2" "$PWD"
      cat pyproject.toml constraints.txt scripts/setup.sh; } | sha256sum | cut -d' ' -f1
}

# Install the CPU build of torch into the virtual environment $1, in the version that constraints.txt names.
install_cpu_torch() {
    # pip alone would fetch several gigabytes of CUDA libraries, so only a build that is marked as CPU will do.
    local venv_python=$1/bin/python log=$1/pip-torch.log torch_version
    torch_version=$(sed -n 's/^torch==//p' constraints.txt)
    if $venv_python -m pip install -q "torch==$torch_version+cpu" 2>"$log"; then return; fi
    say "the configured package indexes have no CPU build of torch $torch_version; trying uv, which knows PyTorch's own"
    $venv_python -m pip install -q -c constraints.txt uv &&
        $venv_python -m uv pip install --python $venv_python --torch-backend=cpu "torch==$torch_version" && return
    printf '\n' >&2
    tail -n 3 "$log" >&2
    die "there is no CPU build of torch $torch_version available for $($venv_python --version)" \
        "let this machine reach PyTorch's CPU package index, or put the wheel into a directory and set PIP_FIND_LINKS to it; EMBODRL_TORCH=cuda takes the much larger CUDA build instead"
}

# Install the CUDA build of torch into the virtual environment $1, in the version that constraints.txt names.
install_cuda_torch() {
    local torch_version
    torch_version=$(sed -n 's/^torch==//p' constraints.txt)
    # Three equal signs: the version as it is written, so that a CPU build (2.x.y+cpu) at hand is not taken.
    "$1/bin/python" -m pip install "torch===$torch_version" ||
        die "torch $torch_version could not be installed" "look at pip's message above; EMBODRL_TORCH=cpu takes the CPU build"
}
