"""Counterparts of RLinf's keys: one table for `embodrl import rlinf`, the migration page and unknown-key hints."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

from embodrl.specs import ENVS

Recipe = Mapping[str, object]
"""Dotted key of a recipe -> value, interpolations resolved."""
Settings = dict[str, object]
"""Dotted key here -> value."""
Convert = Callable[[object, Recipe], Settings]
Kind = Literal["mapped", "meaningless", "unsupported", "unread"]


class UnsupportedValue(Exception):
    """A value that has no counterpart here; the message says why."""


@dataclass(frozen=True)
class RlinfKey:
    """One or several RLinf keys.

    Attributes:
        pattern: dotted key; ``*`` matches a part, ``**`` any number at the end, ``(a|b)`` one of two.
        kind: mapped: has a key here; meaningless: not needed here; unsupported: not available here; unread:
            RLinf's embodied training does not read it either.
        ours: corresponding or nearest key here; "" if there is none.
        note: how a value is converted, or why there is no key.
        convert: converts a value to settings here; None copies it.
        neutral: values of an unsupported key that match the behaviour here.
    """

    pattern: str
    kind: Kind
    ours: str = ""
    note: str = ""
    convert: Convert | None = None
    neutral: tuple[object, ...] = ()

    @property
    def is_literal(self) -> bool:
        """Whether the pattern matches a single key."""
        return not set(self.pattern) & set("*(|")

    def hint(self) -> str:
        aside = f" ({self.note})" if self.note else ""
        if self.ours and self.kind in ("mapped", "unread"):
            return (
                f"write {self.ours}{aside if self.kind == 'mapped' else ''}; `embodrl import rlinf FILE` turns a recipe"
            )
        nearest = f"; nearest: {self.ours}" if self.ours else ""
        return f"remove it{': ' + self.note if self.note else ''}{nearest}"

    def settings(self, value: object, recipe: Recipe) -> Settings:
        """Return the settings that a value becomes here, maybe none.

        Raises:
            UnsupportedValue: the value has no counterpart.
        """
        if self.convert is not None:
            return self.convert(value, recipe)
        return {} if value is None else {self.ours: value}


def find_key(key: str) -> RlinfKey | None:
    """Return the first table entry that an RLinf key matches."""
    return next((entry for pattern, entry in _patterns() if pattern.fullmatch(key)), None)


@cache
def _patterns() -> list[tuple[re.Pattern[str], RlinfKey]]:
    found: list[tuple[re.Pattern[str], RlinfKey]] = []
    for entry in RLINF_KEYS:
        text = entry.pattern.replace(".", r"\.").replace("**", "\0").replace("*", r"[^.]*").replace("\0", ".+")
        found.append((re.compile(text), entry))
    return found


def hint_of(key: str, given: Callable[[str], bool]) -> tuple[str, str] | None:
    """Return the key here and a hint for an RLinf key that the table names in full; None for any other.

    Args:
        key: key that is unknown here, or its first part.
        given: returns whether the configuration has a longer key.
    """
    for entry in RLINF_KEYS:
        if entry.is_literal and (
            entry.pattern == key or (entry.pattern.startswith(f"{key}.") and given(entry.pattern))
        ):
            return entry.ours, entry.hint()
    return None


def number(recipe: Recipe, key: str, default: float) -> float:
    """Return a number from a recipe, or the default."""
    value = recipe.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def is_sparse(recipe: Recipe) -> bool:
    """Return whether the simulator only rewards success."""
    return recipe.get("env.train.env_type") == "libero" or recipe.get("env.train.reward_mode") == "only_success"


def is_off_policy(recipe: Recipe) -> bool:
    """Return whether the loss learns from a replay buffer."""
    return recipe.get("algorithm.loss_type") in ("embodied_sac", "rlt_ac", "rlt_td3", "embodied_dagger")


def _of(ours: str, values: Mapping[object, object], nearest: str = "") -> Convert:
    def convert(value: object, recipe: Recipe) -> Settings:
        if not isinstance(value, (str, int, float, bool, type(None))) or value not in values:
            raise UnsupportedValue(
                f"the value {value} has no counterpart" + (f"; nearest: {nearest}" if nearest else "")
            )
        return {} if values[value] is None else {ours: values[value]}

    return convert


def _positive(ours: str) -> Convert:
    """Convert a positive number; others disable the setting."""

    def convert(value: object, recipe: Recipe) -> Settings:
        return {ours: value} if isinstance(value, (int, float)) and value > 0 else {}

    return convert


def _iterations(value: object, recipe: Recipe) -> Settings:
    steps = number(recipe, "runner.max_steps", -1)
    epochs = number(recipe, "runner.max_epochs", 0)
    limits = [int(found) for found in (steps, epochs) if found > 0]
    return {"runner.max_iterations": min(limits)} if limits else {}


def _eval_interval(value: object, recipe: Recipe) -> Settings:
    return {"runner.eval_interval": max(0, int(number({"": value}, "", 0)))}


def _directory(value: object, recipe: Recipe) -> Settings:
    name = recipe.get("runner.logger.experiment_name") or "rlinf"
    return {} if value is None else {"runner.output_dir": f"{value}/{name}"}


def _loggers(value: object, recipe: Recipe) -> Settings:
    wanted = {str(name) for name in cast("list[object]", value if isinstance(value, list) else [value])}
    online = {f"runner.logger.{name}_mode": "online" for name in ("wandb", "mlflow", "swanlab") if name in wanted}
    if others := wanted - {"tensorboard", "wandb", "mlflow", "swanlab"}:
        raise UnsupportedValue(f"{', '.join(sorted(others))}: TensorBoard, W&B, MLflow and SwanLab are available")
    return {"runner.logger.tensorboard": "tensorboard" in wanted, **online}


def _placement(value: object, recipe: Recipe) -> Settings:
    places = {
        part.strip(): place
        for key, place in recipe.items()
        if key.startswith(PLACEMENT)
        for part in key.removeprefix(PLACEMENT).split(",")
    }
    if unknown := set(places) - {"actor", "rollout", "env"}:
        raise UnsupportedValue(f"{', '.join(sorted(unknown))}: components here are actor, rollout and env")
    if is_off_policy(recipe):
        return {}  # the main process gathers off-policy rollouts, and trains unless the user places the actor
    if len({_first_rank(place) for place in places.values()}) == 1:
        # All components share the devices, as they do here by default; automatic placement uses all devices.
        return {"actor.training_backend": "fsdp", "cluster.placement": "auto"} if _many(value) else {}
    return {
        "actor.training_backend": "fsdp",
        "cluster.component_placement": {name: str(place) for name, place in places.items()},
    }


PLACEMENT = "cluster.component_placement."


def _first_rank(place: object) -> str:
    low, _, high = str(place).partition("-")
    return low if low == high else str(place)


def _many(place: object) -> bool:
    return _first_rank(place) == "all" or "-" in _first_rank(place)


def _tuned(value: object, recipe: Recipe) -> Settings:
    if is_off_policy(recipe):
        return _updates_to_data(value, recipe)
    return {"algorithm.update_epoch": value}


def _updates_to_data(value: object, recipe: Recipe) -> Settings:
    """Convert updates per iteration to updates per stored chunk."""
    envs = number(recipe, "env.train.total_num_envs", 1) * number(recipe, "env.train.rollout_epoch", 1)
    steps = number(recipe, "env.train.max_steps_per_rollout_epoch", 1)
    chunks = envs * math.ceil(steps / number(recipe, "actor.model.num_action_chunks", 1))
    return {"algorithm.off_policy.utd": round(number({"": value}, "", 1) / chunks, 6)}


def _filter(ours: str) -> Convert:
    def convert(value: object, recipe: Recipe) -> Settings:
        if recipe.get("algorithm.filter_rewards") is not True:
            return {}
        rate = number({"": value}, "", 0) / number(recipe, "algorithm.reward_coef", 1)
        return {ours: min(1.0, max(0.0, round(rate, 6)))}

    return convert


def _filter_on(value: object, recipe: Recipe) -> Settings:
    # RLinf masks groups without resampling them.
    return {"algorithm.filter.enabled": True, "algorithm.filter.max_resamples": 0} if value is True else {}


def _success_bonus(value: object, recipe: Recipe) -> Settings:
    if is_sparse(recipe):
        return {"env.success_bonus": value}
    if value in (None, 1, 1.0):
        return {}
    raise UnsupportedValue("dense rewards are not scaled; advantages are normalised")


def _relative_reward(value: object, recipe: Recipe) -> Settings:
    if is_sparse(recipe):
        return {}
    return {"env.reward_mode": "dense_delta" if value is True else "dense"}


def _episodes(value: object, recipe: Recipe) -> Settings:
    epochs = number(recipe, "env.eval.rollout_epoch", number(recipe, "algorithm.eval_rollout_epoch", 1))
    steps = number(recipe, "env.eval.max_steps_per_rollout_epoch", 1) / number(recipe, "env.eval.max_episode_steps", 1)
    episodes = number(recipe, "env.eval.total_num_envs", 1) * epochs * max(1, int(steps))
    return {"env.eval.num_episodes": int(episodes)}


def _eval_envs(value: object, recipe: Recipe) -> Settings:
    found = _envs("env.eval.total_num_envs")(value, recipe)
    return found | _episodes(value, recipe) if found else {}


def _envs(ours: str) -> Convert:
    """Convert a count; odd ones can't be spread over the two processes of the presets."""

    def convert(value: object, recipe: Recipe) -> Settings:
        odd = isinstance(value, int) and value % 2 == 1
        return {} if value is None else {ours: value, **({"env.num_processes": 1} if odd else {})}

    return convert


def _recompute(value: object, recipe: Recipe) -> Settings:
    return {"algorithm.recompute_logprobs": True} if value is True and not is_off_policy(recipe) else {}


def _eval_steps(value: object, recipe: Recipe) -> Settings:
    return {} if value == recipe.get("env.train.max_episode_steps") else {"env.eval.max_episode_steps": value}


def _precision(value: object, recipe: Recipe) -> Settings:
    if is_off_policy(recipe):
        return {}  # critics and small actors stay in float32 regardless of the frozen policy
    names = {None: "auto", "bf16": "bf16", "fp32": "fp32", "32": "fp32", 32: "fp32"}
    if not isinstance(value, (str, int, type(None))) or value not in names:
        raise UnsupportedValue(f"{value}: only bf16 and fp32 are available")
    stored = {"actor.param_dtype": "bf16"} if names[value] == "bf16" else {}
    return {"actor.precision": names[value], "rollout.precision": names[value], **stored}


def _betas(value: object, recipe: Recipe) -> Settings:
    first, second = number(recipe, "actor.optim.adam_beta1", 0.9), number(recipe, "actor.optim.adam_beta2", 0.999)
    return {"actor.optim.betas": [first, second]}


def _top_k(value: object, recipe: Recipe) -> Settings:
    return {"algorithm.sampling.top_k": max(0, int(number({"": value}, "", 0)))}


def _target_entropy(value: object, recipe: Recipe) -> Settings:
    return {"algorithm.off_policy.target_entropy": value}


def _noise_range(value: object, recipe: Recipe) -> Settings:
    ends = cast("list[object]", value) if isinstance(value, list) else []
    if not ends:
        raise UnsupportedValue("not a list of standard deviations")
    return {"model.flow.noise_std_max": ends[0]}


def _joint(value: object, recipe: Recipe) -> Settings:
    if value is not True:
        return {}
    if recipe.get("actor.model.openpi.noise_method") != "flow_noise":
        raise UnsupportedValue("only flow_noise has a joint log-prob")
    return {"model.flow.joint": "mean"}


def _trainable(value: object, recipe: Recipe) -> Settings:
    decided = recipe.get("actor.model.is_lora") is True or is_off_policy(recipe)
    return {} if decided or value is not True else {"model.trainable": "action_expert"}


def _lora(value: object, recipe: Recipe) -> Settings:
    return {"model.trainable": "lora"} if value is True else {}


def _lora_rank(value: object, recipe: Recipe) -> Settings:
    return {"model.lora.rank": value} if recipe.get("actor.model.is_lora") is True else {}


def _oft(ours: str) -> Convert:
    def convert(value: object, recipe: Recipe) -> Settings:
        wanted = {ours: value} if recipe.get("actor.model.model_type") == "openvla_oft" else {}
        if ours == "model.use_proprio" and value is True:
            wanted["env.include_state"] = True
        return wanted

    return convert


def _subset(value: object, recipe: Recipe) -> Settings:
    return {"algorithm.off_policy.subset": value} if isinstance(value, int) and value > 0 else {}


def _camera(side: str) -> Convert:
    return lambda value, recipe: {f"env.cameras.*.{side}": value}


def _action_dim(value: object, recipe: Recipe) -> Settings:
    """The simulators here fix the action: end-effector pose delta and gripper."""
    fixed = _ACTIONS.get(recipe.get("env.train.env_type", recipe.get("env.eval.env_type")))
    if fixed in (None, value):
        return {"model.action_dim": value}
    raise UnsupportedValue(f"actions of this simulator have {fixed} dimensions here, end-effector pose delta first")


_ACTIONS: Mapping[object, int] = {"libero": 7, "maniskill": 7, "metaworld": 4}


def _reward_type(value: object, recipe: Recipe) -> Settings:
    """Convert with matching values: GAE needs as many values as rewards."""
    values = {"model.value_head.output": str(value).removesuffix("_level")}
    return {"algorithm.reward_type": value, **(values if recipe.get("algorithm.adv_type") == "gae" else {})}


def _weights(value: object, recipe: Recipe) -> Settings:
    return {"model.model_path": value} if value else {}


def _weight_cap(value: object, recipe: Recipe) -> Settings:
    return {"algorithm.decoupled.cap": value}


def _max_staleness(value: object, recipe: Recipe) -> Settings:
    return {"runner.max_staleness": value}


def _scheduler(value: object, recipe: Recipe) -> Settings:
    name = str(value).removeprefix("torch_")
    if name not in ("constant", "cosine", "linear"):
        raise UnsupportedValue(f"the value {value} has no counterpart; available: constant, linear, cosine")
    return {"actor.optim.lr_scheduler": name}


_LIBERO = {"libero_spatial", "libero_object", "libero_goal", "libero_10"}
_METAWORLD = {"metaworld_50": "metaworld_mt50"}
_MANISKILL = {"PickCube-v1": "maniskill_pick", "PegInsertionSide-v1": "maniskill_peg_insertion"}
_MODELS = {
    "openvla": "openvla",
    "openvla_oft": "openvla_oft",
    "gr00t": "gr00t",
    "gr00t_n1d7": "gr00t_n1_7",
    "mlp_policy": "mlp",
    "cnn_policy": "cnn",
}
_LIBERO_MODELS = {
    "openvla": "openvla_libero",
    "openvla_oft": "openvla_oft_libero",
    "pi0": "pi0_libero",
    "pi05": "pi05_libero",
    "gr00t": "gr00t_libero",
    "gr00t_n1_7": "gr00t_n1_7_libero",
}
_ALGORITHMS = {
    ("gae", "actor_critic"): "ppo",
    ("gae", "decoupled_actor_critic"): "ppo",
    ("grpo", "actor"): "grpo",
    ("reinpp", "actor"): "reinforce_pp",
}
_LOSSES = {
    "embodied_sac": "sac",
    "embodied_dagger": "dagger",
    "embodied_nft": "pi_nft",
    "rlt_ac": "rlt",
    "offline_iql": "iql",
}


def env_preset(recipe: Recipe) -> str | None:
    """Return the simulator's preset; None if it is not built in."""
    kind = recipe.get("env.train.env_type", recipe.get("env.eval.env_type"))
    suite = str(recipe.get("env.train.task_suite_name", recipe.get("env.eval.task_suite_name")))
    if kind == "libero":
        return suite if suite in _LIBERO else "libero"
    if kind == "metaworld":
        return _METAWORLD.get(suite, "metaworld")
    if kind == "maniskill":
        return _MANISKILL.get(str(recipe.get("env.train.init_params.id")), "maniskill")
    return None


def model_preset(recipe: Recipe) -> str | None:
    """Return the policy's preset; None if its family is not built in."""
    kind = str(recipe.get("actor.model.model_type") or recipe.get("actor.model.model_name"))
    if kind in ("openpi", "openpi_rlinf"):
        name: str | None = "pi0" if str(recipe.get("actor.model.openpi.config_name")).startswith("pi0_") else "pi05"
    else:
        name = _MODELS.get(kind)
    in_libero = recipe.get("env.train.env_type") == "libero"
    return _LIBERO_MODELS.get(name, name) if in_libero and name is not None else name


def algorithm_preset(recipe: Recipe) -> str | None:
    """Return the algorithm's preset; None if it is not built in."""
    estimator, loss = str(recipe.get("algorithm.adv_type")), str(recipe.get("algorithm.loss_type"))
    if loss == "embodied_sac" and recipe.get("actor.model.openpi.use_dsrl") is True:
        return "dsrl"
    if loss == "embodied_sac" and any(key.startswith("algorithm.demo_buffer.") for key in recipe):
        return "rlpd"
    return _ALGORITHMS.get((estimator, loss)) or _LOSSES.get(loss)


def _env(value: object, recipe: Recipe) -> Settings:
    if env_preset(recipe) is None:
        raise UnsupportedValue(f"the simulator {value} is not built in; register an environment (docs/tutorial.md)")
    return {}


def _suite(value: object, recipe: Recipe) -> Settings:
    if env_preset(recipe) == "libero":
        if "libero" in ENVS and value not in (known := ENVS.entry("libero").suites):
            raise UnsupportedValue(f"no suite {value} here; available: {', '.join(known)}")
        return {"env.suite": value}
    if env_preset(recipe) in (None, "metaworld"):
        raise UnsupportedValue(f"no suite {value} here")
    return {}


def _task(value: object, recipe: Recipe) -> Settings:
    if recipe.get("env.train.env_type") != "maniskill":
        return _env(value, recipe)
    if "maniskill" in ENVS and value not in ENVS.entry("maniskill").instructions():
        raise UnsupportedValue(f"no task {value} here; see `embodrl list envs`")
    return {"env.tasks": [value]}


def _model(value: object, recipe: Recipe) -> Settings:
    if model_preset(recipe) is None:
        raise UnsupportedValue(f"the family {value} is not built in; register a model (docs/models.md)")
    return {}


def _algorithm(value: object, recipe: Recipe) -> Settings:
    if algorithm_preset(recipe) is None:
        raise UnsupportedValue(f"{value}: no such algorithm here (`embodrl list algorithms`)")
    if recipe.get("algorithm.loss_type") != "decoupled_actor_critic":
        return {}
    level = "token" if recipe.get("algorithm.logprob_type") == "token_level" else "chunk"
    return {"algorithm.decoupled.enabled": True, "algorithm.decoupled.level": level}


def _key(pattern: str, ours: str, note: str = "", convert: Convert | None = None) -> RlinfKey:
    return RlinfKey(pattern, "mapped", ours, note, convert)


def _same(section: str, ours: str, *names: str) -> list[RlinfKey]:
    return [RlinfKey(f"{section}.{name}", "mapped", f"{ours}.{name}") for name in names]


def _not_needed(pattern: str, note: str, ours: str = "") -> RlinfKey:
    return RlinfKey(pattern, "meaningless", ours, note)


def _absent(pattern: str, note: str, ours: str = "", neutral: tuple[object, ...] = ()) -> RlinfKey:
    return RlinfKey(pattern, "unsupported", ours, note, neutral=neutral)


def _unread(pattern: str, ours: str = "", note: str = "") -> RlinfKey:
    return RlinfKey(pattern, "unread", ours, note or "RLinf's embodied training does not read it")


_ROBOT = "a setting of the robot driver: env=robot takes LeRobot robots and your own (docs/robots.md)"
_ROLLOUT = "rollouts act with the trained policy"
_EXPERT = "experts here are the simulator's scripted ones, or a person"
_COUNTED = "RLinf counts trajectories and keeps some in memory; here the buffer counts observations"
_TOKEN = "the RL token is trained by `embodrl model token`, which writes these into its directory"
_STEPS = "RLinf counts optimizer steps; schedules here count iterations"

RLINF_KEYS: tuple[RlinfKey, ...] = (
    # runner
    _not_needed("runner.task_type", "follows from the algorithm"),
    _key("runner.logger.log_path", "runner.output_dir", "with the experiment's name", _directory),
    _key("runner.logger.project_name", "runner.logger.wandb_project"),
    _key("runner.logger.experiment_name", "runner.name"),
    _key("runner.logger.logger_backends", "runner.logger.tensorboard", "wandb: wandb_mode=online, and so on", _loggers),
    _not_needed("runner.logger.**", "logs are in RUN/logs"),
    _not_needed("runner.per_worker_log*", "each process has its file in RUN/logs"),
    _key("runner.max_epochs", "runner.max_iterations", "the smaller of max_epochs and max_steps", _iterations),
    _key("runner.max_steps", "runner.max_iterations", "the smaller of max_epochs and max_steps", _iterations),
    _key("runner.val_check_interval", "runner.eval_interval", "-1 becomes 0", _eval_interval),
    _key(
        "runner.save_interval",
        "runner.save_interval",
        "-1: only the last iteration",
        _positive("runner.save_interval"),
    ),
    _absent("runner.only_eval", "write `embodrl eval`", neutral=(False,)),
    _absent("runner.resume_dir", "write `embodrl resume RUN`", neutral=(None,)),
    _absent("runner.ckpt_path", "an RLinf .pt file; export it to the family's layout", "model.model_path", (None,)),
    _absent("runner.eval_policy_path", "write `embodrl eval RUN`", neutral=(None,)),
    _absent("runner.expert_ckpt_path", _EXPERT, neutral=(None,)),
    _absent("runner.weight_sync_interval", "weights are sent after each update", neutral=(1,)),
    _absent(
        "runner.enable_decoupled_mode", "collectors and trainers share a store (docs/store.md)", "store.url", (False,)
    ),
    _key("runner.num_data_episodes", "collect.num_episodes"),
    _not_needed("runner.record_task_description", "each episode of a dataset has its instruction"),
    _key("runner.eval_episodes", "env.eval.num_episodes"),
    _key("runner.local_update_steps", "algorithm.offline.updates"),
    _not_needed("runner.log_interval", "every iteration is logged"),
    _not_needed("runner.(seq_length|max_prompt_length)", "follows from the family's processor"),
    # cluster
    _key(
        "cluster.num_nodes",
        "cluster.num_nodes",
        "above 1 with Ray",
        lambda value, recipe: (
            {"cluster.num_nodes": value, **({"cluster.launcher": "ray"} if number({"": value}, "", 1) > 1 else {})}
        ),
    ),
    _absent("cluster.component_placement.*.**", "placement on heterogeneous node groups", "cluster.node_groups"),
    _absent("cluster.component_placement.reward*", "reward models run next to the simulators", "reward.model"),
    _key(
        "cluster.component_placement.*",
        "cluster.component_placement",
        "shared devices: cluster.placement=auto",
        _placement,
    ),
    _absent("cluster.node_groups", "all machines are assumed to be alike", "cluster.node_groups"),
    _absent("cluster.net_emulation.**", "networks are not emulated"),
    # algorithm
    _key("algorithm.adv_type", "algorithm.adv_type", "chooses algorithm=PRESET together with loss_type", _algorithm),
    _key("algorithm.loss_type", "algorithm.loss_type", "chooses algorithm=PRESET together with adv_type", _algorithm),
    _key("algorithm.reward_type", "algorithm.reward_type", "and model.value_head.output", _reward_type),
    *_same("algorithm", "algorithm", "logprob_type", "entropy_type", "gamma", "gae_lambda"),
    *_same("algorithm", "algorithm", "clip_ratio_low", "clip_ratio_high", "value_clip", "huber_delta", "entropy_bonus"),
    _key("algorithm.normalize_advantages", "algorithm.normalize_advantages"),
    _unread("algorithm.kl_beta", "algorithm.kl.coef"),
    _unread("algorithm.kl_penalty", "algorithm.kl.estimator"),
    _unread("algorithm.loss_agg_func", "algorithm.loss_agg"),
    _unread("algorithm.clip_ratio_c", "algorithm.clip_ratio_dual", "RLinf reads it only for GR00T N1.6 and N1.7"),
    _key("algorithm.group_size", "algorithm.group_size"),
    _key("algorithm.update_epoch", "algorithm.update_epoch", "off-policy: algorithm.off_policy.utd, per chunk", _tuned),
    _key(
        "algorithm.num_updates_per_step",
        "algorithm.off_policy.utd",
        "per chunk instead of per iteration",
        _updates_to_data,
    ),
    _key(
        "algorithm.bootstrap_type",
        "algorithm.bootstrap_type",
        "standard: truncation",
        _of("algorithm.bootstrap_type", {"standard": "truncation"}, "truncation"),
    ),
    _key("algorithm.reward_coef", "env.success_bonus", "of sparse rewards", _success_bonus),
    _key("algorithm.filter_rewards", "algorithm.filter.enabled", "without further rollouts", _filter_on),
    _key(
        "algorithm.rewards_lower_bound",
        "algorithm.filter.min_rate",
        "over reward_coef",
        _filter("algorithm.filter.min_rate"),
    ),
    _key(
        "algorithm.rewards_upper_bound",
        "algorithm.filter.max_rate",
        "over reward_coef",
        _filter("algorithm.filter.max_rate"),
    ),
    _key("algorithm.rollout_epoch", "algorithm.rollout_epoch"),
    _key("algorithm.eval_rollout_epoch", "env.eval.num_episodes", "times environments", _episodes),
    _key(
        "(algorithm|rollout).sampling_params.temperature_train",
        "algorithm.sampling.temperature",
        "",
        lambda value, recipe: {"algorithm.sampling.temperature": value},
    ),
    _not_needed(
        "(algorithm|rollout).sampling_params.temperature_eval",
        "env.eval.decoding says how evaluations decode: greedy, sampled as in training, the mean, or all",
        "env.eval.decoding",
    ),
    _key("(algorithm|rollout).sampling_params.top_k", "algorithm.sampling.top_k", "-1 becomes 0", _top_k),
    _absent("(algorithm|rollout).sampling_params.do_sample", "rollouts draw", "env.eval.decoding", (True,)),
    _absent(
        "(algorithm|rollout).sampling_params.(top_p|repetition_penalty)",
        "log-probs cover the whole distribution",
        "algorithm.sampling.top_k",
        (1, 1.0),
    ),
    _not_needed("(algorithm|rollout).sampling_params.(max_new_tokens|add_BOS)", "follows from the family's processor"),
    _not_needed("algorithm.length_params.**", "follows from the family's processor"),
    _key("algorithm.staleness_threshold", "runner.max_staleness", "", _max_staleness),
    _key("algorithm.behave_weight_threshold", "algorithm.decoupled.cap", "", _weight_cap),
    _key("algorithm.tau", "algorithm.off_policy.tau"),
    _key(
        "algorithm.agg_q",
        "algorithm.off_policy.target_q",
        "",
        _of("algorithm.off_policy.target_q", {"min": "min", "mean": "mean"}),
    ),
    _key(
        "algorithm.actor_agg_q",
        "algorithm.off_policy.actor_q",
        "",
        _of("algorithm.off_policy.actor_q", {"min": "min", "mean": "mean"}, "min"),
    ),
    _key("algorithm.backup_entropy", "algorithm.off_policy.backup_entropy"),
    _key("algorithm.critic_actor_ratio", "algorithm.off_policy.policy_delay"),
    _key("algorithm.critic_subsample_size", "algorithm.off_policy.subset", "0: all", _subset),
    _key(
        "algorithm.entropy_tuning.alpha_type",
        "algorithm.off_policy.alpha_lr",
        "fixed_alpha: null",
        lambda value, recipe: {"algorithm.off_policy.alpha_lr": None} if value == "fixed_alpha" else {},
    ),
    _key(
        "algorithm.entropy_tuning.initial_alpha",
        "algorithm.off_policy.alpha",
        "",
        _positive("algorithm.off_policy.alpha"),
    ),
    _key("algorithm.(entropy_tuning.)?target_entropy", "algorithm.off_policy.target_entropy", "", _target_entropy),
    _key(
        "algorithm.entropy_tuning.optim.lr",
        "algorithm.off_policy.alpha_lr",
        "",
        lambda value, recipe: (
            {}
            if recipe.get("algorithm.entropy_tuning.alpha_type") == "fixed_alpha"
            else {"algorithm.off_policy.alpha_lr": value}
        ),
    ),
    _absent(
        "algorithm.entropy_tuning.optim.lr_scheduler",
        "the learning rate of the temperature is constant",
        "algorithm.off_policy.alpha_lr",
        ("torch_constant", "constant"),
    ),
    _not_needed("algorithm.entropy_tuning.optim.clip_grad", "the temperature is a scalar"),
    _absent("algorithm.target_update_freq", "targets move at every update", "algorithm.off_policy.tau", (1,)),
    _absent("algorithm.target_update_type", "all weights of the critics move", "algorithm.off_policy.tau", ("all",)),
    _absent(
        "algorithm.q_head_type", "critics are MLPs with LayerNorm", "algorithm.off_policy.layer_norm", ("default",)
    ),
    _absent("algorithm.enable_drq", "images are not shifted in RL", "sft.random_shift_px", (False,)),
    _key(
        "algorithm.demo_buffer.load_path",
        "algorithm.off_policy.demos",
        "with algorithm=rlpd",
        lambda value, recipe: {"algorithm.off_policy.demos": value} if value else {},
    ),
    _absent("algorithm.(replay|demo)_buffer.min_buffer_size", _COUNTED, "algorithm.off_policy.warm_up"),
    _absent(
        "algorithm.(replay|demo)_buffer.(cache_size|sample_window_size|max_num_samples)",
        _COUNTED,
        "algorithm.off_policy.capacity",
    ),
    _not_needed(
        "algorithm.(replay|demo)_buffer.(enable_cache|auto_save)", "the buffer is kept in memory, and in checkpoints"
    ),
    _key("algorithm.train_actor_steps", "algorithm.off_policy.critic_warm_up"),
    _key("algorithm.dagger.init_beta", "algorithm.dagger.beta"),
    _key("algorithm.dagger.beta_decay", "algorithm.dagger.beta_decay"),
    _absent(
        "algorithm.dagger.beta_schedule",
        "beta is multiplied at every iteration",
        "algorithm.dagger.beta_decay",
        ("exponential",),
    ),
    _absent("algorithm.dagger.beta_min", "beta decays towards 0", "algorithm.dagger.beta_decay", (0, 0.0)),
    _absent("algorithm.dagger.only_save_expert", "all steps are labelled", "algorithm.dagger.gate_threshold", (False,)),
    _absent("algorithm.dagger.**", "demonstrations are kept in the replay buffer or in a store", "store.url"),
    _key("algorithm.q_weight", "algorithm.rlt.q_weight_end"),
    _key("algorithm.bc_weight", "algorithm.rlt.bc_weight_end"),
    _key("algorithm.reference_dropout_prob", "algorithm.rlt.reference_dropout"),
    _key("algorithm.actor_weight_schedule.warmup_bc_weight", "algorithm.rlt.bc_weight"),
    _key("algorithm.actor_weight_schedule.warmup_q_weight", "algorithm.rlt.q_weight"),
    _key("algorithm.actor_weight_schedule.online_bc_weight", "algorithm.rlt.bc_weight_end"),
    _key("algorithm.actor_weight_schedule.online_q_weight", "algorithm.rlt.q_weight_end"),
    _key("algorithm.actor_weight_schedule.ramp_updates", "algorithm.rlt.ramp_updates"),
    _key("algorithm.actor_weight_schedule.warmup_updates", "algorithm.off_policy.critic_warm_up"),
    _not_needed("algorithm.actor_weight_schedule.enable", "equal weights disable the schedule"),
    _absent("algorithm.rlt_schedule.**", "updates follow the stored chunks", "algorithm.off_policy.utd"),
    _absent("algorithm.actor_update_action_noise", "the actor is Gaussian", "model.small_actor.initial_std", (False,)),
    *_same("algorithm", "algorithm.offline", "expectile", "temperature"),
    _absent("algorithm.dropout_rate", "no dropout", "", (None, 0, 0.0)),
    _key("algorithm.hidden_dims", "algorithm.off_policy.critic_hidden_sizes"),
    _key(
        "algorithm.nft_loss_form",
        "algorithm.nft.objective",
        "mse is weighted",
        _of("algorithm.nft.objective", {"mse": "weighted"}, "contrastive"),
    ),
    _key("algorithm.nft_beta", "algorithm.nft.beta"),
    _key("algorithm.adv_clip_max", "algorithm.nft.max_advantage"),
    _absent(
        "algorithm.(nft_*|dpo_beta|recompute_v)", "pi-NFT has beta, objective and max_advantage", "algorithm.nft.beta"
    ),
    _not_needed("algorithm.use_fixed_reset_state_ids", "a setting of env.train", "env.train.use_fixed_reset_state_ids"),
    # env
    _not_needed("(env|rollout|actor|reward).group_name", "processes are named by their component"),
    _unread("env.enable_offload", "env.enable_offload", "RLinf reads only env.train.enable_offload"),
    _absent("env.delay_sampler.**", "steps are not delayed", "env.real_time.latency_s"),
    _key("env.(train|eval).env_type", "env.env_type", "chooses env=PRESET", _env),
    _key("env.(train|eval).task_suite_name", "env.suite", "chooses env=PRESET", _suite),
    _key("env.train.total_num_envs", "env.train.total_num_envs", "", _envs("env.train.total_num_envs")),
    _key("env.eval.total_num_envs", "env.eval.total_num_envs", "and num_episodes", _eval_envs),
    _key("env.train.rollout_epoch", "algorithm.rollout_epoch"),
    _key("env.eval.rollout_epoch", "env.eval.num_episodes", "times environments", _episodes),
    _key("env.train.max_episode_steps", "env.max_episode_steps"),
    _key("env.eval.max_episode_steps", "env.eval.max_episode_steps", "null where equal to training", _eval_steps),
    _key("env.train.max_steps_per_rollout_epoch", "env.train.max_steps_per_rollout_epoch"),
    _key("env.eval.max_steps_per_rollout_epoch", "env.eval.num_episodes", "its episodes", _episodes),
    *_same("env.train", "env.train", "auto_reset", "ignore_terminations", "use_fixed_reset_state_ids"),
    _not_needed("env.eval.auto_reset", "an evaluation plays env.eval.num_episodes", "env.eval.num_episodes"),
    _key("env.eval.ignore_terminations", "env.eval.to_step_limit"),
    _key("env.train.group_size", "algorithm.group_size"),
    _absent("env.eval.group_size", "evaluation episodes have individual seeds", "env.eval.seed", (1, None)),
    _not_needed("env.eval.use_(fixed|ordered)_reset_state_ids", "evaluation seeds are fixed", "env.eval.seed"),
    _absent(
        "env.train.use_ordered_reset_state_ids",
        "initial states are sampled",
        "env.train.use_fixed_reset_state_ids",
        (False,),
    ),
    _key("env.train.seed", "env.train.seed"),
    _key("env.eval.seed", "env.eval.seed"),
    _not_needed("env.(train|eval).(is_eval|num_group|num_envs|policy_mode)", "follows from the component"),
    _key("env.train.reward_coef", "env.success_bonus", "of sparse rewards", _success_bonus),
    _not_needed("env.eval.reward_coef", "evaluations use the training rewards"),
    _key("env.train.use_rel_reward", "env.reward_mode", "true: dense_delta, false: dense", _relative_reward),
    _not_needed(
        "env.eval.(use_rel_reward|reward_mode|use_step_penalty|use_custom_reward|use_dense_reward)",
        "evaluations use the training rewards",
    ),
    _key(
        "env.train.reward_mode",
        "env.reward_mode",
        "only_success: sparse",
        lambda value, recipe: {"env.reward_mode": "sparse"} if value == "only_success" else {},
    ),
    _absent("env.train.use_step_penalty", "write it as a reward function", "reward.fn", (False,)),
    _absent("env.train.use_custom_reward", "write it as a reward function", "reward.fn", (False, None)),
    _key("env.train.enable_offload", "env.enable_offload"),
    _not_needed("env.eval.enable_offload", "evaluations use the training simulators", "env.enable_offload"),
    _absent(
        "env.(train|eval).enable_init_offload",
        "simulators are offloaded after a rollout",
        "env.enable_offload",
        (False,),
    ),
    _key("env.train.num_env_subprocess", "env.num_processes"),
    _not_needed("env.eval.num_env_subprocess", "evaluations use the training processes", "env.num_processes"),
    _key("env.eval.video_cfg.save_video", "env.video.enabled"),
    _key("env.eval.video_cfg.fps", "env.video.fps"),
    _not_needed("env.train.video_cfg.**", "only evaluations are recorded", "env.video.enabled"),
    _not_needed(
        "env.eval.video_cfg.**", "videos are in RUN/videos, with the outcome in their names", "env.video.enabled"
    ),
    _key("env.train.init_params.id", "env.tasks", "chooses env=PRESET", _task),
    _not_needed("env.eval.init_params.id", "env.eval.tasks selects other tasks", "env.eval.tasks"),
    _key("env.train.init_params.camera_heights", "env.cameras", "each height", _camera("height")),
    _key("env.train.init_params.camera_widths", "env.cameras", "each width", _camera("width")),
    _key("env.train.init_params.sensor_configs.height", "env.cameras", "each height", _camera("height")),
    _key("env.train.init_params.sensor_configs.width", "env.cameras", "each width", _camera("width")),
    _not_needed("env.train.init_params.sim_backend", "the CPU's; on a GPU set physx_cuda", "env.sim_backend"),
    _absent(
        "env.train.init_params.control_mode",
        "actions are end-effector pose deltas",
        "",
        (None, "None", "pd_ee_delta_pose", "pd_ee_target_delta_pose"),
    ),
    _absent("env.train.init_params.sensor_configs.shader_pack", "", "env.render_detail", ("default", None)),
    _absent("env.train.init_params.sim_config.**", "the task's own rates are used", ""),
    _absent(
        "env.train.init_params.(reward_mode|obj_set|use_multiple_plates)",
        "a task option",
        "env.tasks",
        (False, "train", None),
    ),
    _not_needed(
        "env.train.init_params.(num_envs|obs_mode|render_mode|max_episode_steps|human_render_camera_configs.*)",
        "follows from other settings",
    ),
    _not_needed("env.eval.init_params.**", "evaluations use the simulator settings of training", "env.eval.settings"),
    _absent("env.train.init_params.**", "a setting of a simulator that is not built in", ""),
    _key(
        "env.(train|eval).task_id_filter",
        "env.tasks",
        "by name: `embodrl list envs`",
        _of("env.tasks", {None: None}, "env.tasks"),
    ),
    _key("env.eval.data_collection.save_dir", "collect.output_dir"),
    _key(
        "env.eval.data_collection.export_format",
        "collect.format",
        "",
        _of("collect.format", {"lerobot": "lerobot"}, "lerobot, or raw"),
    ),
    _key(
        "env.eval.data_collection.only_success",
        "collect.keep_failures",
        "the value is inverted",
        lambda value, recipe: {"collect.keep_failures": value is not True},
    ),
    _key("env.eval.data_collection.fps", "collect.fps"),
    _not_needed(
        "env.(train|eval).data_collection.**", "`embodrl collect` collects demonstrations", "collect.output_dir"
    ),
    _not_needed(
        "env.(train|eval).(reset_gripper_open|specific_reset_id|wrap_obs_mode|obs_format|use_full_state)",
        "follows from the simulator's reset and the model's preset",
        "env.include_state",
    ),
    _not_needed(
        "env.(train|eval).(action_dim|num_action_chunks|ref_num_action_chunks)",
        "a setting of section model",
        "model.num_action_chunks",
    ),
    _not_needed(
        "env.(train|eval).(center_crop|use_3rd_view_as_extra|use_wrist_image|wm_env_type)",
        "a setting of section model",
        "model.center_crop",
    ),
    _unread("env.(train|eval).(omni_config|task_config).**", "", "RLinf passes it to a simulator that is not built in"),
    _absent(
        "env.(train|eval).(override_cfg|pico|glove_config|gello*|keyboard_reward_wrapper|use_gello*|use_pico"
        "|use_spacemouse|no_gripper|left_gello*|right_gello*|smooth_intervene|teleop*|main_image_key)(.**)?",
        _ROBOT,
        "env.robot",
    ),
    _absent("env.(train|eval).rlt_policy_switch.**", _EXPERT, "algorithm.dagger.gate_threshold"),
    _absent("env.(train|eval).perturbation_suffix", "LIBERO-plus is not built in", "env.suite"),
    _absent("env.(train|eval).**", "a setting of a simulator that is not built in", ""),
    # rollout
    _key(
        "rollout.(backend|generation_backend)",
        "rollout.backend",
        "huggingface: native",
        _of("rollout.backend", {"huggingface": "native", "hf": "native"}, "vllm"),
    ),
    _key("rollout.enable_offload", "rollout.enable_offload"),
    _key("rollout.pipeline_stage_num", "rollout.pipeline_stages"),
    _key("rollout.recompute_logprobs", "algorithm.recompute_logprobs", "false: auto", _recompute),
    _not_needed("rollout.unnorm_key", "a setting of section model", "model.unnorm_key"),
    _not_needed("rollout.(collect_prev_infos|collect_transitions)", "the data that the loss needs is always kept"),
    _absent("rollout.enable_torch_compile", "policies are not compiled"),
    _absent("rollout.enable_cuda_graph", "policies are not compiled", "", (False,)),
    _not_needed(
        "rollout.(sync_weight_nccl_max_ctas|gpu_memory_utilization|enforce_eager)",
        "not configurable",
        "rollout.weight_sync",
    ),
    _not_needed("rollout.model.**", _ROLLOUT, "model"),
    _absent("rollout.expert_model.**", _EXPERT, "algorithm.dagger.beta"),
    _not_needed("rollout.rlt_feature_model.**", _TOKEN, "model.warm_start"),
    _not_needed("(weight_syncer|profile).**", "chosen by placement: rollout.weight_sync", "rollout.weight_sync"),
    # actor
    _key(
        "actor.training_backend",
        "actor.training_backend",
        "native on one device",
        lambda value, recipe: {"actor.training_backend": value} if value == "megatron" else {},
    ),
    _key("actor.micro_batch_size", "actor.micro_batch_size"),
    _key("actor.global_batch_size", "actor.global_batch_size"),
    _key("actor.seed", "runner.seed"),
    _key("actor.enable_offload", "actor.enable_offload"),
    _key("actor.optim.lr", "actor.optim.lr"),
    _key("actor.optim.value_lr", "actor.optim.value_lr"),
    _key("actor.critic_optim.lr", "actor.optim.value_lr"),
    _key("actor.value_optim.lr", "actor.optim.value_lr"),
    _key("actor.optim.(adam_beta1|adam_beta2)", "actor.optim.betas", "", _betas),
    _key("actor.optim.adam_eps", "actor.optim.eps"),
    *_same("actor.optim", "actor.optim", "weight_decay", "clip_grad"),
    _key("actor.optim.(lr_scheduler|warmup_style)", "actor.optim.lr_scheduler", "torch_constant: constant", _scheduler),
    _absent("actor.optim.critic_warmup_steps", _STEPS, "actor.optim.critic_warmup_iterations", (0,)),
    _absent("actor.optim.lr_warmup_steps", _STEPS, "actor.optim.lr_warmup_iterations", (0, -1)),
    _absent("actor.optim.total_training_steps", _STEPS, "actor.optim.schedule_iterations"),
    _absent("actor.optim.(min_lr|num_cycles)", "relative to the learning rate", "actor.optim.min_lr_ratio"),
    _not_needed(
        "actor.(critic|value)_optim.**", "one optimizer, with a learning rate for the critics", "actor.optim.value_lr"
    ),
    _key("actor.fsdp_config.gradient_checkpointing", "actor.gradient_checkpointing"),
    _key("actor.fsdp_config.reshard_after_forward", "actor.fsdp.reshard_after_forward", "", lambda value, recipe: {}),
    _absent("actor.fsdp_config.cpu_offload", "", "actor.fsdp.cpu_offload", (False,)),
    _absent(
        "actor.fsdp_config.(use_liger_kernel|amp_autocast.enabled|grad_scaler.enabled|forward_prefetch|limit_all_gathers)",
        "training is in bf16 or fp32",
        "actor.precision",
        (False,),
    ),
    _not_needed(
        "actor.fsdp_config.mixed_precision.**", "reductions are in float32: actor.precision", "actor.precision"
    ),
    _not_needed("actor.fsdp_config.**", "FSDP2 shards by block: actor.fsdp", "actor.fsdp"),
    _absent(
        "actor.(enable_sft_co_train|sft_loss_weight|sft_data_path|config_name)",
        "imitation alongside RL",
        "algorithm.bc_coef",
        (False,),
    ),
    _absent("actor.(compile_model|offline_torch_compile)", "policies are not compiled", "", (False,)),
    _absent("actor.enable_drq", "images are not shifted in RL", "sft.random_shift_px", (False,)),
    _not_needed("actor.(use_fsdp_wrap|num_steps)", "FSDP2 shards by block"),
    # model
    _key("actor.model.(model_type|model_name)", "model.model_type", "chooses model=PRESET", _model),
    _key("actor.model.openpi.config_name", "model.model_type", "chooses model=pi0 or pi05", lambda value, recipe: {}),
    _key("actor.model.model_path", "model.model_path", "", _weights),
    _key("actor.model.precision", "actor.precision", "and rollout.precision, actor.param_dtype", _precision),
    _key("actor.model.num_action_chunks", "model.num_action_chunks"),
    _key("actor.model.action_dim", "model.action_dim", "", _action_dim),
    _not_needed("actor.model.add_value_head", "follows from the algorithm's preset", "model.add_value_head"),
    _not_needed("actor.model.value_type", "follows from reward_type", "model.value_head.output"),
    _key("actor.model.unnorm_key", "model.unnorm_key"),
    _key("actor.model.center_crop", "model.center_crop"),
    _key("actor.model.is_lora", "model.trainable", "true: lora", _lora),
    _key("actor.model.lora_rank", "model.lora.rank", "", _lora_rank),
    _key("actor.model.lora_path", "model.lora_path"),
    _key("actor.model.use_proprio", "model.use_proprio", "openvla_oft", _oft("model.use_proprio")),
    _key("actor.model.use_film", "model.use_film", "openvla_oft", _oft("model.use_film")),
    _key(
        "actor.model.(num_steps|denoising_steps)",
        "model.flow.num_steps",
        "",
        lambda value, recipe: {"model.flow.num_steps": value} if "flow" in _flow(recipe) else {},
    ),
    _key(
        "actor.model.(openpi.)?noise_level",
        "model.flow.noise_level",
        "",
        lambda value, recipe: {"model.flow.noise_level": value} if "flow" in _flow(recipe) else {},
    ),
    _key(
        "actor.model.(openpi.)?noise_method",
        "model.flow.method",
        "",
        lambda value, recipe: (
            _of("model.flow.method", {"flow_sde": "flow_sde", "flow_noise": "flow_noise"}, "flow_noise")(value, recipe)
            if "flow" in _flow(recipe)
            else {}
        ),
    ),
    _key("actor.model.openpi.noise_params", "model.flow.noise_std_max", "the first value; not annealed", _noise_range),
    _key("actor.model.openpi.joint_logprob", "model.flow.joint", "of flow_noise", _joint),
    _key("actor.model.openpi.train_expert_only", "model.trainable", "true: action_expert", _trainable),
    _key("actor.model.openpi.detach_critic_input", "model.value_head.detach"),
    _key(
        "actor.model.openpi.value_after_vlm",
        "model.value_head.input",
        "true: prefix, false: suffix",
        lambda value, recipe: {"model.value_head.input": "prefix" if value is True else "suffix"},
    ),
    _absent(
        "actor.model.openpi.value_vlm_mode",
        "the mean over images and prompt",
        "model.value_head.input",
        ("mean_token",),
    ),
    _key("actor.model.openpi.use_dsrl", "model.small_actor.kind", "algorithm=dsrl", lambda value, recipe: {}),
    _key(
        "actor.model.openpi.dsrl_num_q_heads",
        "algorithm.off_policy.num_q",
        "with use_dsrl",
        lambda value, recipe: _dsrl(recipe, "algorithm.off_policy.num_q", value),
    ),
    _key(
        "actor.model.openpi.dsrl_agg_q",
        "algorithm.off_policy.target_q",
        "with use_dsrl",
        lambda value, recipe: _dsrl(recipe, "algorithm.off_policy.target_q", value),
    ),
    _key(
        "actor.model.openpi.dsrl_hidden_dims",
        "model.small_actor.hidden_sizes",
        "with use_dsrl",
        lambda value, recipe: _dsrl(recipe, "model.small_actor.hidden_sizes", value),
    ),
    _not_needed(
        "actor.model.openpi.(action_chunk|action_horizon|action_env_dim|num_steps|add_value_head|num_images_in_input"
        "|dsrl_*|task|is_nft|ignore_last|model_action_dim|paligemma_variant|action_expert_variant|max_token_len"
        "|discrete_state_input|use_rlt|rlt_*|pi05|state_indices)",
        "follows from the checkpoint or another key",
        "model.pi",
    ),
    _not_needed("actor.model.openpi_data.**", "follows from the checkpoint's statistics", "model.stats_path"),
    _key(
        "actor.model.num_q_heads",
        "algorithm.off_policy.num_q",
        "",
        lambda value, recipe: {"algorithm.off_policy.num_q": value} if is_off_policy(recipe) else {},
    ),
    _absent(
        "actor.model.q_head_type", "critics are MLPs with LayerNorm", "algorithm.off_policy.layer_norm", ("default",)
    ),
    _not_needed("actor.model.(add_q_head|ref_num_action_chunks|z_dim)", "follows from the loss", "algorithm"),
    _not_needed(
        "actor.model.(image_size|image_num|num_images_in_input|state_dim|obs_dim|proprio_dim|hidden_size|vocab_size"
        "|max_prompt_length|tokenizer_path|embodiment_tag|obs_converter_type|input_type|rl_head_config.*"
        "|implement_version|policy_setup|model_config|modality_config*|backbone_model_path|action_env_dim)",
        "follows from the checkpoint, the simulator or the model's preset",
        "model",
    ),
    _not_needed(
        "actor.model.(attn_implementation|low_cpu_mem_usage|trust_remote_code|gradient_checkpointing"
        "|sharding_strategy|padding_value|use_cache)",
        "chosen here; code in checkpoints never runs",
    ),
    _key(
        "actor.model.(mlp_hidden_dim|hidden_dim)",
        "model.gaussian.hidden_sizes",
        "two layers",
        lambda value, recipe: (
            {"model.gaussian.hidden_sizes": [value, value]}
            if recipe.get("actor.model.model_type") in ("mlp_policy", "cnn_policy")
            else {}
        ),
    ),
    _absent("actor.model.safe_get_logprob", "", "", (False,)),
    _absent("actor.model.**", "a setting of a model that is not built in", "model"),
    # reward, critic, the rest
    _absent("reward.use_reward_model", "write a reward as module:function", "reward.fn", (False,)),
    _absent("reward.**", "write a reward as module:function (docs/algorithms.md)", "reward.fn"),
    _absent("router_server_args.**", "write a reward as module:function", "reward.fn"),
    _not_needed("critic.use_critic_model", "follows from the loss", "algorithm.loss_type"),
    _absent(
        "data.(task_name|dataset_type|dataset_path)",
        "D4RL is not built in; use a dataset of `embodrl collect`",
        "algorithm.off_policy.demos",
    ),
    _not_needed("data.**", "follows from runner.seed and actor.global_batch_size", "actor.global_batch_size"),
    _unread("hydra.**", "", "Hydra's own; runs are in runner.output_dir"),
)
"""Mapping of RLinf keys; the first match counts."""


def _flow(recipe: Recipe) -> str:
    kind = str(recipe.get("actor.model.model_type") or recipe.get("actor.model.model_name"))
    return "flow" if kind in ("openpi", "openpi_rlinf", "gr00t", "gr00t_n1d7") else ""


def _dsrl(recipe: Recipe, ours: str, value: object) -> Settings:
    return {ours: value} if recipe.get("actor.model.openpi.use_dsrl") is True else {}
