#!/usr/bin/env bash
# Makes the warm start that ships with embodrl: demonstrations by scripted experts, then imitation, then the measurement
# of what came out. docs/warm_start.md tells why it is made so. About 25 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

work=${WARM_START_DIR:-outputs/warm_start}
target=${WARM_START_TARGET:-embodrl/assets/openvla_tiny}
embodrl=${EMBODRL:-.venv/bin/embodrl}
# The card stays as it is: it names no interface and no place of the camera, so that the policy can be tried anywhere.
mkdir -p "$work" "$(dirname "$target")"
cp embodrl/assets/openvla_tiny/embodrl.json "$work/card.json"

[ -f "$work/demos/index.json" ] || "$embodrl" collect env=maniskill_mix \
    env.max_episode_steps=50 collect.min_speed=0.15 collect.max_speed=0.5 \
    collect.num_episodes=2000 collect.output_dir="$work/demos" collect.format=raw

"$embodrl" sft env=maniskill_mix model=openvla model.warm_start=null \
    sft.data_dir="$work/demos" sft.output_dir="$work/sft" \
    sft.max_steps=3600 sft.lr=6e-4 sft.label_smoothing_bins=3

rm -rf "$target"
cp -r "$work/sft/policy" "$target"
rm "$target/checksums.json"
cp "$work/card.json" "$target/embodrl.json"
cp "$work/sft/sft_metrics.jsonl" "$work/"

for env in maniskill maniskill_mix; do
    "$embodrl" eval env="$env" model=openvla model.warm_start="$target" env.video.enabled=false env.eval.decoding=all --json "$work/eval_$env.json"
done
