"""Dimensions and conventions of pi0-FAST, and its config.json in lerobot's layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from embodrl.errors import CheckpointError
from embodrl.fields import Fields
from embodrl.models.common.config_file import OWN_SECTION, check_family, read_file
from embodrl.models.common.patches import SiglipSpec
from embodrl.models.flow.gemma import GemmaSpec
from embodrl.models.openpi.config import (
    BY_DEVIATION,
    BY_QUANTILES,
    PUBLIC,
    PiConfig,
    from_embodrl,
    from_lerobot,
    variant_name,
)
from embodrl.models.openpi.tokenizer import PALIGEMMA
from embodrl.models.pi0_fast.spec import Pi0FastArchitectureConfig

NAME = "pi0_fast"
ACTION_TOKENIZER = "lerobot/fast-action-tokenizer"
SEGMENTATION_TOKENS = 128
"""Tokens at the end of PaliGemma's vocabulary that pi0-FAST does not use."""
MAX_TOKENS = 4096
TINY_TOKENS = 40


@dataclass(frozen=True)
class FastConfig:
    """A pi0-FAST.

    Attributes:
        inputs: input configuration of a pi0.5 with the state in its prompt; there is no action expert.
        max_action_tokens: maximum tokens of a chunk (M), including its end token.
        skip_tokens: number of the vocabulary's last ids that are not action tokens.
        tied: whether the output layer is the embedding.
        bos_in_prompt: whether images and prompt see BOS, as in lerobot's inference but not its training.
        text_tokenizer, action_tokenizer: hub ids, for files that the checkpoint lacks.
    """

    inputs: PiConfig
    max_action_tokens: int = 256
    skip_tokens: int = SEGMENTATION_TOKENS
    tied: bool = True
    bos_in_prompt: bool = True
    text_tokenizer: str = PALIGEMMA
    action_tokenizer: str = ACTION_TOKENIZER

    @property
    def vocab_size(self) -> int:
        """Embedding rows."""
        return self.inputs.vocab_size

    @staticmethod
    def from_architecture(arch: Pi0FastArchitectureConfig, vocab_size: int) -> FastConfig:
        """Return the tiny size; ``vocab_size`` counts text and action ids."""
        siglip = arch.siglip
        gemma = GemmaSpec(
            arch.vlm_width, arch.depth, arch.vlm_mlp_dim, arch.num_heads, arch.num_kv_heads, arch.head_dim
        )
        inputs = PiConfig(
            "pi05",
            SiglipSpec(arch.image_size, arch.patch_size, siglip.width, siglip.depth, siglip.num_heads, siglip.mlp_dim),
            gemma,
            gemma,
            vocab_size,
            arch.max_action_dim,
            arch.action_horizon,
            arch.num_images,
            arch.max_prompt_tokens,
            discrete_state=True,
            padded_state_in_prompt=bool(arch.padded_state_in_prompt),
            dark_bars=bool(arch.dark_bars),
            normalization=BY_QUANTILES,
            antialias=arch.antialias is not False,
        )
        # Random tied weights would make the network repeat every token at first.
        return FastConfig(inputs, arch.max_action_tokens or TINY_TOKENS, skip_tokens=0, tied=False)

    @staticmethod
    def read(path: Path) -> FastConfig:
        """Read config.json in lerobot's or embodrl's layout.

        Raises ``CheckpointError`` if it is missing, another model's, invalid, or uses an unsupported feature.
        """
        if not path.is_file() and (path.parent / "params").is_dir():
            raise CheckpointError(
                f"{path.parent} is a checkpoint of openpi's JAX model, whose converter to PyTorch has no pi0-FAST",
                "use lerobot/pi0fast-base, which is openpi's pi0_fast_base, or a fine-tune of it",
                code="pi0-fast-jax",
            )
        fields = read_file(path)
        check_family(fields, (NAME,))
        if fields.text("type", "") != NAME:
            fields.refuse(f"it is not a pi0-FAST: type is {fields.content.get('type')!r}")
        if OWN_SECTION in fields:
            own = fields.fields(OWN_SECTION)
            config = FastConfig(from_embodrl(own.fields("inputs"), "pi05"), tied=own.flag("tied"))
            return _with_tokens(config, fields)
        inputs = replace(from_lerobot(fields, "pi05"), normalization=BY_DEVIATION)
        return _with_tokens(FastConfig(inputs), fields)

    def to_dict(self, action_dim: int, state_dim: int, precision: str, cameras: int) -> Mapping[str, object]:
        """Return config.json: lerobot's keys, and ``embodrl`` with the rest."""
        inputs = self.inputs
        pixels = inputs.siglip.image_size
        pictures = {
            f"observation.images.camera{number + 1}": {"type": "VISUAL", "shape": [3, pixels, pixels]}
            for number in range(cameras)
        }
        modes = {"VISUAL": "IDENTITY", "STATE": inputs.normalization.state, "ACTION": inputs.normalization.actions}
        return {
            "type": NAME,
            "n_obs_steps": 1,
            "chunk_size": inputs.action_horizon,
            "n_action_steps": inputs.action_horizon,
            "input_features": {**pictures, "observation.state": {"type": "STATE", "shape": [state_dim]}},
            "output_features": {"action": {"type": "ACTION", "shape": [action_dim]}},
            "normalization_mapping": {name: mode.upper() for name, mode in modes.items()},
            "paligemma_variant": variant_name(inputs.vlm),
            "dtype": precision,
            "max_state_dim": inputs.max_action_dim,
            "max_action_dim": inputs.max_action_dim,
            "max_action_tokens": self.max_action_tokens,
            "max_decoding_steps": self.max_action_tokens,
            "fast_skip_tokens": self.skip_tokens,
            "tokenizer_max_length": inputs.max_prompt_tokens,
            "text_tokenizer_name": self.text_tokenizer,
            "action_tokenizer_name": self.action_tokenizer,
            "image_resolution": [pixels, pixels],
            OWN_SECTION: {"inputs": asdict(inputs), "tied": self.tied},
        }


def _with_tokens(config: FastConfig, fields: Fields) -> FastConfig:
    return replace(
        config,
        max_action_tokens=fields.integer("max_decoding_steps", 256, low=1, high=MAX_TOKENS),
        skip_tokens=fields.integer("fast_skip_tokens", SEGMENTATION_TOKENS, low=0, high=MAX_TOKENS),
        text_tokenizer=fields.text("text_tokenizer_name", PALIGEMMA),
        action_tokenizer=fields.text("action_tokenizer_name", ACTION_TOKENIZER),
    )


PUBLIC_FAST = FastConfig(replace(PUBLIC["pi05"], antialias=False))
"""lerobot's pi0fast-base."""
