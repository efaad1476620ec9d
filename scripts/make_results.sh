#!/usr/bin/env bash
# Makes the greedy curves of docs/results.md with earlier defaults: demonstrations, imitation, reinforcement learning, task by task.
#
#   scripts/make_results.sh [lift|reach|drawer|libero ...]
#
# RESULTS_DIR holds what is made; a stage whose result is there is not done again, and a run that was stopped is resumed.
# Demonstrations whose collection was stopped are collected again.
# RESULTS_TARGET takes the recorded metrics. SIMULATORS_PYTHON is an interpreter with Meta-World, where embodrl's own has none.
set -euo pipefail
cd "$(dirname "$0")/.."

work=${RESULTS_DIR:-outputs/results}
target=${RESULTS_TARGET:-benchmarks/results}
embodrl=${EMBODRL:-.venv/bin/embodrl}
elsewhere=(${SIMULATORS_PYTHON:+"env.python=$SIMULATORS_PYTHON"})
# A machine that has other work, too, may take long over a step.
patience=(env.start_timeout_s=1500 env.reset_timeout_s=900 env.step_timeout_s=900)
# What these runs were recorded with, where defaults have changed since.
recorded=(actor.optim.lr=7e-5 algorithm.sampling.temperature=0.3 algorithm.bootstrap_type=truncation model.freeze_vision=false)
mkdir -p "$work" "$target"

# warm_start NAME EPISODES STEPS LR ARGS...: demonstrations, and a policy that imitates them
warm_start() {
    local name=$1 episodes=$2 steps=$3 lr=$4 each of_experts=()
    shift 4
    for each in "$@"; do
        [[ $each == model.* ]] || of_experts+=("$each") # which have no model
    done
    if grep -qs '"stopped_early": true' "$work/$name/demos/meta/embodrl.json"; then
        echo "$work/$name/demos is short, as its collection was stopped: it is removed and collected again"
        rm -r "$work/$name/demos"
    fi
    [ -d "$work/$name/demos" ] || $embodrl collect "${of_experts[@]}" collect.num_episodes="$episodes" collect.output_dir="$work/$name/demos"
    [ -d "$work/$name/sft/policy" ] || $embodrl sft "$@" sft.data_dir="$work/$name/demos" sft.output_dir="$work/$name/sft" \
        sft.max_steps="$steps" sft.lr="$lr" sft.label_smoothing_bins=3
}

# learn NAME ITERATIONS ARGS...: reinforcement learning, measured on fixed seeds at the start, on the way, at the end
learn() {
    local name=$1 iterations=$2
    shift 2
    if [ ! -d "$work/$name/rl" ]; then
        $embodrl train "$@" "${recorded[@]}" runner.max_iterations="$iterations" runner.output_dir="$work/$name/rl" env.video.enabled=false
    elif [ ! -d "$work/$name/rl/policy" ]; then
        $embodrl resume "$work/$name/rl"
    fi
    cp "$work/$name/rl/metrics.jsonl" "$target/$name.jsonl"
}

# more NAME ITERATIONS: continues a run that is whole
more() {
    [ "$(wc -l <"$work/$1/rl/metrics.jsonl")" -gt "$2" ] || $embodrl resume "$work/$1/rl" runner.max_iterations="$2"
    cp "$work/$1/rl/metrics.jsonl" "$target/$1.jsonl"
}

lift() {
    local name=lift_peg_seed_0 args=(env=maniskill_lift_peg model=openvla model.warm_start=null "${patience[@]}")
    warm_start $name 400 500 5e-4 "${args[@]}"
    learn $name 30 "${args[@]}" model.warm_start="$work/$name/sft/policy"
}

reach() {
    local name=metaworld_reach_seed_0 args=(env=metaworld model=openvla model.warm_start=null "${elsewhere[@]}" "${patience[@]}")
    warm_start $name 150 400 6e-4 "${args[@]}"
    learn $name 30 "${args[@]}" model.warm_start="$work/$name/sft/policy" env.eval.num_episodes=128
    more $name 60
}

drawer() {
    local name=metaworld_drawer_seed_0
    local args=(env=metaworld "env.tasks=[drawer-close-v3]" model=openvla model.warm_start=null "${elsewhere[@]}" "${patience[@]}")
    warm_start $name 60 100 6e-4 "${args[@]}"
    learn $name 30 "${args[@]}" model.warm_start="$work/$name/sft/policy" env.eval.num_episodes=128
}

libero() {
    local args=(env=libero_spatial model=openvla model.warm_start=null "${patience[@]}")
    [ -f "$work/libero_eval.json" ] || $embodrl eval "${args[@]}" env.video.enabled=false \
        --output "$work/libero_eval" --json "$work/libero_eval.json"
    learn libero_spatial_seed_0 3 "${args[@]}" runner.eval_at_start=false runner.eval_interval=0 env.eval.num_episodes=40
}

for task in "${@:-lift reach drawer libero}"; do
    for each in $task; do
        date -u +"%H:%M:%S $each"
        $each
    done
done
