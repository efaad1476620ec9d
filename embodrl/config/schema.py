"""The typed configuration. Unknown keys are errors; cross-field rules are in ``rules/``. Imports no torch.

Every field's description is its documentation: docs/configuration.md is made from it.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import Any, Literal, cast

from pydantic import BaseModel, Field, SerializeAsAny, ValidationError, ValidationInfo, create_model, field_validator

from embodrl.config.algorithm_schema import (
    AlgorithmConfig,
    DecoupledConfig,
    FilterConfig,
    KlConfig,
    SamplingConfig,
    SrpoConfig,
)
from embodrl.config.cluster_schema import ClusterConfig
from embodrl.config.engine_schema import ActorConfig, FsdpConfig, OptimConfig, RolloutConfig, VllmConfig
from embodrl.config.model_schema import FlowConfig, FlowModelConfig, ModelConfig, ValueHeadConfig
from embodrl.config.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
)
from embodrl.errors import EmbodrlError
from embodrl.names import import_object
from embodrl.specs import ENVS, MODELS

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "Config",
    "DecoupledConfig",
    "EnvConfig",
    "FilterConfig",
    "FlowConfig",
    "FlowModelConfig",
    "FsdpConfig",
    "KlConfig",
    "ModelConfig",
    "OptimConfig",
    "RolloutConfig",
    "SamplingConfig",
    "Section",
    "SrpoConfig",
    "ValueHeadConfig",
    "VllmConfig",
]


DEFAULT_ENV, DEFAULT_MODEL = "maniskill", "openvla"


class CameraConfig(Section):
    """A camera of the simulator that the policy sees."""

    name: str = Field(default="base_camera", description="camera name in the simulator")
    height: PositiveInt = Field(default=64, description="pixels")
    width: PositiveInt = Field(default=64, description="pixels")
    fov_rad: PositiveFloat | None = Field(
        default=None, description="vertical field of view in radians; null keeps the task's own"
    )
    eye: tuple[float, float, float] | None = Field(
        default=None, description="camera position in metres; null keeps the task's own"
    )
    target: tuple[float, float, float] | None = Field(
        default=None, description="point looked at, in metres; goes with eye"
    )


class EnvTrainConfig(Section):
    """Environments that gather experience."""

    total_num_envs: PositiveInt = Field(default=32, description="environments over all processes")
    max_steps_per_rollout_epoch: PositiveInt = Field(
        default=100, description="environment steps per environment and rollout epoch"
    )
    auto_reset: bool = Field(
        default=True, description="start a new episode when one has ended, at the end of its chunk"
    )
    ignore_terminations: bool = Field(default=False, description="only the step limit ends an episode")
    use_fixed_reset_state_ids: bool = Field(
        default=False,
        description="every rollout starts from the same initial states (seeds and tasks) instead of fresh ones",
    )
    seed: Seed = Field(default=0, description="reset seeds are drawn from it, runner.seed and the iteration")


class EnvEvalConfig(Section):
    """Environments that measure the policy on fixed seeds."""

    total_num_envs: PositiveInt = Field(
        default=32,
        description="environments over all processes in `embodrl eval` and `sft`; `train` evaluates in those of"
        " env.train",
    )
    num_episodes: PositiveInt = Field(default=128, description="episodes an evaluation, spread evenly over the tasks")
    seed: Seed = Field(default=1_000_000, description="reset seed of the first episode; episode i uses seed + i")


class VideoConfig(Section):
    """Evaluation videos."""

    enabled: bool = Field(default=True, description="write videos of the last evaluation")
    every_eval: bool = Field(default=False, description="write videos of every evaluation, not only of the last")
    num_episodes: PositiveInt = Field(default=6, description="episodes filmed, the first ones of the fixed seeds")
    height: PositiveInt = Field(default=256, description="pixels")
    width: PositiveInt = Field(default=256, description="pixels")
    fps: PositiveInt | None = Field(
        default=None,
        description="frames a second, of which each step gives one; null is the simulator's own rate of control: 20 of"
        " ManiSkill and LIBERO, 80 of Meta-World, and what an environment of Gymnasium tells",
    )


class EnvConfig(Section):
    """Simulator, tasks and how they are run: what all simulators share.

    A simulator with settings of its own derives a class from this one, adds fields with defaults, and names the class
    in its spec; what it adds is validated like the rest and passed to its VectorEnv.
    """

    env_type: str = Field(default=DEFAULT_ENV, description="a name of `embodrl list envs`")
    tasks: tuple[str, ...] = Field(
        default=("PushCube-v1",), description="tasks; several make a language-conditioned mix", min_length=1
    )
    max_episode_steps: PositiveInt = Field(
        default=50, description="environment steps after which an episode is truncated"
    )
    reward_mode: Literal["dense_delta", "dense", "sparse"] = Field(
        default="dense_delta",
        description="dense: the simulator's own reward; dense_delta: its change from step to step; sparse: none; each"
        " plus success_bonus",
    )
    success_bonus: NonNegativeFloat = Field(default=1.0, description="reward at the first success of an episode")
    cameras: tuple[CameraConfig, ...] = Field(
        default=(CameraConfig(),), description="what the policy sees", min_length=1
    )
    include_state: bool = Field(
        default=False, description="add robot joint positions and velocities to the observation"
    )
    render_detail: Literal["auto", "full", "fast"] = Field(
        default="auto",
        description="fast leaves out shadows, reflections, anti-aliasing and most triangles of large meshes (ManiSkill:"
        " 95 % of the robot's triangles and nearly all of the ground's); full draws as the simulator does; auto is fast"
        " where a CPU draws",
    )
    num_processes: PositiveInt = Field(
        default=2,
        description="simulator processes (EnvManagers); auto measures at the first start which number is fastest, and"
        " keeps the result",
    )
    pin_cpus: bool = Field(default=True, description="bind each process to its core and to the memory of its NUMA node")
    enable_offload: bool = Field(
        default=False,
        description="free the simulators while the policy trains; their states are kept, and they come back to the bit",
    )
    offload_level: Literal["process", "simulator"] = Field(
        default="process",
        description="process: end the simulator processes, which frees all of their memory; simulator: only what the"
        " simulators hold, which comes back sooner",
    )
    python: str | None = Field(
        default=None,
        description="another interpreter for the simulator processes; auto is the one of `embodrl env install`, if"
        " there is one; null is this one",
    )
    start_timeout_s: PositiveFloat = Field(default=180.0, description="seconds a process may take to come up")
    reset_timeout_s: PositiveFloat = Field(default=60.0, description="seconds a reset may take")
    step_timeout_s: PositiveFloat = Field(default=60.0, description="seconds a chunk may take")
    max_restarts: NonNegativeInt = Field(
        default=10,
        description="restarts of simulators that died, hung or raised; one more stops the run, and so does"
        " one more chunk of an environment that can't be true (see the next two) without a valid one in between",
    )
    max_abs_reward: PositiveFloat = Field(
        default=1e6, description="a reward beyond it is taken for a fault of the simulator, as one that is no number is"
    )
    max_abs_state: PositiveFloat = Field(
        default=1e6, description="the same of each number of the robot's state; see include_state"
    )
    train: EnvTrainConfig = Field(default=EnvTrainConfig(), description="environments that gather experience")
    eval: EnvEvalConfig = Field(default=EnvEvalConfig(), description="environments that measure the policy")
    video: VideoConfig = Field(default=VideoConfig(), description="evaluation videos")


class RewardConfig(Section):
    """A reward function of the user's."""

    fn: str | None = Field(
        default=None, description="module:function, sync or async, from an episode to its reward; null for none"
    )
    timeout_s: PositiveFloat = Field(default=15.0, description="seconds a call may take")
    retries: NonNegativeInt = Field(default=2, description="further attempts after a call that failed or took too long")
    max_concurrency: PositiveInt = Field(default=16, description="calls at the same time")
    on_error: Literal["drop", "raise"] = Field(
        default="drop", description="drop: an episode without a reward is not trained on, and counted; raise: stop"
    )


class PipelineConfig(Section):
    """The graph that an iteration walks."""

    name: str | None = Field(
        default=None,
        description="a name of `embodrl list pipelines`; null takes the one that belongs to the algorithm's settings",
    )
    fn: str | None = Field(
        default=None, description="custom module:function, from the configuration to a Pipeline; null for none"
    )


class LoggerConfig(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = Field(default=True, description="write DIR/tensorboard")
    wandb_mode: Literal["off", "offline", "online"] = Field(
        default="off", description="Weights & Biases; needs the extra `wandb`"
    )
    wandb_project: str = Field(default="embodrl", description="W&B project")
    console: Literal["auto", "rich", "plain", "off"] = Field(
        default="auto", description="auto is rich on a terminal and plain lines elsewhere"
    )


class RunnerConfig(Section):
    """The loop."""

    name: str = Field(default="auto", description="run name; auto is <env>-<model>-<algorithm>-<date and time>")
    output_dir: str = Field(default="auto", description="directory of the run; auto is outputs/<name>")
    max_iterations: PositiveInt = Field(default=40, description="rollout + update cycles")
    max_staleness: NonNegativeInt = Field(
        default=0,
        description="updates that rollouts may run ahead: 0 takes turns, 1 plays the next rollout while training, more"
        " let rollouts run freely; best with algorithm.decoupled",
    )
    seed: Seed = Field(default=0, description="of everything random")
    eval_interval: NonNegativeInt = Field(
        default=10, description="iterations between evaluations; 0 for none; the last one always counts"
    )
    eval_at_start: bool = Field(default=True, description="evaluate before the first update")
    save_interval: PositiveInt = Field(
        default=10, description="iterations between checkpoints; the last one is always saved"
    )
    checkpoint_format: Literal["auto", "full", "sharded"] = Field(
        default="auto",
        description="full: the main process writes whole tensors; sharded: every training process writes what it holds"
        " (torch.distributed.checkpoint); auto is sharded with several training processes. Any resumes from either",
    )
    keep_last_n: PositiveInt = Field(default=2, description="checkpoints kept")
    keep_best: bool = Field(
        default=True,
        description="export the policy with the best evaluation to policy_best, and keep the checkpoint of that"
        " iteration, if one was saved (checkpoints/best), beyond keep_last_n",
    )
    logger: LoggerConfig = Field(default=LoggerConfig(), description="where metrics go")


class CollectConfig(Section):
    """`embodrl collect`."""

    output_dir: str = Field(default="data/demos", description="directory of the demonstrations, new or empty")
    format: Literal["lerobot", "raw"] = Field(
        default="lerobot",
        description="lerobot: a LeRobot data set (v3.0), of parquet and MP4 files; raw: safetensors, every pixel",
    )
    fps: PositiveInt | None = Field(
        default=None,
        description="frames a second that a LeRobot data set states; null is the simulator's own rate of control, as"
        " for env.video.fps",
    )
    video_crf: int = Field(
        default=0,
        ge=0,
        le=51,
        description="of a LeRobot data set's videos: 0 keeps every pixel as it is, 6 is hardly visible, 18 is small",
    )
    num_episodes: PositiveInt = Field(
        default=400, description="episodes to keep over all tasks; successful ones unless keep_failures"
    )
    noise_std: NonNegativeFloat = Field(
        default=0.12, description="Gaussian noise on the executed actions; the expert's own action is stored"
    )
    noise_fraction: Fraction = Field(default=0.7, description="part of the episodes with noise")
    seed: Seed = Field(default=500_000, description="first reset seed")
    keep_failures: bool = Field(default=False, description="keep episodes that failed, too")


class SftConfig(Section):
    """`embodrl sft`."""

    data_dir: str = Field(
        default="data/demos", description="made by `embodrl collect` or `convert`, or any LeRobot dataset"
    )
    cameras: tuple[str, ...] | None = Field(
        default=None,
        description="cameras of a LeRobot data set, in the order of env.cameras; null takes those of the same names",
    )
    output_dir: str = Field(default="outputs/sft", description="directory of the policy")
    max_steps: PositiveInt = Field(default=1000, description="optimizer steps")
    batch_size: PositiveInt = Field(default=64, description="frames a step")
    lr: PositiveFloat = Field(default=4e-4, description="peak learning rate")
    lr_warmup_steps: NonNegativeInt = Field(default=50, description="linear warm-up")
    weight_decay: NonNegativeFloat = Field(default=0.01, description="AdamW weight decay")
    label_smoothing_bins: NonNegativeFloat = Field(
        default=4.0, description="standard deviation, in bins, of the Gaussian target; 0 is one-hot"
    )
    random_shift_px: NonNegativeInt = Field(default=0, description="largest random shift of the image, in pixels")
    max_episodes: PositiveInt | None = Field(default=None, description="use only the first episodes")
    micro_batch_size: PositiveInt | None = Field(
        default=None,
        description="frames per forward and backward pass of a process; null: all at once, on a CPU one part per core",
    )
    log_interval: PositiveInt = Field(default=25, description="steps between log lines")
    save_interval: NonNegativeInt = Field(
        default=0, description="steps between checkpoints; 0 for one at the end or when stopped"
    )
    eval_interval: NonNegativeInt = Field(
        default=0, description="steps between evaluations in the simulator; 0 for none"
    )


class Config(Section):
    """A whole run."""

    env: SerializeAsAny[EnvConfig] = Field(
        default_factory=lambda: env_settings(DEFAULT_ENV)(), description="simulator and tasks"
    )
    model: SerializeAsAny[ModelConfig] = Field(
        default_factory=lambda: model_settings(DEFAULT_MODEL)(), description="the policy"
    )
    algorithm: AlgorithmConfig = Field(default=AlgorithmConfig(), description="advantages, losses, sampling")
    reward: RewardConfig = Field(default=RewardConfig(), description="a custom reward function")
    pipeline: PipelineConfig = Field(default=PipelineConfig(), description="the graph that an iteration walks")
    actor: ActorConfig = Field(default=ActorConfig(), description="training backend and optimizer")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="inference backend")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="devices and placement")
    runner: RunnerConfig = Field(default=RunnerConfig(), description="loop, evaluation, checkpoints, logs")
    collect: CollectConfig = Field(default=CollectConfig(), description="demonstrations by scripted experts")
    sft: SftConfig = Field(default=SftConfig(), description="supervised fine-tuning")
    extensions: tuple[str, ...] = Field(
        default=(), description="modules imported first, which may register models and environments"
    )

    @field_validator("env", "model", mode="before")
    @classmethod
    def _of_its_type(cls, value: object, info: ValidationInfo) -> object:
        """Validate a section that depends on its type with the settings of that type."""
        if not isinstance(value, dict):
            return value
        section = cast(dict[str, object], value)
        if info.field_name == "env":
            settings: type[Section] = env_settings(section.get("env_type", DEFAULT_ENV))
        else:
            settings = model_settings(section.get("model_type", DEFAULT_MODEL))
        # in JSON mode lists become tuples, although types are strict
        return (
            settings.model_validate_json(json.dumps(section))
            if info.mode == "json"
            else settings.model_validate(section)
        )


def env_settings(name: object) -> type[EnvConfig]:
    """Return the class of the section ``env`` for a simulator; that of the common settings if it has none of its own.

    Raises:
        EmbodrlError: the spec names no class derived from EnvConfig, or one that can't be made without arguments.
    """
    spec = ENVS.entry(name) if isinstance(name, str) and name in ENVS else None
    return EnvConfig if spec is None or spec.settings is None else _settings(spec.name, spec.settings, EnvConfig)


def model_settings(name: object) -> type[ModelConfig]:
    """Return the class of the section ``model`` for a family; as ``env_settings``."""
    spec = MODELS.entry(name) if isinstance(name, str) and name in MODELS else None
    return ModelConfig if spec is None or spec.settings is None else _settings(spec.name, spec.settings, ModelConfig)


@cache
def _settings(name: str, settings: type[Any] | str, base: type[Any]) -> type[Any]:
    found: Any = import_object(settings) if isinstance(settings, str) else settings
    if not isinstance(found, type) or not issubclass(found, base):
        raise EmbodrlError(
            f"the settings of '{name}' are {found!r}, which is not derived from {base.__name__}",
            f"write class MySettings({base.__name__}) with a default for every field",
            code="settings-class-invalid",
        )
    section = cast(type[BaseModel], found)
    required = [field for field, info in section.model_fields.items() if info.is_required()]
    if required:
        raise EmbodrlError(
            f"the setting '{required[0]}' of '{name}' has no default",
            f"write {required[0]}: ... = Field(default=..., description=...)",
            code="settings-class-invalid",
        )
    added = {field: info for field, info in section.model_fields.items() if field not in base.model_fields}
    try:  # pydantic does not validate defaults by itself
        section.model_validate({field: info.get_default(call_default_factory=True) for field, info in added.items()})
    except ValidationError as error:
        first = error.errors()[0]
        raise EmbodrlError(
            f"the default of the setting '{'.'.join(map(str, first['loc']))}' of '{name}' is invalid: {first['msg']}",
            "give a default that the type and the bounds of the setting allow",
            code="settings-class-invalid",
        ) from None
    return found


@lru_cache(maxsize=64)
def config_class(env: type[EnvConfig], model: type[ModelConfig]) -> type[Config]:
    """Return the class of a configuration whose sections ``env`` and ``model`` are of these classes."""
    sections: dict[str, Any] = {
        name: (cls, Field(default=cls(), description=Config.model_fields[name].description))
        for name, cls in (("env", env), ("model", model))
    }
    return create_model("Config", __base__=Config, **sections)


def schema_for(env_type: object, model_type: object) -> type[Config]:
    """Return the schema of a configuration with this simulator and model; the common settings for unknown ones."""
    return config_class(env_settings(env_type), model_settings(model_type))


def defaults_of(config: Config) -> Config:
    """Return the defaults of a configuration with this simulator and model."""
    return Config(env=type(config.env)(), model=type(config.model)())
