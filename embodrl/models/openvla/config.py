"""What config.json of an OpenVLA checkpoint says, plus the dimensions that it leaves to library names."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from embodrl.errors import CheckpointError
from embodrl.models.common.checkpoint import read_json
from embodrl.models.common.family import OPENVLA_FAMILIES, check_family
from embodrl.models.common.vit import VitSpec
from embodrl.models.openvla.spec import ArchitectureConfig, VitConfig

PAD_TO_MULTIPLE_OF = 64
LLAMA_PROMPT_END = 29871

DINO_MEAN, DINO_STD = (0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375)
SIGLIP_MEAN, SIGLIP_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

KNOWN_VISION: dict[str, tuple[VitSpec, VitSpec]] = {
    "dinosiglip-vit-so-224px": (
        VitSpec(224, 14, 1024, 24, 16, 4096, num_registers=4, class_token=True, layer_scale=True),
        VitSpec(224, 14, 1152, 27, 16, 4304, attention_pool=True),
    )
}

_LLAMA_2_7B = {
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


@dataclass(frozen=True)
class LlamaSpec:
    """Dimensions of the language model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class OpenVLAConfig:
    """An OpenVLA model.

    Attributes:
        dino, siglip: the two vision transformers.
        llama: the language model.
        pad_token_id: id of padding; also the first id that is neither text nor action.
        n_action_bins: bins of an action dimension; their ids are the last ones before ``action_vocab_size``.
        pad_to_multiple_of: ids at the end of the embedding that no token uses.
        prompt_end_id: the id that a prompt ends with (29871, a lone word boundary, with the Llama tokenizer).
        bos_id, eos_id: ends of a sequence.
        norm_stats: statistics by data set, as in config.json.
        raw: the file's contents, so that saving keeps the keys that embodrl does not use.
    """

    dino: VitSpec
    siglip: VitSpec
    llama: LlamaSpec
    pad_token_id: int = 32000
    n_action_bins: int = 256
    pad_to_multiple_of: int = PAD_TO_MULTIPLE_OF
    prompt_end_id: int = LLAMA_PROMPT_END
    bos_id: int = 1
    eos_id: int = 2
    norm_stats: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def action_vocab_size(self) -> int:
        """Text and action ids together (32000 for the public model); bin k has the id ``action_vocab_size - k``."""
        return self.llama.vocab_size - self.pad_to_multiple_of

    @property
    def first_action_id(self) -> int:
        """The smallest action id (31744 for the public model)."""
        return self.action_vocab_size - self.n_action_bins

    @property
    def image_size(self) -> int:
        """Side of the square input image in pixels."""
        return self.dino.image_size

    @property
    def num_patches(self) -> int:
        """Image tokens in the language model's sequence."""
        return self.dino.num_patches

    def to_dict(self) -> dict[str, Any]:
        """Return config.json: the public keys, and ``embodrl`` with what those leave open."""
        text = {**self.raw.get("text_config", {}), **asdict(self.llama), "model_type": "llama"}
        text["pad_token_id"] = self.pad_token_id
        public = {
            **{k: v for k, v in self.raw.items() if k != "embodrl"},
            "model_type": "openvla",
            "arch_specifier": "no-align+fused-gelu-mlp",
            "llm_backbone_id": self.raw.get("llm_backbone_id", "llama2-7b-pure"),
            "vision_backbone_id": self.raw.get("vision_backbone_id", "dinosiglip-vit-so-224px"),
            "use_fused_vision_backbone": True,
            "image_resize_strategy": "resize-naive",
            "image_sizes": [self.dino.image_size, self.siglip.image_size],
            "n_action_bins": self.n_action_bins,
            "pad_token_id": self.pad_token_id,
            "pad_to_multiple_of": self.pad_to_multiple_of,
            "norm_stats": self.norm_stats,
            "text_config": text,
        }
        extra = {
            "dino": asdict(self.dino),
            "siglip": asdict(self.siglip),
            "prompt_end_id": self.prompt_end_id,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
        }
        return {**public, "embodrl": extra}

    @staticmethod
    def from_dict(
        raw: dict[str, Any], vision: tuple[VitSpec, VitSpec] | None = None, source: str = "config.json"
    ) -> OpenVLAConfig:
        """Read config.json.

        Args:
            raw: the parsed file.
            vision: dimensions of DINOv2 and SigLIP, if the file does not name known ones.
            source: named in errors.

        Raises:
            CheckpointError: another family, an older OpenVLA (one vision tower, or letterboxed images) or unknown
                towers.
        """
        _reject_other_families(raw, source)
        extra = raw.get("embodrl", {})
        if vision is None and "dino" in extra:
            vision = (VitSpec(**extra["dino"]), VitSpec(**extra["siglip"]))
        backbone = raw.get("vision_backbone_id", "")
        if vision is None and backbone not in KNOWN_VISION:
            raise CheckpointError(
                f"{source}: unknown vision backbone '{backbone}'; known: {', '.join(KNOWN_VISION)}",
                "use a checkpoint of the fused DINOv2 + SigLIP model at 224 pixels",
            )
        dino, siglip = vision if vision is not None else KNOWN_VISION[backbone]
        text = {**_LLAMA_2_7B, **raw.get("text_config", {})}
        llama = LlamaSpec(**{name: text[name] for name in LlamaSpec.__dataclass_fields__})
        ids = {name: extra[name] for name in ("prompt_end_id", "bos_id", "eos_id") if name in extra}
        return OpenVLAConfig(
            dino,
            siglip,
            llama,
            pad_token_id=raw.get("pad_token_id", 32000),
            n_action_bins=raw.get("n_action_bins", 256),
            pad_to_multiple_of=raw.get("pad_to_multiple_of", PAD_TO_MULTIPLE_OF),
            norm_stats=raw.get("norm_stats") or {},
            raw=raw,
            **ids,
        )

    @staticmethod
    def from_directory(directory: Path) -> OpenVLAConfig:
        """Read config.json and, if there is one, dataset_statistics.json of a fine-tuned checkpoint.

        Raises:
            CheckpointError: config.json is missing, not JSON, or of another model.
        """
        config = OpenVLAConfig.from_dict(read_json(directory / "config.json"), source=str(directory / "config.json"))
        statistics = directory / "dataset_statistics.json"
        if statistics.is_file():
            config = replace(config, norm_stats={**config.norm_stats, **read_json(statistics)})
        return config

    @staticmethod
    def from_architecture(
        arch: ArchitectureConfig, text_vocab_size: int, prompt_end_id: int, norm_stats: dict[str, Any]
    ) -> OpenVLAConfig:
        """Return the configuration of a model built without a checkpoint.

        The embedding holds the text ids, then 256 action ids, then 64 ids of which the first is padding: the public
        layout with another size of text vocabulary.
        """
        action_vocab = text_vocab_size + 256
        llama = LlamaSpec(
            vocab_size=action_vocab + PAD_TO_MULTIPLE_OF,
            hidden_size=arch.hidden_size,
            intermediate_size=arch.intermediate_size,
            num_hidden_layers=arch.num_hidden_layers,
            num_attention_heads=arch.num_attention_heads,
            num_key_value_heads=arch.num_attention_heads,
        )

        def vit(part: VitConfig, **traits: Any) -> VitSpec:
            return VitSpec(
                arch.image_size, arch.patch_size, part.width, part.depth, part.num_heads, part.mlp_dim, **traits
            )

        return OpenVLAConfig(
            vit(arch.dino, num_registers=4, class_token=True, layer_scale=True),
            vit(arch.siglip, attention_pool=True),
            llama,
            pad_token_id=action_vocab,
            prompt_end_id=prompt_end_id,
            norm_stats=norm_stats,
        )


def _reject_other_families(raw: dict[str, Any], source: str) -> None:
    check_family(raw, OPENVLA_FAMILIES, source)
    family = raw.get("model_type")
    if family != "openvla":
        raise CheckpointError(
            f"{source}: model_type is '{family}', not 'openvla'", "choose the matching model.model_type"
        )
    if not raw.get("use_fused_vision_backbone", True) or "dinosiglip" not in raw.get(
        "vision_backbone_id", "dinosiglip"
    ):
        raise CheckpointError(
            f"{source}: older OpenVLA with the one vision tower '{raw.get('vision_backbone_id')}' is not supported",
            "use a checkpoint with the fused DINOv2 + SigLIP backbone (openvla-7b or a fine-tune of it)",
        )
    strategy = raw.get("image_resize_strategy", "resize-naive")
    if strategy != "resize-naive":
        raise CheckpointError(
            f"{source}: image_resize_strategy '{strategy}' is not supported (older OpenVLA checkpoints letterbox)",
            "use a checkpoint trained with resize-naive",
        )
    projector = raw.get("arch_specifier", "no-align+fused-gelu-mlp")
    if projector != "no-align+fused-gelu-mlp":
        raise CheckpointError(f"{source}: arch_specifier '{projector}' is not supported", "use no-align+fused-gelu-mlp")
