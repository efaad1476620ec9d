"""The typed configuration. Unknown keys are errors; cross-field rules are in ``rules/``. Imports no torch.

Every field's description is its documentation: docs/configuration.md is made from it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodrl.config.cluster_schema import ClusterConfig
from embodrl.config.model_schema import ArchitectureConfig, ModelConfig, ValueHeadConfig, VitConfig
from embodrl.config.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
)

__all__ = ["ArchitectureConfig", "Config", "ModelConfig", "Section", "ValueHeadConfig", "VitConfig"]


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
        default=False, description="every rollout starts from the same initial states (seeds) instead of fresh ones"
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
    fps: PositiveInt = Field(default=20, description="frames a second; the control frequency is 20 Hz")


class EnvConfig(Section):
    """Simulator, tasks and how they are run."""

    env_type: str = Field(default="maniskill", description="a name of `embodrl list envs`")
    tasks: tuple[str, ...] = Field(
        default=("PushCube-v1",), description="tasks; several make a language-conditioned mix", min_length=1
    )
    control_mode: Literal["pd_ee_delta_pose"] = Field(default="pd_ee_delta_pose", description="meaning of an action")
    max_episode_steps: PositiveInt = Field(
        default=50, description="environment steps after which an episode is truncated"
    )
    reward_mode: Literal["dense_delta", "sparse"] = Field(
        default="dense_delta",
        description="dense_delta: change of the normalised dense reward plus success_bonus; sparse: success_bonus only",
    )
    success_bonus: NonNegativeFloat = Field(default=1.0, description="reward at the first success of an episode")
    cameras: tuple[CameraConfig, ...] = Field(
        default=(CameraConfig(),), description="what the policy sees", min_length=1
    )
    include_state: bool = Field(
        default=False, description="add robot joint positions and velocities to the observation"
    )
    sim_backend: Literal["auto", "physx_cpu", "physx_cuda"] = Field(
        default="auto", description="physics; auto is physx_cpu, which gives bit-reproducible runs"
    )
    render_backend: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="Vulkan device; auto takes a GPU if there is one"
    )
    mesh_decimation: Fraction | Literal["auto"] = Field(
        default="auto", description="part of the robot's visual triangles to drop; auto is 0.95 on a CPU and 0 on a GPU"
    )
    num_processes: PositiveInt = Field(default=2, description="simulator processes (EnvManagers)")
    pin_cpus: bool = Field(default=True, description="bind each process to its core and to the memory of its NUMA node")
    python: str | None = Field(
        default=None, description="another interpreter for the simulator processes; null is this one"
    )
    start_timeout_s: PositiveFloat = Field(default=180.0, description="seconds a process may take to come up")
    reset_timeout_s: PositiveFloat = Field(default=60.0, description="seconds a reset may take")
    step_timeout_s: PositiveFloat = Field(default=60.0, description="seconds a chunk may take")
    train: EnvTrainConfig = Field(default=EnvTrainConfig(), description="environments that gather experience")
    eval: EnvEvalConfig = Field(default=EnvEvalConfig(), description="environments that measure the policy")
    video: VideoConfig = Field(default=VideoConfig(), description="evaluation videos")


class SamplingConfig(Section):
    """How actions are drawn."""

    temperature: PositiveFloat = Field(default=0.3, description="of rollout and of the log-probs in training alike")
    top_k: NonNegativeInt = Field(default=0, description="most probable bins kept; 0 keeps all")


class KlConfig(Section):
    """Distance to the policy that the run began with."""

    coef: NonNegativeFloat = Field(
        default=0.0, description="weight; 0 for none, above 0 a copy of the trained weights is kept as the reference"
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="of the KL per token: k1 log ratio, k2 half its square, k3 1/ratio - 1 + log ratio"
    )
    placement: Literal["loss", "reward"] = Field(
        default="loss", description="added to the loss, or taken off the reward of each action"
    )


class FilterConfig(Section):
    """DAPO's dynamic sampling."""

    enabled: bool = Field(
        default=False, description="train only on groups whose success rate is above min_rate and below max_rate"
    )
    min_rate: Fraction = Field(default=0.0, description="groups with this success rate or less are dropped")
    max_rate: Fraction = Field(default=1.0, description="groups with this success rate or more are dropped")
    max_resamples: NonNegativeInt = Field(
        default=2, description="further rollouts to replace what was dropped; what is still missing then stays missing"
    )


class SrpoConfig(Section):
    """Rewards of failures by their likeness to successes."""

    enabled: bool = Field(
        default=False, description="replace rewards by 1 for a success and less for a failure, by its distance to them"
    )
    encoder: str = Field(
        default="pixels", description="pixels (built in), vjepa2, or module:function of yours, frames to embeddings"
    )
    encoder_path: str | None = Field(default=None, description="directory with the weights of vjepa2")
    num_frames: PositiveInt = Field(default=64, description="frames of an episode that the encoder sees")
    failure_scale: Fraction = Field(default=0.6, description="rewards of failures stay below it")
    steepness: PositiveFloat = Field(default=10.0, description="of the sigmoid from distance to reward")
    cluster_eps: PositiveFloat = Field(
        default=0.5, description="DBSCAN: distance of neighbours, root mean square over standardised dimensions"
    )
    cluster_min_samples: PositiveInt = Field(default=2, description="DBSCAN: neighbours that make a cluster")
    memory: NonNegativeInt = Field(
        default=64, description="successes of a task kept for rollouts that have none; 0 keeps none"
    )


class AlgorithmConfig(Section):
    """PPO, its kin, and their parts."""

    adv_type: str = Field(default="gae", description="a name of `embodrl list algorithms`, or module:function of yours")
    loss_type: str = Field(
        default="actor_critic", description="a name of `embodrl list algorithms`, or module:function of yours"
    )
    reward_type: Literal["chunk_level", "action_level"] = Field(
        default="chunk_level", description="chunk_level sums the rewards of a chunk and has one value a chunk"
    )
    logprob_type: Literal["token_level", "action_level", "chunk_level"] = Field(
        default="token_level", description="level of the importance ratio"
    )
    length_normalized_ratio: bool = Field(
        default=False, description="the ratio of an action or chunk is the geometric mean over its tokens (GSPO)"
    )
    entropy_type: Literal["token_level", "action_level", "chunk_level"] = Field(
        default="token_level", description="level of the entropy bonus"
    )
    gamma: Fraction = Field(default=0.97, description="discount per reward step (chunk or action)")
    gae_lambda: Fraction = Field(default=0.95, description="lambda of GAE")
    normalize_advantages: bool = Field(default=True, description="to zero mean and unit variance")
    normalization_scope: Literal["batch", "group"] = Field(
        default="batch", description="over all steps of the rollout, or over the episodes of each group"
    )
    bootstrap_type: Literal["truncation", "none"] = Field(
        default="truncation",
        description="add gamma * V(last observation) where the step limit, not the task, ended an episode",
    )
    surrogate: Literal["ratio", "log_ratio"] = Field(
        default="ratio", description="what the advantage multiplies: the clipped ratio (PPO) or its logarithm (CPGD)"
    )
    clip_ratio_low: Fraction = Field(default=0.2, description="lower clip of the ratio")
    clip_ratio_high: PositiveFloat = Field(default=0.28, description="upper clip of the ratio")
    clip_ratio_dual: PositiveFloat | None = Field(
        default=None, description="with a negative advantage no ratio counts for more than this (dual clip)"
    )
    drift_coef: NonNegativeFloat = Field(
        default=0.0, description="weight of the KL from the policy that acted (CPGD's policy drift)"
    )
    kl: KlConfig = Field(default=KlConfig(), description="distance to the policy that the run began with")
    value_clip: PositiveFloat | None = Field(default=0.2, description="clip of the value change; null for none")
    value_loss_coef: NonNegativeFloat = Field(default=0.5, description="weight of the value loss")
    huber_delta: PositiveFloat | None = Field(
        default=None, description="beyond this error the value loss grows linearly; null for the square everywhere"
    )
    entropy_bonus: NonNegativeFloat = Field(default=0.0, description="weight of the entropy")
    loss_agg: Literal["token_mean", "episode_mean", "fixed_length"] = Field(
        default="token_mean",
        description="each ratio counts the same, or each episode, or sums over episodes are divided by the rollout's"
        " length (Dr. GRPO)",
    )
    update_epoch: PositiveInt = Field(default=2, description="passes over a rollout")
    rollout_epoch: PositiveInt = Field(default=1, description="rollouts gathered one after the other for an update")
    group_size: PositiveInt = Field(default=1, description="environments that share an initial state")
    filter: FilterConfig = Field(default=FilterConfig(), description="dynamic sampling by success rate")
    srpo: SrpoConfig = Field(default=SrpoConfig(), description="rewards of failures by their likeness to successes")
    target_kl: PositiveFloat | None = Field(
        default=None, description="end an update once the approximate KL per token exceeds this"
    )
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="how actions are drawn")


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


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: PositiveFloat = Field(default=7e-5, description="peak learning rate of the policy")
    value_lr: PositiveFloat = Field(default=1e-3, description="peak learning rate of the value head")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), description="AdamW betas")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW epsilon")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="AdamW weight decay")
    clip_grad: PositiveFloat = Field(default=1.0, description="largest gradient norm")
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field(
        default="linear", description="after the warm-up, over runner.max_iterations"
    )
    lr_warmup_iterations: NonNegativeInt = Field(
        default=4, description="linear warm-up of the policy, from the first iteration it trains"
    )
    min_lr_ratio: Fraction = Field(default=0.1, description="last learning rate as a part of the peak")
    critic_warmup_iterations: NonNegativeInt = Field(
        default=2, description="iterations in which only the value head trains"
    )


class ActorConfig(Section):
    """The trainer."""

    training_backend: Literal["native"] = Field(default="native", description="native: one process, CPU or one GPU")
    global_batch_size: PositiveInt = Field(default=160, description="chunks an optimizer step")
    micro_batch_size: PositiveInt = Field(
        default=80, description="chunks a forward and backward pass; divides global_batch_size"
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="autocast of the forward pass; auto is bf16 where the device has it in hardware"
    )
    param_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="dtype of weights and optimizer state; bf16 halves the memory of a 7B"
    )
    gradient_checkpointing: bool = Field(default=False, description="recompute activations in the backward pass")
    optim: OptimConfig = Field(default=OptimConfig(), description="optimizer")


class RolloutConfig(Section):
    """The policy that acts."""

    backend: Literal["huggingface"] = Field(
        default="huggingface", description="huggingface: the training weights, in the same process"
    )
    pipeline_stages: PositiveInt = Field(
        default=1, description="groups of environments, so that simulation and inference overlap"
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="autocast of inference; as actor.precision"
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
    seed: Seed = Field(default=0, description="of everything random")
    eval_interval: NonNegativeInt = Field(
        default=10, description="iterations between evaluations; 0 for none; the last one always counts"
    )
    eval_at_start: bool = Field(default=True, description="evaluate before the first update")
    save_interval: PositiveInt = Field(
        default=10, description="iterations between checkpoints; the last one is always saved"
    )
    keep_last_n: PositiveInt = Field(default=2, description="checkpoints kept")
    logger: LoggerConfig = Field(default=LoggerConfig(), description="where metrics go")


class CollectConfig(Section):
    """`embodrl collect`."""

    output_dir: str = Field(default="data/demos", description="directory of the demonstrations")
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

    data_dir: str = Field(default="data/demos", description="directory made by `embodrl collect`")
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
    log_interval: PositiveInt = Field(default=25, description="steps between log lines")
    eval_interval: NonNegativeInt = Field(
        default=0, description="steps between evaluations in the simulator; 0 for none"
    )


class Config(Section):
    """A whole run."""

    env: EnvConfig = Field(default=EnvConfig(), description="simulator and tasks")
    model: ModelConfig = Field(default=ModelConfig(), description="the policy")
    algorithm: AlgorithmConfig = Field(default=AlgorithmConfig(), description="advantages, losses, sampling")
    reward: RewardConfig = Field(default=RewardConfig(), description="a reward function of yours")
    actor: ActorConfig = Field(default=ActorConfig(), description="training backend and optimizer")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="inference backend")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="devices and placement")
    runner: RunnerConfig = Field(default=RunnerConfig(), description="loop, evaluation, checkpoints, logs")
    collect: CollectConfig = Field(default=CollectConfig(), description="demonstrations by scripted experts")
    sft: SftConfig = Field(default=SftConfig(), description="supervised fine-tuning")
    extensions: tuple[str, ...] = Field(
        default=(), description="modules imported first, which may register models and environments"
    )
