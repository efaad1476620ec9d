"""A small Gaussian policy, trained by PPO and its variants, by imitation, or off-policy.

Shapes: B batch, C actions in a chunk, A action dimensions, F features.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from embodrl.config.schema import ModelConfig
from embodrl.data.rng import RandomSource
from embodrl.errors import CheckpointError, EmbodrlError
from embodrl.fields import Fields
from embodrl.models.base import OffPolicyActor, VLAPolicy
from embodrl.models.common import checkpoint
from embodrl.models.common.condition import signs_of
from embodrl.models.common.config_file import CONFIG_FILE, MAX_SIZE, check_family, read_file, size
from embodrl.models.common.heads import build_value_head, save_heads
from embodrl.models.common.images import resize_area
from embodrl.models.common.init import new_generator
from embodrl.models.common.norm_stats import given_stats
from embodrl.models.common.sampling import standard_normal
from embodrl.models.common.value_head import ValueHead
from embodrl.models.gaussian.frozen_encoder import ENCODER_DIR, PATCHES, SETTING, FrozenEncoder
from embodrl.models.gaussian.modeling import Categorical, GaussianModel, GaussianSpec, one_hot
from embodrl.models.gaussian.spec import GaussianModelConfig
from embodrl.models.load_report import LoadReport
from embodrl.types import ActMode, EvalOutput, Observation, PolicyOutput, SamplingParams

DRAWN = "pre_tanh"
"""Key of ``forward_inputs``: the drawn ``float32[B,C,A]``, whose tanh is the action, or the one-hot discrete action."""
FAMILY = "gaussian"


class GaussianPolicy(VLAPolicy, OffPolicyActor):
    """Draws action chunks from a tanh-Gaussian in environment units, or discrete ones; ``value_head`` is the critic.

    A frozen ``encoder`` is not among the policy's weights.
    """

    draws_by_row = True

    def __init__(
        self,
        model: GaussianModel,
        config: ModelConfig,
        value_head: ValueHead | None,
        encoder: FrozenEncoder | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.encoder = encoder
        self.value_head = value_head
        self.num_action_chunks = config.num_action_chunks
        self.action_dim = config.action_dim
        self.detach_value = config.value_head.detach

    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return ``state float32[B,S]``, padded, and with a CNN ``images uint8[B,V,H,H,3]``.

        With a frozen encoder its features ``patches float16[B,V,16,W]`` take the place of the images. The last state
        number encodes the advantage condition of the instruction: 1 positive, -1 negative. Raises ``EmbodrlError`` if
        the state is too large, or the cameras or the encoder differ.
        """
        spec = self.model.spec
        rows = observation.batch_size
        cameras = observation.images.shape[1]
        state = padded_state(observation, spec.max_state_dim, "model.gaussian")
        if any(signs := signs_of(observation.instruction)):
            dims = observation.state.shape[1]
            if dims == spec.max_state_dim:
                raise EmbodrlError(
                    f"the policy has room for the {dims} numbers of the state but not for the condition",
                    f"set model.gaussian.max_state_dim={dims + 1} without a checkpoint",
                    code="condition-no-room",
                )
            state[:, -1] = torch.tensor(signs)
        inputs = {"state": state.to(self.device)}
        if spec.use_images:
            if cameras != spec.num_cameras:
                raise EmbodrlError(
                    f"the policy reads {spec.num_cameras} image(s), but there are {cameras}",
                    "use the cameras that the policy was trained with",
                    code="policy-cameras",
                )
            images = torch.from_numpy(np.ascontiguousarray(observation.images)).flatten(0, 1)
            images = resize_area(images, spec.image_size, spec.image_size)
            images = images.view(rows, cameras, *images.shape[1:]).to(self.device)
            inputs |= {"images": images} if self.encoder is None else {PATCHES: self._encoded(images)}
        return inputs

    def _encoded(self, images: Tensor) -> Tensor:
        """Return the frozen encoder's features; ``EmbodrlError`` if the weights were trained with another encoder."""
        assert self.encoder is not None
        # Weights may also come from a checkpoint or another process, where the same path may hold another encoder.
        _check_identity(self.model.encoder_identity, self.encoder, "the policy's weights")
        return self.encoder(images)

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Draw a chunk per row; in ``eval`` mode it is the tanh of the mean. ``sampling`` is for token policies."""
        self.check_mode(mode)
        inputs = self.preprocess(observation)
        features = self.features(inputs)
        chunk = self.model.chunk_distribution(features)
        u = chunk.mean
        if mode == "train":
            u = chunk.sample(standard_normal(u.shape, generator, self.device))
        values = self._values(features) if compute_values else None
        actions = self.chosen(features, u).cpu().numpy()
        return PolicyOutput(actions, chunk.log_prob(u), values, {**inputs, DRAWN: u})

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        return self._values(self.features(self.preprocess(observation)))

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
    ) -> EvalOutput:
        features = self.features(forward_inputs)
        chunk = self.model.chunk_distribution(features)
        entropy = chunk.entropy() if compute_entropy else None
        values = self._values(features) if compute_values else None
        return EvalOutput(chunk.log_prob(forward_inputs[DRAWN].float()), entropy, values)

    def _values(self, features: Tensor) -> Tensor:
        if self.value_head is None:
            raise EmbodrlError(
                "the policy has no value head", "set model.add_value_head=true", code="value-head-missing"
            )
        return self.value_head(features.detach() if self.detach_value else features)

    # Imitation -------------------------------------------------------------------------------------------------------

    def sft_inputs(self, observation: Observation, actions: Tensor) -> dict[str, Tensor]:
        """Return the output of ``preprocess`` and ``target float32[B,C,A]``."""
        return {**self.preprocess(observation), "target": actions.float().to(self.device)}

    def sft_loss(self, batch: dict[str, Tensor], label_smoothing_bins: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean squared error of the greedy action, and ``l1``; the standard deviation is not trained.

        Of discrete actions it is the cross-entropy, and ``l1`` the distance of the one-hot actions. ``action_mask
        bool[B,C]`` in ``batch``, if present, excludes actions.
        """
        features = self.features(batch)
        chunk = self.model.chunk_distribution(features)
        error = self.chosen(features, chunk.mean) - batch["target"]
        weight = torch.ones_like(error)
        if "action_mask" in batch:
            weight = weight * batch["action_mask"][..., None]
        total = weight.sum().clamp(min=1.0)
        l1 = (error.detach().abs() * weight).sum() / total
        if isinstance(chunk, Categorical):
            wanted = one_hot(batch["target"])
            return -(chunk.log_prob(wanted) * weight[..., :1]).sum() / weight[..., :1].sum().clamp(min=1.0), {"l1": l1}
        return (error.square() * weight).sum() / total, {"l1": l1}

    # Off-policy ------------------------------------------------------------------------------------------------------

    @property
    def feature_dim(self) -> int:
        return self.model.spec.num_features

    @property
    def chunk_shape(self) -> tuple[int, int]:
        return self.model.spec.num_action_chunks, self.model.spec.action_dim

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model.features(inputs)

    @property
    def state_dim(self) -> int:
        return self.model.spec.max_state_dim

    def whole_state(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model.whole_state(inputs)

    def encoder_parameters(self) -> list[nn.Parameter]:
        return [] if self.model.vision is None else list(self.model.vision.parameters())

    def sample_chunk(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        chunk = self.model.distribution(features)
        u = chunk.sample(noise)
        return self.chosen(features, u), chunk.log_prob(u).sum((1, 2))

    def chosen(self, features: Tensor, u: Tensor) -> Tensor:
        """Return the executed action ``float32[B,C,A]`` for a draw ``u`` of the same shape."""
        return 2 * u - 1 if self.model.spec.categorical else torch.tanh(u)

    # Parts and files -------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, nn.Module]:
        """Return ``vision`` with a CNN, ``policy``, and ``value_head`` if there is a critic."""
        parts = {"vision": self.model.vision, "policy": self.model.policy, "value_head": self.value_head}
        return {name: part for name, part in parts.items() if part is not None}

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.model.policy[-1].parameters())

    def enable_gradient_checkpointing(self) -> None:
        """Do nothing: the activations are small."""

    def save_pretrained(self, directory: Path) -> None:
        with checkpoint.policy_directory(directory) as staging:
            checkpoint.save_weights(self.model.state_dict(), staging, one_file=True)
            save_heads(staging, self.value_head)
            if self.encoder is not None:
                self.encoder.save(staging)
            checkpoint.write_json(staging / CONFIG_FILE, {"model_type": FAMILY, **asdict(self.model.spec)})


def padded_state(observation: Observation, size: int, section: str) -> Tensor:
    """Return the state as ``float32[B,size]``; raise ``EmbodrlError``, naming ``section``, if it is larger."""
    dims = observation.state.shape[1]
    if dims > size:
        raise EmbodrlError(
            f"the state has {dims} numbers, the policy has room for {size}",
            f"set {section}.max_state_dim={dims} without a checkpoint, or env.include_state=false",
            code="state-size",
        )
    state = torch.zeros(observation.batch_size, size)
    state[:, :dims] = torch.from_numpy(np.ascontiguousarray(observation.state))
    return state


def build_gaussian(
    config: GaussianModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[GaussianPolicy, LoadReport]:
    """Build the configured policy; see ``models.registry.build_policy``."""
    device = torch.device(device)
    directory, report = checkpoint.locate(config)
    spec, files = _spec_and_weights(config, directory)
    encoder = _load_encoder(config, spec, directory, report, device)
    if encoder is not None:
        spec = replace(spec, encoder_width=encoder.width)
    generator = new_generator(device, seed)
    with torch.device("meta"):
        model = GaussianModel(spec)
    checkpoint.fill(
        model,
        files,
        report,
        lambda: model.init_weights(generator),
        device=device,
        dtype=dtype,
        in_float32=lambda name: name.startswith("state_"),
    )
    if encoder is not None and not files:
        model.encoder_identity = encoder.identity.clone()  # loading weights overwrites it
    _normalise(model, config, report)
    model.to(device)
    head = build_value_head(config, spec.num_features, directory, report, device, generator)
    return GaussianPolicy(model, config, head, encoder), report


def _spec_and_weights(config: GaussianModelConfig, directory: Path | None) -> tuple[GaussianSpec, list[Path]]:
    """Return the dimensions and weights in ``directory``; without one the configured dimensions."""
    wanted = GaussianSpec.of(config.gaussian, config.num_action_chunks, config.action_dim)
    if directory is None:
        return wanted, []
    spec = read_spec(directory / CONFIG_FILE)
    parts = set(asdict(wanted)) - {"initial_std", "normalise_state", "encoder_width"}
    if config.model_path is not None:
        parts = {"num_action_chunks", "action_dim"}
    checkpoint.check_size(spec, wanted, sorted(parts), directory, "model")
    return spec, checkpoint.weight_files(directory)


def _load_encoder(
    config: GaussianModelConfig, spec: GaussianSpec, directory: Path | None, report: LoadReport, device: torch.device
) -> FrozenEncoder | None:
    """Return the frozen encoder of the policy in ``directory``, without one the configured encoder; None for a CNN."""
    path = config.gaussian.frozen_encoder
    if not spec.encoder_layer:
        return None
    if directory is None:
        assert path is not None
        source = Path(path).expanduser() if device.type == "meta" else checkpoint.resolve(path, SETTING)
        encoder = FrozenEncoder.load(source, spec.encoder_layer, device)
    else:
        source = directory / ENCODER_DIR
        encoder = FrozenEncoder.of_policy(directory, spec.encoder_layer, device)
        # The policy has its own; a given one may have gone since, but must not be another.
        if path is not None and Path(path).expanduser().is_dir():
            given = FrozenEncoder.load(Path(path).expanduser(), spec.encoder_layer, device)
            _check_identity(given.identity, encoder, f"{SETTING}={path}")
    report.conventions["frozen encoder"] = f"{source}, layer {encoder.layer}"
    return encoder


def _check_identity(identity: Tensor, encoder: FrozenEncoder, what: str) -> None:
    if not identity.is_meta and not torch.equal(identity.cpu(), encoder.identity.cpu()):
        raise CheckpointError(
            f"{what}: the frozen encoder is another one than the policy's",
            f"set {SETTING} to the encoder that the policy was trained with",
            code="frozen-encoder-differs",
        )


def _normalise(model: GaussianModel, config: GaussianModelConfig, report: LoadReport) -> None:
    """Take the state's normalisation from ``model.stats_path``, else from the checkpoint if it has one."""
    given = given_stats(config)
    if given is None or given.state is None:
        own = model.spec.normalise_state
        report.conventions["state"] = "normalised as in the weights" if own else "as it is: there are no statistics"
        return
    report.conventions["state"] = f"normalised by {given.source}"
    fields = Fields(given.state, given.source, CheckpointError, "compute them: `embodrl sft sft.stats=data`")
    size = len(fields.items("mean"))
    if size > model.spec.max_state_dim:
        raise CheckpointError(
            f"{given.source}: a state of {size} numbers, the policy has room for {model.spec.max_state_dim}",
            "give statistics of the policy's own data, or raise model.gaussian.max_state_dim",
            code="state-size",
        )
    model.normalise_state(fields.numbers("mean", size), fields.numbers("std", size))


def read_spec(path: Path) -> GaussianSpec:
    """Return the dimensions in config.json.

    Raises:
        PolicyFileError: the file is damaged.
        CheckpointError: the file is another family's.
    """
    fields = read_file(path)
    check_family(fields, (FAMILY,))
    numbers = ("num_action_chunks", "action_dim", "image_size", "num_cameras", "feature_dim", "max_state_dim")
    return GaussianSpec(
        use_images=fields.flag("use_images"),
        channels=_sizes(fields, "channels"),
        hidden_sizes=_sizes(fields, "hidden_sizes"),
        initial_std=fields.number("initial_std", low=1e-6, high=7.0),
        categorical=fields.flag("categorical", False),
        normalise_state=fields.flag("normalise_state"),
        encoder_layer=fields.integer("encoder_layer", 0, high=512),
        encoder_width=fields.integer("encoder_width", 0, high=MAX_SIZE),
        seen_state_dim=fields.integer("seen_state_dim", 0, high=MAX_SIZE),
        **{name: size(fields, name) for name in numbers},
    )


def _sizes(fields: Fields, name: str) -> tuple[int, ...]:
    items = fields.items(name)
    if not 1 <= len(items) <= 64 or not all(type(item) is int and 1 <= item <= 2**17 for item in items):
        fields.refuse(f"'{name}' is not a list of 1 to 64 sizes")
    return tuple(item for item in items if isinstance(item, int))
