"""Files of a GR00T N1.7 checkpoint, completed by facts about the model that they name.

The public config.json describes the action head and names the vision-language model without its dimensions, which are
constants below: nvidia/Cosmos-Reason2-2B, a Qwen3-VL of 2B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

from embodrl.fields import Fields
from embodrl.models.common.config_file import (
    CONFIG_FILE,
    OWN_SECTION,
    check_multiple,
    fields_of,
    read_file,
    read_sizes,
    size,
)
from embodrl.models.common.norm_stats import StatsSets
from embodrl.models.gr00t.config import (
    ActionHeadSpec,
    QwenSpec,
    check_model_type,
    head_dict,
    head_spec,
    refuse,
    tiny_head,
    tiny_qwen,
)
from embodrl.models.gr00t.dit import TransformerSpec
from embodrl.models.gr00t.qwen3_vl import VisionSpec
from embodrl.models.gr00t.robots import NEW_EMBODIMENT
from embodrl.models.gr00t.sidecars import EMBODIMENT_IDS, Sidecars, identity_sidecars
from embodrl.models.gr00t.spec import Gr00tTiledSizes

CROP_FRACTION = 0.95
TEXT_EVERY = 2
PUBLIC_IMAGE_SIZE = 256
MIN_PIXELS = 256 * 256
"""Qwen's own image processor enlarges smaller images."""


QWEN3_VL_2B = QwenSpec(151936, 2048, 6144, 16, 16, 8, 128, max_position_embeddings=262144, rope_theta=5e6)
"""Qwen3-VL-2B's language model, with the layers that NVIDIA's GR00T-N1.7-3B keeps."""
QWEN3_VL_2B_VISION = VisionSpec(1024, 24, 16, 4096, 16, 2, 2304)
HEAD = ActionHeadSpec(
    TransformerSpec(32, 32, 48),
    TransformerSpec(4, 32, 64),
    backbone_dim=2048,
    hidden_size=1024,
    action_dim=132,
    max_state_dim=132,
    action_horizon=40,
    num_future_tokens=0,
    text_every=TEXT_EVERY,
)
"""Action head of NVIDIA's GR00T-N1.7-3B."""
REQUIRED: dict[str, object] = {
    **{"use_alternate_vl_dit": True, "state_history_length": 1, "strict_action_padding_mask": False},
    **{"use_tactile": False, "exclude_state": False, "reproject_vision": False},
}
"""Supported values of config.json."""


@dataclass(frozen=True)
class Gr00tN17Config:
    """A GR00T N1.7 model.

    Attributes:
        vision, qwen, head: parts of the model.
        sidecars: preparation of images, states and actions.
        lm_head: whether to keep Qwen's output layer, which a checkpoint may have but nothing runs.
        raw: config.json, so that saving preserves keys that embodrl does not use.
    """

    vision: VisionSpec
    qwen: QwenSpec
    head: ActionHeadSpec
    sidecars: Sidecars
    lm_head: bool = False
    raw: Mapping[str, object] = field(default_factory=dict[str, object])

    family: ClassVar[str] = "gr00t_n1_7"
    model_type: ClassVar[str] = "Gr00tN1d7"
    backbone: ClassVar[str] = "nvidia/Cosmos-Reason2-2B"
    backbone_type: ClassVar[str] = "qwen"
    public_vision: ClassVar[VisionSpec] = QWEN3_VL_2B_VISION
    public_qwen: ClassVar[QwenSpec] = QWEN3_VL_2B
    public_head: ClassVar[ActionHeadSpec] = HEAD

    @property
    def image_size(self) -> int:
        """Side of the model's square input in pixels."""
        return self.sidecars.images().side

    @property
    def tokens_per_image(self) -> int:
        """N."""
        return (self.image_size // (self.vision.patch_size * self.vision.merge_size)) ** 2

    @property
    def patches_per_image(self) -> int:
        """Patches that the vision transformer reads."""
        return (self.image_size // self.vision.patch_size) ** 2

    @property
    def embodiment_ids(self) -> Mapping[str, int]:
        """Robot name -> encoder index."""
        return self.sidecars.embodiment_ids

    @property
    def metadata(self) -> StatsSets:
        """Statistics by robot."""
        return self.sidecars.statistics

    def to_dict(self) -> dict[str, object]:
        """Return config.json: the public keys, and ``embodrl`` for everything else."""
        return {
            "model_name": self.backbone,
            "backbone_model_type": self.backbone_type,
            **self.raw,
            **head_dict(self.head, fields_of(self.raw, CONFIG_FILE)),
            "model_type": self.model_type,
            "architectures": [self.model_type],
            "select_layer": self.qwen.num_hidden_layers,
            "state_history_length": 1,
            "use_alternate_vl_dit": True,
            "attend_text_every_n_blocks": self.head.text_every,
            OWN_SECTION: {"vision": asdict(self.vision), "qwen": asdict(self.qwen)},
        }

    def files(self) -> dict[str, Mapping[str, object]]:
        """Return the contents of the files that accompany the weights, by name."""
        return {CONFIG_FILE: self.to_dict(), **self.sidecars.files()}

    @classmethod
    def from_dict(cls, raw: Mapping[str, object], sidecars: Sidecars, source: str = CONFIG_FILE) -> Self:
        """Read config.json; ``source`` is named in errors.

        Raises:
            CheckpointError: another model, an unsupported variant, or an invalid value.
        """
        fields = fields_of(raw, source)
        cls.reject_other_models(fields)
        head = head_spec(fields, "max_action_dim")
        text_every = size(fields, "text_every", TEXT_EVERY, key="attend_text_every_n_blocks")
        head = replace(head, num_future_tokens=0, text_every=text_every)
        own = fields.fields(OWN_SECTION, {})
        vision = cls.public_vision
        qwen = replace(cls.public_qwen, num_hidden_layers=size(fields, "num_layers", key="select_layer"))
        is_public = "qwen" not in own
        if is_public and fields.text("model_name", cls.backbone) != cls.backbone:
            refuse(source, "model_name", fields.content["model_name"], f"{cls.model_type} has {cls.backbone}")
        if not is_public:
            qwen = read_sizes(qwen, own.fields("qwen"), complete=True)
            check_multiple(own.fields("qwen"), "num_attention_heads", "num_key_value_heads")
            vision = read_sizes(vision, own.fields("vision"), complete=True)
            check_multiple(own.fields("vision"), "width", "num_heads")
        if head.backbone_dim != qwen.hidden_size:
            refuse(source, "backbone_embedding_dim", head.backbone_dim, f"the language model has {qwen.hidden_size}")
        config = cls(vision, qwen, head, sidecars, raw=raw)
        config.check_pictures(is_public)
        return config

    @classmethod
    def from_directory(cls, directory: Path, files: Path) -> Self:
        """Read config.json, and its sidecars from ``files`` (the adapters' own directory for adapters).

        Raises:
            CheckpointError: a file is missing, invalid, or another model's.
        """
        fields = read_file(directory / CONFIG_FILE)
        cls.reject_other_models(fields)
        return cls.from_dict(fields.content, Sidecars.read(files), fields.source)

    @classmethod
    def from_architecture(cls, arch: Gr00tTiledSizes, vocab_size: int, action_dim: int) -> Self:
        """Return the configuration of a model without a checkpoint."""
        vision = arch.vision
        return cls(
            VisionSpec(
                vision.width,
                vision.depth,
                vision.num_heads,
                vision.mlp_dim,
                arch.patch_size,
                arch.merge_size,
                (arch.image_size // arch.patch_size) ** 2,
            ),
            tiny_qwen(arch, vocab_size),
            tiny_head(arch, text_every=TEXT_EVERY),
            identity_sidecars(
                f"{cls.model_type}Processor",
                arch.image_size,
                CROP_FRACTION,
                action_dim,
                arch.action_horizon,
                arch.num_embodiments - 1,
            ),
        )

    @classmethod
    def public(cls, action_dim: int) -> Self:
        """Return NVIDIA's base model for a new robot with A-dimensional actions in [-1, 1]."""
        horizon = cls.public_head.action_horizon
        embodiment = EMBODIMENT_IDS[NEW_EMBODIMENT]
        sidecars = identity_sidecars(
            f"{cls.model_type}Processor", PUBLIC_IMAGE_SIZE, CROP_FRACTION, action_dim, horizon, embodiment
        )
        return cls(cls.public_vision, cls.public_qwen, cls.public_head, sidecars)

    def check_pictures(self, is_public: bool) -> None:
        """Refuse images that the reference would resize further, or that tiles do not fill."""
        side = self.image_size
        tile = self.vision.patch_size * self.vision.merge_size
        source = self.sidecars.processor.source
        if side % tile:
            refuse(source, "an image side of", side, f"it is a multiple of {tile} in {self.model_type}")
        if is_public and side**2 < MIN_PIXELS:
            refuse(source, "an image side of", side, "Qwen3-VL enlarges images below 256 pixels")

    @classmethod
    def reject_other_models(cls, fields: Fields) -> None:
        """Refuse config.json of another model or an unsupported variant."""
        check_model_type(fields, cls.family, cls.model_type)
        for name, wanted in REQUIRED.items():
            if (value := fields.content.get(name, wanted)) != wanted:
                refuse(fields.source, name, value, f"{cls.model_type} has {str(wanted).lower()}")
