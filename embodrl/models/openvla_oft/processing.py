"""Observations to inputs of OpenVLA-OFT: several images and optionally the robot's state.

Shapes: B batch, V cameras, H x W pixels, L prompt tokens, S state dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.errors import EmbodrlError
from embodrl.models.common.limits import check_cameras
from embodrl.models.common.tokenizer import PromptTokenizer
from embodrl.models.openvla.processing import OpenVLAProcessor
from embodrl.models.openvla_oft.config import MAX_IMAGES, ProprioStats
from embodrl.types import Observation


@dataclass(frozen=True)
class ProprioInput:
    """Prepares the robot's state for a projector with ``dim`` inputs.

    ``stats`` normalise; None zero-pads the unchanged state, as for the tiny size.
    """

    dim: int
    stats: ProprioStats | None

    def __call__(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map ``float32[B,S]`` in environment units to ``float32[B,dim]``; raise ``EmbodrlError`` for a wrong S."""
        size = state.shape[1]
        if size == 0:
            raise EmbodrlError(
                "model.use_proprio is true, but the observation has no robot state",
                "set env.include_state=true or model.use_proprio=false",
                code="state-missing",
            )
        if size > self.dim or (self.stats is not None and size != self.dim):
            raise EmbodrlError(
                f"the robot's state has {size} dimensions, the policy takes {self.dim}",
                "set model.use_proprio=false, or use a checkpoint of this robot",
                code="state-size",
            )
        if self.stats is not None:
            return self.stats.normalize(state).astype(np.float32)
        return np.pad(state.astype(np.float32), ((0, 0), (0, self.dim - size)))


class OpenVLAOFTProcessor(OpenVLAProcessor):
    """``OpenVLAProcessor`` for several cameras and, with ``proprio``, the state token's input."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        image_size: int,
        max_prompt_tokens: int,
        pad_token_id: int,
        center_crop: bool,
        proprio: ProprioInput | None,
        resize_filter: str = "bicubic",
    ) -> None:
        super().__init__(tokenizer, image_size, max_prompt_tokens, pad_token_id, center_crop, resize_filter)
        self.proprio = proprio

    def __call__(self, observation: Observation, device: torch.device) -> dict[str, Tensor]:
        """Return ``images uint8[B,V,H,W,3]`` at the model's size, ``input_ids`` and ``attention_mask`` ``int64[B,L]``.

        With a state token also ``proprio float32[B,S]``.

        Raises:
            EmbodrlError: no camera or more than four, a prompt that does not fit, or a state that is missing or of
                another size.
        """
        batch, cameras = observation.images.shape[:2]
        check_cameras(cameras, MAX_IMAGES)
        images = self.resize(observation.images.reshape(-1, *observation.images.shape[2:]), device)
        inputs = {"images": images.unflatten(0, (batch, cameras)), **self.prompts(observation.instruction, device)}
        if self.proprio is not None:
            inputs["proprio"] = torch.tensor(self.proprio(observation.state), device=device)
        return inputs
