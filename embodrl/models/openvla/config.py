"""config.json of an OpenVLA checkpoint, completed by dimensions that it leaves to library names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from embodrl.errors import CheckpointError
from embodrl.fields import Fields
from embodrl.models.common.config_file import (
    CONFIG_FILE,
    OWN_SECTION,
    UNKNOWN_FAMILY,
    check_family,
    check_multiple,
    fields_of,
    read_file,
    read_sizes,
    read_vit,
)
from embodrl.models.common.llama import LlamaSpec
from embodrl.models.common.norm_stats import stats_content, stats_sets
from embodrl.models.common.vit import VitSpec
from embodrl.models.openvla.spec import ArchitectureConfig

PAD_TO_MULTIPLE_OF = 64
LLAMA_PROMPT_END = 29871
STATISTICS_FILE = "dataset_statistics.json"

DINO_MEAN = (0.484375, 0.455078125, 0.40625)
DINO_STD = (0.228515625, 0.2236328125, 0.224609375)
SIGLIP_MEAN = (0.5, 0.5, 0.5)
SIGLIP_STD = (0.5, 0.5, 0.5)

KNOWN_VISION: dict[str, tuple[VitSpec, VitSpec]] = {
    "dinosiglip-vit-so-224px": (
        VitSpec(224, 14, 1024, 24, 16, 4096, num_registers=4, class_token=True, layer_scale=True),
        VitSpec(224, 14, 1152, 27, 16, 4304, attention_pool=True),
    )
}


LLAMA_2_7B = LlamaSpec(32064, 4096, 11008, 32, 32, 32)


@dataclass(frozen=True)
class OpenVLAConfig:
    """An OpenVLA model.

    Attributes:
        dino, siglip: vision transformers.
        llama: language model.
        pad_token_id: padding id; also the first id that is neither text nor action.
        n_action_bins: bins per action dimension; their ids are the last before ``action_vocab_size``.
        pad_to_multiple_of: unused ids at the end of the embedding.
        prompt_end_id: last id of a prompt (29871, a lone word boundary, with the Llama tokenizer).
        bos_id, eos_id: start and end of a sequence.
        norm_stats: statistics by dataset.
        raw: contents of the file, so that saving preserves keys that embodrl does not use.
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
    norm_stats: dict[str, Fields] = field(default_factory=dict[str, Fields])
    raw: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def action_vocab_size(self) -> int:
        """Number of text and action ids (32000 for the public model); bin k has the id ``action_vocab_size - k``."""
        return self.llama.vocab_size - self.pad_to_multiple_of

    @property
    def first_action_id(self) -> int:
        """Smallest action id (31744 for the public model)."""
        return self.action_vocab_size - self.n_action_bins

    @property
    def image_size(self) -> int:
        """Side of the square input image in pixels."""
        return self.dino.image_size

    @property
    def num_patches(self) -> int:
        """Image tokens in the language model's sequence."""
        return self.dino.num_patches

    def to_dict(self) -> dict[str, object]:
        """Return config.json: the public keys, and ``embodrl`` for everything else."""
        text = {**fields_of(self.raw, CONFIG_FILE).fields("text_config", {}).content, **asdict(self.llama)}
        return {
            **{k: v for k, v in self.raw.items() if k != OWN_SECTION},
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
            "norm_stats": stats_content(self.norm_stats),
            "text_config": {**text, "model_type": "llama", "pad_token_id": self.pad_token_id},
            OWN_SECTION: self.own_section(),
        }

    def own_section(self) -> dict[str, object]:
        """Return the section for everything that the public keys of config.json omit."""
        return {
            "dino": asdict(self.dino),
            "siglip": asdict(self.siglip),
            "prompt_end_id": self.prompt_end_id,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
        }

    @property
    def own(self) -> Fields:
        """embodrl's section of config.json; empty for a public checkpoint."""
        return fields_of(self.raw, CONFIG_FILE).fields(OWN_SECTION, {})

    @staticmethod
    def from_dict(
        raw: Mapping[str, object], vision: tuple[VitSpec, VitSpec] | None = None, source: str = CONFIG_FILE
    ) -> OpenVLAConfig:
        """Read config.json; ``vision`` replaces unknown DINOv2 and SigLIP dimensions, ``source`` is named in errors.

        Raises:
            CheckpointError: another family, an older OpenVLA (one vision tower, or letterboxed images), unknown towers,
                or an invalid value.
        """
        fields = fields_of(raw, source)
        _reject_other_models(fields)
        own = fields.fields(OWN_SECTION, {})
        text = fields.fields("text_config", {})
        llama = read_sizes(LLAMA_2_7B, text)
        sizes = fields_of(asdict(llama), text.source)
        check_multiple(sizes, "hidden_size", "num_attention_heads")
        check_multiple(sizes, "num_attention_heads", "num_key_value_heads")
        if llama.hidden_size // llama.num_attention_heads % 2:
            text.refuse("the head dimension 'hidden_size' / 'num_attention_heads' is odd")
        config = OpenVLAConfig(*(vision or _vision(fields)), llama, raw=raw)
        last_id = llama.vocab_size - 1
        config = replace(
            config,
            pad_token_id=fields.integer("pad_token_id", config.pad_token_id, high=last_id),
            pad_to_multiple_of=fields.integer("pad_to_multiple_of", config.pad_to_multiple_of, high=last_id),
            n_action_bins=fields.integer("n_action_bins", config.n_action_bins, low=2, high=last_id),
            prompt_end_id=own.integer("prompt_end_id", config.prompt_end_id, high=last_id),
            bos_id=own.integer("bos_id", config.bos_id, high=last_id),
            eos_id=own.integer("eos_id", config.eos_id, high=last_id),
            norm_stats=stats_sets(fields.fields("norm_stats", {})),
        )
        if config.first_action_id < 0:
            fields.refuse("'n_action_bins' and 'pad_to_multiple_of' do not fit in 'vocab_size' of text_config")
        return config

    @staticmethod
    def from_directory(directory: Path, fine_tuned: Path | None = None) -> OpenVLAConfig:
        """Read config.json and, from ``fine_tuned`` if given, a fine-tuned checkpoint's dataset_statistics.json.

        Raises:
            CheckpointError: config.json is missing, invalid, or another model's.
        """
        path = directory / CONFIG_FILE
        config = OpenVLAConfig.from_dict(read_file(path).content, source=str(path))
        statistics = (fine_tuned or directory) / STATISTICS_FILE
        if statistics.is_file():
            config = replace(config, norm_stats={**config.norm_stats, **stats_sets(read_file(statistics))})
        return config

    @staticmethod
    def from_architecture(
        arch: ArchitectureConfig, text_vocab_size: int, prompt_end_id: int, norm_stats: Mapping[str, object]
    ) -> OpenVLAConfig:
        """Return the configuration of a model without a checkpoint.

        The embedding holds the text ids, then 256 action ids, then 64 ids of which the first is padding: the public
        layout with another text vocabulary size.
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
        image = (arch.image_size, arch.patch_size)
        dino, siglip = ((part.width, part.depth, part.num_heads, part.mlp_dim) for part in (arch.dino, arch.siglip))
        return OpenVLAConfig(
            VitSpec(*image, *dino, num_registers=4, class_token=True, layer_scale=True),
            VitSpec(*image, *siglip, attention_pool=True),
            llama,
            pad_token_id=action_vocab,
            prompt_end_id=prompt_end_id,
            norm_stats=stats_sets(fields_of(norm_stats, "built-in statistics")),
        )


def _vision(fields: Fields) -> tuple[VitSpec, VitSpec]:
    own = fields.fields(OWN_SECTION, {})
    if "dino" not in own:
        backbone = fields.text("vision_backbone_id", "")
        if backbone not in KNOWN_VISION:
            raise CheckpointError(
                f"{fields.source}: unknown vision backbone '{backbone}'; known: {', '.join(KNOWN_VISION)}",
                "use a checkpoint of the fused DINOv2 + SigLIP model at 224 pixels",
                code="checkpoint-unsupported",
            )
        return KNOWN_VISION[backbone]
    dino, siglip = (read_vit(VitSpec(1, 1, 1, 1, 1, 1), own.fields(name)) for name in ("dino", "siglip"))
    if dino.image_size != siglip.image_size or dino.num_patches != siglip.num_patches:
        own.refuse("'dino' and 'siglip' differ in image size or number of patches")
    return dino, siglip


def _reject_other_models(fields: Fields) -> None:
    check_family(fields, ("openvla", "openvla_oft"))
    source = fields.source
    family = fields.content.get("model_type")
    if family != "openvla":
        raise CheckpointError(
            f"{source}: model_type is '{family}', not 'openvla'", UNKNOWN_FAMILY, code="checkpoint-family"
        )
    backbone = fields.text("vision_backbone_id", "dinosiglip")
    if not fields.flag("use_fused_vision_backbone", True) or "dinosiglip" not in backbone:
        raise CheckpointError(
            f"{source}: older OpenVLA with a single vision tower '{backbone}' is not supported",
            "use a checkpoint with the fused DINOv2 + SigLIP backbone (openvla-7b or a fine-tune of it)",
            code="checkpoint-unsupported",
        )
    strategy = fields.text("image_resize_strategy", "resize-naive")
    if strategy != "resize-naive":
        raise CheckpointError(
            f"{source}: image_resize_strategy '{strategy}' is not supported (older OpenVLA checkpoints letterbox)",
            "use a checkpoint trained with resize-naive",
            code="checkpoint-unsupported",
        )
    projector = fields.text("arch_specifier", "no-align+fused-gelu-mlp")
    if projector != "no-align+fused-gelu-mlp":
        raise CheckpointError(
            f"{source}: arch_specifier '{projector}' is not supported",
            "use no-align+fused-gelu-mlp",
            code="checkpoint-unsupported",
        )


PUBLIC = OpenVLAConfig(*KNOWN_VISION["dinosiglip-vit-so-224px"], LLAMA_2_7B)
"""openvla-7b."""
