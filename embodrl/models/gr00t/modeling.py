"""GR00T's networks with the parameter names of their public checkpoints (NVIDIA, "GR00T N1.5", 2025, and N1.7).

Shapes: B batch, V cameras, N image patches, S tokens of images and prompt, E hidden size of the language model.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Self

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from embodrl.models.common.attention import with_attention
from embodrl.models.common.init import init_linears
from embodrl.models.common.llama import causal_mask, token_positions
from embodrl.models.flow.recompute import recompute_layers
from embodrl.models.flow.siglip import SiglipTower
from embodrl.models.gr00t.action_head import FlowActionHead
from embodrl.models.gr00t.config import Gr00tConfig, QwenSpec
from embodrl.models.gr00t.config_n1_7 import Gr00tN17Config
from embodrl.models.gr00t.qwen3_vl import QwenBackbone


class LanguageModel(nn.Module):
    """Checkpoint nesting around Qwen3, with its output layer, which is stored but never run."""

    def __init__(self, spec: QwenSpec, lm_head: bool) -> None:
        super().__init__()
        self.model = Qwen3Model(qwen_config(spec))
        if lm_head:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)


class EagleModel(nn.Module):
    """SigLIP 2, a linear connector, and the first layers of Qwen3."""

    def __init__(self, config: Gr00tConfig) -> None:
        super().__init__()
        self.vision_model = SiglipTower(config.siglip, config.pooling_head)
        # "1mlp_nops": one layer, no pixel shuffle.
        self.mlp1 = nn.Sequential(nn.Linear(config.siglip.width, config.qwen.hidden_size))
        self.language_model = LanguageModel(config.qwen, config.lm_head)

    def forward(self, pixels: Tensor, input_ids: Tensor, image_token_id: int, mask: Tensor | None) -> Tensor:
        """Return the hidden states ``[B,S,E]`` after the last kept layer and the final norm.

        Args:
            pixels: ``[B,V,3,H,W]``.
            input_ids: ``int64[B,S]``, with N ids ``image_token_id`` per camera, in order.
            image_token_id: placeholder id of an image patch.
            mask: ``bool[B,S]``, False at padding, which may be anywhere; None without padding.
        """
        qwen = self.language_model.model
        embeddings = qwen.embed_tokens(input_ids)
        tokens = self.image_tokens(pixels.flatten(0, 1)).to(embeddings.dtype)
        at_images = (input_ids == image_token_id)[..., None]
        embeddings = embeddings.masked_scatter(at_images, tokens)
        positions = None
        bias = None
        if mask is not None:
            positions = token_positions(mask.long())
            bias = causal_mask(mask.long())
        output = qwen(inputs_embeds=embeddings, attention_mask=bias, position_ids=positions, use_cache=False)
        return output.last_hidden_state

    def image_tokens(self, images: Tensor) -> Tensor:
        """Map ``[B,3,H,W]`` to ``[B,N,E]``."""
        return self.mlp1(self.vision_model(images))

    def init_connector(self, generator: torch.Generator) -> None:
        init_linears(self.mlp1, generator)


class Backbone(nn.Module):
    """Checkpoint nesting around the vision-language model."""

    def __init__(self, config: Gr00tConfig) -> None:
        super().__init__()
        self.eagle_model = EagleModel(config)


class Gr00tModel(nn.Module):
    """Vision-language model and action head of N1.5."""

    def __init__(self, config: Gr00tConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.action_head = FlowActionHead(config.head)

    def public_size(self, action_dim: int) -> Self:
        """Return a network of NVIDIA's dimensions for A-dimensional actions."""
        return type(self)(self.config.public(action_dim))

    def features(self, pixels: Tensor, input_ids: Tensor, image_token_id: int, mask: Tensor | None) -> Tensor:
        """Return the vision-language features of images and prompt; see ``EagleModel``."""
        return self.eagle(pixels, input_ids, image_token_id, mask)

    @property
    def eagle(self) -> EagleModel:
        return self.backbone.eagle_model

    @property
    def vision(self) -> nn.Module:
        """Vision transformer and connector."""
        eagle = self.eagle
        return nn.ModuleList([eagle.vision_model, eagle.mlp1])

    @property
    def connectors(self) -> list[nn.Module]:
        """Parts of ``vision`` that process an image's tokens rather than its patches."""
        return [self.eagle.mlp1]

    @property
    def language(self) -> nn.Module:
        return self.eagle.language_model

    def reset_buffers(self, device: torch.device) -> None:
        """Recompute the buffers that no checkpoint holds, after building on the meta device."""
        qwen = self.eagle.language_model.model
        qwen.rotary_emb = Qwen3RotaryEmbedding(qwen.config).to(device)

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that affect no output."""
        eagle = self.eagle
        unused = (
            getattr(eagle.language_model, "lm_head", None),
            getattr(eagle.vision_model.vision_model, "head", None),
        )
        return [parameter for part in unused if part is not None for parameter in part.parameters()]

    def enable_gradient_checkpointing(self) -> None:
        eagle = self.eagle
        eagle.vision_model.enable_gradient_checkpointing()
        recompute_layers(eagle.language_model.model, eagle.language_model.model.layers)
        self.action_head.enable_gradient_checkpointing()

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch; see ``common/init.py``.

        Only SigLIP gets larger queries and keys: elsewhere they delay the use of the image.
        """
        eagle = self.eagle
        eagle.vision_model.init_weights(generator)
        eagle.init_connector(generator)
        qwen = eagle.language_model.model
        init_linears(qwen, generator, residual=("o_proj", "down_proj"), blocks=len(qwen.layers))
        qwen.embed_tokens.weight.data.normal_(0.0, 1.0, generator=generator)
        for module in qwen.modules():
            if isinstance(module, Qwen3RMSNorm):
                nn.init.ones_(module.weight)
        self.action_head.init_weights(generator)


class Gr00tN17Model(nn.Module):
    """Vision-language model and action head of N1.7."""

    def __init__(self, config: Gr00tN17Config) -> None:
        super().__init__()
        self.config = config
        self.backbone = QwenBackbone(config.vision, config.qwen, config.lm_head)
        self.action_head = FlowActionHead(config.head)

    def public_size(self, action_dim: int) -> Self:
        """Return a network of NVIDIA's dimensions for A-dimensional actions."""
        return type(self)(self.config.public(action_dim))

    def features(self, pixels: Tensor, input_ids: Tensor, image_token_id: int, mask: Tensor | None) -> Tensor:
        """Return the vision-language features of images and prompt; see ``QwenBackbone``."""
        return self.backbone(pixels, input_ids, image_token_id, mask)

    @property
    def vision(self) -> nn.Module:
        """Vision transformer and its connectors."""
        return self.backbone.visual

    @property
    def connectors(self) -> list[nn.Module]:
        """Parts of ``vision`` that process an image's tokens rather than its patches."""
        visual = self.backbone.visual
        return [visual.merger, visual.deepstack_merger_list]

    @property
    def language(self) -> nn.Module:
        return self.backbone.language_model

    def reset_buffers(self, device: torch.device) -> None:
        """Recompute the buffers that no checkpoint holds, after building on the meta device."""
        self.backbone.reset_buffers(device)

    def unused_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that affect no output."""
        return self.backbone.unused_parameters()

    def enable_gradient_checkpointing(self) -> None:
        self.backbone.enable_gradient_checkpointing()
        self.action_head.enable_gradient_checkpointing()

    def init_weights(self, generator: torch.Generator) -> None:
        """Draw weights for training from scratch; see ``common/init.py``."""
        self.backbone.init_weights(generator)
        self.action_head.init_weights(generator)


def qwen_config(spec: QwenSpec) -> Qwen3Config:
    """Return the transformers configuration of the language model."""
    sizes = asdict(spec)
    rope = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
    return Qwen3Config(**sizes, rope_parameters=rope, **with_attention())
