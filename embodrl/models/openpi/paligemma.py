"""PaliGemma: SigLIP and Gemma, with openpi's parameter names.

Shapes: B batch, V cameras, N image patches of a camera, L prompt tokens, W PaliGemma's width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodrl.models.common.patches import SiglipSpec
from embodrl.models.flow.gemma import GemmaModel, GemmaSpec
from embodrl.models.flow.siglip import SiglipTower


class MultiModalProjector(nn.Module):
    """Projects vision features to language embeddings."""

    def __init__(self, vision_width: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(vision_width, width)

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[B,N,*]`` to ``[B,N,W]``; unlike text, images are not scaled by sqrt(W)."""
        return self.linear(features)


class PaliGemmaModel(nn.Module):
    """Beyer et al., "PaliGemma", 2024, without its output layer."""

    def __init__(self, siglip: SiglipSpec, vlm: GemmaSpec, vocab_size: int) -> None:
        super().__init__()
        self.vision_tower = SiglipTower(siglip)
        self.multi_modal_projector = MultiModalProjector(siglip.width, vlm.width)
        self.language_model = GemmaModel(vlm, vocab_size)

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Map ``[B,V,3,h,w]`` in [-1, 1] to embeddings ``[B,V*N,W]``."""
        features = self.vision_tower(pixels.flatten(0, 1))
        return self.multi_modal_projector(features).unflatten(0, (len(pixels), -1)).flatten(1, 2)

    def embed_prefix(
        self, pixels: Tensor, ids: Tensor, prompt_mask: Tensor, image_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return embeddings ``[B,P',W]`` of images and prompt, and ``bool[B,P']``, False at padding (None without).

        Cameras and columns that every row lacks are omitted. Arguments as in ``PiModel.encode``.
        """
        if image_mask is not None:
            needed = image_mask.any(dim=0)
            pixels = pixels[:, needed]
            image_mask = image_mask[:, needed]
        longest = int(prompt_mask.sum(dim=1).max())
        ids = ids[:, :longest]
        prompt_mask = prompt_mask[:, :longest]
        x = torch.cat([self.embed_images(pixels), self.language_model.embed(ids)], dim=1)
        # Without a mask attention is faster in every layer.
        if bool(prompt_mask.all()) and (image_mask is None or bool(image_mask.all())):
            return x, None
        if image_mask is None:
            image_mask = prompt_mask.new_ones(pixels.shape[:2])
        patches = image_mask.repeat_interleave(self.vision_tower.spec.num_patches, dim=1)
        return x, torch.cat([patches, prompt_mask], dim=1)


def token_places(valid: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Return each token's index among non-padding tokens, ``int64[B,S]``, or ``[1,S]`` where all rows agree."""
    if valid is None:
        return torch.arange(length, device=device)[None]
    return (valid.cumsum(dim=1) - 1).clamp(min=0)
