"""Observations to inputs of SmolVLA, as lerobot prepares them.

Shapes: B batch, V cameras, S state dimensions, L prompt tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from embodrl.errors import EmbodrlError
from embodrl.models.common.limits import check_cameras, check_prompt
from embodrl.models.openpi.stats import Scaling, cut
from embodrl.models.openpi.tokenizer import TextTokenizer, with_line_feed
from embodrl.models.smolvla.config import SmolVlaConfig
from embodrl.types import Observation

MAX_CAMERAS = 8


class SmolProcessor:
    """Prepares prompts and states; images are resized when encoded. Without ``state`` states stay unchanged."""

    def __init__(self, tokenizer: TextTokenizer, config: SmolVlaConfig, state: Scaling | None) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.state = state
        self._prompts: dict[str, list[int]] = {}

    def __call__(self, observation: Observation, device: torch.device) -> dict[str, Tensor]:
        """Return inputs on ``device``.

        Returns:
            ``images uint8[B,V,H,W,3]`` at camera resolution, ``input_ids int64[B,L]`` and ``attention_mask bool[B,L]``
            (padded on the right), ``state float32[B,max_state_dim]``.

        Raises:
            EmbodrlError: too many cameras, a state that is too large, or a prompt that does not fit.
        """
        batch, cameras = observation.images.shape[:2]
        check_cameras(cameras, len(self.config.cameras) or MAX_CAMERAS)
        prompts = [self._prompt(text) for text in observation.instruction]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros(batch, self.config.max_prompt_tokens, dtype=torch.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        mask = torch.arange(self.config.max_prompt_tokens)[None] < lengths[:, None]
        copied = np.array(observation.images, order="C")  # copy, since the source may be a reused buffer
        return {
            "images": torch.from_numpy(copied).to(device),
            "input_ids": ids.to(device),
            "attention_mask": mask.to(device),
            "state": self._state(observation).to(device),
        }

    def pixels(self, images: Tensor) -> Tensor:
        """Map ``uint8[B,V,H,W,3]`` to ``float32[B,V,3,h,w]`` in [-1, 1].

        Aspect ratios are kept with bars at left and top; bilinear without antialiasing, in float, as in lerobot.
        """
        size = self.config.siglip.image_size
        batch, cameras, height, width, _ = images.shape
        pixels = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 255.0
        if (height, width) != (size, size):
            ratio = max(height / size, width / size)
            inner = (int(height / ratio), int(width / ratio))
            pixels = F.interpolate(pixels, size=inner, mode="bilinear", align_corners=False)
            pixels = F.pad(pixels, (size - inner[1], 0, size - inner[0], 0))
        return (pixels * 2.0 - 1.0).unflatten(0, (batch, cameras))

    def _state(self, observation: Observation) -> Tensor:
        state = observation.state
        room = self.config.max_state_dim
        dims = state.shape[1]
        if dims > room:
            raise EmbodrlError(
                f"the model's states have room for {room} dimensions, the environment's have {dims}",
                f"set env.include_state=false, or model.smolvla.max_action_dim={dims} without a checkpoint",
                code="state-size",
            )
        values = state.astype(np.float64)
        if self.state is not None and dims:
            values = cut(self.state, dims, "the statistics of states", "the environment's state").normalize(state)
        return torch.from_numpy(np.pad(values, [(0, 0), (0, room - dims)]).astype(np.float32))

    def _prompt(self, instruction: str) -> list[int]:
        """Return the ids of the instruction and a line feed; too long ones are refused, where lerobot truncates."""
        if instruction not in self._prompts:
            ids = self.tokenizer.encode(with_line_feed(instruction))
            check_prompt(instruction, len(ids), self.config.max_prompt_tokens, "shorten the instruction")
            self._prompts[instruction] = ids
        return self._prompts[instruction]
