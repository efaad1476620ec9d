"""The page capabilities.md of the documentation site: what of other distributed systems works here.

scripts/docs_hooks.py adds it to the site; python scripts/make_capabilities.py prints it.

Each command is checked as its verb checks it before anything starts; the tests that are named run it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from embodrl.config.schema.readers import Verb
from embodrl.errors import ConfigError
from embodrl.pipelines.load import load_config
from embodrl.tools.sweep.combinations import expand_sweep

ROOT = Path(__file__).resolve().parent.parent
INTRODUCTION = """\
# Capabilities of distributed training

<!-- Made by scripts/make_capabilities.py: change that instead. -->

What AReaL, RLinf, verl, siiRL, slime and Prime-RL offer for placement, asynchrony, distribution and running many jobs,
and what of it embodrl has. `accepted` and `refused` are what the configuration check of the command says (`refused`
with its [code](errors.md)); it was not run for this page: the tests run it, on CPUs. *works*: nothing is known to be
missing; where no command is given, the tests show it. *partly*: the last column says what is missing. *missing*: the
command is refused, so that nothing is ignored in silence.
"""


BEFORE = {
    "Training, rollouts and simulators on GPUs of their own": "partly",
    "GPU physics, one process on each GPU": "partly",
    "Simulators on a machine without policy": "missing",
    "Placement by name: colocated, disaggregated, hybrid": "missing",
    "Automatic placement": "partly",
    "Devices that move between training and rollouts within a run": "missing",
    "Different hardware in one cluster": "missing",
    "Requests of simulators as methods of a manager": "partly",
    "Offload of GPU physics": "missing",
    "Rollouts ahead of training with a bound on staleness": "partly",
    "Asynchronous training with vLLM": "missing",
    "Collectors that join and leave, over a store": "partly",
    "Sharded training": "partly",
    "SGLang": "missing",
    "vLLM over several GPUs": "missing",
    "Tokens of a step of vLLM": "missing",
    "Prefix caching of vLLM": "missing",
    "Megatron, tensor parallel": "partly",
    "Megatron, pipeline, context and expert parallel": "missing",
    "A custom graph of an iteration": "partly",
    "The loop as a script of one's own": "missing",
    "Saved rollouts, trained on again": "missing",
    "A critic of its own": "missing",
    "VAPO": "missing",
    "On-policy distillation": "missing",
    "TD3+BC": "missing",
    "Evaluation in several processes": "missing",
    "Evaluation by the workflow that trains": "missing",
    "Use of GPUs, cores, memory and links in the metrics": "missing",
    "Runs as jobs of Slurm": "partly",
    "Slurm by Hydra's launcher": "missing",
    "Names of other systems are answered": "partly",
}
"""State of rows in an audit of 28 November 2026; all others worked or were not tried."""


@dataclass(frozen=True)
class Row:
    """A capability.

    Attributes:
        name: what it is.
        systems: which have it.
        command: one that asks for it, without ``embodrl``; "" where tests say more.
        tests: ``path::name`` below tests/, of those that run it.
        remains: what is missing, and why.
    """

    name: str
    systems: str
    command: str
    tests: tuple[str, ...] = ()
    remains: str = ""


GPUS = "plan train cluster=8xh100 actor=fsdp model.trainable=lora"
SECTIONS: dict[str, list[Row]] = {
    "Placement": [
        Row(
            "Training, rollouts and simulators on GPUs of their own",
            "RLinf, verl",
            f"{GPUS} actor.micro_batch_size=40 env.num_processes=32"
            " 'cluster.component_placement={actor:0-3,rollout:4-7,env:4-7}'",
            (
                "unit/deployment/test_deployment.py::test_simulators_render_on_the_gpus_that_they_are_placed_on",
                "unit/deployment/test_placement.py::test_processes_are_pinned_near_their_gpu",
            ),
            "tested with a described machine, not on several GPUs",
        ),
        Row(
            "GPU physics, one process on each GPU",
            "RLinf",
            "plan train cluster=8xh100 env.sim_backend=physx_cuda env.num_processes=4"
            " 'cluster.component_placement={actor:0,rollout:0,env:4-7}'",
            ("unit/deployment/test_deployment.py::test_gpu_physics_has_a_process_on_each_gpu",),
            "tested with a described machine",
        ),
        Row(
            "Simulators on a machine without policy",
            "RLinf",
            "plan train cluster=2x8xh100 cluster.launcher=ray actor=fsdp actor.micro_batch_size=20 env.num_processes=32"
            " 'cluster.component_placement={actor:0-7,rollout:0-7,env:8-15}' env.video.enabled=false",
            ("integration/test_ray_runs.py::test_simulators_on_a_machine_without_rollouts",),
            "run on two nodes of Ray on one machine; no videos",
        ),
        Row(
            "Placement by name: colocated, disaggregated, hybrid",
            "RLinf, slime",
            f"{GPUS} actor.micro_batch_size=10 env.num_processes=32 env.train.total_num_envs=64"
            " cluster.placement=hybrid",
            (
                "unit/deployment/test_placement.py::test_a_hybrid_placement_gives_simulators_and_the_acting_policy"
                "_their_own_gpus",
                "unit/deployment/test_placement.py::test_one_component_is_placed_on_the_command_line",
            ),
            "tested with described machines, not on several GPUs",
        ),
        Row(
            "Automatic placement",
            "RLinf",
            "plan train cluster=8xh100 cluster.placement=auto",
            (
                "unit/deployment/test_placement.py::test_an_automatic_placement_fills_the_cluster",
                "unit/preflight/test_weighed_placement.py::test_the_weighed_placement_is_the_fastest_that_fits",
                "integration/test_async_runs.py::test_the_first_run_measures_the_share_of_training",
            ),
            "from settings, devices, memory and, once a run has measured it, the share of training",
        ),
        Row(
            "Devices that move between training and rollouts within a run",
            "RLinf",
            "plan train cluster=8xh100 actor=fsdp actor.micro_batch_size=10 env.num_processes=30"
            " env.train.total_num_envs=120 cluster.placement=auto runner.max_staleness=1"
            " algorithm.decoupled.enabled=true cluster.rebalance=10",
            (
                "integration/test_async_runs.py::test_a_run_moves_to_another_placement_and_goes_on",
                "integration/test_ray_runs.py::test_a_run_moves_to_a_faster_placement",
                "unit/trainer/test_training_share.py::test_a_run_moves_where_a_measured_iteration_is_shorter",
            ),
            "asynchronous runs; by a checkpoint and new processes, which takes seconds, not within one",
        ),
        Row(
            "Different hardware in one cluster",
            "RLinf",
            "plan train env=toy cluster=2x8xh100"
            " 'cluster.node_groups=[{label: cards, node_ranks: 1, hardware: {name: 4xl40, num_gpus: 4}}]'",
            ("unit/deployment/test_placement.py::test_devices_of_machines_that_are_not_alike",),
            remains="no run was made on unlike machines",
        ),
        Row(
            "Requests of simulators as methods of a manager",
            "RLinf",
            "",
            ("unit/envs/test_proxy.py::test_a_request_is_a_method_that_asks_every_simulator",),
        ),
        Row(
            "Offload between phases",
            "RLinf, verl",
            "train env=maniskill model=openvla env.enable_offload=true",
            ("integration/test_offload_runs.py::test_a_run_is_the_same_with_offload_and_without",),
        ),
        Row(
            "Offload of GPU physics",
            "RLinf",
            "plan train cluster=8xh100 env.sim_backend=physx_cuda env.num_processes=1 env.enable_offload=true",
            remains="its states are restored approximately, not bit-exactly",
        ),
    ],
    "Asynchrony": [
        Row(
            "A robot that never waits for the learner, with interventions",
            "RLinf, lerobot",
            "",
            (
                "integration/test_robots.py::test_no_episode_is_lost_when_actor_and_learner_are_killed",
                "integration/test_robots.py::test_a_robot_registered_with_lerobot_is_driven_in_its_interpreter",
            ),
            "no real robot was driven",
        ),
        Row(
            "Rollouts ahead of training with a bound on staleness",
            "AReaL, Prime-RL",
            "train env=maniskill model=openvla runner.max_staleness=4 algorithm.decoupled.enabled=true",
            (
                "integration/test_async_runs.py"
                "::test_a_run_killed_at_random_moments_continues_without_losing_or_repeating_a_rollout",
                "integration/test_rollout_processes.py::test_ahead_of_training",
                "unit/workers/test_streaming.py::test_an_update_takes_what_has_ended_while_others_go_on",
            ),
            "single episodes (`rollout.streaming`) in the main process alone; the bound is fixed",
        ),
        Row(
            "Rewards while rollouts continue, in any process",
            "slime, Prime-RL",
            "train env=toy reward.fn=math:isfinite 'cluster.component_placement={actor:0,rollout:\"0:0-1\",env:0}'"
            " env.num_processes=8",
            (
                "integration/test_rewards_meanwhile.py::test_two_rollout_processes_are_paid_as_one_is",
                "integration/test_rewards_meanwhile.py::test_ahead_of_training",
            ),
            "episodes of workflows are judged after the rollout; in asynchronous runs the simulators of a rollout"
            " process pause for its last rewards",
        ),
        Row(
            "Asynchronous training with vLLM",
            "AReaL",
            "plan train rollout=vllm runner.max_staleness=1 algorithm.decoupled.enabled=true",
            (
                "vllm/test_vllm_runs.py::test_vllm_acts_ahead_of_training",
                "integration/test_remote_rollout_runs.py::test_a_server_acts_ahead_of_training",
            ),
            "between two chunks, not between two tokens; on CPUs",
        ),
        Row(
            "Simulators without a state, such as robots",
            "AReaL",
            "",
            (
                "unit/envs/test_stepping.py::test_only_offloading_needs_states_and_synchronous_training_warns",
                "integration/test_examples.py"
                "::test_an_environment_that_keeps_no_state_trains_with_a_warning_and_is_resumed",
            ),
        ),
        Row(
            "Rollout workers that are killed",
            "AReaL, Prime-RL",
            "train 'cluster.component_placement={actor:0,rollout:\"0:0-1\",env:0}' env.num_processes=8",
            ("integration/test_rollout_processes.py::test_a_rollout_process_that_is_killed_plays_again",),
            "they are replaced; others can join and leave a run with `store.url` alone",
        ),
        Row(
            "Collectors that join and leave, over a store",
            "Prime-RL",
            "plan train env=maniskill model=openvla store.url=/data/run runner.max_staleness=1 runner.save_interval=1"
            " algorithm.decoupled.enabled=true",
            (
                "integration/test_store_runs.py::test_no_episode_is_lost_or_counted_twice",
                "integration/test_store_runs.py::test_a_killed_run_learns_by_reward_from_each_episode_once",
                "integration/test_join_runs.py::test_processes_join_a_run_leave_it_and_are_killed",
            ),
            "not with branches, nor with robots by reward",
        ),
        Row(
            "Evaluation beside training",
            "Prime-RL",
            "train env=toy runner.eval_async=true",
            (
                "integration/test_runs.py::test_evaluations_beside_training_have_the_same_figures",
                "integration/test_runs.py::test_an_evaluation_that_was_under_way_is_repeated",
                "unit/trainer/test_early_stop.py::test_late_evaluations_end_a_run_when_they_are_known",
            ),
        ),
        Row(
            "Early stopping and a gate against regressions",
            "Prime-RL",
            "train env=maniskill model=openvla runner.stop_at_success=0.9 runner.stop_evaluations=2"
            " runner.max_regression=0.2",
            (
                "unit/trainer/test_early_stop.py::test_a_regression_fails_the_run_after_a_checkpoint",
                "integration/test_runs.py::test_a_run_that_has_solved_its_task_ends_and_can_be_trained_on",
            ),
        ),
        Row(
            "Held-out evaluation",
            "RLinf",
            "train env=maniskill_push model=openvla 'env.eval.tasks=[PullCube-v1]'",
            ("integration/test_runs.py::test_held_out_evaluations_change_nothing_of_what_is_trained",),
            "the same simulator, cameras and actions as in training",
        ),
    ],
    "Distribution": [
        Row(
            "Sharded training",
            "verl, AReaL",
            f"{GPUS} actor.micro_batch_size=8 env.num_processes=64 env.train.total_num_envs=256"
            " 'cluster.component_placement={actor:0-3,rollout:4-7,env:4-7}'",
            ("integration/test_fsdp_runs.py::test_the_first_iterations_have_the_losses_of_one_process",),
            "every training process gets the whole rollout; NCCL has not been run",
        ),
        Row(
            "Sharded fine-tuning",
            "verl, Prime-RL",
            "sft env=maniskill model=openvla actor=fsdp"
            " 'cluster.component_placement={actor:\"0:0-1\",rollout:0,env:0}'",
            ("integration/test_demo_runs.py::test_fine_tuning_in_two_processes_has_the_losses_of_one",),
        ),
        Row(
            "Rollouts from inference servers",
            "AReaL, Prime-RL",
            "plan train rollout=remote 'rollout.remote.urls=[http://127.0.0.1:8000]'",
            ("integration/test_remote_rollout_runs.py::test_a_server_that_is_killed_does_not_end_the_run",),
        ),
        Row(
            "Simulators on other machines than the trainer",
            "RLinf",
            "plan train env=maniskill model=openvla 'env.remote=[tcp://127.0.0.1:5700]' env.video.enabled=false",
            (
                "integration/test_env_server.py::test_a_connection_that_breaks_all_the_time_neither_loses_nor_repeats_a_step",
                "integration/test_env_server.py::test_a_run_whose_network_is_gone_for_20_s_is_the_local_run_to_the_bit",
            ),
            "no videos; a server that is gone is not replaced by another one",
        ),
        Row(
            "SGLang",
            "AReaL, slime, siiRL",
            "train rollout=sglang",
            remains="vLLM is the only inference library",
        ),
        Row(
            "vLLM over several GPUs",
            "siiRL, verl",
            "plan train rollout=vllm rollout.vllm.tensor_parallel_size=2",
            remains="each rollout process holds a whole policy",
        ),
        Row(
            "Tokens of a step of vLLM",
            "siiRL",
            "plan train rollout=vllm rollout.vllm.max_num_batched_tokens=4096",
            ("vllm/test_vllm_engine.py::test_steps_of_few_tokens_choose_the_same",),
        ),
        Row(
            "Prefix caching of vLLM",
            "siiRL",
            "plan train rollout=vllm rollout.vllm.enable_prefix_caching=true",
            remains="every prompt begins with its own picture, so there is no prefix to share",
        ),
        Row(
            "Megatron, tensor parallel",
            "verl, AReaL",
            "plan train actor=megatron \"cluster.component_placement={actor:'0:0-1',rollout:0,env:0}\"",
            (
                "unit/hybrid_engines/training/megatron_engine/test_megatron_training.py"
                "::test_processes_of_a_run_train_as_one",
                "unit/hybrid_engines/training/megatron_engine/test_megatron_training.py"
                "::test_shards_of_a_run_are_read_by_every_backend",
            ),
            "OpenVLA alone, on CPUs",
        ),
        Row(
            "Megatron, pipeline, context and expert parallel",
            "verl",
            "plan train actor=megatron actor.pipeline_model_parallel_size=2",
            remains="no model here is so large, or has experts",
        ),
        Row(
            "A custom graph of an iteration",
            "siiRL",
            "train pipeline=on_policy",
            (
                "integration/test_pipelines.py::test_a_built_in_pipeline_trains",
                "integration/test_pipelines.py::test_a_node_that_is_tried_again_leaves_no_trace_but_its_count",
                "unit/pipelines/test_pipeline_run.py::test_nodes_that_do_not_depend_on_each_other_run_at_once",
                "integration/test_pipelines.py::test_a_node_is_tested_by_itself",
                "integration/test_placed_nodes.py::test_two_processes_compute_what_one_does",
                "unit/compat/test_spellings.py::test_a_pipeline_of_siirl_is_the_one_here",
            ),
            "compute nodes run in processes of their own (pipeline.placement); rollouts and training begin in the main"
            " process, through which every batch passes",
        ),
        Row(
            "The loop as a script of one's own",
            "AReaL, verl",
            "",
            ("integration/test_api_runs.py::test_a_session_takes_the_steps_of_the_trainer",),
        ),
        Row(
            "Saved rollouts, trained on again",
            "slime",
            "train env=toy model=mlp runner.save_rollouts=true",
            ("integration/test_saved_rollouts.py::test_a_replay_learns_what_the_run_learned",),
            "rollouts of runs without a replay buffer, in the main process",
        ),
        Row(
            "No setting is ignored in silence",
            "",
            "eval env=toy model=mlp model.random_weights=true env.include_state=true",
            ("integration/test_keys_of_verbs.py::test_no_key_is_ignored_in_silence",),
        ),
    ],
    "Learning": [
        Row(
            "A critic of its own",
            "verl, slime",
            "train env=toy model=mlp algorithm.critic.kind=network",
            ("integration/test_own_critic.py::test_it_learns_alone_and_is_resumed",),
            "a small network in the policy's process; not a pretrained model, nor a placement of its own",
        ),
        Row(
            "VAPO",
            "verl",
            "train env=toy model=mlp algorithm=vapo",
            (
                "unit/algorithms/test_advantages.py::test_the_critic_has_a_lambda_of_its_own_and_the_policy_that_of_its_length",
            ),
        ),
        Row(
            "On-policy distillation",
            "slime",
            "",
            ("integration/test_teacher.py::test_the_policy_becomes_like_its_teacher",),
            "the teacher has the family and size of the policy",
        ),
        Row(
            "TD3+BC",
            "verl-vla",
            "",
            ("unit/learners/offline/test_td3_bc.py::test_the_actor_descends_the_equation",),
            "small Gaussian policies, in one process",
        ),
        Row(
            "Evaluation in several processes",
            "verl",
            "eval env=toy model=mlp model.random_weights=true rollout.own_process=true",
            ("integration/test_eval_processes.py::test_two_processes_evaluate_as_one_does",),
        ),
        Row(
            "Evaluation by the workflow that trains",
            "AReaL",
            "",
            ("integration/test_workflow_runs.py::test_a_run_is_evaluated_by_its_workflow_on_the_way_and_afterwards",),
        ),
        Row(
            "Use of GPUs, cores, memory and links in the metrics",
            "verl",
            "",
            ("integration/test_usage_runs.py::test_every_row_has_the_use_of_each_component",),
            "GPUs were read on one machine with one GPU",
        ),
    ],
    "Many runs": [
        Row(
            "Sweeps",
            "RLinf, verl",
            "sweep env=maniskill model=openvla runner.seed=1,2,3 algorithm=ppo,grpo",
            ("integration/test_sweeps_and_profiles.py::test_a_killed_sweep_leaves_no_run_behind_and_is_resumed",),
            "on this machine or as Slurm jobs; not on a Ray cluster",
        ),
        Row(
            "Presets of one's own",
            "RLinf, verl",
            "",
            ("unit/config/test_own_presets.py::test_the_command_line_names_directories_and_lists_what_is_in_them",),
        ),
        Row(
            "Timeline of all processes",
            "verl",
            "",
            ("integration/test_sweeps_and_profiles.py::test_a_profile_has_every_process",),
            "shares of time, without the utilisation of GPUs and links",
        ),
        Row(
            "Runs as jobs of Slurm",
            "verl, siiRL",
            "",
            ("unit/tools/sweep/test_sweep.py::test_slurm_gets_one_array_whose_jobs_start_or_continue_their_runs",),
            "tried with a stand-in for Slurm; one run over several nodes by scripts/slurm_ray.sh, which was not run",
        ),
        Row(
            "Slurm by Hydra's launcher",
            "siiRL",
            "train hydra/launcher=slurm",
            remains="`embodrl sweep --backend slurm` writes the jobs",
        ),
        Row(
            "Names of other systems are answered",
            "",
            "",
            (
                "unit/config/test_other_systems.py::test_a_line_of_an_example_is_answered",
                "unit/config/test_other_systems.py::test_a_key_of_another_system_is_answered",
            ),
        ),
        Row(
            "Recording a policy",
            "Hybrid",
            "",
            ("unit/runs/test_collect.py::test_a_policy_is_recorded_step_by_step",),
        ),
    ],
}


def outcome(command: str) -> str:
    """Return what the check of a command says: ``accepted``, or ``refused`` with the codes."""
    verb, *settings = shlex.split(command.removeprefix("plan ")) if command else [""]
    if not verb:
        return ""
    runs = [each.overrides for each in expand_sweep(settings)] if verb == "sweep" else [tuple(settings)]
    checked = "plan" if command.startswith("plan ") else "train" if verb == "sweep" else verb
    try:
        for overrides in runs:
            load_config(list(overrides), verb=cast(Verb, checked))
    except ConfigError as error:
        return f"refused: {', '.join(sorted({f'`{problem.code}`' for problem in error.problems}))}"
    return "accepted"


def missing_tests() -> list[str]:
    """Return the tests of the rows that are not there."""
    named = [test.partition("::") for rows in SECTIONS.values() for row in rows for test in row.tests]
    return [
        f"tests/{path}::{name}"
        for path, _, name in named
        if not (ROOT / "tests" / path).is_file()
        or not re.search(rf"^def {name}\b", (ROOT / "tests" / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]


def state_of(row: Row, found: str) -> str:
    """Return the state of a row, given what the check of its command says."""
    return "missing" if found.startswith("refused") else "partly" if row.remains else "works"


def table(rows: list[Row], states: dict[str, str]) -> list[str]:
    """Return the rows of a section, and enter their states."""
    head = ("capability", "of", "command", "check", "tests", "before", "now", "what remains")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        found = outcome(row.command)
        states[row.name] = state_of(row, found)
        tests = "<br>".join(f"`{test}`" for test in row.tests)
        command = f"`embodrl {row.command}`" if row.command else ""
        cells = (row.name, row.systems, command, found, tests, BEFORE.get(row.name, ""), states[row.name], row.remains)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def change(states: dict[str, str]) -> str:
    """Return a table of the numbers of rows in each state in the audit, and now."""
    lines = ["| | works | partly | missing |", "|---|---|---|---|"]
    now = {name: states[name] for name in BEFORE if name in states}
    for title, found in (("28 November 2026", {name: BEFORE[name] for name in now}), ("now", now)):
        counted = Counter(found.values())
        lines.append(f"| {title} | {counted['works']} | {counted['partly']} | {counted['missing']} |")
    text = f"Of {len(now)} rows that an audit found partly there or missing on 28 November 2026 (`before`):"
    return f"{text}\n\n" + "\n".join(lines) + "\n"


def page() -> str:
    """Return the page."""
    states: dict[str, str] = {}
    tables = {title: "\n".join(table(rows, states)) for title, rows in SECTIONS.items()}
    parts = [INTRODUCTION, change(states)]
    for title, rows in tables.items():
        parts += [f"## {title}\n", rows + "\n"]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
