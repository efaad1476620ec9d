"""Sections ``reward``, ``pipeline``, ``runner``, ``collect``, ``recipe`` and ``sft``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from embodrl.config.schema.section import (
    EPISODES,
    POLICY,
    RL,
    TRAINING,
    AppliesIf,
    Fraction,
    GroupRanks,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    ReadBy,
    Section,
    Seed,
)


class JudgeConfig(Section):
    """A model that sees pictures, behind a server with OpenAI's chat completions. Its token: EMBODRL_JUDGE_TOKEN."""

    url: str | None = Field(default=None, description="http(s)://HOST:PORT/v1, where pictures go; null for none")
    model: Annotated[str, AppliesIf("reward.judge.url")] = Field(default="", description="its name at the server")
    question: Annotated[str, AppliesIf("reward.judge.url")] = Field(
        default="The pictures show a robot in order. Its task: {instruction}. Is the task done? Answer yes or no.",
        description="asked with the pictures; the answer is yes, no, or a number from 0 to 1",
    )
    num_frames: Annotated[PositiveInt, AppliesIf("reward.judge.url")] = Field(
        default=4, description="pictures of the first camera, evenly spaced from first to last"
    )


class RewardConfig(Section):
    """Rewards from a user's function, a trained reward model, or a judge."""

    fn: str | None = Field(
        default=None, description="module:function, sync or async, that maps an episode to its reward; null for none"
    )
    model: PathText | None = Field(
        default=None, description="directory of `embodrl reward train`, whose model rewards episodes; null for none"
    )
    judge: JudgeConfig = JudgeConfig()
    timeout_s: PositiveFloat = Field(default=15.0, description="time limit for a call, in seconds")
    retries: NonNegativeInt = Field(default=2, description="further attempts after a call that failed or timed out")
    max_concurrency: PositiveInt = Field(default=16, description="concurrent calls")
    on_error: Literal["drop", "raise"] = Field(
        default="drop", description="drop: exclude an episode without a reward from training, and count it; raise: stop"
    )

    @property
    def judged(self) -> bool:
        """Whether a function or a model judges each episode."""
        return bool(self.judges)

    @property
    def judges(self) -> list[str]:
        """Keys of what judges each episode: one at most in a valid configuration."""
        given = {"reward.fn": self.fn, "reward.model": self.model, "reward.judge.url": self.judge.url}
        return [key for key, value in given.items() if value is not None]


class PipelineConfig(Section):
    """The graph of an iteration."""

    name: str | None = Field(
        default=None,
        description="a name from `embodrl list pipelines`; null uses the loss's own pipeline",
    )
    fn: str | None = Field(
        default=None, description="custom module:function that maps the configuration to a Pipeline; null for none"
    )
    placement: dict[str, GroupRanks] = Field(
        default={},
        description="nodes that run in processes of their own, each on its share of the environments: the name of a"
        " node with the role compute, reward or sink -> devices, as in cluster.component_placement",
    )


class LoggerConfig(Section):
    """Destinations of metrics besides metrics.jsonl."""

    tensorboard: Annotated[bool, TRAINING] = Field(default=True, description="write DIR/tensorboard")
    wandb_mode: Annotated[Literal["off", "offline", "online"], TRAINING] = Field(
        default="off", description="Weights & Biases; needs the extra `wandb`"
    )
    wandb_project: Annotated[str, AppliesIf("runner.logger.wandb_mode", ("online", "offline")), TRAINING] = Field(
        default="embodrl", description="W&B project"
    )
    mlflow_mode: Annotated[Literal["off", "offline", "online"], TRAINING] = Field(
        default="off", description="MLflow: DIR/mlflow, or the server of MLFLOW_TRACKING_URI; needs the extra `mlflow`"
    )
    mlflow_experiment: Annotated[str, AppliesIf("runner.logger.mlflow_mode", ("online", "offline")), TRAINING] = Field(
        default="embodrl", description="MLflow's experiment"
    )
    swanlab_mode: Annotated[Literal["off", "offline", "online"], TRAINING] = Field(
        default="off", description="SwanLab; needs the extra `swanlab`"
    )
    swanlab_project: Annotated[str, AppliesIf("runner.logger.swanlab_mode", ("online", "offline")), TRAINING] = Field(
        default="embodrl", description="SwanLab's project"
    )
    console: Literal["auto", "rich", "plain", "off"] = Field(
        default="auto", description="auto: rich on a terminal, plain lines elsewhere"
    )


class RunnerConfig(Section):
    """The training loop."""

    name: Annotated[str, AppliesIf("runner.output_dir", ("auto",)), RL] = Field(
        default="auto", description="run name; auto is <env>-<model>-<algorithm>-<date and time>"
    )
    output_dir: Annotated[PathText, ReadBy("train", "eval")] = Field(
        default="auto", description="directory of the run; auto is outputs/<name>"
    )
    max_iterations: Annotated[PositiveInt, RL] = Field(
        default=40, le=10_000_000, description="rollout and update cycles"
    )
    fit_batches: Annotated[bool, RL] = Field(
        default=False,
        description="lower actor.global_batch_size and micro_batch_size, where unset, to the largest values that"
        " divide a rollout",
    )
    max_staleness: Annotated[NonNegativeInt, RL] = Field(
        default=0,
        description="updates by which rollouts may run ahead: 0 alternates rollouts and training, 1 runs the next"
        " rollout during training, more lets rollouts run freely; best with algorithm.decoupled",
    )
    seed: Annotated[Seed, POLICY] = Field(default=0, description="global random seed")
    eval_interval: Annotated[NonNegativeInt, RL] = Field(
        default=10, description="iterations between evaluations; 0 for none; the last iteration is always evaluated"
    )
    eval_at_start: Annotated[bool, RL] = Field(default=True, description="evaluate before the first update")
    eval_async: bool = Field(
        default=False,
        description="evaluate in parallel with training, in a process with its own simulators and a copy of the"
        " policy; the next evaluation waits for the previous one. Same results as false, only later",
    )
    stop_at_success: Annotated[
        Fraction | None,
        AppliesIf("runner.eval_interval", reason="with runner.eval_interval 0 only the last iteration is evaluated"),
    ] = Field(
        default=None,
        description="success rate of evaluations at which a run ends early, as a finished one; null for never",
    )
    stop_evaluations: Annotated[PositiveInt, AppliesIf("runner.stop_at_success")] = Field(
        default=1, description="consecutive evaluations that have to reach runner.stop_at_success"
    )
    max_regression: Fraction | None = Field(
        default=None,
        description="a run fails, with exit code 1 and a checkpoint, if an evaluation's success rate is lower than"
        " the previous best by more than this; null for never",
    )
    save_interval: Annotated[PositiveInt, RL] = Field(
        default=10, description="iterations between checkpoints; the last iteration is always saved"
    )
    stop_timeout_s: PositiveFloat = Field(
        default=10.0,
        description="seconds without progress after SIGTERM, SIGINT or SIGHUP until the run ends without saving; an"
        " advancing update is finished, and a checkpoint being written is completed",
    )
    checkpoint_format: Literal["auto", "full", "sharded"] = Field(
        default="auto",
        description="full: the main process writes whole tensors; sharded: every training process writes its own"
        " shard (torch.distributed.checkpoint); auto is sharded with several training processes. Runs resume from"
        " either",
    )
    keep_last_n: PositiveInt = Field(default=2, description="checkpoints kept")
    keep_best: bool = Field(
        default=True,
        description="export the policy with the best evaluation to policy_best, and keep the checkpoint of its"
        " iteration, if one was saved (checkpoints/best), beyond keep_last_n",
    )
    save_rollouts: Annotated[bool, RL] = Field(
        default=False,
        description="write the batch of every iteration, as gathered, to DIR/rollouts, with what reward.fn, model or"
        " judge paid, for rollout.replay",
    )
    logger: Annotated[LoggerConfig, EPISODES] = Field(default=LoggerConfig(), description="destinations of metrics")


class CollectConfig(Section):
    """`embodrl collect`."""

    output_dir: Annotated[PathText, ReadBy("collect", "record")] = Field(
        default="data/demos", description="directory of the demonstrations, new or empty"
    )
    format: Annotated[Literal["lerobot", "raw"], ReadBy("collect", "record")] = Field(
        default="lerobot",
        description="lerobot: a LeRobot dataset (v3.0) of parquet and MP4 files; raw: safetensors with every pixel",
    )
    fps: PositiveInt | None = Field(
        default=None,
        description="frames per second declared by a LeRobot dataset; null is the simulator's control rate, as for"
        " env.video.fps",
    )
    video_crf: int = Field(
        default=0,
        ge=0,
        le=51,
        description="CRF of a LeRobot dataset's videos: 0 is lossless, 6 is hardly visible, 18 is small",
    )
    num_episodes: PositiveInt = Field(
        default=400, le=100_000_000, description="episodes to keep over all tasks; successful ones unless keep_failures"
    )
    noise_std: Annotated[NonNegativeFloat, ReadBy("collect")] = Field(
        default=0.12, description="Gaussian noise on the executed actions; the expert's own action is stored"
    )
    noise_fraction: Annotated[Fraction, ReadBy("collect")] = Field(
        default=0.7, description="fraction of the episodes with noise"
    )
    min_speed: Annotated[Fraction, ReadBy("collect")] = Field(
        default=1.0,
        gt=0,
        description="speed of the slowest episodes, as a fraction of the expert's own; each episode samples its speed"
        " uniformly",
    )
    max_speed: Annotated[Fraction, ReadBy("collect")] = Field(
        default=1.0, gt=0, description="speed of the fastest episodes; not below min_speed"
    )
    seed: Seed = Field(default=500_000, description="first reset seed")
    keep_failures: Annotated[bool, ReadBy("collect", "record")] = Field(
        default=False, description="keep failed episodes, too"
    )
    sample: Annotated[bool, ReadBy("record")] = Field(
        default=False,
        description="with policy=PATH: sample actions as in rollouts, and record their log-probs; false: the most"
        " probable actions, as in evaluations",
    )


class RecipeConfig(Section):
    """`embodrl run`."""

    stages: tuple[Literal["collect", "teacher", "sft", "rl"], ...] = Field(
        default=(),
        description="stages, in this order: collect, teacher, sft, rl; each is optional, and rl is the last",
    )
    collect: tuple[str, ...] = Field(
        default=(), description="settings of this stage only, as on a command line: [env.train.total_num_envs=8]"
    )
    teacher: tuple[str, ...] = Field(
        default=(), description="settings of this stage only: it trains the expert of rl (algorithm.dagger.expert)"
    )
    sft: tuple[str, ...] = Field(default=(), description="settings of this stage only")
    rl: tuple[str, ...] = Field(default=(), description="settings of this stage only")
    expected: str = Field(default="", description="known result of the recipe, and how it was measured")


class SftConfig(Section):
    """`embodrl sft`."""

    data_dir: Annotated[PathText, ReadBy("sft")] = Field(
        default="data/demos",
        description="dataset made by `embodrl collect` or `convert`, or any LeRobot dataset; on the hub:"
        " hf://datasets/OWNER/NAME[@REVISION]",
    )
    further_data: Annotated[tuple[PathText, ...], ReadBy("sft")] = Field(
        default=(),
        description="directories of further datasets with the same actions, state and cameras, mixed with that of"
        " data_dir in every batch",
    )
    data_weights: Annotated[tuple[PositiveFloat, ...] | None, AppliesIf("sft.further_data"), ReadBy("sft")] = Field(
        default=None,
        description="weights of data_dir and of each of further_data, in this order: each frame of a batch is drawn"
        " from a dataset with a probability proportional to its weight; null: the datasets' numbers of frames",
    )
    memory_gb: Annotated[PositiveFloat | None, ReadBy("sft")] = Field(
        default=None,
        description="maximum memory in GB for the images of all datasets, of mixed ones twice; images above it are"
        " decoded to a file in output_dir while the run lasts, and read from there, with the same results; null: 70 %"
        " of the free memory",
    )
    cameras: Annotated[tuple[str, ...] | None, ReadBy("sft", "train")] = Field(
        default=None,
        description="cameras of a LeRobot dataset, in the order of env.cameras; null uses those with the same names",
    )
    keys: Annotated[dict[str, str], ReadBy("sft", "train")] = Field(
        default={},
        description="features of a LeRobot dataset whose names differ from embodrl's action, state and images.NAME,"
        " e.g. {action: actions, state: state, images.top: image}",
    )
    stats: Annotated[PathText, ReadBy("sft")] = Field(
        default="auto",
        description="statistics that normalise actions and state: checkpoint (its own), data (computed from the"
        " demonstrations), a file as for model.stats_path, or auto: the checkpoint's if it has some for this robot,"
        " else the data's; a model without weights uses simulator actions as they are, -1 to 1",
    )
    max_clipped: Fraction = Field(
        default=0.05, description="fraction of out-of-range values of an action dimension above which data are refused"
    )
    check_robot: Annotated[bool, ReadBy("sft", "train")] = Field(
        default=True, description="refuse data that declare a robot or frame rate other than the environment's"
    )
    output_dir: PathText = Field(default="outputs/sft", description="directory of the policy")
    max_steps: PositiveInt = Field(default=1000, le=1_000_000_000, description="optimizer steps")
    batch_size: PositiveInt = Field(default=64, le=100_000, description="frames per step")
    lr: PositiveFloat = Field(default=4e-4, description="peak learning rate")
    lr_warmup_steps: NonNegativeInt = Field(default=50, description="linear warm-up")
    weight_decay: NonNegativeFloat = Field(default=0.01, description="AdamW weight decay")
    label_smoothing_bins: NonNegativeFloat = Field(
        default=4.0, description="standard deviation, in bins, of the Gaussian target; 0 is one-hot"
    )
    random_shift_px: NonNegativeInt = Field(default=0, description="maximum random shift of the image, in pixels")
    max_episodes: Annotated[PositiveInt | None, ReadBy("sft")] = Field(
        default=None, description="use only the first episodes of each dataset"
    )
    val_episodes: Annotated[NonNegativeInt, ReadBy("sft")] = Field(
        default=0,
        description="held-out episodes at the end of data_dir: never trained on; sft/val_loss is the loss of frames"
        " spread evenly over them, four batches at most, at every logged step",
    )
    micro_batch_size: PositiveInt | None = Field(
        default=None,
        description="frames per forward and backward pass of a process; null: the whole batch, on a CPU one part per"
        " core",
    )
    log_interval: PositiveInt = Field(default=25, description="steps between log lines")
    save_interval: Annotated[NonNegativeInt, ReadBy("sft")] = Field(
        default=0, description="steps between checkpoints; 0 for a single one at the end or when stopped"
    )
    eval_interval: NonNegativeInt = Field(
        default=0, description="steps between evaluations in the simulator; 0 for none"
    )
