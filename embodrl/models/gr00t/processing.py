"""Observations to model inputs.

The chat is Eagle 2.5's, whose files come with NVIDIA's code instead of the checkpoint: prompt and special tokens follow
its public processor and are defined only here. The centre of an image is resized to one tile.
Shapes: B batch, V cameras, H x W pixels, N image patches, L text tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from embodrl.errors import CheckpointError, EmbodrlError, PolicyFileError
from embodrl.models.common.images import crop_side_and_resize
from embodrl.models.common.limits import check_cameras, check_prompt
from embodrl.models.common.tokenizer import TINY_TOKENIZER, FileTokenizer, read_tokenizer
from embodrl.models.gr00t.robots import JoinedStats
from embodrl.types import Observation

CHAT_START = "<|im_start|>"
CHAT_END = "<|im_end|>"
IMAGE_START = "<img>"
IMAGE_TOKEN = "<IMG_CONTEXT>"
IMAGE_END = "</img>"
SPECIAL_TOKENS = (CHAT_START, CHAT_END, IMAGE_START, IMAGE_TOKEN, IMAGE_END)
PAD_ID = 0
"""Any id works: padding is masked everywhere."""


def chat(instruction: str, num_images: int, num_patches: int, system_prompt: str) -> str:
    """Return the prompt: a user message of numbered images and the instruction, then the start of an answer.

    The instruction is neither lower-cased nor stripped; ``system_prompt`` may be empty.
    """
    system = f"{CHAT_START}system\n{system_prompt}{CHAT_END}\n" if system_prompt else ""
    patches = f"{IMAGE_START}{IMAGE_TOKEN * num_patches}{IMAGE_END}"
    images = "".join(f"<image {number}>{patches}" for number in range(1, num_images + 1))
    return f"{system}{CHAT_START}user\n{images}{instruction}{CHAT_END}\n{CHAT_START}assistant\n"


class ChatTokenizer(FileTokenizer):
    """A tokenizer with the chat's special tokens; raises ``CheckpointError``, naming ``source``, if one is missing."""

    special_tokens: ClassVar[tuple[str, ...]] = SPECIAL_TOKENS
    image_token: ClassVar[str] = IMAGE_TOKEN
    model: ClassVar[str] = "Eagle 2.5"

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        image_token_id = tokenizer.token_to_id(self.image_token)
        missing = [token for token in self.special_tokens if tokenizer.token_to_id(token) is None]
        if image_token_id is None or missing:
            raise CheckpointError(
                f"the tokenizer of {source} has no {', '.join(missing)}",
                f"use the tokenizer of {self.model}",
                code="tokenizer-mismatch",
            )
        super().__init__(tokenizer)
        self.image_token_id = image_token_id

    def encode(self, text: str) -> list[int]:
        """Return the ids of a chat, without adding any."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def tiny_chat_tokenizer(kind: type[ChatTokenizer] = ChatTokenizer) -> ChatTokenizer:
    """Return the shipped tokenizer with the chat's special tokens appended."""
    tokenizer = read_tokenizer(TINY_TOKENIZER)
    tokenizer.add_special_tokens(list(kind.special_tokens))
    return kind(tokenizer, "embodrl")


def has_tokenizer(directory: Path) -> bool:
    """Return whether the directory has tokenizer.json, or vocab.json and merges.txt."""
    names = {path.name for path in directory.iterdir()}
    return "tokenizer.json" in names or {"vocab.json", "merges.txt"} <= names


def load_chat_tokenizer(directory: Path, kind: type[ChatTokenizer] = ChatTokenizer) -> ChatTokenizer:
    """Load tokenizer.json, or vocab.json, merges.txt and the other files of Qwen's tokenizer.

    Raises:
        CheckpointError: the files are corrupt or another model's.
    """
    path = directory / "tokenizer.json"
    if path.is_file():
        return kind(read_tokenizer(path), str(directory))
    from transformers import Qwen2Tokenizer

    try:
        tokenizer = Qwen2Tokenizer.from_pretrained(str(directory), local_files_only=True).backend_tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
    except Exception as error:  # tokenizers raises plain Exception for invalid content
        raise PolicyFileError(f"{directory} has no readable tokenizer: {error}", "fetch the files again") from error
    return kind(tokenizer, str(directory))


class Gr00tProcessor:
    """Prepares prompts, images and states as in GR00T's training.

    Args:
        tokenizer: tokenizer of the language model.
        image_size: side of the model's square input in pixels.
        num_patches: N.
        max_prompt_tokens: L, excluding image tokens.
        system_prompt: see ``chat``.
        crop_side: visible fraction of each image side.
        state_stats: statistics that normalise states; None leaves them unchanged.
        max_state_dim: states are zero-padded to this size.
    """

    section: ClassVar[str] = "model.gr00t"

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        image_size: int,
        num_patches: int,
        max_prompt_tokens: int,
        system_prompt: str,
        crop_side: float,
        state_stats: JoinedStats | None,
        max_state_dim: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.image_size = image_size
        self.num_patches = num_patches
        self.max_prompt_tokens = max_prompt_tokens
        self.system_prompt = system_prompt
        self.crop_side = crop_side
        self.state_stats = state_stats
        self.max_state_dim = max_state_dim
        self._rows: dict[tuple[str, int], tuple[list[int], list[int]]] = {}

    def chat(self, instruction: str, num_images: int) -> str:
        return chat(instruction, num_images, self.num_patches, self.system_prompt)

    def resized(self, images: Tensor) -> Tensor:
        """Return images ``uint8[B,H,W,3]`` at the model's size."""
        return crop_side_and_resize(images, self.image_size, self.image_size, self.crop_side)

    def prompt_row(self, instruction: str, num_images: int) -> tuple[list[int], list[int]]:
        """Return ``L + V N`` ids and mask, padded on the left.

        Neither the language model nor the action head sees padding. In the public code, padding to the longest prompt
        lets the rows of a batch influence each other; here each row gives what that code gives for the row alone.

        Raises:
            EmbodrlError: the prompt is longer than L.
        """
        key = (instruction, num_images)
        if key not in self._rows:
            ids = self.tokenizer.encode(self.chat(instruction, num_images))
            text = len(ids) - num_images * self.num_patches
            hint = f"set {self.section}.max_prompt_tokens={text} or more"
            check_prompt(instruction, text, self.max_prompt_tokens, hint)
            space = self.max_prompt_tokens - text
            self._rows[key] = ([PAD_ID] * space + ids, [0] * space + [1] * len(ids))
        return self._rows[key]

    def check_room(self) -> None:
        """Raise ``EmbodrlError`` if no instruction fits into L, e.g. with another model's tokenizer."""
        self.prompt_row("", num_images=1)

    def __call__(self, observation: Observation, device: torch.device) -> dict[str, Tensor]:
        """Return the model's inputs on ``device``.

        ``images uint8[B,V,H,W,3]`` at the model's size, ``input_ids`` and ``attention_mask`` ``int64[B,L+VN]``, and the
        normalised ``state float32[B,max_state_dim]``.

        Raises:
            EmbodrlError: no camera, a prompt that does not fit, or a state whose dimensions differ from the statistics.
        """
        batch, num_images = observation.images.shape[:2]
        check_cameras(num_images)
        images = torch.tensor(observation.images, device=device).flatten(0, 1)  # a copy: the source may be reused
        images = self.resized(images)
        rows = [self.prompt_row(text, num_images) for text in observation.instruction]
        return {
            "images": images.unflatten(0, (batch, num_images)),
            "input_ids": torch.tensor([ids for ids, _ in rows], device=device),
            "attention_mask": torch.tensor([mask for _, mask in rows], device=device),
            "state": torch.from_numpy(self.padded_state(observation.state)).to(device),
        }

    def padded_state(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return normalised states ``float32[B,max_state_dim]`` of ``float32[B,S]``; S = 0 gives zeros.

        Raises ``EmbodrlError`` if dimensions differ from the statistics or exceed ``max_state_dim``.
        """
        dims = state.shape[1]
        padded = np.zeros((len(state), self.max_state_dim), dtype=np.float32)
        if dims == 0:
            return padded
        wanted = None if self.state_stats is None else self.state_stats.dims
        if wanted is not None and dims != wanted:
            raise EmbodrlError(
                f"the robot's state has {dims} dimensions, the checkpoint's statistics have {wanted}",
                "choose the robot with model.unnorm_key, or set env.include_state=false",
                code="state-size",
            )
        width = dims if self.state_stats is None else self.state_stats.width
        if width > self.max_state_dim:
            raise EmbodrlError(
                f"the robot's state has {width} dimensions, the model has room for {self.max_state_dim}",
                f"set {self.section}.max_state_dim={width} or more, or env.include_state=false",
                code="state-size",
            )
        padded[:, :width] = state if self.state_stats is None else self.state_stats.normalize(state)
        return padded
