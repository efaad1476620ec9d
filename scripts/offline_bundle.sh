#!/usr/bin/env bash
# Collects wheels for a machine without package registries that has torch, transformers and the common packages
# (numpy, tokenizers, safetensors, pyarrow, aiohttp, msgpack, psutil, rich, typer, tensorboard, imageio, peft, pytest), but not
# embodrl and the small packages that it needs.
#
#   scripts/offline_bundle.sh DIR [--with SET,...] [--python-version 3.12]
#
# SET: megatron   megatron-core, for actor=megatron
#      mujoco     MuJoCo with EGL pictures, for env=gymnasium
#      gpu        nvidia-ml-py, for the GPU's name and memory in `embodrl plan` and `embodrl doctor`
#      all        these three
#
#   PYTHON=/path/to/python3.11   the interpreter whose pip downloads (otherwise the first 3.11 or 3.12 on the PATH)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

CORE=(hydra-core omegaconf pydantic pydantic-core annotated-types typing-inspection gymnasium farama-notifications
    fast-simplification pyzmq)
declare -A SETS=([megatron]="megatron-core" [mujoco]="mujoco glfw pyopengl" [gpu]="nvidia-ml-py")
# What constraints.txt does not pin: needs of needs. pydantic names the one pydantic-core that it works with.
declare -A PINS=([pydantic-core]=2.50.4 [annotated-types]=0.8.0 [typing-inspection]=0.4.5 [antlr4-python3-runtime]=4.9.3)
PLATFORMS=(manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
    manylinux_2_5_x86_64 manylinux1_x86_64)

directory=""
with=""
version=3.12
while [[ $# -gt 0 ]]; do
    case "$1" in
    --with) with=${2:?--with needs a list of sets}; shift 2 ;;
    --python-version) version=${2:?--python-version needs a version}; shift 2 ;;
    -*) die "unknown option $1" "usage: scripts/offline_bundle.sh DIR [--with SET,...] [--python-version 3.12]" ;;
    *) [[ -z "$directory" ]] || die "two directories: $directory and $1" "give one"; directory=$1; shift ;;
    esac
done
[[ -n "$directory" ]] || die "no directory" "usage: scripts/offline_bundle.sh DIR [--with SET,...]"
[[ "$with" == all ]] && with=$(IFS=,; echo "${!SETS[*]}")

packages=("${CORE[@]}")
IFS=, read -ra chosen <<<"$with"
for name in ${chosen[@]+"${chosen[@]}"}; do
    [[ -n "${SETS[$name]:-}" ]] || die "there is no set '$name'" "known: ${!SETS[*]}, all"
    read -ra more <<<"${SETS[$name]}"
    packages+=("${more[@]}")
done

# Print "NAME==VERSION" if a version is pinned here or in constraints.txt, else the name.
pinned() {
    local found
    found=${PINS[$1]:-$(sed -n "s/^$1==//p" constraints.txt)}
    printf '%s\n' "$1${found:+==$found}"
}

# Copy a wheel to the bundle without its modules, which the checkout has: entry points alone remain.
keep_metadata() {
    "$python" - "$1" "$directory" <<'CODE'
import pathlib, sys, zipfile
source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
with zipfile.ZipFile(source) as whole, zipfile.ZipFile(target / source.name, "w", zipfile.ZIP_DEFLATED) as part:
    for name in whole.namelist():
        if ".dist-info/" not in name.split("/")[0] + "/":
            continue
        data = whole.read(name)
        if name.endswith("/RECORD"):
            data = b"".join(line for line in data.splitlines(True) if b".dist-info/" in line)
        part.writestr(name, data)
CODE
}

mkdir -p "$directory"
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
python=$(find_python)
wanted=()
for name in "${packages[@]}"; do wanted+=("$(pinned "$name")"); done
platforms=()
for name in "${PLATFORMS[@]}"; do platforms+=(--platform "$name"); done
say "downloading ${#wanted[@]} packages for Python $version"
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version "$version" "${platforms[@]}" -d "$directory" "${wanted[@]}"
say "building wheels of antlr4-python3-runtime, which has none, and of embodrl, whose modules the checkout has"
"$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$directory" "$(pinned antlr4-python3-runtime)"
"$python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$built" .
keep_metadata "$built"/embodrl-*.whl

doubled=$(for file in "$directory"/*.whl; do file=${file##*/}; echo "${file%%-*}"; done | sort -f | uniq -di)
[[ -z "$doubled" ]] || die "$directory holds two versions of: $doubled" "delete the older wheels, or give an empty directory"
for file in "$directory"/*.whl; do printf '%12d  %s\n' "$(stat -c %s "$file")" "${file##*/}"; done
printf '%12d  bytes in %d wheels\n' "$(cat "$directory"/*.whl | wc -c)" "$(ls "$directory"/*.whl | wc -l)"
cat <<TEXT

Copy $directory and this checkout to the machine, and there, in the checkout:
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/site DIR/*.whl
  export PYTHONPATH=/tmp/site:\$PWD
  scripts/gpu_checks.sh OUTPUT_DIR
TEXT
