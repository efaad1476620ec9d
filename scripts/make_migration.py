"""The page migration.md of the documentation site: what the keys of other systems are here.

RLinf's are from the table of `embodrl import rlinf`. scripts/docs_hooks.py adds it to the site; python
scripts/make_migration.py prints it.
"""

from __future__ import annotations

import re
import sys

from embodrl.config.check import schema_keys, shipped_schemas
from embodrl.config.rlinf import RLINF_KEYS, RlinfKey

INTRODUCTION = """\
# Coming from another system

<!-- Made by scripts/make_migration.py: change that, or the table in embodrl/config/rlinf.py, instead. -->

What settings of other systems are called here. `embodrl config validate` answers many of these names with the key here
when they are typed; [configuration](configuration.md) has all keys. Equal names do not make equal runs: each system
has its own optimizer, its own order of episodes and its own defaults.

## RLinf

```bash
embodrl import rlinf examples/embodiment/config/NAME.yaml --out mine.yaml
embodrl config validate --config mine.yaml
```

The recipe is read as plain YAML together with the files of `env/`, `model/` and the other folders beside it; no code
runs, and an interpolation that leads out of the recipe is reported. Each key is reported as mapped, equal to our
default, without meaning here, or unsupported, with the nearest key. `*` stands for a part of a key, `**` for the rest.
"""
KINDS = {
    "mapped": "Keys that become one here",
    "meaningless": "Keys that nothing here asks for",
    "unsupported": "Keys without a counterpart",
    "unread": "Keys that RLinf's embodied training does not read",
}
OTHERS: dict[str, dict[str, tuple[str, str]]] = {
    "SimpleVLA-RL": {
        "data.task_suite_name": ("env.suite", "env=libero_spatial and its siblings"),
        "data.n_samples": ("algorithm.group_size", ""),
        "data.filter_accuracy": ("algorithm.filter.enabled", "algorithm=dapo"),
        "data.accuracy_lower_bound": ("algorithm.filter.min_rate", ""),
        "data.accuracy_upper_bound": ("algorithm.filter.max_rate", ""),
        "data.train_batch_size": ("env.train.total_num_envs", "divided by the groups: groups times their size"),
        "actor_rollout_ref.model.path": ("model.model_path", "model=openvla_oft_libero"),
        "actor_rollout_ref.model.vla": ("model.model_type", "openvla_oft"),
        "actor_rollout_ref.model.action_chunks_len": ("model.num_action_chunks", ""),
        "actor_rollout_ref.rollout.unnorm_key": ("model.unnorm_key", ""),
        "actor_rollout_ref.rollout.temperature": ("algorithm.sampling.temperature", ""),
        "actor_rollout_ref.actor.clip_ratio_low": ("algorithm.clip_ratio_low", ""),
        "actor_rollout_ref.actor.clip_ratio_high": ("algorithm.clip_ratio_high", ""),
        "algorithm.kl_ctrl.kl_coef": ("algorithm.kl.coef", ""),
        "others": ("", "as verl's"),
    },
    "verl": {
        "algorithm.adv_estimator": ("algorithm.adv_type", "gae, grpo, rloo, reinforce_plus_plus: reinforce_pp"),
        "algorithm.gamma": ("algorithm.gamma", ""),
        "algorithm.lam": ("algorithm.gae_lambda", ""),
        "algorithm.norm_adv_by_std_in_grpo": ("algorithm.normalize_advantages", "algorithm.normalization_scope=group"),
        "algorithm.use_kl_in_reward": ("algorithm.kl.placement", "reward"),
        "algorithm.kl_ctrl.kl_coef": ("algorithm.kl.coef", "with placement reward"),
        "actor_rollout_ref.model.path": ("model.model_path", "with model=FAMILY"),
        "actor_rollout_ref.model.enable_gradient_checkpointing": ("actor.gradient_checkpointing", ""),
        "actor_rollout_ref.actor.ppo_mini_batch_size": ("actor.global_batch_size", "chunks; verl counts prompts"),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": ("actor.micro_batch_size", ""),
        "actor_rollout_ref.actor.ppo_epochs": ("algorithm.update_epoch", ""),
        "actor_rollout_ref.actor.optim.lr": ("actor.optim.lr", ""),
        "actor_rollout_ref.actor.grad_clip": ("actor.optim.clip_grad", ""),
        "actor_rollout_ref.actor.clip_ratio": ("algorithm.clip_ratio_low", "and clip_ratio_high"),
        "actor_rollout_ref.actor.clip_ratio_c": ("algorithm.clip_ratio_dual", ""),
        "actor_rollout_ref.actor.entropy_coeff": ("algorithm.entropy_bonus", ""),
        "actor_rollout_ref.actor.use_kl_loss": ("algorithm.kl.placement", "loss"),
        "actor_rollout_ref.actor.kl_loss_coef": ("algorithm.kl.coef", "with placement loss"),
        "actor_rollout_ref.actor.kl_loss_type": ("algorithm.kl.estimator", "kl: k1, mse: k2, low_var_kl: k3"),
        "actor_rollout_ref.actor.loss_agg_mode": ("algorithm.loss_agg", "token-mean: token_mean"),
        "actor_rollout_ref.actor.fsdp_config.param_offload": ("actor.enable_offload", ""),
        "actor_rollout_ref.rollout.name": ("rollout.backend", "vllm, or native"),
        "actor_rollout_ref.rollout.n": ("algorithm.group_size", ""),
        "actor_rollout_ref.rollout.temperature": ("algorithm.sampling.temperature", ""),
        "actor_rollout_ref.rollout.top_k": ("algorithm.sampling.top_k", "-1: 0"),
        "actor_rollout_ref.rollout.tensor_model_parallel_size": ("", "each rollout process holds a whole policy"),
        "critic.optim.lr": ("actor.optim.value_lr", "the critic is a head of the policy"),
        "critic.cliprange_value": ("algorithm.value_clip", ""),
        "trainer.critic_warmup": ("actor.optim.critic_warmup_iterations", ""),
        "trainer.total_training_steps": ("runner.max_iterations", ""),
        "trainer.save_freq": ("runner.save_interval", ""),
        "trainer.test_freq": ("runner.eval_interval", ""),
        "trainer.n_gpus_per_node": ("cluster.placement", "actor=fsdp cluster.placement=auto takes all GPUs"),
        "trainer.nnodes": ("cluster.num_nodes", "with cluster.launcher=ray"),
        "trainer.project_name": ("runner.logger.wandb_project", ""),
        "trainer.experiment_name": ("runner.name", ""),
        "trainer.default_local_dir": ("runner.output_dir", ""),
        "trainer.resume_mode": ("", "`embodrl resume RUN`"),
    },
    "lerobot": {
        "policy.type": ("model.model_type", "pi0, pi05, pi0_fast, smolvla; any other: model=lerobot, for `eval`"),
        "policy.path": ("model.model_path", "a directory or OWNER/NAME"),
        "policy.chunk_size": ("model.num_action_chunks", "those that are run: n_action_steps"),
        "dataset.repo_id, dataset.root": ("sft.data_dir", "`embodrl fetch` gets it from the hub"),
        "batch_size": ("sft.batch_size", ""),
        "steps": ("sft.max_steps", ""),
        "optimizer.lr": ("sft.lr", ""),
        "save_freq": ("sft.save_interval", ""),
        "eval_freq": ("sft.eval_interval", ""),
        "log_freq": ("sft.log_interval", ""),
        "output_dir": ("sft.output_dir", ""),
        "resume": ("", "`embodrl resume DIR`"),
        "seed": ("runner.seed", ""),
        "env.type, env.task": ("env.env_type", "env=PRESET, env.tasks"),
        "eval.n_episodes": ("env.eval.num_episodes", ""),
        "eval.batch_size": ("env.eval.total_num_envs", ""),
        "wandb.enable": ("runner.logger.wandb_mode", "online"),
        "wandb.project": ("runner.logger.wandb_project", ""),
    },
    "CleanRL": {
        "env_id": ("env.tasks", "env=gymnasium env.id=NAME for Gymnasium's"),
        "total_timesteps": ("runner.max_iterations", "times total_num_envs and max_steps_per_rollout_epoch"),
        "num_envs": ("env.train.total_num_envs", ""),
        "num_steps": ("env.train.max_steps_per_rollout_epoch", ""),
        "num_minibatches": ("actor.global_batch_size", "the size of one"),
        "update_epochs": ("algorithm.update_epoch", ""),
        "learning_rate": ("actor.optim.lr", ""),
        "anneal_lr": ("actor.optim.lr_scheduler", "linear"),
        "gamma": ("algorithm.gamma", "per chunk unless algorithm.reward_type=action_level"),
        "gae_lambda": ("algorithm.gae_lambda", ""),
        "norm_adv": ("algorithm.normalize_advantages", "over the rollout, not over a minibatch"),
        "clip_coef": ("algorithm.clip_ratio_low", "and clip_ratio_high"),
        "clip_vloss": ("algorithm.value_clip", "null for none"),
        "ent_coef": ("algorithm.entropy_bonus", ""),
        "vf_coef": ("algorithm.value_loss_coef", ""),
        "max_grad_norm": ("actor.optim.clip_grad", ""),
        "target_kl": ("algorithm.target_kl", ""),
        "buffer_size": ("algorithm.off_policy.capacity", "SAC"),
        "learning_starts": ("algorithm.off_policy.warm_up", "SAC, in chunks"),
        "tau": ("algorithm.off_policy.tau", "SAC"),
        "policy_lr": ("actor.optim.lr", "SAC"),
        "q_lr": ("actor.optim.value_lr", "SAC"),
        "policy_frequency": ("algorithm.off_policy.policy_delay", "SAC"),
        "alpha, autotune": ("algorithm.off_policy.alpha", "SAC; alpha_lr=null keeps it"),
        "seed": ("runner.seed", ""),
        "cuda": ("cluster.device", "auto, cpu, cuda"),
        "track": ("runner.logger.wandb_mode", "online"),
        "wandb_project_name": ("runner.logger.wandb_project", ""),
        "capture_video": ("env.video.enabled", "evaluations"),
    },
}
"""System -> its key -> the key here, "" for none, and a remark."""


def code(text: str) -> str:
    """Return names, which commas separate, as code."""
    return ", ".join(f"`{part}`" for part in re.split(r", ", text)) if text else ""


def cell(text: str) -> str:
    """Return a text that does not end the cell of a table."""
    return text.replace("|", "\\|")


def row(entry: RlinfKey) -> str:
    """Return a line of RLinf's tables."""
    return f"| `{cell(entry.pattern)}` | {code(entry.ours)} | {cell(entry.note)} |"


def page() -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    for kind, title in KINDS.items():
        lines += [f"### {title}", "", "| RLinf | here, or nearest | remark |", "|---|---|---|"]
        lines += [*(row(entry) for entry in RLINF_KEYS if entry.kind == kind), ""]
    for system, keys in OTHERS.items():
        lines += [f"## {system}", "", f"| {system} | here | remark |", "|---|---|---|"]
        lines += [f"| {code(theirs)} | {code(ours)} | {cell(remark)} |" for theirs, (ours, remark) in keys.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def unknown_keys() -> set[str]:
    """Return keys of the tables that are not there."""
    known = {key for schema in shipped_schemas() for key in schema_keys(schema)}
    named = [entry.ours for entry in RLINF_KEYS] + [ours for keys in OTHERS.values() for ours, _ in keys.values()]
    return {ours for ours in named if ours} - known


if __name__ == "__main__":
    sys.stdout.write(page())
