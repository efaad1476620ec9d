"""Section ``env``: simulator, tasks, cameras, processes."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from embodrl.config.schema.real_time import RealTimeConfig
from embodrl.config.schema.section import (
    EPISODES,
    EVALUATION,
    RL,
    AppliesIf,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    ReadBy,
    Section,
    Seed,
)
from embodrl.config.schema.settings_class import settings_class
from embodrl.specs import DEFAULT_ENV, ENVS


class CameraConfig(Section):
    """A simulator camera whose images the policy sees."""

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
        default=None, description="look-at point in metres; set together with eye"
    )


class CurriculumConfig(Section):
    """Episodes that begin within demonstrations: near their ends first."""

    fraction: Fraction = Field(
        default=0.5, description="fraction of the episodes that a rollout begins with which begin in a demonstration"
    )
    step: PositiveInt = Field(
        default=4, description="actions from the first start to the end of a demonstration, and from start to start"
    )
    window: PositiveInt = Field(
        default=5, le=10_000, description="last episodes from the current start whose success rate counts"
    )
    success_rate: Fraction = Field(
        default=0.8,
        description="from this rate on the start moves back; a demonstration whose reset has it is done with",
    )


class TaskPartConfig(Section):
    """A reason to play some tasks more often than others; it has the settings of its kind alone."""

    kind: Literal["stages", "between"] = Field(
        description="stages: tasks join in the order of env.tasks, each once those before it succeed; between: tasks"
        " with a success rate within bounds are played more often"
    )
    success_rate: Fraction | None = Field(
        default=None, description="of stages: mean success rate of the tasks so far from which on the next one joins"
    )
    low: Fraction | None = Field(default=None, description="of between: lower bound of the success rate")
    high: Fraction | None = Field(default=None, description="of between: upper bound of the success rate")
    factor: PositiveFloat | None = Field(
        default=None,
        description="of between: how many times as often as others a task within the bounds is played; so is a task"
        " with fewer episodes than the window",
    )


class TaskCurriculumConfig(Section):
    """How often the tasks are played, by their success so far."""

    parts: tuple[TaskPartConfig, ...] = Field(
        default=(),
        description="weights of the tasks that are multiplied, e.g. [{kind: stages, success_rate: 0.8}]; without, all"
        " tasks are played equally often",
    )
    window: Annotated[PositiveInt, AppliesIf("env.train.task_curriculum.parts")] = Field(
        default=20, le=10_000, description="last episodes of a task whose success rate counts"
    )


class EnvTrainConfig(Section):
    """Environments of training rollouts."""

    total_num_envs: Annotated[PositiveInt, ReadBy("train", "collect", "record", "store")] = Field(
        default=32, le=1_000_000, description="environments over all processes"
    )
    max_steps_per_rollout_epoch: PositiveInt = Field(
        default=100, description="environment steps per environment and rollout epoch, rounded up to whole chunks"
    )
    auto_reset: Annotated[bool, ReadBy("train", "eval", "sft")] = Field(
        default=True, description="start a new episode when one ends, at the end of its chunk"
    )
    ignore_terminations: Annotated[bool, ReadBy("train", "eval", "sft", "collect", "record", "store")] = Field(
        default=False, description="only the step limit ends an episode"
    )
    use_fixed_reset_state_ids: bool = Field(
        default=False,
        description="start every rollout from the same initial states (seeds and tasks) instead of fresh ones",
    )
    seed: Seed = Field(default=0, description="base of the reset seeds, together with runner.seed and the iteration")
    failed_seed_fraction: Fraction = Field(
        default=0.0,
        description="fraction of the episodes that a rollout begins with which take a seed, and its task, on which the"
        " policy failed last time; fewer as long as fewer are known",
    )
    failed_seed_memory: Annotated[PositiveInt, AppliesIf("env.train.failed_seed_fraction")] = Field(
        default=1000, le=1_000_000, description="seeds whose last outcomes are remembered"
    )
    start_from_demos: PathText | None = Field(
        default=None,
        description="directory of `embodrl collect`, in whose demonstrations some of the episodes begin that a rollout"
        " begins with (with auto_reset, later ones begin at resets): the executed actions up to the start are repeated"
        " from the seed, count towards the step limit, and are not trained on",
    )
    curriculum: Annotated[CurriculumConfig, AppliesIf("env.train.start_from_demos")] = Field(
        default=CurriculumConfig(), description="where in the demonstrations these episodes begin"
    )
    task_curriculum: TaskCurriculumConfig = Field(
        default=TaskCurriculumConfig(), description="how often the tasks are played, by their success so far"
    )


OF_EVALUATIONS = ("tasks", "max_episode_steps", "cameras")
"""Settings in ``env.eval`` that take the place of those with the same name in ``env``."""


class EnvEvalConfig(Section):
    """Environments of evaluations, on fixed seeds."""

    tasks: tuple[str, ...] | None = Field(
        default=None, description="evaluation tasks, e.g. held-out ones; null uses env.tasks", min_length=1
    )
    max_episode_steps: PositiveInt | None = Field(
        default=None, description="step limit of evaluations; null uses env.max_episode_steps"
    )
    env_type: str | None = Field(
        default=None,
        description="another simulator for evaluations, with actions and observations of the same meaning; null uses"
        " env.env_type",
    )
    cameras: tuple[CameraConfig, ...] | None = Field(
        default=None,
        description="cameras of evaluations, as many and of the same sizes as env.cameras; null uses those",
        min_length=1,
    )
    settings: dict[str, bool | int | float | str] = Field(
        default={},
        description="simulator-specific settings that evaluations use instead of those in env, e.g. {suite:"
        " libero_10}; see `embodrl list envs`",
    )
    total_num_envs: Annotated[PositiveInt, ReadBy("eval", "sft", "store")] = Field(
        default=32,
        le=1_000_000,
        description="environments over all processes in `embodrl eval` and `sft`; `train` evaluates in the"
        " environments of env.train",
    )
    num_episodes: Annotated[PositiveInt, EPISODES] = Field(
        default=128, le=10_000_000, description="episodes per evaluation, spread evenly over the tasks"
    )
    seed: Annotated[Seed, EPISODES] = Field(
        default=1_000_000, description="reset seed of the first episode; episode i uses seed + i"
    )
    decoding: Literal["all", "greedy", "sampled", "mean"] = Field(
        default="all",
        description="how actions are chosen: greedy: the most probable; sampled: as in training; mean: nearest to the"
        " mean (openvla, openvla_oft); all: the same episodes with every decoding that the policy supports, greedy"
        " first",
    )
    decoding_on_the_way: Annotated[
        Literal["greedy", "sampled", "mean", "all"],
        AppliesIf("env.eval.decoding", ("all",)),
        ReadBy("train", "sft", "store"),
    ] = Field(
        default="greedy",
        description="decoding of a run's evaluations other than the one before the first update and the one at the end;"
        " it has the main figures of all of them",
    )
    to_step_limit: bool = Field(
        default=False, description="continue after a success until the step limit, to check whether it lasts"
    )

    def decoding_of(self, every: bool) -> Literal["greedy", "sampled", "mean", "all"]:
        """Return ``decoding``, or unless ``every``, that of evaluations on the way."""
        return self.decoding if every or self.decoding != "all" else self.decoding_on_the_way


class VideoConfig(Section):
    """Evaluation videos."""

    enabled: bool = Field(default=True, description="write videos of the last evaluation")
    every_eval: Annotated[bool, RL] = Field(
        default=False, description="write videos of every evaluation, not only of the last one"
    )
    num_episodes: PositiveInt = Field(
        default=6, description="number of recorded episodes, from the first fixed seed on"
    )
    height: PositiveInt = Field(default=256, description="pixels")
    width: PositiveInt = Field(default=256, description="pixels")
    fps: PositiveInt | None = Field(
        default=None,
        description="frames per second, one frame per step; null is the simulator's control rate: 20 for ManiSkill"
        " and LIBERO, 80 for Meta-World, and the rate that a Gymnasium environment declares",
    )


class EnvConfig(Section):
    """Simulator, tasks and processes: the settings shared by all simulators.

    A simulator with settings of its own derives a class from this one, adds fields with defaults, and names the class
    in its spec; what it adds is validated like the rest and passed to its VectorEnv.
    """

    env_type: str = Field(default=DEFAULT_ENV, description="simulator: a name from `embodrl list envs`")
    tasks: tuple[str, ...] = Field(
        default=("PushCube-v1",), description="tasks; several form a language-conditioned mix", min_length=1
    )
    max_episode_steps: Annotated[PositiveInt, EPISODES] = Field(
        default=50, description="environment steps after which an episode is truncated"
    )
    reward_mode: Annotated[Literal["dense_delta", "potential", "dense", "sparse"], EPISODES] = Field(
        default="dense_delta",
        description="dense: the simulator's own reward; dense_delta: its change from step to step; potential: gamma *"
        " next - current dense reward (algorithm.gamma per reward step; next is 0 after the end), which leaves the"
        " optimal policy unchanged; sparse: none; each plus success_bonus",
    )
    success_bonus: Annotated[NonNegativeFloat, EPISODES] = Field(
        default=1.0, description="reward at the first success of an episode"
    )
    cameras: tuple[CameraConfig, ...] = Field(
        default=(CameraConfig(),), description="cameras that the policy sees", min_length=1
    )
    include_state: bool = Field(
        default=False, description="add robot joint positions and velocities to the observation"
    )
    state: Literal["proprio", "full"] = Field(
        default="proprio",
        description="content of the state; full: also quantities known only to the simulator, such as the poses of"
        " objects and goals (libero, maniskill, metaworld, toy), for baselines: a robot has no such sensors",
    )
    include_images: bool = Field(
        default=True,
        description="false: images are not rendered but black, for policies that read only the state",
    )
    render_detail: Annotated[Literal["auto", "full", "fast"], EPISODES] = Field(
        default="auto",
        description="fast omits shadows, reflections, anti-aliasing and most triangles of large meshes (ManiSkill: 95"
        " % of the robot's triangles and nearly all of the ground's); full renders as the simulator does; auto is"
        " fast if a CPU renders",
    )
    num_processes: Annotated[PositiveInt, EPISODES] = Field(
        default=2,
        le=100_000,
        description="simulator processes (EnvManagers); auto measures the fastest number at the first start, and"
        " keeps the result",
    )
    pin_cpus: Annotated[bool, EPISODES] = Field(
        default=True, description="bind each process to its core and to the memory of its NUMA node"
    )
    enable_offload: Annotated[bool, RL] = Field(
        default=False,
        description="free the simulators while the policy trains; their states are kept and restored bit-exact",
    )
    offload_level: Annotated[Literal["process", "simulator"], AppliesIf("env.enable_offload"), RL] = Field(
        default="process",
        description="process: end the simulator processes, which frees all of their memory; simulator: free only the"
        " simulators' own memory, which is faster to restore",
    )
    python: Annotated[PathText | None, EPISODES] = Field(
        default=None,
        description="interpreter of the simulator processes; auto is the one of `embodrl env install`, if it exists;"
        " null is the current one",
    )
    remote: tuple[str, ...] = Field(
        default=(),
        description="`embodrl env serve` on other machines, tcp://HOST:PORT, ..., which run the simulator processes"
        " in turn; their token is read from the environment variable EMBODRL_TOKEN. Empty: run the processes here",
    )
    reconnect_timeout_s: PositiveFloat = Field(
        default=60.0,
        le=3600,
        description="seconds that the connection to env.remote, or to a machine without rollouts, may be down before"
        " its simulator counts as dead",
    )
    start_timeout_s: Annotated[PositiveFloat, EPISODES] = Field(
        default=180.0, description="time limit for starting a process, in seconds"
    )
    reset_timeout_s: Annotated[PositiveFloat, EPISODES] = Field(
        default=60.0, description="time limit for a reset, in seconds"
    )
    step_timeout_s: Annotated[PositiveFloat, EPISODES] = Field(
        default=60.0, description="time limit for a chunk, in seconds"
    )
    max_restarts: Annotated[NonNegativeInt, EPISODES] = Field(
        default=10,
        description="maximum simulator restarts per run; the run also stops after this many consecutive invalid"
        " chunks from one environment",
    )
    max_abs_reward: Annotated[PositiveFloat, EPISODES] = Field(
        default=1e6, description="largest valid reward; a larger one, or NaN, counts as a simulator fault"
    )
    max_abs_state: Annotated[PositiveFloat, EPISODES] = Field(
        default=1e6, description="largest valid number in the robot's state, likewise; see include_state"
    )
    real_time: Annotated[RealTimeConfig, AppliesIf("env.real_time.control_hz"), EPISODES] = Field(
        default=RealTimeConfig(), description="wall-clock time, for robots and simulated robots"
    )
    train: Annotated[EnvTrainConfig, RL] = Field(
        default=EnvTrainConfig(), description="environments of training rollouts"
    )
    eval: Annotated[EnvEvalConfig, EVALUATION] = Field(
        default=EnvEvalConfig(), description="environments of evaluations"
    )
    video: Annotated[VideoConfig, AppliesIf("env.video.enabled"), ReadBy("train", "eval")] = Field(
        default=VideoConfig(), description="evaluation videos"
    )

    @property
    def own_settings(self) -> frozenset[str]:
        """Names of the simulator-specific settings."""
        return frozenset(type(self).model_fields) - frozenset(EnvConfig.model_fields)

    def evaluated(self) -> EnvConfig:
        """Return the section with the overrides in ``eval``; itself if there are none.

        Another simulator has its own defaults, and ``python: auto``, since an interpreter belongs to a simulator.

        Raises:
            ValidationError: ``eval.settings`` has a name or value that the simulator does not accept.
        """
        other = self.eval
        name = other.env_type or self.env_type
        if name == self.env_type and not other.settings and all(getattr(other, key) is None for key in OF_EVALUATIONS):
            return self
        values: dict[str, object] = json.loads(self.model_dump_json())
        if name != self.env_type:
            values = {key: value for key, value in values.items() if key in EnvConfig.model_fields}
            values |= {"env_type": name, "python": "auto"}
        values |= other.settings
        spec = ENVS.entry(name) if name in ENVS else None
        if spec is not None and spec.derive is not None:
            derived, source = spec.derive(values)
            values |= derived if source in other.settings else {}
        given = json.loads(other.model_dump_json(include=set(OF_EVALUATIONS), exclude_none=True))
        settings = type(self)
        if name != self.env_type:
            settings = EnvConfig if spec is None else settings_class(name, spec.settings, EnvConfig)
        found = settings.model_validate_json(json.dumps(values | given))
        return self if found == self else found
