"""Observations to inputs of pi0 and pi0.5.

Shapes: B batch, V cameras, S state dimensions, D padded state dimensions, L prompt tokens.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodrl.errors import EmbodrlError
from embodrl.models.common.images import picture_box, resize_with_pad
from embodrl.models.common.limits import check_cameras, check_prompt
from embodrl.models.openpi.aloha import NUM_DIMS, state_to_pi
from embodrl.models.openpi.config import PiConfig
from embodrl.models.openpi.stats import Scaling, cut
from embodrl.models.openpi.tokenizer import TextTokenizer, with_line_feed
from embodrl.types import Observation

PAD_ID = 0
STATE_BINS = np.linspace(-1.0, 1.0, 257)[:-1]
DARK_BARS = -3.0
"""lerobot before 0.5 pads images in [0, 1] with -1, and then maps [0, 1] to [-1, 1]."""


class PiProcessor:
    """Prepares images, prompts and states as in openpi; ``state`` has its statistics, None leaves it unchanged."""

    section: ClassVar[str] = "model.pi"
    """Settings section, for hints."""
    prompt_end: ClassVar[str] = "\nAction: "
    """Text after the state in a prompt."""

    def __init__(self, tokenizer: TextTokenizer, config: PiConfig, state: Scaling | None) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.state = state
        self._prompts: dict[str, list[int]] = {}

    def __call__(self, observation: Observation, device: torch.device) -> dict[str, Tensor]:
        """Return inputs on ``device``.

        Returns:
            ``images uint8[B,V,h,w,3]`` at the model's size, ``input_ids int64[B,L]`` and ``attention_mask bool[B,L]``
            (padded on the right), for pi0 ``state float32[B,D]`` and, where bars are not black, ``picture_box
            int64[B,4]`` (top, left, bottom, right, in pixels).

        Raises:
            EmbodrlError: too many cameras, a state that is too large, or a prompt that does not fit.
        """
        batch, cameras = observation.images.shape[:2]
        check_cameras(cameras, self.config.num_images)
        size = self.config.siglip.image_size
        copied = np.array(observation.images, order="C")  # copy, since the source may be a reused buffer
        images = torch.from_numpy(copied).to(device).flatten(0, 1)
        state = self.normalized_state(observation.state)
        rows = [self._prompt(text, row) for text, row in zip(observation.instruction, state, strict=True)]
        ids = torch.full((batch, self.config.max_prompt_tokens), PAD_ID, dtype=torch.int64)
        for row, prompt in zip(ids, rows, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        lengths = torch.tensor([len(prompt) for prompt in rows])
        mask = torch.arange(self.config.max_prompt_tokens)[None] < lengths[:, None]
        inputs = {
            "images": resize_with_pad(images, size, size, self.config.antialias).unflatten(0, (batch, cameras)),
            "input_ids": ids.to(device),
            "attention_mask": mask.to(device),
        }
        if not self.config.adaptive_norm:
            inputs["state"] = torch.from_numpy(self._padded(state).astype(np.float32)).to(device)
        box = picture_box(images.shape[1], images.shape[2], size, size)
        if self.config.dark_bars and box != (0, 0, size, size):
            inputs["picture_box"] = torch.tensor([box] * batch, device=device)
        return inputs

    @staticmethod
    def pixels(inputs: dict[str, Tensor]) -> Tensor:
        """Return the images of ``inputs`` as ``float32[B,V,3,h,w]`` in [-1, 1], with bars as in training."""
        pixels = inputs["images"].float().permute(0, 1, 4, 2, 3) / 127.5 - 1.0
        if "picture_box" not in inputs:
            return pixels
        top, left, bottom, right = inputs["picture_box"][:, None, None, None].unbind(-1)
        row = torch.arange(pixels.shape[3], device=pixels.device)
        column = torch.arange(pixels.shape[4], device=pixels.device)
        inside = ((row >= top) & (row < bottom))[..., None] & ((column >= left) & (column < right))[..., None, :]
        return pixels.masked_fill(~inside, DARK_BARS)

    def normalized_state(self, state: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return ``[B,S]`` in model units.

        Raises ``EmbodrlError`` if S exceeds D, differs from the statistics, or is 0 although the prompt needs a state.
        """
        dims = state.shape[1]
        if dims > self.config.max_action_dim:
            raise EmbodrlError(
                f"the model's states have room for {self.config.max_action_dim} dimensions, the environment's have "
                f"{dims}",
                f"set env.include_state=false, or {self.section}.max_action_dim={dims} if there is no checkpoint",
                code="state-size",
            )
        if dims == 0 and self.state is not None and self.config.discrete_state:
            raise EmbodrlError(
                "the checkpoint was trained with the robot's state in the prompt, but the observation has none",
                "set env.include_state=true, or model.pi.discrete_state=false if it was trained without",
                code="pi-state-missing",
            )
        units = self.in_units(state)
        if self.state is None or dims == 0:
            return units
        return cut(self.state, dims, "the statistics of states", "the environment's state").normalize(units)

    def in_units(self, state: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return a state ``[B,S]`` in the units of the model's statistics.

        Raises:
            EmbodrlError: it has too few numbers for ALOHA's (``state-size``).
        """
        if not self.config.aloha_units or state.shape[1] == 0:
            return state.astype(np.float64)
        if state.shape[1] < NUM_DIMS:
            raise EmbodrlError(
                f"the state has {state.shape[1]} numbers, fewer than the {NUM_DIMS} of ALOHA's two arms",
                "give joints and gripper of both, or set model.pi.aloha_units=false if there is no checkpoint",
                code="state-size",
            )
        return state_to_pi(state)

    def prompt(self, instruction: str, state: NDArray[np.float64]) -> list[int]:
        """Return the ids of the prompt for an instruction and a normalised ``state [S]``.

        pi0 reads the instruction and a separately encoded line feed. pi0.5 with the state in its prompt reads ``Task:
        ..., State: 128 17 ...;`` with the bin of each dimension out of 256 over [-1, 1], and ``Action:`` with a blank
        on the next line. As in openpi, values below -1 have bin -1, and underscores and line feeds in instructions
        become blanks. lerobot's pi0 keeps them, and appends a missing line feed.
        """
        bos = [self.tokenizer.bos_id]
        if self.config.raw_instruction:
            return bos + self.tokenizer.encode(with_line_feed(instruction))
        text = instruction.strip().replace("_", " ").replace("\n", " ")
        if not self.config.discrete_state:
            return bos + self.tokenizer.encode(text) + self.tokenizer.encode("\n")
        if self.config.padded_state_in_prompt:
            state = self._padded(state)
        bins = " ".join(str(place) for place in np.digitize(state, STATE_BINS) - 1)
        return bos + self.tokenizer.encode(f"Task: {text}, State: {bins};{self.prompt_end}")

    def _prompt(self, instruction: str, state: NDArray[np.float64]) -> list[int]:
        if self.config.discrete_state:
            return self._fitting(self.prompt(instruction, state), instruction)
        if instruction not in self._prompts:
            self._prompts[instruction] = self._fitting(self.prompt(instruction, state), instruction)
        return self._prompts[instruction]

    def _fitting(self, ids: list[int], instruction: str) -> list[int]:
        setting = f"{self.section}.max_prompt_tokens={len(ids)}"
        hint = f"shorten the instruction, or set {setting} for a model without a checkpoint"
        check_prompt(instruction, len(ids), self.config.max_prompt_tokens, hint)
        return ids

    def _padded(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        missing = self.config.max_action_dim - state.shape[-1]
        return np.pad(state, [(0, 0)] * (state.ndim - 1) + [(0, missing)])
