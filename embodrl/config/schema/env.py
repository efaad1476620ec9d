"""Section ``env``: simulator, tasks, cameras, processes."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Self

from pydantic import Field

from embodrl.config.schema.real_time import RealTimeConfig
from embodrl.config.schema.section import (
    EPISODES,
    EVALUATION,
    RL,
    AppliesIf,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    ReadBy,
    Section,
    Seed,
)
from embodrl.specs import DEFAULT_ENV, ENVS


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

    total_num_envs: Annotated[PositiveInt, ReadBy("train", "collect", "record", "store")] = Field(
        default=32, le=1_000_000, description="environments over all processes"
    )
    max_steps_per_rollout_epoch: PositiveInt = Field(
        default=100, description="environment steps per environment and rollout epoch, rounded up to whole chunks"
    )
    auto_reset: Annotated[bool, ReadBy("train", "eval", "sft")] = Field(
        default=True, description="start a new episode when one has ended, at the end of its chunk"
    )
    ignore_terminations: Annotated[bool, ReadBy("train", "eval", "sft")] = Field(
        default=False, description="only the step limit ends an episode"
    )
    use_fixed_reset_state_ids: bool = Field(
        default=False,
        description="every rollout starts from the same initial states (seeds and tasks) instead of fresh ones",
    )
    seed: Seed = Field(default=0, description="reset seeds are drawn from it, runner.seed and the iteration")


class EnvEvalConfig(Section):
    """Environments that measure the policy on fixed seeds."""

    tasks: tuple[str, ...] | None = Field(
        default=None, description="tasks of evaluations, e.g. held-out ones; null takes env.tasks", min_length=1
    )
    max_episode_steps: PositiveInt | None = Field(
        default=None, description="step limit of evaluations; null takes env.max_episode_steps"
    )
    settings: dict[str, bool | int | float | str] = Field(
        default={},
        description="the simulator's own settings that evaluations have instead of those of env, e.g. {suite:"
        " libero_10}; `embodrl list envs` shows which there are",
    )
    total_num_envs: Annotated[PositiveInt, ReadBy("eval", "sft", "store")] = Field(
        default=32,
        le=1_000_000,
        description="environments over all processes in `embodrl eval` and `sft`; `train` evaluates in those of"
        " env.train",
    )
    num_episodes: Annotated[PositiveInt, EPISODES] = Field(
        default=128, le=10_000_000, description="episodes per evaluation, spread evenly over the tasks"
    )
    seed: Annotated[Seed, EPISODES] = Field(
        default=1_000_000, description="reset seed of the first episode; episode i uses seed + i"
    )
    decoding: Literal["all", "greedy", "sampled", "mean"] = Field(
        default="all",
        description="how the policy's actions are chosen: greedy: the most probable; sampled: drawn, as in training;"
        " mean: nearest to the mean (openvla, openvla_oft); all: the same episodes by each that the policy has, greedy"
        " first",
    )
    to_step_limit: bool = Field(
        default=False, description="continue after a success until the step limit, to see whether it lasts"
    )


class VideoConfig(Section):
    """Evaluation videos."""

    enabled: bool = Field(default=True, description="write videos of the last evaluation")
    every_eval: Annotated[bool, RL] = Field(
        default=False, description="write videos of every evaluation, not only of the last"
    )
    num_episodes: PositiveInt = Field(default=6, description="episodes filmed, the first ones of the fixed seeds")
    height: PositiveInt = Field(default=256, description="pixels")
    width: PositiveInt = Field(default=256, description="pixels")
    fps: PositiveInt | None = Field(
        default=None,
        description="frames per second, of which each step gives one; null is the simulator's own rate of control: 20"
        " of ManiSkill and LIBERO, 80 of Meta-World, and what an environment of Gymnasium tells",
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
    max_episode_steps: Annotated[PositiveInt, EPISODES] = Field(
        default=50, description="environment steps after which an episode is truncated"
    )
    reward_mode: Annotated[Literal["dense_delta", "potential", "dense", "sparse"], EPISODES] = Field(
        default="dense_delta",
        description="dense: the simulator's own reward; dense_delta: its change from step to step; potential: that"
        " with algorithm.gamma on what comes later, per reward step, and 0 after the end, which leaves the best policy"
        " what it is without; sparse: none; each plus success_bonus",
    )
    success_bonus: Annotated[NonNegativeFloat, EPISODES] = Field(
        default=1.0, description="reward at the first success of an episode"
    )
    cameras: tuple[CameraConfig, ...] = Field(
        default=(CameraConfig(),), description="what the policy sees", min_length=1
    )
    include_state: bool = Field(
        default=False, description="add robot joint positions and velocities to the observation"
    )
    state: Literal["proprio", "full"] = Field(
        default="proprio",
        description="what include_state adds; full: also what the simulator alone knows, such as the poses of objects"
        " and goals (libero, maniskill, metaworld, toy), for baselines: a robot has no such sensors",
    )
    include_images: bool = Field(
        default=True,
        description="false: nothing is drawn and pictures are black, for policies that read the state alone",
    )
    render_detail: Annotated[Literal["auto", "full", "fast"], EPISODES] = Field(
        default="auto",
        description="fast leaves out shadows, reflections, anti-aliasing and most triangles of large meshes (ManiSkill:"
        " 95 % of the robot's triangles and nearly all of the ground's); full draws as the simulator does; auto is fast"
        " where a CPU draws",
    )
    num_processes: Annotated[PositiveInt, EPISODES] = Field(
        default=2,
        le=100_000,
        description="simulator processes (EnvManagers); auto measures at the first start which number is fastest, and"
        " keeps the result",
    )
    pin_cpus: Annotated[bool, EPISODES] = Field(
        default=True, description="bind each process to its core and to the memory of its NUMA node"
    )
    enable_offload: Annotated[bool, RL] = Field(
        default=False,
        description="free the simulators while the policy trains; their states are kept, and they come back bit-exact",
    )
    offload_level: Annotated[Literal["process", "simulator"], AppliesIf("env.enable_offload"), RL] = Field(
        default="process",
        description="process: end the simulator processes, which frees all of their memory; simulator: only what the"
        " simulators hold, which comes back sooner",
    )
    python: Annotated[PathText | None, EPISODES] = Field(
        default=None,
        description="another interpreter for the simulator processes; auto is the one of `embodrl env install`, if"
        " there is one; null is this one",
    )
    remote: tuple[str, ...] = Field(
        default=(),
        description="`embodrl env serve` on other machines, tcp://HOST:PORT, ..., which run the simulator processes in"
        " turn; their token stands in the environment variable EMBODRL_TOKEN. Empty: they run here",
    )
    reconnect_timeout_s: Annotated[PositiveFloat, AppliesIf("env.remote")] = Field(
        default=60.0,
        le=3600,
        description="seconds that the connection to env.remote may be away before its simulator counts as dead",
    )
    start_timeout_s: Annotated[PositiveFloat, EPISODES] = Field(
        default=180.0, description="time limit for starting a process, in seconds"
    )
    reset_timeout_s: Annotated[PositiveFloat, EPISODES] = Field(default=60.0, description="seconds a reset may take")
    step_timeout_s: Annotated[PositiveFloat, EPISODES] = Field(
        default=60.0, description="time limit for a chunk, in seconds"
    )
    max_restarts: Annotated[NonNegativeInt, EPISODES] = Field(
        default=10,
        description="maximum simulator restarts per run; the run also stops after this many consecutive invalid"
        " chunks from one environment",
    )
    max_abs_reward: Annotated[PositiveFloat, EPISODES] = Field(
        default=1e6, description="a reward beyond it, or NaN, counts as a fault of the simulator"
    )
    max_abs_state: Annotated[PositiveFloat, EPISODES] = Field(
        default=1e6, description="the same of each number of the robot's state; see include_state"
    )
    real_time: Annotated[RealTimeConfig, AppliesIf("env.real_time.control_hz"), EPISODES] = Field(
        default=RealTimeConfig(), description="wall-clock time: of a robot, and of a simulator that stands in for one"
    )
    train: Annotated[EnvTrainConfig, RL] = Field(
        default=EnvTrainConfig(), description="environments that gather experience"
    )
    eval: Annotated[EnvEvalConfig, EVALUATION] = Field(
        default=EnvEvalConfig(), description="environments that measure the policy"
    )
    video: Annotated[VideoConfig, AppliesIf("env.video.enabled"), ReadBy("train", "eval")] = Field(
        default=VideoConfig(), description="evaluation videos"
    )

    @property
    def own_settings(self) -> frozenset[str]:
        """The names of the settings that this simulator adds to those of all."""
        return frozenset(type(self).model_fields) - frozenset(EnvConfig.model_fields)

    def evaluated(self) -> Self:
        """Return the section as evaluations play it, with what ``eval`` says otherwise; itself where nothing differs.

        Raises:
            ValidationError: ``eval.settings`` has a name or a value that this simulator's settings do not have.
        """
        other = self.eval
        if other.tasks is None and other.max_episode_steps is None and not other.settings:
            return self
        values: dict[str, object] = json.loads(self.model_dump_json()) | other.settings
        spec = ENVS.entry(self.env_type) if self.env_type in ENVS else None
        if spec is not None and spec.derive is not None:
            derived, source = spec.derive(values)
            values |= derived if source in other.settings else {}
        given = {"tasks": other.tasks, "max_episode_steps": other.max_episode_steps}
        values |= {name: value for name, value in given.items() if value is not None}
        found = type(self).model_validate_json(json.dumps(values))
        return self if found == self else found
