"""Dimensions of pi0 and pi0.5, and config.json in openpi's and lerobot's layouts.

openpi's file (action_dim, action_horizon, the two Gemma variants, precision) does not say which of the two models it
is, the number of cameras, or how prompts and actions were prepared in training; openpi's code derives those from the
name of the training configuration. ``PUBLIC`` and ``with_data_set`` fill the gaps; ``conventions`` decides between
files, datasets and settings. The published checkpoints themselves were not available.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from embodrl.errors import CheckpointError
from embodrl.fields import Fields
from embodrl.models.common.config_file import (
    CONFIG_FILE,
    OWN_SECTION,
    UNKNOWN_FAMILY,
    check_family,
    check_multiple,
    fields_of,
    read_sizes,
    read_vit,
    size,
)
from embodrl.models.common.patches import SO400M_224, SiglipSpec
from embodrl.models.flow.gemma import GEMMA_2B, GEMMA_300M, GemmaSpec
from embodrl.models.openpi.settings import PiArchitectureConfig

Variant = Literal["pi0", "pi05"]
Method = Literal["mean_std", "quantiles", "identity"]
METHODS: tuple[Method, ...] = get_args(Method)
OPENPI_EPS = 1e-6
PALIGEMMA_VOCAB_SIZE = 257152
KNOWN_GEMMA = {"gemma_2b": GEMMA_2B, "gemma_300m": GEMMA_300M}
LIBERO = "physical-intelligence/libero"
STATELESS = frozenset(
    {
        LIBERO,
        "physical-intelligence/maniskill",
        "physical-intelligence/pick_and_place_real",
        "lerobot/metaworld_mt50",
        "InternRobotics/InternData-Calvin_ABC",
        "RLinf/IsaacLab-Stack-Cube-Data",
        "RLinf/GSEnv-PutCubeOnPlate-v0",
        "RLinf/pick_red",
    }
)
"""Datasets that openpi's or RLinf's configurations train pi0.5 on with ``discrete_state_input=False``."""

RELATIVE = {LIBERO: 6, "physical-intelligence/behavior": 6}
"""Leading action dimensions that openpi's or RLinf's configurations make pi0 predict relative to the state."""
KNOWN_DATASETS = STATELESS | RELATIVE.keys() | {"droid"}
"""Datasets for which it is known whether actions are relative."""
ROBOTWIN = "physical-intelligence/robotwin"
TWO_ARMS = (13, (6,))
"""Relative dimensions of two arms of six joints and a gripper each, and the gripper among them: DeltaActions with
``make_bool_mask(6, -1, 6, -1)``."""


def two_arms_of(key: str) -> tuple[int, tuple[int, ...], bool] | None:
    """Return relative and absolute dimensions, and whether units are ALOHA's, of a data set of two arms by its name.

    As openpi's LeRobotAlohaDataConfig has them by default, its configuration for a simulated ALOHA (absolute joints),
    and RLinf's for RoboTwin (no ALOHA). None: another robot.
    """
    if key == ROBOTWIN:
        return *TWO_ARMS, False
    if "aloha_sim" in key.lower():
        return 0, (), True
    return (*TWO_ARMS, True) if key == "trossen" or "aloha" in key.lower() else None


@dataclass(frozen=True)
class Normalization:
    """Use of statistics for state and actions; ``eps`` is added to deviations and ranges."""

    state: Method
    actions: Method
    eps: float = OPENPI_EPS


BY_DEVIATION = Normalization("mean_std", "mean_std")
BY_QUANTILES = Normalization("quantiles", "quantiles")


@dataclass(frozen=True)
class PiConfig:
    """A pi0 or pi0.5.

    Attributes:
        variant: pi0 or pi0.5.
        siglip: vision transformer.
        vlm: PaliGemma's Gemma.
        expert: action expert; depth, heads and head dimension equal those of ``vlm``.
        vocab_size: embedding rows.
        max_action_dim: padded size of actions and states (D).
        action_horizon: number of predicted actions (H).
        num_images: maximum number of cameras.
        max_prompt_tokens: padded length of prompts (L).
        discrete_state: whether the prompt includes the state (pi0.5 only).
        padded_state_in_prompt: whether the prompt includes the state's padding, as in lerobot before 0.5; not in
            openpi.
        dark_bars: pad non-square images with -3, as in lerobot before 0.5, instead of black (-1).
        relative_dims: number of leading action dimensions relative to the state.
        absolute_dims: those among them that are absolute.
        aloha_units: whether states and actions are ALOHA's, which the model has in openpi's units (``aloha``).
        normalization: use of statistics.
        antialias: resize images with antialiasing, as in openpi; not in lerobot.
        raw_instruction: keep underscores and line feeds of instructions, as in lerobot's pi0; never in pi0.5.
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
    dark_bars: bool = False
    relative_dims: int = 0
    absolute_dims: tuple[int, ...] = ()
    aloha_units: bool = False
    normalization: Normalization = BY_DEVIATION
    antialias: bool = True
    raw_instruction: bool = False

    @property
    def adaptive_norm(self) -> bool:
        """pi0.5: the noise level enters through the expert's norms, and there is no state token."""
        return self.variant == "pi05"

    def to_dict(self, precision: str) -> dict[str, object]:
        """Return config.json: openpi's keys, and ``embodrl`` with everything; precision is float32 or bfloat16."""
        return {
            "action_dim": self.max_action_dim,
            "action_horizon": self.action_horizon,
            "paligemma_variant": variant_name(self.vlm),
            "action_expert_variant": variant_name(self.expert),
            "precision": precision,
            OWN_SECTION: asdict(self),
        }

    def with_data_set(self, key: str) -> PiConfig:
        """Return the configuration with the known conventions of a public checkpoint's dataset."""
        if (arms := two_arms_of(key)) is not None:
            return replace(self, relative_dims=arms[0], absolute_dims=arms[1], aloha_units=arms[2])
        if self.variant == "pi05":
            return replace(self, discrete_state=False) if key in STATELESS else self
        return replace(self, relative_dims=RELATIVE.get(key, 0))

    @staticmethod
    def from_dict(raw: Mapping[str, object], variant: Variant, source: str = CONFIG_FILE) -> PiConfig:
        """Read config.json of the expected ``variant`` in openpi's or lerobot's layout; ``source`` is named in errors.

        Raises:
            CheckpointError: another or an unsupported model, or an invalid value.
        """
        fields = fields_of(raw, source)
        check_family(fields, (variant,))
        if OWN_SECTION in fields:
            return from_embodrl(fields.fields(OWN_SECTION), variant)
        if "type" in fields:
            _check_variant(fields.text("type"), variant, source)
            return from_lerobot(fields, variant)
        missing = [name for name in ("action_dim", "action_horizon") if name not in fields]
        if missing:
            raise CheckpointError(
                f"{source} is neither openpi's nor lerobot's: it has no type and no {' and no '.join(missing)}",
                "give the directory of a pi0 or pi0.5 checkpoint",
                code="checkpoint-family",
            )
        return replace(
            PUBLIC[variant],
            vlm=_known_gemma(fields, "paligemma_variant", "gemma_2b"),
            expert=_known_gemma(fields, "action_expert_variant", "gemma_300m"),
            max_action_dim=size(fields, "action_dim"),
            action_horizon=size(fields, "action_horizon"),
            max_prompt_tokens=size(fields, "max_prompt_tokens", PUBLIC[variant].max_prompt_tokens, key="max_token_len"),
        )

    @staticmethod
    def from_architecture(arch: PiArchitectureConfig, variant: Variant, vocab_size: int) -> PiConfig:
        """Return the configuration of a model without a checkpoint."""
        siglip = arch.siglip
        heads = (arch.num_heads, arch.num_kv_heads, arch.head_dim)
        return PiConfig(
            variant,
            SiglipSpec(arch.image_size, arch.patch_size, siglip.width, siglip.depth, siglip.num_heads, siglip.mlp_dim),
            GemmaSpec(arch.vlm_width, arch.depth, arch.vlm_mlp_dim, *heads),
            GemmaSpec(arch.expert_width, arch.depth, arch.expert_mlp_dim, *heads),
            max(vocab_size, arch.vocab_size or 0),
            arch.max_action_dim,
            arch.action_horizon,
            arch.num_images,
            arch.max_prompt_tokens,
            discrete_state=bool(arch.discrete_state) and variant == "pi05",
            padded_state_in_prompt=bool(arch.padded_state_in_prompt) and variant == "pi05",
            dark_bars=bool(arch.dark_bars),
            relative_dims=arch.relative_dims or 0,
            absolute_dims=arch.absolute_dims or (),
            aloha_units=bool(arch.aloha_units),
            normalization=PUBLIC[variant].normalization,
            antialias=arch.antialias is not False,
        )


PUBLIC: dict[Variant, PiConfig] = {
    "pi0": PiConfig("pi0"),
    "pi05": PiConfig("pi05", max_prompt_tokens=200, discrete_state=True, normalization=BY_QUANTILES),
}
"""Public models, with defaults for what their files leave out."""


def from_embodrl(own: Fields, variant: Variant) -> PiConfig:
    """Read embodrl's section of config.json; errors as in ``PiConfig.from_dict``."""
    _check_variant(own.text("variant"), variant, own.source)
    config = read_sizes(PiConfig(variant), own, complete=True)
    stated = own.fields("normalization")
    check_multiple(own.fields("vlm"), "num_heads", "num_kv_heads")
    if config.vlm.head_dim % 2 or config.expert.width % 2:
        own.refuse("'head_dim' and the width of 'expert' must be even")
    if replace(config.expert, width=config.vlm.width, mlp_dim=config.vlm.mlp_dim) != config.vlm:
        own.refuse("'vlm' and 'expert' differ in more than width and mlp_dim")
    absolute = [] if "absolute_dims" not in own else own.numbers("absolute_dims", low=0, high=4095)
    return replace(
        config,
        absolute_dims=tuple(int(dim) for dim in absolute),
        siglip=read_vit(config.siglip, own.fields("siglip")),
        normalization=Normalization(
            method(stated, "state"), method(stated, "actions"), stated.number("eps", OPENPI_EPS, low=0.0, high=1.0)
        ),
    )


def method(fields: Fields, name: str) -> Method:
    """Return the normalisation method of a field; lerobot names methods in upper case."""
    found = fields.text(name).lower()
    for known in METHODS:
        if found == known:
            return known
    fields.refuse(f"normalisation '{found.upper()}' of '{name}' is not supported; known: {', '.join(METHODS)}")


def from_lerobot(fields: Fields, variant: Variant) -> PiConfig:
    """Read config.json in lerobot's layout, without dataset conventions; errors as in ``PiConfig.from_dict``."""
    if fields.flag("use_relative_actions", False):
        raise CheckpointError(
            f"{fields.source}: lerobot's use_relative_actions is not supported",
            "use a checkpoint trained on absolute actions",
            code="checkpoint-unsupported",
        )
    for memory in ("use_visual_memory", "use_proprioceptive_memory"):
        if fields.flag(memory, False):
            raise CheckpointError(
                f"{fields.source}: lerobot's {memory} (MEM: several past observations) is not supported",
                "use a checkpoint trained on single observations",
                code="checkpoint-unsupported",
            )
    pixels = SO400M_224.image_size
    resolution = fields.numbers("image_resolution", 2) if "image_resolution" in fields else [pixels, pixels]
    if resolution != [pixels, pixels]:
        width, height = map(int, resolution)
        raise CheckpointError(
            f"{fields.source}: image_resolution {width} x {height} is not supported",
            f"use a checkpoint at {pixels} pixels",
            code="checkpoint-unsupported",
        )
    features = fields.fields("input_features", {})
    cameras = [name for name in features if features.fields(name).content.get("type") == "VISUAL"]
    public = PUBLIC[variant]
    return replace(
        public,
        vlm=_known_gemma(fields, "paligemma_variant", "gemma_2b"),
        expert=_known_gemma(fields, "action_expert_variant", "gemma_300m"),
        max_action_dim=size(fields, "max_action_dim", public.max_action_dim),
        action_horizon=size(fields, "action_horizon", public.action_horizon, key="chunk_size"),
        num_images=max(len(cameras), public.num_images),
        max_prompt_tokens=size(fields, "max_prompt_tokens", public.max_prompt_tokens, key="tokenizer_max_length"),
        padded_state_in_prompt=True,
        antialias=False,
        raw_instruction=variant == "pi0",
    )


def _known_gemma(fields: Fields, key: str, default: str) -> GemmaSpec:
    name = fields.text(key, default)
    if name not in KNOWN_GEMMA:
        raise CheckpointError(
            f"{fields.source}: Gemma variant '{name}' is not supported; known: {', '.join(KNOWN_GEMMA)}",
            "merge LoRA weights before converting" if "lora" in name else "use a checkpoint of a known size",
            code="checkpoint-unsupported",
        )
    return KNOWN_GEMMA[name]


def variant_name(spec: GemmaSpec) -> str:
    """Return openpi's name of the dimensions, or ``embodrl`` for others."""
    return next((name for name, known in KNOWN_GEMMA.items() if known == spec), OWN_SECTION)


def _check_variant(found: str, wanted: Variant, source: str) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{source} is of a '{found}' model, not '{wanted}'",
            f"set model.model_type={found}" if found in get_args(Variant) else UNKNOWN_FAMILY,
            code="checkpoint-family",
        )
