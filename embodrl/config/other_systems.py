"""Names and keys that users of other systems type, and their counterparts here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from embodrl.config.foreign_keys import foreign_advice
from embodrl.config.rlinf import hint_of

_OWN = "register an environment of your own (docs/tutorial.md), or choose one of `embodrl list envs`"
_GAE = "write algorithm.adv_type=gae, PPO's estimator; algorithm=ppo chooses estimator and loss"
_PPO_LOSS = "write algorithm.loss_type=actor_critic, PPO's loss with a critic; algorithm=ppo chooses estimator and loss"
OTHER_NAMES: Mapping[tuple[str, str], tuple[str, str]] = (
    {
        ("model", "openpi"): ("pi05", "openpi's models are model=pi0, model=pi05 and model=pi0_fast"),
        ("model", "pi0.5"): ("pi05", "write model=pi05"),
        ("rollout", "sglang"): ("vllm", "SGLang is not supported; write rollout=vllm or rollout=native"),
        ("rollout", "hf"): ("native", "write rollout=native"),
        ("rollout", "huggingface"): ("native", "write rollout=native"),
        ("rollout.backend", "huggingface"): ("native", "write rollout.backend=native"),
        ("actor", "fsdp2"): ("fsdp", "write actor=fsdp, which is FSDP2"),
        ("env", "libero_long"): ("libero_10", "write env=libero_10"),
        ("model.model_type", "openpi"): ("pi05", "openpi's models are model=pi0, model=pi05 and model=pi0_fast"),
        ("cluster", "co-located"): ("colocated", "write cluster=colocated"),
        ("cluster", "collocated"): ("colocated", "write cluster=colocated"),
        ("runner.logger", "wandb"): ("", "write runner.logger.wandb_mode=online"),
        ("runner.logger", "tensorboard"): ("", "write runner.logger.tensorboard=true"),
        ("runner.logger", "swanlab"): ("", "write runner.logger.swanlab_mode=online"),
        ("runner.logger", "mlflow"): ("", "write runner.logger.mlflow_mode=online"),
        ("algorithm", "a2c"): ("ppo", "write algorithm=ppo, or algorithm=reinforce_pp without a critic"),
        ("algorithm.loss_type", "a2c"): ("actor_critic", _PPO_LOSS),
        ("algorithm.adv_type", "a2c"): ("gae", _GAE),
        ("algorithm", "pf_ppo"): ("ppo", "write algorithm=ppo algorithm.pf_ppo.method=pow"),
        ("algorithm", "reinforce++"): ("reinforce_pp", "write algorithm=reinforce_pp"),
        ("algorithm.adv_type", "ppo"): ("gae", _GAE),
        ("algorithm.adv_type", "embodied_gae"): ("gae", _GAE),
        ("algorithm.loss_type", "ppo"): ("actor_critic", _PPO_LOSS),
        ("algorithm.loss_type", "ppo_actor_critic"): ("actor_critic", _PPO_LOSS),
    }
    | {
        ("env", name): ("", f"{title} is not built in; {_OWN}")
        for name, title in {
            "behavior": "BEHAVIOR (OmniGibson)",
            "calvin": "CALVIN",
            "genesis": "Genesis",
            "isaaclab": "Isaac Lab",
            "robocasa": "RoboCasa",
            "robotwin": "RoboTwin",
            "simpler": "SIMPLER",
            "pusht": "gym-pusht (LeRobot)",
            "aloha": "gym-aloha (LeRobot)",
        }.items()
    }
    | {
        (group, name): found
        for group in ("model", "model.model_type")
        for name, found in {
            "act": (
                "lerobot",
                "write model=lerobot model.model_path=DIR, which evaluates LeRobot policies (docs/models.md)",
            ),
            "octo": (
                "",
                "Octo is not built in; register a model of your own (docs/models.md), serve it (model=remote), or use"
                " a LeRobot policy (model=lerobot)",
            ),
        }.items()
    }
)
"""(preset group or key, lower-case name elsewhere) -> (name here, "" if there is none; hint)."""


MEANT = {
    "kl_penalty": "algorithm.kl.estimator",
    "kl_beta": "algorithm.kl.coef",
    "replay_buffer": "algorithm.off_policy.capacity",
    "episodes": "env.eval.num_episodes",
    "lr": "actor.optim.lr",
    "learning_rate": "actor.optim.lr",
    "num_envs": "env.train.total_num_envs",
    "n_envs": "env.train.total_num_envs",
    "envs": "env.train.total_num_envs",
    "num_workers": "env.num_processes",
    "num_episodes": "env.eval.num_episodes",
    "batch_size": "actor.global_batch_size",
    "minibatch_size": "actor.micro_batch_size",
    "seed": "runner.seed",
    "iterations": "runner.max_iterations",
    "max_iterations": "runner.max_iterations",
    "epochs": "runner.max_iterations",
    "ppo_epochs": "algorithm.update_epoch",
    "output_dir": "runner.output_dir",
    "output": "runner.output_dir",
    "log_dir": "runner.output_dir",
    "task": "env.tasks",
    "tasks": "env.tasks",
    "checkpoint": "model.model_path",
    "policy": "model.warm_start",
    "temperature": "algorithm.sampling.temperature",
    "clip": "algorithm.clip_ratio_high",
    "wandb": "runner.logger.wandb_mode",
    "mlflow": "runner.logger.mlflow_mode",
    "swanlab": "runner.logger.swanlab_mode",
    "name": "runner.name",
    "steps": "runner.max_iterations",
}
"""Short names, and names in other libraries -> the intended key."""
_MODEL_PATH = ("model.model_path", "write model.model_path=DIR-or-hub-id with the preset of its family, model=NAME")
_BATCH = ("actor.global_batch_size", "write actor.global_batch_size, or actor.micro_batch_size for one pass")
_GPUS = (
    "cluster.placement",
    "write actor=fsdp cluster.placement=auto, which uses all GPUs that fit the batches; choose fewer with, e.g.,"
    " actor=fsdp 'cluster.component_placement={actor:0-1,rollout:0-1,env:all}'; cluster=8xh100 describes them to"
    " `embodrl plan`",
)
OTHER_KEYS: Mapping[str, tuple[str, str]] = {
    "actor.model.path": _MODEL_PATH,
    "rollout.model.path": _MODEL_PATH,
    "model.path": _MODEL_PATH,
    "model.pth": _MODEL_PATH,
    "actor.bs": _BATCH,
    "actor.lr": ("actor.optim.lr", "write actor.optim.lr"),
    "actor.optim.learning_rate": ("actor.optim.lr", "write actor.optim.lr"),
    "env.eval.video_cfg": ("env.video", "write env.video.enabled=true, which records evaluations"),
    "resume": ("", "write `embodrl resume RUN`, followed by the changes"),
    "config_name": (
        "",
        "choose a preset with GROUP=NAME, e.g. experiment=pick_cube, and a YAML file with --config FILE",
    ),
    "config_path": ("", "pass a YAML file with --config FILE, a directory of presets with --presets DIR"),
    "policy.type": ("model", "write model=NAME, a preset of `embodrl list presets`"),
    "env.type": ("env", "write env=NAME, a preset of `embodrl list presets`"),
    "actor.batch_size": _BATCH,
    "trainer.n_gpus_per_node": _GPUS,
    "gpus": _GPUS,
    "cluster.num_gpus": _GPUS,
    "runner.precision": ("actor.precision", "write actor.precision, which rollouts follow"),
    "env.num_envs": ("env.train.total_num_envs", "write env.train.total_num_envs, over all processes"),
    "rollout.model": (
        "model",
        "remove it: rollouts act with the trained policy, which section model describes",
    ),
    "algorithm.replay_buffer": ("algorithm.off_policy", "write algorithm.off_policy.capacity, in observations"),
    "rollout.sampling_params": ("algorithm.sampling", "write algorithm.sampling.temperature and top_k"),
}
"""Dotted key elsewhere -> (key here, "" if there is none; hint)."""


def key_advice(key: str, given: Callable[[str], bool]) -> tuple[str, str] | None:
    """Return the key here and a hint for a key of another system; None if the key is unknown there, too.

    Args:
        key: key that is unknown here, or its first part.
        given: returns whether the configuration has a longer key.
    """
    for full, found in OTHER_KEYS.items():
        if full == key or (full.startswith(f"{key}.") and given(full)):
            return found
    return (None if key in MEANT else foreign_advice(key, given)) or hint_of(key, given)


def advice(key: str, name: str) -> tuple[str, str] | None:
    """Return the nearest name here and a hint for a name of another system; None if the name is unknown there, too."""
    return OTHER_NAMES.get((key, name.lower()))
