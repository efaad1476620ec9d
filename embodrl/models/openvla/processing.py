"""Observations to model inputs.

Shapes: B batch, V cameras, H x W pixels, L prompt tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.models.common.images import center_crop_area, jpeg_round_trip, resize_bicubic, resize_lanczos
from embodrl.models.common.limits import check_cameras, check_prompt
from embodrl.models.common.tokenizer import PromptTokenizer
from embodrl.types import Observation

PROMPT = "In: What action should the robot take to {instruction}?\nOut:"


class OpenVLAProcessor:
    """Prepares prompts (L = ``max_prompt_tokens``) and images as in OpenVLA's training.

    ``center_crop`` crops the central 90 % of the area. ``resize_filter`` is ``bicubic``, or ``lanczos_jpeg`` for
    Lanczos after a JPEG round trip.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        image_size: int,
        max_prompt_tokens: int,
        pad_token_id: int,
        center_crop: bool,
        resize_filter: str = "bicubic",
    ) -> None:
        self.tokenizer = tokenizer
        self.image_size = image_size
        self.max_prompt_tokens = max_prompt_tokens
        self.pad_token_id = pad_token_id
        self.center_crop = center_crop
        self.resize_filter = resize_filter
        self._rows: dict[str, tuple[list[int], list[int]]] = {}

    def prompt_row(self, instruction: str) -> tuple[list[int], list[int]]:
        """Return L ids and an L-long mask: BOS, padding, the prompt; raise ``EmbodrlError`` if the prompt is longer.

        Padding comes between BOS and the text, so that every row's last prompt token, from which the first action and
        the value are read, is in the last place. Masks and positions make the place of padding irrelevant.
        """
        if instruction not in self._rows:
            ids = self.tokenizer.encode(PROMPT.format(instruction=instruction.lower()))
            hint = f"set model.architecture.max_prompt_tokens={len(ids)} or more"
            check_prompt(instruction, len(ids), self.max_prompt_tokens, hint)
            space = self.max_prompt_tokens - len(ids)
            row = [ids[0], *([self.pad_token_id] * space), *ids[1:]]
            self._rows[instruction] = (row, [1, *([0] * space), *([1] * (len(ids) - 1))])
        return self._rows[instruction]

    def resize(self, images: NDArray[np.uint8], device: torch.device) -> Tensor:
        """Return ``uint8[N,H,W,3]`` at the model's size, cropped if ``center_crop``."""
        compressed = self.resize_filter == "lanczos_jpeg"
        resize = resize_lanczos if compressed else resize_bicubic
        # a copy: the source may be a reused buffer
        pixels = torch.tensor(jpeg_round_trip(images) if compressed else images, device=device)
        pixels = resize(pixels, self.image_size, self.image_size)
        return center_crop_area(pixels) if self.center_crop else pixels

    def prompts(self, instructions: list[str], device: torch.device) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask`` ``int64[B,L]``; errors as in ``prompt_row``."""
        rows = [self.prompt_row(text) for text in instructions]
        return {
            "input_ids": torch.tensor([ids for ids, _ in rows], device=device),
            "attention_mask": torch.tensor([mask for _, mask in rows], device=device),
        }

    def __call__(self, observation: Observation, device: torch.device) -> dict[str, Tensor]:
        """Return ``images uint8[B,H,W,3]`` at the model's size, ``input_ids`` and ``attention_mask`` ``int64[B,L]``.

        Raises ``EmbodrlError`` for several cameras, or a prompt that does not fit.
        """
        check_cameras(observation.images.shape[1], 1)
        images = self.resize(observation.images[:, 0], device)
        return {"images": images, **self.prompts(observation.instruction, device)}
