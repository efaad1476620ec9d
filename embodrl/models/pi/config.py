"""Dimensions of pi0 and pi0.5, and what config.json says of them in openpi's and lerobot's layouts.

openpi's file (action_dim, action_horizon, the two Gemma variants, precision) leaves open which of the two models it is,
the number of cameras and how prompts and actions were prepared in training; those are chosen in openpi's code by the
name of the training configuration. What a checkpoint leaves open is filled in here, in ``_UNSAID`` and
``_BY_DATA_SET``. The published checkpoints themselves were not at hand.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from embodrl.errors import CheckpointError
from embodrl.models.common.family import check_family
from embodrl.models.common.gemma import GEMMA_2B, GEMMA_300M, GemmaSpec
from embodrl.models.common.siglip import SO400M_224, SiglipSpec
from embodrl.models.pi.spec import PiArchitectureConfig

Variant = Literal["pi0", "pi05"]
Method = Literal["mean_std", "quantiles", "identity"]
OPENPI_EPS = 1e-6
PALIGEMMA_VOCAB_SIZE = 257152
KNOWN_GEMMA = {"gemma_2b": GEMMA_2B, "gemma_300m": GEMMA_300M}
EMBODRL_KEY = "embodrl"


@dataclass(frozen=True)
class Normalization:
    """How statistics are used.

    Attributes:
        state, actions: by mean and standard deviation, by quantiles, or not at all.
        eps: added to deviations and ranges.
    """

    state: Method
    actions: Method
    eps: float = OPENPI_EPS


BY_DEVIATION = Normalization("mean_std", "mean_std")
BY_QUANTILES = Normalization("quantiles", "quantiles")
_UNSAID: dict[Variant, dict[str, Any]] = {
    "pi0": {"max_prompt_tokens": 48, "num_images": 3, "discrete_state": False, "normalization": BY_DEVIATION},
    "pi05": {"max_prompt_tokens": 200, "num_images": 3, "discrete_state": True, "normalization": BY_QUANTILES},
}
_BY_DATA_SET: dict[tuple[Variant, str], dict[str, Any]] = {
    ("pi0", "physical-intelligence/libero"): {"relative_dims": 6},
    ("pi05", "physical-intelligence/libero"): {"discrete_state": False},
}


@dataclass(frozen=True)
class PiConfig:
    """A pi0 or pi0.5.

    Attributes:
        variant: which of the two.
        siglip: vision.
        vlm: Gemma of PaliGemma.
        expert: the action expert; depth, heads and head dimension are those of ``vlm``.
        vocab_size: rows of the embedding.
        max_action_dim: actions and states are padded to it (D).
        action_horizon: actions predicted (H).
        num_images: cameras at most.
        max_prompt_tokens: prompts are padded to it (L).
        discrete_state: the prompt tells the state (pi0.5 only).
        padded_state_in_prompt: it tells the padding as well, as lerobot does; openpi does not.
        relative_dims: this many leading action dimensions are relative to the state.
        normalization: how statistics are used.
    """

    variant: Variant
    siglip: SiglipSpec = SO400M_224
    vlm: GemmaSpec = GEMMA_2B
    expert: GemmaSpec = GEMMA_300M
    vocab_size: int = PALIGEMMA_VOCAB_SIZE
    max_action_dim: int = 32
    action_horizon: int = 50
    num_images: int = 3
    max_prompt_tokens: int = 48
    discrete_state: bool = False
    padded_state_in_prompt: bool = False
    relative_dims: int = 0
    normalization: Normalization = BY_DEVIATION

    @property
    def adaptive_norm(self) -> bool:
        """pi0.5: the noise level enters through the expert's norms, and there is no token of the state."""
        return self.variant == "pi05"

    def to_dict(self, precision: str) -> dict[str, Any]:
        """Return config.json: openpi's keys, and ``embodrl`` with everything.

        Args:
            precision: ``float32`` or ``bfloat16``.
        """
        return {
            "action_dim": self.max_action_dim,
            "action_horizon": self.action_horizon,
            "paligemma_variant": _variant_name(self.vlm),
            "action_expert_variant": _variant_name(self.expert),
            "precision": precision,
            EMBODRL_KEY: asdict(self),
        }

    def with_data_set(self, key: str, raw: dict[str, Any]) -> PiConfig:
        """Return the configuration with what is known of a data set that a public checkpoint was trained on.

        Args:
            key: name of its statistics.
            raw: config.json, whose own word counts more.
        """
        known = {} if EMBODRL_KEY in raw else _BY_DATA_SET.get((self.variant, key), {})
        return replace(self, **known)

    def with_normalization(self, normalization: Normalization) -> PiConfig:
        """Return the configuration with another use of statistics."""
        return replace(self, normalization=normalization)

    @staticmethod
    def from_dict(raw: dict[str, Any], variant: Variant, source: str = "config.json") -> PiConfig:
        """Read config.json of openpi's or lerobot's layout.

        Args:
            raw: the parsed file.
            variant: the model that is wanted.
            source: named in errors.

        Raises:
            CheckpointError: of another model, or of a kind that is not supported.
        """
        check_family(raw, (variant,), source)
        if EMBODRL_KEY in raw:
            config = _from_embodrl(raw[EMBODRL_KEY], source)
            _check_variant(config.variant, variant, source)
            return config
        if "type" in raw:
            _check_variant(raw["type"], variant, source)
            return _from_lerobot(raw, variant, source)
        missing = [name for name in ("action_dim", "action_horizon") if name not in raw]
        if missing:
            raise CheckpointError(
                f"{source} is neither openpi's nor lerobot's: it has no type and no {' and no '.join(missing)}",
                "give the directory of a pi0 or pi0.5 checkpoint",
            )
        return PiConfig(
            variant,
            vlm=_known_gemma(raw.get("paligemma_variant", "gemma_2b"), source),
            expert=_known_gemma(raw.get("action_expert_variant", "gemma_300m"), source),
            max_action_dim=raw["action_dim"],
            action_horizon=raw["action_horizon"],
            **_UNSAID[variant],
        )

    @staticmethod
    def from_architecture(arch: PiArchitectureConfig, variant: Variant, vocab_size: int) -> PiConfig:
        """Return the configuration of a model built without a checkpoint."""
        siglip = arch.siglip
        heads = (arch.num_heads, arch.num_kv_heads, arch.head_dim)
        return PiConfig(
            variant,
            SiglipSpec(arch.image_size, arch.patch_size, siglip.width, siglip.depth, siglip.num_heads, siglip.mlp_dim),
            GemmaSpec(arch.vlm_width, arch.depth, arch.vlm_mlp_dim, *heads),
            GemmaSpec(arch.expert_width, arch.depth, arch.expert_mlp_dim, *heads),
            vocab_size,
            arch.max_action_dim,
            arch.action_horizon,
            arch.num_images,
            arch.max_prompt_tokens,
            discrete_state=arch.discrete_state and variant == "pi05",
            normalization=_UNSAID[variant]["normalization"],
        )


PI0_FULL = PiConfig("pi0")
PI05_FULL = PiConfig("pi05", **_UNSAID["pi05"])


def _from_embodrl(extra: dict[str, Any], source: str) -> PiConfig:
    try:
        parts: dict[str, Any] = {"siglip": SiglipSpec(**extra["siglip"])}
        parts["normalization"] = Normalization(**extra["normalization"])
        parts |= {name: GemmaSpec(**extra[name]) for name in ("vlm", "expert")}
        return PiConfig(**{**extra, **parts})
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{source}: its part '{EMBODRL_KEY}' does not fit: {error}", "use a checkpoint of this version of embodrl"
        ) from error


def _from_lerobot(raw: dict[str, Any], variant: Variant, source: str) -> PiConfig:
    if raw.get("use_relative_actions"):
        raise CheckpointError(
            f"{source}: lerobot's use_relative_actions is not supported",
            "use a checkpoint trained on absolute actions",
        )
    size = tuple(raw.get("image_resolution", (SO400M_224.image_size,) * 2))
    if size != (SO400M_224.image_size,) * 2:
        raise CheckpointError(f"{source}: image_resolution {size} is not supported", "use a checkpoint at 224 pixels")
    cameras = [part for part in raw.get("input_features", {}).values() if part.get("type") == "VISUAL"]
    unsaid = _UNSAID[variant]
    return PiConfig(
        variant,
        vlm=_known_gemma(raw.get("paligemma_variant", "gemma_2b"), source),
        expert=_known_gemma(raw.get("action_expert_variant", "gemma_300m"), source),
        max_action_dim=raw.get("max_action_dim", 32),
        action_horizon=raw.get("chunk_size", 50),
        num_images=max(len(cameras), unsaid["num_images"]),
        max_prompt_tokens=raw.get("tokenizer_max_length", unsaid["max_prompt_tokens"]),
        discrete_state=unsaid["discrete_state"],
        normalization=unsaid["normalization"],
        padded_state_in_prompt=True,
    )


def _known_gemma(name: str, source: str) -> GemmaSpec:
    if name not in KNOWN_GEMMA:
        raise CheckpointError(
            f"{source}: Gemma variant '{name}' is not supported; known: {', '.join(KNOWN_GEMMA)}",
            "merge LoRA weights before converting" if "lora" in name else "use a checkpoint of a known size",
        )
    return KNOWN_GEMMA[name]


def _variant_name(spec: GemmaSpec) -> str:
    return next((name for name, known in KNOWN_GEMMA.items() if known == spec), EMBODRL_KEY)


def _check_variant(found: str, wanted: Variant, source: str) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{source} is of a '{found}' model, not '{wanted}'",
            f"set model.model_type={found}" if found in get_args(Variant) else "choose the matching model.model_type",
        )
