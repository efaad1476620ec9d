#!/usr/bin/env bash
# make_warm_start.sh [openvla|openvla_oft] [SETTING...]
# Makes a warm start that ships with embodrl: demonstrations by scripted experts, then imitation, then the measurement
# of what came out. Settings are further ones of `embodrl sft`. Demonstrations in $WARM_START_DIR/demos are reused.
# OpenVLA begins with random weights, OpenVLA-OFT with the shipped OpenVLA, whose layers it has.
# docs/warm_start.md tells why it is made so. About 25 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

model=${1:-openvla}
case $model in
openvla) start=null steps=3600 lr=6e-4 ;;
openvla_oft) start=embodrl/assets/openvla_tiny steps=1200 lr=3e-4 ;;
*)
    echo "usage: make_warm_start.sh [openvla|openvla_oft] [SETTING...]" >&2
    exit 2
    ;;
esac
work=${WARM_START_DIR:-outputs/warm_start}
target=${WARM_START_TARGET:-embodrl/assets/${model}_tiny}
embodrl=${EMBODRL:-.venv/bin/embodrl}
made=$work/$model
# The card stays as it is: it names no interface and no place of the camera, so that the policy can be tried anywhere.
mkdir -p "$made" "$(dirname "$target")"
cp embodrl/assets/openvla_tiny/embodrl.json "$made/card.json"

[ -f "$work/demos/index.json" ] || "$embodrl" collect env=maniskill_mix \
    env.max_episode_steps=50 collect.min_speed=0.15 collect.max_speed=0.5 \
    collect.num_episodes=2000 collect.output_dir="$work/demos" collect.format=raw

"$embodrl" sft env=maniskill_mix model="$model" model.warm_start="$start" \
    sft.data_dir="$work/demos" sft.output_dir="$made/sft" \
    sft.max_steps="$steps" sft.lr="$lr" sft.label_smoothing_bins=3 "${@:2}"

rm -rf "$target"
cp -r "$made/sft/policy" "$target"
rm "$target/checksums.json"
cp "$made/card.json" "$target/embodrl.json"
cp "$made/sft/sft_metrics.jsonl" "$made/"

for env in maniskill maniskill_mix; do
    "$embodrl" eval env="$env" model="$model" model.warm_start="$target" env.video.enabled=false env.eval.decoding=all --json "$made/eval_$env.json"
done
