#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh virtual environment and trains from it, outside the checkout; a wheel that
# passes is left in dist/.
#
#   PYTHON=/path/to/python3.11   the interpreter (otherwise the first 3.11 or 3.12 on the PATH)
#   EMBODRL_TORCH=cpu|cuda       the kind of torch (otherwise cuda where an NVIDIA GPU answers)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

root=$PWD
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

python=$(find_python)
"$python" -m venv "$place/venv"
"install_$(torch_kind)_torch" "$place/venv"
PYTHON=$python scripts/build_wheel.sh "$place/dist"
wheel=$(echo "$place"/dist/embodrl-*.whl)
"$place/venv/bin/python" -m pip install -q -c constraints.txt "$wheel"

cd "$place" # outside the checkout: presets and data files must come from the wheel
unset PYTHONPATH
bin=$place/venv/bin/embodrl
[[ $("$place/venv/bin/python" -c 'import embodrl; print(embodrl.__file__)') == "$place"/venv/* ]]
"$bin" --version
"$bin" list presets >/dev/null
small=(env.train.total_num_envs=8 env.train.max_steps_per_rollout_epoch=20 env.eval.num_episodes=8)
"$bin" train env=toy runner=debug model.warm_start=null "${small[@]}" actor.global_batch_size=8 actor.micro_batch_size=8 \
    runner.output_dir="$place/run"
"$bin" eval "$place/run" env.eval.total_num_envs=8 --output "$place/eval"
mkdir -p "$root/dist"
cp "$wheel" "$root/dist/"
say "dist/$(basename "$wheel") installs and trains with $("$place/venv/bin/python" --version)"
