"""config.json of a GR00T N1.5 checkpoint, completed by facts from the training code.

The public config.json describes the action head and names the vision-language model ("Eagle 2.5") without its
dimensions. Those, the connector ("1mlp_nops": one linear layer, no pixel shuffle) and the embodiment ids are constants
below. They follow public descriptions of the checkpoint; its weights were not available, but with these constants the
model has the 2,724,163,520 parameters that users of the checkpoint report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

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
    size,
)
from embodrl.models.common.norm_stats import stats_content, stats_sets
from embodrl.models.common.patches import SO400M_224, SiglipSpec
from embodrl.models.gr00t.dit import TransformerSpec
from embodrl.models.gr00t.robots import NEW_EMBODIMENT, Keys
from embodrl.models.gr00t.spec import Gr00tArchitectureConfig, Gr00tFeatureBlocks, Gr00tSizes

MODEL_TYPE = "gr00t_n1_5"
EAGLE_PATH = "NVEagle/eagle_er-qwen3_1_7B-Siglip2_400M_stage1_5_128gpu_er_v7_1mlp_nops"
METADATA_FILE = Path("experiment_cfg") / "metadata.json"
EMBODIMENT_IDS = {
    **{NEW_EMBODIMENT: 31, "oxe_droid": 17, "agibot_genie1": 26, "genie1_gripper": 26, "gr1": 24},
    **{"libero_franka": 31, "maniskill_widowx": 30, "isaaclab_franka": 31},
}
"""Robots of NVIDIA's N1.5 and of RLinf."""
SYSTEM_PROMPT = "You are a helpful assistant."
NO_TRANSFORMER = TransformerSpec(0, 0, 0)


@dataclass(frozen=True)
class QwenSpec:
    """Dimensions of the language model; ``num_hidden_layers`` counts the kept layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6


def qwen3_1_7b(num_layers: int) -> QwenSpec:
    """Return the first layers of Qwen3-1.7B with the vocabulary of Eagle 2.5."""
    return QwenSpec(151680, 2048, 6144, num_layers, 16, 8, 128)


@dataclass(frozen=True)
class ActionHeadSpec:
    """Dimensions of the action head.

    Attributes:
        dit: diffusion transformer.
        vl: self-attention over image and prompt features; absent if it has no layers.
        backbone_dim: width of those features.
        hidden_size: output width of the diffusion transformer, and hidden units of state encoder and decoder.
        action_dim, max_state_dim: padded dimensions.
        action_horizon: H.
        num_embodiments: robots with their own encoders and decoders.
        num_future_tokens: learned tokens between state and actions (N1.5).
        max_seq_len: rows of the position embedding; the first H are used.
        num_timestep_buckets: maximum of the integer times.
        noise_beta_alpha, noise_beta_beta, noise_s: distribution of training times.
        text_every: every n-th cross-attention reads the prompt, the others read images; None: all read both.
    """

    dit: TransformerSpec
    vl: TransformerSpec
    backbone_dim: int
    hidden_size: int
    action_dim: int
    max_state_dim: int
    action_horizon: int
    num_embodiments: int = 32
    num_future_tokens: int = 32
    max_seq_len: int = 1024
    num_timestep_buckets: int = 1000
    noise_beta_alpha: float = 1.5
    noise_beta_beta: float = 1.0
    noise_s: float = 0.999
    text_every: int | None = None


@dataclass(frozen=True)
class Gr00tConfig:
    """A GR00T N1.5 model.

    Attributes:
        siglip, qwen, head: parts of the model.
        system_prompt: start of the chat; empty for none.
        embodiment_ids: robot name -> encoder index.
        lm_head, pooling_head: whether to keep Qwen's output layer and SigLIP's pooling head, which the public
            checkpoint has but nothing runs.
        metadata: statistics by robot, from experiment_cfg/metadata.json.
        raw: config.json, so that saving preserves keys that embodrl does not use.
        keys: state and action keys by robot, for policies trained by embodrl.
    """

    siglip: SiglipSpec
    qwen: QwenSpec
    head: ActionHeadSpec
    system_prompt: str = SYSTEM_PROMPT
    embodiment_ids: dict[str, int] = field(default_factory=lambda: dict(EMBODIMENT_IDS))
    lm_head: bool = False
    pooling_head: bool = False
    metadata: dict[str, Fields] = field(default_factory=dict[str, Fields])
    raw: Mapping[str, object] = field(default_factory=dict[str, object])
    keys: Mapping[str, Keys] = field(default_factory=dict[str, Keys])

    @property
    def tokens_per_image(self) -> int:
        """N."""
        return self.siglip.num_patches

    @property
    def patches_per_image(self) -> int:
        """Patches that the vision transformer reads."""
        return self.siglip.num_patches

    def files(self) -> dict[str, Mapping[str, object]]:
        """Return the contents of the files that accompany the weights, by name."""
        return {CONFIG_FILE: self.to_dict(), str(METADATA_FILE): stats_content(self.metadata)}

    def public(self, action_dim: int) -> Gr00tConfig:
        """Return NVIDIA's sizes with this robot's statistics, which have the action's dimensions."""
        return replace(PUBLIC, metadata=self.metadata, keys=self.keys)

    def to_dict(self) -> dict[str, object]:
        """Return config.json: the public keys, and ``embodrl`` for everything else."""
        head = self.head
        raw = fields_of(self.raw, CONFIG_FILE)
        raw_head = raw.fields("action_head_cfg", {})
        action_head = {
            **raw_head.content,
            **head_dict(head, raw_head, cross_attention_dim=head.backbone_dim),
            "action_dim": head.action_dim,
            "num_target_vision_tokens": head.num_future_tokens,
        }
        return {
            **self.raw,
            "model_type": MODEL_TYPE,
            "architectures": ["GR00T_N1_5"],
            "action_dim": head.action_dim,
            "action_horizon": head.action_horizon,
            "hidden_size": head.backbone_dim,
            "action_head_cfg": action_head,
            "backbone_cfg": {
                "eagle_path": EAGLE_PATH,
                "project_to_dim": None,
                "reproject_vision": False,
                **raw.fields("backbone_cfg", {}).content,
                "select_layer": self.qwen.num_hidden_layers,
            },
            OWN_SECTION: {
                "siglip": asdict(self.siglip),
                "qwen": asdict(self.qwen),
                "system_prompt": self.system_prompt,
                "embodiment_ids": self.embodiment_ids,
                "keys": {
                    robot: {kind: list(names) for kind, names in asdict(keys).items() if names is not None}
                    for robot, keys in self.keys.items()
                },
            },
        }

    @staticmethod
    def from_dict(raw: Mapping[str, object], metadata: Mapping[str, Fields], source: str = CONFIG_FILE) -> Gr00tConfig:
        """Read config.json and the statistics by robot (``metadata``); ``source`` is named in errors.

        Raises:
            CheckpointError: another model or GR00T version, an unsupported variant, or an invalid value.
        """
        fields = fields_of(raw, source)
        _reject_other_models(fields)
        head = head_spec(fields.fields("action_head_cfg"))
        if not head.vl.num_layers:
            fields.refuse("'action_head_cfg.vl_self_attention_cfg' is missing")
        own = fields.fields(OWN_SECTION, {})
        qwen = qwen3_1_7b(size(fields.fields("backbone_cfg"), "num_layers", key="select_layer"))
        siglip = SO400M_224
        is_public = "qwen" not in own
        if not is_public:
            qwen = read_sizes(qwen, own.fields("qwen"), complete=True)
            check_multiple(own.fields("qwen"), "num_attention_heads", "num_key_value_heads")
            siglip = read_vit(siglip, own.fields("siglip"))
        if head.backbone_dim != qwen.hidden_size:
            refuse(source, "backbone_embedding_dim", head.backbone_dim, f"it is {qwen.hidden_size} in GR00T N1.5")
        ids = own.fields("embodiment_ids", EMBODIMENT_IDS)
        return Gr00tConfig(
            siglip,
            qwen,
            head,
            own.text("system_prompt", SYSTEM_PROMPT),
            {name: ids.integer(name, high=head.num_embodiments * 64) for name in ids},
            lm_head=is_public,
            pooling_head=is_public,
            metadata=dict(metadata),
            raw=raw,
            keys=_keys(own.fields("keys", {})),
        )

    @staticmethod
    def from_directory(directory: Path, fine_tuned: Path | None = None) -> Gr00tConfig:
        """Read config.json and, from ``fine_tuned`` if given, experiment_cfg/metadata.json.

        Raises:
            CheckpointError: a file is missing, invalid, or another model's.
        """
        fields = read_file(directory / CONFIG_FILE)
        _reject_other_models(fields)
        metadata = stats_sets(read_file((fine_tuned or directory) / METADATA_FILE))
        return Gr00tConfig.from_dict(fields.content, metadata, fields.source)

    @staticmethod
    def from_architecture(
        arch: Gr00tArchitectureConfig, vocab_size: int, metadata: Mapping[str, object]
    ) -> Gr00tConfig:
        """Return the configuration of a model without a checkpoint; its chat has no system message."""
        siglip = arch.siglip
        return Gr00tConfig(
            SiglipSpec(arch.image_size, arch.patch_size, siglip.width, siglip.depth, siglip.num_heads, siglip.mlp_dim),
            tiny_qwen(arch, max(vocab_size, arch.vocab_size or 0)),
            tiny_head(arch, num_future_tokens=arch.num_future_tokens),
            system_prompt="",
            embodiment_ids={NEW_EMBODIMENT: arch.num_embodiments - 1},
            lm_head=arch.unused_layers,
            pooling_head=arch.unused_layers,
            metadata=stats_sets(fields_of(metadata, "built-in statistics")),
        )


def _keys(robots: Fields) -> dict[str, Keys]:
    found: dict[str, Keys] = {}
    for robot in robots:
        kinds = robots.fields(robot)
        state, action = (tuple(kinds.texts(kind)) if kind in kinds else None for kind in ("state", "action"))
        found[robot] = Keys(state, action)
    return found


def tiny_qwen(arch: Gr00tSizes, vocab_size: int) -> QwenSpec:
    """Return the language model's dimensions for a model without a checkpoint."""
    return QwenSpec(
        vocab_size,
        arch.hidden_size,
        arch.intermediate_size,
        arch.num_hidden_layers,
        arch.num_attention_heads,
        arch.num_key_value_heads,
        arch.head_dim,
        max_position_embeddings=4096,
        rope_theta=10000.0,
    )


def tiny_head(arch: Gr00tSizes, num_future_tokens: int = 0, text_every: int | None = None) -> ActionHeadSpec:
    """Return the action head's dimensions for a model without a checkpoint; see ``ActionHeadSpec``."""
    vl = NO_TRANSFORMER
    if isinstance(arch, Gr00tFeatureBlocks):
        vl = TransformerSpec(arch.vl_num_layers, arch.vl_num_heads, arch.vl_head_dim)
    return ActionHeadSpec(
        TransformerSpec(arch.dit_num_layers, arch.dit_num_heads, arch.dit_head_dim),
        vl,
        arch.hidden_size,
        arch.dit_output_dim,
        arch.max_action_dim,
        arch.max_state_dim,
        arch.action_horizon,
        num_embodiments=arch.num_embodiments,
        num_future_tokens=num_future_tokens,
        max_seq_len=arch.action_horizon,
        text_every=text_every,
    )


def transformer_dict(spec: TransformerSpec) -> dict[str, int]:
    """Return a transformer's dimensions under their config.json names."""
    return {
        "num_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "attention_head_dim": spec.head_dim,
    }


def transformer_spec(fields: Fields) -> TransformerSpec:
    """Return a transformer's dimensions; raise ``CheckpointError`` if it has positions or a dimension is invalid."""
    if fields.content.get("positional_embeddings") is not None:
        refuse(fields.source, "positional_embeddings", fields.content["positional_embeddings"], "GR00T has null")
    return TransformerSpec(*(size(fields, name) for name in transformer_dict(NO_TRANSFORMER)))


def head_dict(head: ActionHeadSpec, raw: Fields, **of_dit: int) -> dict[str, object]:
    """Return an action head's config.json section, with the names of all versions; inverse of ``head_spec``.

    Dropout and the number of denoising steps are preserved from ``raw``; ``of_dit`` extends ``diffusion_model_cfg``.
    """

    def transformer(name: str, spec: TransformerSpec) -> dict[str, object]:
        defaults = {"dropout": 0.2, "final_dropout": True, "positional_embeddings": None}
        return {**defaults, **raw.fields(name, {}).content, **transformer_dict(spec)}

    content: dict[str, object] = {
        "action_horizon": head.action_horizon,
        "add_pos_embed": True,
        "backbone_embedding_dim": head.backbone_dim,
        "diffusion_model_cfg": {
            **transformer("diffusion_model_cfg", head.dit),
            **of_dit,
            "interleave_self_attention": True,
            "norm_type": "ada_norm",
            "output_dim": head.hidden_size,
        },
        "hidden_size": head.hidden_size,
        "input_embedding_dim": head.dit.width,
        "max_action_dim": head.action_dim,
        "max_num_embodiments": head.num_embodiments,
        "max_seq_len": head.max_seq_len,
        "max_state_dim": head.max_state_dim,
        "noise_beta_alpha": head.noise_beta_alpha,
        "noise_beta_beta": head.noise_beta_beta,
        "noise_s": head.noise_s,
        "num_inference_timesteps": raw.content.get("num_inference_timesteps", 4),
        "num_timestep_buckets": head.num_timestep_buckets,
        "use_vlln": True,
    }
    if head.vl.num_layers:
        content["vl_self_attention_cfg"] = transformer("vl_self_attention_cfg", head.vl)
    return content


def head_spec(head: Fields, action_dim: str = "action_dim") -> ActionHeadSpec:
    """Return the dimensions of an action head's config.json section, with the names of all versions.

    ``action_dim`` is the key of the padded action dimensions. Raises ``CheckpointError`` for invalid values.
    """
    model = head.fields("diffusion_model_cfg")
    for holder, name, wanted in (
        (model, "interleave_self_attention", True),
        (model, "norm_type", "ada_norm"),
        (head, "add_pos_embed", True),
        (head, "use_vlln", True),
    ):
        if holder.content.get(name, wanted) != wanted:
            refuse(holder.source, name, holder.content[name], f"GR00T has {wanted}")
    dit = transformer_spec(model)
    hidden_size = size(head, "hidden_size", 1024)
    for holder, name, wanted in ((head, "input_embedding_dim", dit.width), (model, "output_dim", hidden_size)):
        if (found := size(holder, name, wanted)) != wanted:
            refuse(holder.source, name, found, f"the other dimensions require {wanted}")
    vl = head.fields("vl_self_attention_cfg", {})
    spec = ActionHeadSpec(
        dit,
        transformer_spec(vl) if vl.content else NO_TRANSFORMER,
        size(head, "backbone_embedding_dim"),
        hidden_size,
        size(head, "action_dim", key=action_dim),
        size(head, "max_state_dim"),
        size(head, "action_horizon"),
    )
    spec = replace(
        spec,
        num_embodiments=size(head, "num_embodiments", spec.num_embodiments, key="max_num_embodiments"),
        num_future_tokens=size(head, "num_future_tokens", spec.num_future_tokens, key="num_target_vision_tokens"),
        max_seq_len=size(head, "max_seq_len", spec.max_seq_len),
        num_timestep_buckets=size(head, "num_timestep_buckets", spec.num_timestep_buckets),
        noise_beta_alpha=head.number("noise_beta_alpha", spec.noise_beta_alpha, low=1e-3, high=1e3),
        noise_beta_beta=head.number("noise_beta_beta", spec.noise_beta_beta, low=1e-3, high=1e3),
        noise_s=head.number("noise_s", spec.noise_s, low=1e-3, high=1e3),
    )
    if spec.max_seq_len < spec.action_horizon:
        head.refuse(f"'max_seq_len' is {spec.max_seq_len}, below 'action_horizon' = {spec.action_horizon}")
    return spec


def _reject_other_models(fields: Fields) -> None:
    check_model_type(fields, "gr00t", MODEL_TYPE)
    backbone = fields.fields("backbone_cfg")
    for name in ("project_to_dim", "reproject_vision"):
        if backbone.content.get(name):
            refuse(backbone.source, name, backbone.content[name], "GR00T N1.5 has none")


def check_model_type(fields: Fields, family: str, model_type: str) -> None:
    """Raise ``CheckpointError`` if config.json is not of the configured ``model.model_type`` (``family``)."""
    check_family(fields, (family,))
    found = fields.content.get("model_type", fields.content.get("type"))
    if found != model_type:
        raise CheckpointError(
            f"{fields.source}: model_type is '{found}', not '{model_type}'", UNKNOWN_FAMILY, code="checkpoint-family"
        )


def refuse(source: str, name: str, found: object, reason: str) -> NoReturn:
    """Raise a CheckpointError about an unsupported value."""
    raise CheckpointError(
        f"{source}: {name} {found} is not supported; {reason}",
        "use NVIDIA's checkpoint of GR00T",
        code="checkpoint-unsupported",
    )


PUBLIC = Gr00tConfig(
    SO400M_224,
    qwen3_1_7b(12),
    ActionHeadSpec(TransformerSpec(16, 32, 48), TransformerSpec(4, 32, 64), 2048, 1024, 32, 64, 16),
    lm_head=True,
    pooling_head=True,
)
"""NVIDIA's GR00T-N1.5-3B."""
