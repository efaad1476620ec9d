"""A small Gaussian policy: settings, facts and rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from embodrl.config.rules.base import Context, multiples, path_kind
from embodrl.config.schema import ModelConfig, PathText, PositiveFloat, PositiveInt, Section
from embodrl.config.schema.section import AppliesIf
from embodrl.hub import parse
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import ModelSpec

PATCH_SIZE = 14
"""Pixels per side of a patch of every DINOv2."""
GRID = 4
"""Cells per side over which a frozen encoder's features are averaged."""
CELL_WIDTH = 32
"""Numbers per cell that the trained part behind a frozen encoder reads."""


class GaussianArchitectureConfig(Section):
    """Dimensions of a Gaussian policy."""

    use_images: bool = Field(default=False, description="encode images with a CNN; false: use the state only")
    image_size: PositiveInt = Field(default=64, description="pixels, square; images are resized to it")
    num_cameras: PositiveInt = Field(default=1, description="images per observation")
    channels: Annotated[tuple[PositiveInt, ...], AppliesIf("model.gaussian.frozen_encoder", (None,))] = Field(
        default=(16, 32, 64, 64), description="output channels of the CNN's convolutions; each halves the image"
    )
    frozen_encoder: PathText | None = Field(
        default=None,
        description="DINOv2 in place of the CNN, frozen: a directory or hub id in transformers' layout; its features"
        " are computed once per observation, and a small head trains on them",
    )
    encoder_layer: Annotated[PositiveInt, AppliesIf("model.gaussian.frozen_encoder")] = Field(
        default=8, description="layer of the frozen encoder whose features are used, from 1"
    )
    feature_dim: PositiveInt = Field(default=128, description="size of the image features of an observation")
    max_state_dim: PositiveInt = Field(default=64, description="states are zero-padded to this size")
    seen_state_dim: PositiveInt | None = Field(
        default=None,
        description="numbers of the state that the policy reads, from the first; the others are for critics"
        " (algorithm.off_policy.critic_reads=state); null: all",
    )
    hidden_sizes: tuple[PositiveInt, ...] = Field(default=(256, 256), description="hidden units of the MLP")
    initial_std: PositiveFloat = Field(
        default=0.6, description="initial standard deviation before the tanh, for a policy without weights", lt=7
    )
    categorical: bool = Field(
        default=False,
        description="discrete actions: model.action_dim of them, of which the policy chooses one (env=gymnasium)",
    )


class GaussianModelConfig(ModelConfig):
    """A small Gaussian policy."""

    gaussian: GaussianArchitectureConfig = Field(
        default=GaussianArchitectureConfig(), description="dimensions without a checkpoint"
    )


RULES = RuleSet()


@RULES.rule("model.gaussian", "env.include_state", "env.cameras")
def gaussian_policy_sees_something(context: Context) -> Iterator[Finding]:
    """There is an input, and the number of images matches the CNN."""
    shape = context.model(GaussianModelConfig).gaussian
    env = context.config.env
    if not (shape.use_images or env.include_state):
        message = "neither images nor the state reach the policy: env.include_state is false"
        hint = "set env.include_state=true (model=mlp does), or model.gaussian.use_images=true"
        yield Finding("model.gaussian.use_images", message, hint, "true", others=("env.include_state",))
    if shape.use_images and shape.num_cameras != len(env.cameras):
        yield Finding(
            "model.gaussian.num_cameras",
            f"the CNN reads {shape.num_cameras} image(s), but env.cameras has {len(env.cameras)}",
            f"set it to {len(env.cameras)}",
            str(len(env.cameras)),
            others=("env.cameras",),
        )


@RULES.rule("model.gaussian")
def gaussian_layers_exist(context: Context) -> Iterator[Finding]:
    """The MLP has a hidden layer, and every convolution has an image to halve."""
    shape = context.model(GaussianModelConfig).gaussian
    if not shape.hidden_sizes:
        yield Finding("model.gaussian.hidden_sizes", "the MLP has no hidden layer", "set it to [256,256]")
    most = (shape.image_size - 1).bit_length()
    if shape.use_images and shape.frozen_encoder is None and not 1 <= len(shape.channels) <= most:
        message = f"{len(shape.channels)} convolutions, but images of {shape.image_size} pixels can be halved"
        message += f" {most} times"
        yield Finding("model.gaussian.channels", message, "set it to [16,32,64,64]", f"1 to {most} numbers")


@RULES.rule("model.gaussian")
def the_policy_reads_a_part_of_its_state(context: Context) -> Iterator[Finding]:
    """The numbers that it reads are among those that it has room for."""
    shape = context.model(GaussianModelConfig).gaussian
    if shape.seen_state_dim is not None and shape.seen_state_dim > shape.max_state_dim:
        key = "model.gaussian.seen_state_dim"
        message = f"{shape.seen_state_dim} numbers, but the policy has room for {shape.max_state_dim}"
        hint = f"set it to {shape.max_state_dim} or less, or raise model.gaussian.max_state_dim"
        yield Finding(key, message, hint, f"1 to {shape.max_state_dim}", others=("model.gaussian.max_state_dim",))


@RULES.rule("model.gaussian")
def frozen_encoder_fits(context: Context) -> Iterator[Finding]:
    """A frozen encoder is at hand, and sees pictures of whole patches."""
    model = context.model(GaussianModelConfig)
    shape = model.gaussian
    path = shape.frozen_encoder
    if path is None:
        return
    key = "model.gaussian.frozen_encoder"
    others = (key,)
    # A policy on disk has its own encoder, so that this one may have gone.
    is_new = model.model_path is None and model.warm_start is None and not context.resuming
    if is_new and path_kind(path) != "directory" and parse(path) is None:
        hint = "give the directory of a DINOv2 in transformers' layout, or OWNER/NAME of the hub"
        yield Finding(key, f"no directory '{path}'", hint, "a directory, or a hub id")
    if not shape.use_images:
        message = "there is a frozen encoder, but the policy reads no images"
        yield Finding("model.gaussian.use_images", message, "set it to true (model=cnn does)", "true", others=others)
    if shape.image_size % PATCH_SIZE:
        message = f"{shape.image_size} pixels are not whole patches of {PATCH_SIZE}"
        allowed = multiples(shape.image_size, PATCH_SIZE)
        yield Finding("model.gaussian.image_size", message, "set it to 112", allowed, others=others)


@RULES.rule("algorithm.off_policy.shift_pixels", "model.gaussian")
def shifted_pictures_are_seen(context: Context) -> Iterator[Finding]:
    """A shift leaves a part of the picture, and there are pictures to shift."""
    shape = context.model(GaussianModelConfig).gaussian
    key = "algorithm.off_policy.shift_pixels"
    if shape.frozen_encoder is not None:
        if context.config.algorithm.off_policy.shift_pixels:
            message = "the replay buffer has features of the frozen encoder, and no pictures"
            yield Finding(key, message, "set it to 0", "0", others=("model.gaussian.frozen_encoder",))
    elif shape.use_images and context.config.algorithm.off_policy.shift_pixels >= shape.image_size:
        message = f"nothing would be left of pictures of {shape.image_size} pixels"
        allowed = f"0 to {shape.image_size - 1}"
        yield Finding(key, message, "set it to 4", allowed, others=("model.gaussian.image_size",))


@RULES.rule("model")
def gaussian_policy_has_plain_actions(context: Context) -> Iterator[Finding]:
    """Actions are the environment's, images are whole, and all weights train."""
    model = context.config.model
    wanted = {
        **{"unnorm_key": None, "lora_path": None},
        **{"center_crop": False, "gripper": "as_is"},
    }
    for name, value in wanted.items():
        if getattr(model, name) != value:
            allowed = "null" if value is None else str(value).lower()
            message = "is for policies with action statistics or pretrained vision, which this policy lacks"
            yield Finding(f"model.{name}", message, f"set it to {allowed}", allowed, others=("model.model_type",))


@RULES.rule("model.gaussian", "model.freeze_vision")
def frozen_vision_was_trained(context: Context) -> Iterator[Finding]:
    """Without images there is no CNN to freeze."""
    model = context.model(GaussianModelConfig)
    if model.freeze_vision and not model.gaussian.use_images:
        message = "there is no vision backbone: model.gaussian.use_images is false"
        yield Finding("model.freeze_vision", message, "set it to false", "false", others=("model.gaussian.use_images",))


@RULES.rule("model.gaussian", "algorithm.loss_type")
def discrete_actions_have_no_gradient(context: Context) -> Iterator[Finding]:
    """Off-policy actors need actions that can be differentiated."""
    loss = context.loss
    differentiates = (loss.off_policy and not loss.imitates) or loss.name == "td3_bc"
    if context.model(GaussianModelConfig).gaussian.categorical and differentiates:
        message = "off-policy learning differentiates actions, which discrete ones do not permit"
        hint = "choose algorithm=ppo_gaussian"
        yield Finding("model.gaussian.categorical", message, hint, "false", others=("algorithm.loss_type",))


@RULES.note("env.tasks", "env.state", "model.gaussian")
def gaussian_policy_reads_no_instruction(context: Context) -> Iterator[Finding]:
    """Several tasks can only be distinguished by the observation."""
    if len(context.config.env.tasks) > 1:
        message = f"the policy reads no instruction, so it can't tell the {len(context.config.env.tasks)} tasks"
        hint = "train one policy per task, or choose env.state=full where it describes the task's objects"
        yield Finding("env.tasks", f"{message} apart unless they look different", hint)


@RULES.note("algorithm.sampling", "sft.label_smoothing_bins")
def gaussian_policy_has_no_bins(context: Context) -> Iterator[Finding]:
    """Temperature, top-k and bins apply to action tokens."""
    for key in ("algorithm.sampling.temperature", "algorithm.sampling.top_k", "sft.label_smoothing_bins"):
        if context.by_user(key):
            yield Finding(key, "has no effect on a Gaussian policy", "leave it out")


def num_parameters(config: ModelConfig) -> int:
    """Return the approximate parameter count of a policy without a checkpoint (matrices only)."""
    assert isinstance(config, GaussianModelConfig)
    shape = config.gaussian
    total = 0
    inputs = config.gaussian.max_state_dim
    if shape.use_images and shape.frozen_encoder is not None:
        # The sizes of the encoder are in its files.
        total += shape.num_cameras * GRID * GRID * CELL_WIDTH * shape.feature_dim
        inputs += shape.feature_dim
    elif shape.use_images:
        side = shape.image_size
        planes = 3 * shape.num_cameras
        for before, after in pairwise((planes, *shape.channels)):
            total = total + 9 * before * after
            side = (side + 1) // 2
        total += shape.channels[-1] * side * side * shape.feature_dim
        inputs += shape.feature_dim
    outputs = (1 if shape.categorical else 2) * config.num_action_chunks * config.action_dim
    sizes = (inputs, *shape.hidden_sizes, outputs)
    return total + sum(a * b for a, b in pairwise(sizes))


SPEC = ModelSpec(
    name="gaussian",
    target="embodrl.models.gaussian.policy:build_gaussian",
    description="small policy without language: an MLP on the state, or a CNN on images, and a tanh-Gaussian",
    recognizes=lambda raw: raw.get("model_type") == "gaussian",
    settings=GaussianModelConfig,
    rules=(RULES,),
    kind="gaussian",
    value_inputs=(),
    trainable=("all", "head"),
    uses_state=True,
    uses_images="model.gaussian.use_images",
    off_policy=True,
    num_parameters=num_parameters,
    sizes="0.1 M (mlp), 0.3 M (cnn)",
    actions="continuous chunk, a Gaussian through tanh; or one of n discrete actions",
    checkpoint="embodrl's own",
    rl="log-probs of the tanh-Gaussian; re-parameterised samples for sac and rlpd",
)
