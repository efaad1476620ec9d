"""The section ``model``: the policy. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodrl.config.section import PositiveFloat, PositiveInt, Section


class VitConfig(Section):
    """A vision transformer."""

    width: PositiveInt = Field(default=96, description="embedding dimension")
    depth: int = Field(default=4, description="blocks; the last one is stored but never run, as in OpenVLA", ge=2)
    num_heads: PositiveInt = Field(default=3, description="attention heads; divides width")
    mlp_dim: PositiveInt = Field(default=384, description="hidden units of the MLP")


class ArchitectureConfig(Section):
    """Dimensions of a model built without a checkpoint."""

    image_size: PositiveInt = Field(default=64, description="pixels, square; divisible by patch_size")
    patch_size: PositiveInt = Field(default=8, description="pixels")
    dino: VitConfig = Field(default=VitConfig(), description="DINOv2 with 4 registers and a class token")
    siglip: VitConfig = Field(default=VitConfig(), description="SigLIP")
    hidden_size: PositiveInt = Field(default=128, description="Llama hidden size; divisible by num_attention_heads")
    intermediate_size: PositiveInt = Field(default=352, description="Llama MLP size")
    num_hidden_layers: PositiveInt = Field(default=3, description="Llama layers")
    num_attention_heads: PositiveInt = Field(default=4, description="Llama heads")
    max_prompt_tokens: PositiveInt = Field(default=48, description="prompts are padded to this length")


class SiglipConfig(Section):
    """SigLIP of pi0, pi0.5 and GR00T, all of whose blocks are run."""

    width: PositiveInt = Field(default=96, description="embedding dimension")
    depth: PositiveInt = Field(default=3, description="blocks")
    num_heads: PositiveInt = Field(default=3, description="attention heads; divides width")
    mlp_dim: PositiveInt = Field(default=384, description="hidden units of the MLP")


class PiArchitectureConfig(Section):
    """Dimensions of a pi0 or pi0.5 built without a checkpoint."""

    image_size: PositiveInt = Field(default=64, description="pixels, square; divisible by patch_size")
    patch_size: PositiveInt = Field(default=8, description="pixels")
    siglip: SiglipConfig = Field(default=SiglipConfig(), description="vision")
    depth: PositiveInt = Field(default=3, description="layers of Gemma and of the action expert")
    num_heads: PositiveInt = Field(default=4, description="query heads of both")
    num_kv_heads: PositiveInt = Field(default=1, description="key and value heads of both; divides num_heads")
    head_dim: PositiveInt = Field(default=32, description="of both; even, since rotary embeddings turn pairs")
    vlm_width: PositiveInt = Field(default=128, description="Gemma hidden size")
    vlm_mlp_dim: PositiveInt = Field(default=384, description="Gemma MLP size")
    expert_width: PositiveInt = Field(default=96, description="action expert hidden size; even")
    expert_mlp_dim: PositiveInt = Field(default=256, description="action expert MLP size")
    max_action_dim: PositiveInt = Field(default=32, description="actions and states are padded to this with zeros")
    action_horizon: PositiveInt = Field(default=5, description="actions predicted; the first num_action_chunks are run")
    num_images: PositiveInt = Field(default=1, description="image slots; cameras that are missing are masked")
    max_prompt_tokens: PositiveInt = Field(default=48, description="prompts are padded to this length")
    discrete_state: bool = Field(default=False, description="pi0.5 only: write the state into the prompt")


class Gr00tArchitectureConfig(Section):
    """Dimensions of a GR00T N1.5 built without a checkpoint."""

    image_size: PositiveInt = Field(default=64, description="pixels, square; divisible by patch_size")
    patch_size: PositiveInt = Field(default=8, description="pixels")
    siglip: SiglipConfig = Field(default=SiglipConfig(), description="vision")
    hidden_size: PositiveInt = Field(default=128, description="Qwen3 hidden size")
    intermediate_size: PositiveInt = Field(default=352, description="Qwen3 MLP size")
    num_hidden_layers: PositiveInt = Field(default=3, description="Qwen3 layers that are kept")
    num_attention_heads: PositiveInt = Field(default=4, description="Qwen3 query heads")
    num_key_value_heads: PositiveInt = Field(
        default=2, description="Qwen3 key and value heads; divides the query heads"
    )
    head_dim: PositiveInt = Field(default=32, description="Qwen3 head dimension; even")
    dit_num_layers: PositiveInt = Field(
        default=4, description="DiT blocks; even ones cross-attend, odd ones self-attend"
    )
    dit_num_heads: PositiveInt = Field(default=4, description="DiT heads")
    dit_head_dim: PositiveInt = Field(default=24, description="DiT head dimension; width = heads x head dimension")
    dit_output_dim: PositiveInt = Field(default=64, description="DiT output and hidden size of the action decoder")
    vl_num_layers: PositiveInt = Field(default=1, description="self-attention blocks over the backbone's features")
    vl_num_heads: PositiveInt = Field(default=4, description="their heads; times vl_head_dim it is hidden_size")
    vl_head_dim: PositiveInt = Field(default=32, description="their head dimension")
    num_embodiments: PositiveInt = Field(default=2, description="robots with encoders and decoders of their own")
    max_action_dim: PositiveInt = Field(default=8, description="actions are padded to this with zeros")
    max_state_dim: PositiveInt = Field(default=32, description="states are padded to this with zeros")
    action_horizon: PositiveInt = Field(default=5, description="actions predicted; the first num_action_chunks are run")
    num_future_tokens: PositiveInt = Field(default=4, description="learned tokens before the actions")
    max_prompt_tokens: PositiveInt = Field(default=64, description="prompts are padded to this length")


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., 2021), used with trainable: lora."""

    rank: PositiveInt = Field(default=32, description="rank of the adapters")
    alpha: PositiveInt | None = Field(default=None, description="scale times rank; null is min(rank, 16), as OpenVLA")
    target_modules: tuple[str, ...] = Field(
        default=(), description="last parts of the names of linear layers, e.g. q_proj; empty: every one of the network"
    )


class FlowConfig(Section):
    """Sampling of flow policies (pi0, pi0.5, GR00T) and the noise that makes it a distribution."""

    method: Literal["flow_sde", "flow_noise"] = Field(
        default="flow_sde",
        description="flow_sde: one random denoising step is stochastic; flow_noise: all are, with learned noise",
    )
    num_steps: PositiveInt = Field(default=4, description="denoising steps")
    noise_level: PositiveFloat = Field(default=0.5, description="eta of flow_sde")
    noise_std_min: PositiveFloat = Field(default=0.08, description="least standard deviation of flow_noise, a step")
    noise_std_max: PositiveFloat = Field(default=0.16, description="largest one; above noise_std_min")


class ValueHeadConfig(Section):
    """MLP from hidden states to the value."""

    input: Literal["auto", "prompt_end", "prompt_mean", "prefix", "suffix"] = Field(
        default="auto",
        description="prompt_end, prompt_mean: hidden state of the last prompt token, or the mean over images and prompt"
        " (OpenVLA); prefix, suffix: mean over images and prompt, or of the action expert's output (flow policies);"
        " auto: the family's own",
    )
    detach: bool = Field(default=False, description="the value loss trains the value head only")

    hidden_sizes: tuple[PositiveInt, ...] = Field(default=(512, 128), description="hidden units")
    output: Literal["chunk", "action"] = Field(default="chunk", description="one value a chunk, or one an action")


class ModelConfig(Section):
    """The policy."""

    model_type: str = Field(default="openvla", description="a name of `embodrl list models`")
    model_path: str | None = Field(
        default=None,
        description="local directory or hub id of a checkpoint in the family's public layout; null: the tiny size",
    )
    warm_start: str | None = Field(
        default="builtin",
        description="weights of the tiny size: builtin (shipped with embodrl), a directory, or null for random ones;"
        " not used with model_path",
    )
    architecture: ArchitectureConfig = Field(
        default=ArchitectureConfig(), description="dimensions of the tiny OpenVLA and OpenVLA-OFT"
    )
    pi: PiArchitectureConfig = Field(default=PiArchitectureConfig(), description="dimensions of the tiny pi0 and pi0.5")
    gr00t: Gr00tArchitectureConfig = Field(
        default=Gr00tArchitectureConfig(), description="dimensions of the tiny GR00T N1.5"
    )
    num_action_chunks: PositiveInt = Field(default=5, description="actions predicted at once (C)")
    action_dim: PositiveInt = Field(default=7, description="dimensions of an action (A)")
    unnorm_key: str | None = Field(
        default=None, description="which statistics un-normalise actions; null if the checkpoint has one set"
    )
    add_value_head: bool = Field(default=True, description="needed by actor-critic losses")
    value_head: ValueHeadConfig = Field(default=ValueHeadConfig(), description="shape of the value head")
    center_crop: bool = Field(
        default=False, description="crop 90 % of the image's area, for checkpoints trained with random crops"
    )
    freeze_vision: bool = Field(default=False, description="do not train the vision backbone")
    trainable: Literal["all", "lora", "action_expert", "head"] = Field(
        default="all",
        description="what trains besides the value head: all weights, low-rank adapters, the action expert (flow"
        " policies), or the output layer only",
    )
    lora: LoraConfig = Field(default=LoraConfig(), description="low-rank adapters")
    flow: FlowConfig = Field(default=FlowConfig(), description="sampling of flow policies")
    gripper: Literal["as_is", "libero", "bridge"] = Field(
        default="as_is",
        description="last action dimension: as_is; libero: 0..1 (1 open) becomes -1 open, +1 closed; bridge: 0..1"
        " becomes -1 closed, +1 open",
    )
    use_proprio: bool = Field(default=False, description="OpenVLA-OFT: feed the robot's state as a token")
    keep_stop_token: bool = Field(
        default=True, description="OpenVLA-OFT: end the sequence with the stop token, as its public checkpoints"
    )
    trust_remote_code: Literal[False] = Field(default=False, description="code from a checkpoint is never run")
