"""From a ModelConfig to a GR00T N1.6 policy: a public checkpoint, or the tiny size."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from embodrl.models.base import LoadReport
from embodrl.models.common.images import resize_bicubic
from embodrl.models.gr00t.build_n1_7 import Gr00tN17Processor, Version, build
from embodrl.models.gr00t.config import SYSTEM_PROMPT
from embodrl.models.gr00t.config_n1_6_n1_7 import Gr00tN16Config
from embodrl.models.gr00t.modeling import Gr00tN16Model
from embodrl.models.gr00t.policy import Gr00tPolicy
from embodrl.models.gr00t.processing import (
    CHAT_END,
    CHAT_START,
    IMAGE_END,
    IMAGE_START,
    IMAGE_TOKEN,
    ChatTokenizer,
)
from embodrl.models.gr00t.spec import Gr00tN16ModelConfig

QWEN = "backbone.model.language_model"
VISION = "backbone.model.vision_model"


class Gr00tN16Processor(Gr00tN17Processor):
    """N1.7's with the chat of Eagle 3, and pictures resized once more, to whole tiles."""

    section: ClassVar[str] = "model.gr00t_n1_6"

    def chat(self, instruction: str, num_images: int) -> str:
        """Return a system's message and a user's of the instruction and numbered images, which begins no answer."""
        patches = f"{IMAGE_START}{IMAGE_TOKEN * self.num_patches}{IMAGE_END}"
        images = "".join(f"<image {number}>{patches}" for number in range(1, num_images + 1))
        system = f"{CHAT_START}system\n{SYSTEM_PROMPT}{CHAT_END}\n"
        return f"{system}{CHAT_START}user\n{self.formalized(instruction)}{images}{CHAT_END}\n"

    def resized(self, images: Tensor) -> Tensor:
        """Return images ``uint8[B,H,W,3]`` at the model's size."""
        return resize_bicubic(self.images(images), self.image_size, self.image_size)


N1_6 = Version(
    Gr00tN16Config,
    Gr00tN16Model,
    Gr00tN16Processor,
    ChatTokenizer,
    None,
    f"{QWEN}.model.",
    f"{QWEN}.lm_head.weight",
    f"{VISION}.vision_model.encoder.layers.",
)


def build_gr00t_n1_6(
    config: Gr00tN16ModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[Gr00tPolicy, LoadReport]:
    """Build the policy that a configuration asks for; see ``build_gr00t_n1_7``."""
    return build(config, config.gr00t_n1_6, N1_6, torch.device(device), dtype, seed)
