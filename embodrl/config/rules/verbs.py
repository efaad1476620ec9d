"""Which settings a verb does not read: its rules leave them alone, and a note says so where the user gives one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from embodrl.config.nodes import Node, walk
from embodrl.config.rules.base import Finding

Verb = Literal["train", "eval", "collect", "record", "sft", "plan", "serve", "store"]
"""``record`` is `embodrl collect` with a policy in place of the experts."""
COMMANDS: dict[Verb, str] = {"record": "collect policy=PATH"}
"""What a verb is called, where it is not its own name."""

_TRAINING_LOOP = (
    *("max_iterations", "max_staleness", "eval_interval", "eval_at_start", "eval_async", "save_interval"),
    *("checkpoint_format", "stop_at_success", "stop_evaluations", "max_regression"),
    *("keep_last_n", "keep_best", "logger.tensorboard", "logger.wandb_mode", "logger.wandb_project"),
)
_ROLLOUT_LOOP = (
    *("env.train.max_steps_per_rollout_epoch", "env.train.use_fixed_reset_state_ids", "env.train.seed"),
    *("env.enable_offload", "env.offload_level"),
    *(f"rollout.{name}" for name in ("workflow", "episode_timeout_s", "weight_sync", "max_restarts")),
    *("rollout.enable_offload", "rollout.own_process", "rollout.pipeline_stages"),
)
_TRAINER = (
    *("optim", "fsdp", "global_batch_size", "micro_batch_size", "enable_offload", "own_process"),
    *("tensor_parallel_size", "training_backend", "precision", "gradient_checkpointing", "max_restarts"),
)
_ALGORITHM = ("algorithm", "reward", "pipeline")
_CLUSTER = tuple(
    f"cluster.{name}"
    for name in (
        *("launcher", "ray_address", "num_nodes", "node_groups", "stall_timeout_s", "collective_timeout_s"),
        "training_share",
    )
)
"""Of worker processes, which verbs of one process do not start."""
_DEMONSTRATOR = ("noise_std", "noise_fraction", "min_speed", "max_speed")
_SCHEDULE = (
    *("value_lr", "lr_scheduler", "lr_warmup_iterations", "schedule_iterations", "min_lr_ratio"),
    "critic_warmup_iterations",
)

UNREAD: dict[Verb, tuple[str, ...]] = {
    "train": ("axes", "env.eval.total_num_envs", "collect", "sft", "serve", "store"),
    "plan": ("axes", "env.eval.total_num_envs", "collect", "sft", "serve", "store"),
    "eval": (
        *_ALGORITHM,
        *_ROLLOUT_LOOP,
        *(f"actor.{name}" for name in _TRAINER),
        *(f"runner.{name}" for name in _TRAINING_LOOP),
        *_CLUSTER,
        *("rollout.publish_weights", "runner.name", "runner.stop_timeout_s"),
        *("env.train.total_num_envs", "env.video.every_eval", "collect", "sft", "serve", "store"),
    ),
    "collect": (
        *_ALGORITHM,
        *_ROLLOUT_LOOP,
        *_CLUSTER,
        *(f"runner.{name}" for name in (*_TRAINING_LOOP, "name", "output_dir", "seed", "stop_timeout_s")),
        *("env.train.auto_reset", "env.train.ignore_terminations", "env.eval", "env.video", "actor", "rollout"),
        *("model", "collect.sample", "sft", "serve", "store", "axes"),
    ),
    "record": (
        *_ALGORITHM,
        *_ROLLOUT_LOOP,
        *_CLUSTER,
        *(f"actor.{name}" for name in _TRAINER),
        *(f"runner.{name}" for name in (*_TRAINING_LOOP, "name", "output_dir", "stop_timeout_s")),
        *("env.train.auto_reset", "env.train.ignore_terminations", "env.eval", "env.video", "rollout.publish_weights"),
        *(f"collect.{name}" for name in _DEMONSTRATOR),
        *("sft", "serve", "store", "axes"),
    ),
    "sft": (
        *_ALGORITHM,
        *_ROLLOUT_LOOP,
        *(f"actor.{name}" for name in ("global_batch_size", "micro_batch_size")),
        *(f"actor.optim.{name}" for name in ("lr", "weight_decay", *_SCHEDULE)),
        *(f"runner.{name}" for name in ("name", "output_dir", "max_iterations", "max_staleness", "eval_interval")),
        *("runner.eval_at_start", "runner.save_interval"),
        *("env.train.total_num_envs", "env.video", "rollout.publish_weights", "collect", "serve", "store"),
        "axes",
    ),
    "store": (
        *_ALGORITHM,
        *_ROLLOUT_LOOP,
        *_CLUSTER,
        *("env.train.auto_reset", "env.train.ignore_terminations", "rollout.publish_weights", "collect.sample"),
        *(f"actor.{name}" for name in ("global_batch_size", "micro_batch_size")),
        *(f"actor.optim.{name}" for name in ("lr", "weight_decay", *_SCHEDULE)),
        *(f"runner.{name}" for name in ("name", "output_dir", "max_iterations", "max_staleness", "eval_interval")),
        *("runner.eval_at_start", "runner.save_interval", "env.video"),
        *("serve", "axes"),
        *(f"sft.{name}" for name in ("data_dir", "cameras", "stats", "check_robot", "max_episodes")),
        "sft.save_interval",
        *(f"collect.{name}" for name in ("output_dir", "format", *_DEMONSTRATOR, "keep_failures")),
    ),
    "serve": (
        *_ALGORITHM,
        *_ROLLOUT_LOOP,
        *(f"actor.{name}" for name in _TRAINER),
        *(f"runner.{name}" for name in _TRAINING_LOOP),
        *(f"env.{name}" for name in ("train", "eval", "video", "reward_mode", "success_bonus", "max_episode_steps")),
        *(f"env.{name}" for name in ("num_processes", "pin_cpus", "python", "start_timeout_s", "reset_timeout_s")),
        *(f"env.{name}" for name in ("step_timeout_s", "max_restarts", "render_detail", "max_abs_reward")),
        "env.real_time",
        *_CLUSTER,
        *("cluster.heartbeat_timeout_s", "cluster.restart_window_s", "env.max_abs_state", "rollout.publish_weights"),
        *(f"runner.{name}" for name in ("name", "output_dir", "stop_timeout_s", "logger")),
        *("protocol", "axes", "collect", "sft", "store"),
    ),
}
"""Sections and keys that a verb ignores, beside ``OF_RECIPES``."""
OF_RECIPES = "recipe"
"""The section that no verb but `embodrl run` reads, which starts verbs with settings of their own."""
READ: dict[Verb, tuple[str, ...]] = {
    "eval": ("algorithm.sampling",),
    "collect": ("env.eval.num_episodes", "env.eval.seed", "model.model_type", "model.action_dim"),
    "record": ("env.eval.num_episodes", "env.eval.seed", "algorithm.sampling"),
    "sft": ("algorithm.sampling",),
    "serve": ("algorithm.sampling",),
    "store": ("algorithm.sampling", "algorithm.dagger.gate_threshold", "algorithm.dagger.gate_steps"),
}
"""Exceptions: keys below those of ``UNREAD`` that the verb does read."""


def _below(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def reads(verb: Verb | None, key: str) -> bool:
    """Return whether a verb reads a key or a part of it; without a verb every key counts."""
    return verb is None or _below(key, READ.get(verb, ())) or not _below(key, (*UNREAD[verb], OF_RECIPES))


def concerns(verb: Verb | None, finding: Finding) -> bool:
    """Return whether a verb reads all keys of a finding."""
    return all(reads(verb, key) for key in (finding.key, *finding.others))


def settings_without_effect(verb: Verb, tree: Node) -> Iterator[Finding]:
    """Yield settings of the command line that a verb does not read; files may be shared by verbs."""
    for key, node in walk(tree):
        if node.origin.kind == "argument" and not node.children and not reads(verb, key):
            command = COMMANDS.get(verb, verb)
            yield Finding(key, f"has no effect on `embodrl {command}`", "leave it out", code="setting-of-another-verb")
