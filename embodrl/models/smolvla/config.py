"""Dimensions of SmolVLA, and its config.json in lerobot's layout.

lerobot's file names the vision-language model by its hub id without dimensions, so those of the published ones are
defined here. A policy written by embodrl has everything under the key ``embodrl``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from embodrl.fields import Fields
from embodrl.models.common.config_file import (
    OWN_SECTION,
    check_family,
    check_multiple,
    fields_of,
    read_file,
    read_sizes,
    read_vit,
    size,
)
from embodrl.models.common.patches import SiglipSpec
from embodrl.models.flow.gemma import GemmaSpec
from embodrl.models.smolvla.spec import SmolVlaArchitectureConfig


@dataclass(frozen=True)
class VlmSpec:
    """A published SmolVLM2: vision, language (all layers), patches merged per side, embedding rows."""

    siglip: SiglipSpec
    language: GemmaSpec
    scale_factor: int
    vocab_size: int


_SIGLIP_512 = SiglipSpec(512, 16, 768, 12, 12, 3072)
KNOWN_VLMS = {
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": VlmSpec(_SIGLIP_512, GemmaSpec(960, 32, 2560, 15, 5, 64), 4, 49280),
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": VlmSpec(_SIGLIP_512, GemmaSpec(576, 30, 1536, 9, 3, 64), 4, 49280),
}
DEFAULT_VLM = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"


@dataclass(frozen=True)
class SmolVlaConfig:
    """A SmolVLA.

    Attributes:
        siglip: vision transformer.
        vlm: language model, cut to the used layers.
        expert: action expert.
        scale_factor: patches along each side of a token.
        vocab_size: embedding rows.
        self_attention_every: actions see each other in every n-th layer of the VLM; 0: in none.
        cross_attention: False if all layers are self-attention.
        expert_every: every n-th layer of the VLM has a layer of the expert.
        max_state_dim: padded size of states.
        max_action_dim: padded size of actions (D).
        action_horizon: number of predicted actions (H).
        max_prompt_tokens: padded length of prompts (L).
        num_steps: denoising steps in the checkpoint.
        vlm_name: hub id of the VLM, whose tokenizer is needed.
        cameras: image names in order; () if unknown.
    """

    siglip: SiglipSpec
    vlm: GemmaSpec
    expert: GemmaSpec
    scale_factor: int
    vocab_size: int
    self_attention_every: int = 2
    cross_attention: bool = True
    expert_every: int = 1
    max_state_dim: int = 32
    max_action_dim: int = 32
    action_horizon: int = 50
    max_prompt_tokens: int = 48
    num_steps: int = 10
    vlm_name: str = DEFAULT_VLM
    cameras: tuple[str, ...] = ()

    @property
    def tokens_per_image(self) -> int:
        """N."""
        return self.siglip.num_patches // self.scale_factor**2

    def is_cross(self, place: int) -> bool:
        """Return whether the expert's layer at this VLM layer attends only to the VLM."""
        every = self.self_attention_every
        return self.cross_attention and not (every > 0 and place % every == 0)

    @staticmethod
    def from_architecture(shape: SmolVlaArchitectureConfig, vocab_size: int) -> SmolVlaConfig:
        """Return the tiny size of a section ``model.smolvla``."""
        vision = shape.siglip
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        return SmolVlaConfig(
            SiglipSpec(
                shape.image_size, shape.patch_size, vision.width, vision.depth, vision.num_heads, vision.mlp_dim
            ),
            GemmaSpec(shape.vlm_width, shape.depth, shape.vlm_mlp_dim, *heads),
            GemmaSpec(shape.expert_width, shape.depth, shape.expert_mlp_dim, *heads),
            shape.scale_factor,
            max(vocab_size, shape.vocab_size or 0),
            max_state_dim=shape.max_action_dim,
            max_action_dim=shape.max_action_dim,
            action_horizon=shape.action_horizon,
            max_prompt_tokens=shape.max_prompt_tokens,
        )

    def to_dict(self) -> dict[str, object]:
        """Return embodrl's section of config.json."""
        return {**asdict(self), "cameras": list(self.cameras)}

    @staticmethod
    def read(path: Path) -> SmolVlaConfig:
        """Read config.json in lerobot's or embodrl's layout.

        Raises ``CheckpointError`` if it is another model's, invalid, or uses an unsupported feature.
        """
        raw = read_file(path)
        check_family(raw, ("smolvla",))
        if raw.text("type", "") != "smolvla":
            raw.refuse(f"it is not a SmolVLA: type is {raw.content.get('type')!r}")
        return _own(raw.fields(OWN_SECTION)) if OWN_SECTION in raw else _lerobot(raw)


def expert_mlp_dim(width: int) -> int:
    """Return the expert's hidden units: 8/3 of its width, rounded up to a multiple of 256."""
    return 256 * -(-int(4 * int(2 * width / 3)) // 256)


def _lerobot(raw: Fields) -> SmolVlaConfig:
    name = raw.text("vlm_model_name", DEFAULT_VLM)
    if name not in KNOWN_VLMS:
        raw.refuse(f"the dimensions of vlm_model_name '{name}' are not known; known: {', '.join(KNOWN_VLMS)}")
    if raw.flag("adapt_to_pi_aloha", False) or raw.flag("use_delta_joint_actions_aloha", False):
        raw.refuse("adapt_to_pi_aloha and use_delta_joint_actions_aloha (joints of ALOHA) are not supported")
    if raw.flag("add_image_special_tokens", False):
        raw.refuse("add_image_special_tokens is not supported")
    known = KNOWN_VLMS[name]
    depth = raw.integer("num_vlm_layers", 16, low=-1, high=known.language.depth)
    vlm = replace(known.language, depth=depth if depth > 0 else known.language.depth)
    layers = raw.integer("num_expert_layers", -1, low=-1, high=vlm.depth)
    layers = layers if layers > 0 else vlm.depth
    if vlm.depth % layers:
        raw.refuse(f"num_expert_layers {layers} does not divide the {vlm.depth} layers of the VLM")
    width = int(vlm.width * raw.number("expert_width_multiplier", 0.75, low=0.05, high=4.0))
    mode = raw.text("attention_mode", "cross_attn")
    return SmolVlaConfig(
        _image_size(raw, known.siglip),
        vlm,
        replace(vlm, width=width, depth=layers, mlp_dim=expert_mlp_dim(width)),
        known.scale_factor,
        known.vocab_size,
        self_attention_every=max(raw.integer("self_attn_every_n_layers", 2, low=-1, high=vlm.depth), 0),
        cross_attention="cross" in mode,
        expert_every=vlm.depth // layers,
        max_state_dim=size(raw, "max_state_dim", 32),
        max_action_dim=size(raw, "max_action_dim", 32),
        action_horizon=size(raw, "action_horizon", 50, key="chunk_size"),
        max_prompt_tokens=size(raw, "max_prompt_tokens", 48, key="tokenizer_max_length"),
        num_steps=raw.integer("num_steps", 10, low=1, high=1000),
        vlm_name=name,
        cameras=_cameras(raw),
    )


def _image_size(raw: Fields, siglip: SiglipSpec) -> SiglipSpec:
    size = raw.content.get("resize_imgs_with_padding", [512, 512])
    if size != [siglip.image_size, siglip.image_size]:
        raw.refuse(f"resize_imgs_with_padding {size} is not supported, only {siglip.image_size} x {siglip.image_size}")
    return siglip


def _cameras(raw: Fields) -> tuple[str, ...]:
    features = raw.content.get("input_features")
    if not isinstance(features, Mapping):
        return ()
    inputs = raw.fields("input_features")
    return tuple(name for name in inputs if inputs.fields(name).text("type", "") == "VISUAL")


def _own(raw: Fields) -> SmolVlaConfig:
    public = KNOWN_VLMS[DEFAULT_VLM]
    language = public.language
    known = SmolVlaConfig(public.siglip, language, language, public.scale_factor, public.vocab_size)
    config = read_sizes(known, raw, complete=True)
    read_vit(known.siglip, raw.fields("siglip"))
    check_multiple(raw.fields("vlm"), "num_heads", "num_kv_heads")
    if config.vlm.head_dim % 2 or config.expert.width % 2 or config.siglip.grid % config.scale_factor:
        raw.refuse("'head_dim' or the width of 'expert' is odd, or 'scale_factor' does not divide the rows of patches")
    vlm = config.vlm
    expert = config.expert
    same = replace(expert, width=vlm.width, mlp_dim=vlm.mlp_dim, depth=vlm.depth) == vlm
    if not same or expert.depth * config.expert_every != vlm.depth:
        raw.refuse("'vlm' and 'expert' differ in heads, or 'expert_every' is not the ratio of their depths")
    return replace(config, vlm_name=raw.text("vlm_name"), cameras=tuple(raw.texts("cameras")))


PUBLIC = _lerobot(fields_of({}, "smolvla_base"))
"""lerobot's smolvla_base."""
