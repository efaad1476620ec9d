"""A small actor on a frozen policy of any family: it corrects actions, chooses noise, or chooses the action itself.

Residual: ``a = a_base + s tanh(u)``, Yuan et al. 2024, "Policy Decorator", arXiv 2412.13630. DSRL: the noise that a
flow policy denoises is ``w = s tanh(u)``, Wagenmaker et al. 2025, "Steering Your Diffusion Policy with Latent Space
Reinforcement Learning", arXiv 2506.15799. RL token: the actor reads a compact token of the frozen policy's prefix
states and its action, and returns an action of its own (see ``models.small_actors.rl_token``). In all, ``u`` is
Gaussian given the frozen policy's features of an observation, which are computed once and stored in the replay buffer
instead of images. Shapes: B batch, C actions run, A action dimensions, H actions predicted, D padded action dimensions,
G features of the frozen policy, S padded state.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodrl.config.schema import ModelConfig, SmallActorConfig
from embodrl.data.rng import RandomSource
from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy
from embodrl.models.common import checkpoint
from embodrl.models.common.init import new_generator
from embodrl.models.common.sampling import standard_normal
from embodrl.models.common.small_actor import ACTOR_CONFIG
from embodrl.models.common.value_head import FeatureTap, ValueHead, keep_prefix
from embodrl.models.flow.flow_policy import FlowPolicy
from embodrl.models.gaussian.modeling import GaussianModel, GaussianSpec, TanhGaussian
from embodrl.models.gaussian.policy import GaussianPolicy, padded_state
from embodrl.models.load_report import LoadReport
from embodrl.models.small_actors.rl_token import RLToken, RLTokenSpec
from embodrl.specs import MODELS
from embodrl.storage.files import write_safetensors
from embodrl.types import CHOSEN, ActMode, Observation, PolicyOutput, SamplingParams

ACTOR_WEIGHTS = "small_actor.safetensors"
GREEDY = SamplingParams()
PREFIX_INPUTS = ("prefix", "prompt_mean")
"""Values of ``model.value_head.input`` that mean the average of the prefix states."""


class OnFrozenPolicy(GaussianPolicy):
    """A Gaussian actor with inputs from the frozen policy ``base``; a ``ReferencePolicy`` also reads ``token``."""

    network = GaussianModel

    def __init__(
        self,
        base: VLAPolicy,
        model: GaussianModel,
        config: ModelConfig,
        settings: SmallActorConfig,
        token: RLToken | None = None,
    ) -> None:
        super().__init__(model, config, None)
        self.base = base.requires_grad_(False)
        self.settings = settings
        self.token = token

    @classmethod
    def base_config(cls, config: ModelConfig, settings: SmallActorConfig) -> ModelConfig:
        """Return the configuration of the frozen policy, with a critic in whose place features are read."""
        head = config.value_head.model_copy(update=cls._value_input(config))
        return config.model_copy(update={"add_value_head": True, "value_head": head})

    @classmethod
    def _value_input(cls, config: ModelConfig) -> dict[str, str]:
        """Return the required ``model.value_head.input``, if it matters."""
        return {}

    @classmethod
    def build(
        cls,
        base: VLAPolicy,
        config: ModelConfig,
        settings: SmallActorConfig,
        directory: Path | None,
        report: LoadReport,
        seed: int,
    ) -> OnFrozenPolicy:
        """Return the small actor on a policy of ``base_config``, replacing its value head; fills in ``report``.

        ``directory`` has the actor's weights (``CheckpointError`` if they do not fit); None draws new ones.
        """
        head = getattr(base, "value_head", None)
        assert isinstance(head, ValueHead), "the configuration was checked"
        first = head.hidden[0] if len(head.hidden) else head.out
        assert isinstance(first, nn.Linear)
        token = cls._token(config, base.device, first.in_features)
        width = first.in_features if token is None else token.spec.size
        base.value_head = FeatureTap()
        for name in [name for name in report.initialized if name.startswith("value_head.")]:
            del report.initialized[name]
        with torch.device("meta"):
            model = cls.network(cls.spec_of(base, width, settings))
        own = LoadReport(str(directory))
        files = [] if directory is None else [directory / ACTOR_WEIGHTS]
        generator = new_generator(base.device, seed)
        checkpoint.fill(
            model, files, own, lambda: model.init_weights(generator), device=base.device, dtype=torch.float32
        )
        report.initialized |= {f"small_actor.{name}": reason for name, reason in own.initialized.items()}
        report.num_loaded += own.num_loaded
        kind = f"{settings.kind}, scale {settings.scale:g}, on a frozen {config.model_type}"
        report.conventions["small actor"] = kind
        return cls(base, model, config, settings, None if token is None else token.to(base.device))

    @classmethod
    def _token(cls, config: ModelConfig, device: torch.device, width: int) -> RLToken | None:
        """Return the frozen token that summarises prefix states of size ``width``, if the actor reads one."""
        return None

    @staticmethod
    @abstractmethod
    def spec_of(base: VLAPolicy, width: int, settings: SmallActorConfig) -> GaussianSpec:
        """Return the dimensions of the actor on a policy with G = ``width``."""

    @abstractmethod
    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return the stored inputs: ``seen float32[B,G]``, ``state float32[B,S]``, and further ones of the class.

        Runs the frozen policy once, without gradients.
        """

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return ``seen``, standardised per row, concatenated with the other inputs."""
        seen = inputs["seen"].float()
        parts = [F.layer_norm(seen, seen.shape[-1:]), inputs["state"].float()]
        return torch.cat([*parts, *([inputs["base"].float().flatten(1)] if "base" in inputs else [])], -1)

    def _values(self, features: Tensor) -> NoReturn:
        raise _off_policy_only()

    def evaluate_actions(self, *args: object, **kwargs: object) -> NoReturn:
        raise _off_policy_only()

    def encoder_parameters(self) -> list[nn.Parameter]:
        return []

    def parts(self) -> dict[str, nn.Module]:
        """Return ``small_actor`` and the parts of the frozen policy."""
        return {"small_actor": self.model, **self.base.parts()}

    def unused_parameters(self) -> list[nn.Parameter]:
        return self.base.unused_parameters()

    def save_pretrained(self, directory: Path) -> None:
        """Write the frozen policy in its family's layout, with the actor in separate files."""
        with checkpoint.policy_directory(directory) as staging:
            self.base.save_pretrained(staging)
            write_safetensors(staging / ACTOR_WEIGHTS, self.model.state_dict())
            checkpoint.write_json(staging / ACTOR_CONFIG, self.settings.model_dump(mode="json"))
            self._save_beside(staging)

    def _save_beside(self, staging: Path) -> None:
        """Write the actor's other files; a residual and chosen noise have none."""

    def _state(self, observation: Observation) -> Tensor:
        return padded_state(observation, self.settings.max_state_dim, "model.small_actor").to(self.device)


class ResidualPolicy(OnFrozenPolicy):
    """Adds at most ``scale`` to each number of the frozen policy's greedy action, within -1 to 1."""

    @staticmethod
    def spec_of(base: VLAPolicy, width: int, settings: SmallActorConfig) -> GaussianSpec:
        chunk = base.num_action_chunks
        dims = base.action_dim
        return _mlp(chunk, dims, width + settings.max_state_dim + chunk * dims, settings)

    @torch.no_grad()
    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return ``seen``, ``state`` and the frozen policy's action ``base float32[B,C,A]``."""
        output = self.base.predict_action_batch(observation, "eval", GREEDY, compute_values=True)
        assert output.values is not None
        base = torch.from_numpy(output.actions).to(self.device)
        return {"seen": output.values.float(), "state": self._state(observation), "base": base}

    def chosen(self, features: Tensor, u: Tensor) -> Tensor:
        base = features[:, -u[0].numel() :].view_as(u)
        return (base + self.settings.scale * torch.tanh(u)).clamp(-1.0, 1.0)


class NoisePolicy(OnFrozenPolicy):
    """Chooses the initial noise ``float32[B,1,D]`` of a frozen flow policy, shared by its H actions."""

    base: FlowPolicy

    @classmethod
    def _value_input(cls, config: ModelConfig) -> dict[str, str]:
        return {"input": "prefix"}  # features that do not depend on the noise

    @staticmethod
    def spec_of(base: VLAPolicy, width: int, settings: SmallActorConfig) -> GaussianSpec:
        assert isinstance(base, FlowPolicy), "the configuration was checked"
        return _mlp(1, base.padded_action_dim, width + settings.max_state_dim, settings)

    @torch.no_grad()
    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        return self._inputs(observation, self.base.prefix_features(self.base.encode_observation(observation)))

    def _inputs(self, observation: Observation, seen: Tensor) -> dict[str, Tensor]:
        return {"seen": seen.float(), "state": self._state(observation)}

    def chosen(self, features: Tensor, u: Tensor) -> Tensor:
        return self.settings.scale * torch.tanh(u)

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """As in ``GaussianPolicy``; ``forward_inputs`` has the noise, and log-probs are 0."""
        self.check_mode(mode)
        context = self.base.encode_observation(observation)
        inputs = self._inputs(observation, self.base.prefix_features(context))
        features = self.features(inputs)
        noise = self.model.distribution(features)
        u = noise.mean
        if mode == "train":
            u = noise.sample(standard_normal(u.shape, generator, self.device))
        w = self.chosen(features, u)
        actions = self.base.denoise(context, w.expand(-1, self.base.horizon, -1), observation)
        return PolicyOutput(actions, torch.zeros(actions.shape), None, {**inputs, CHOSEN: w})

    def sft_loss(self, *args: object, **kwargs: object) -> NoReturn:
        raise _off_policy_only()


class FixedGaussian(TanhGaussian):
    """``TanhGaussian`` without the tanh."""

    def log_prob(self, u: Tensor) -> Tensor:
        return torch.distributions.Normal(self.mean, self.std).log_prob(u)


class ReferenceActor(GaussianModel):
    """An MLP and a learned diagonal of the reference, which alone is active at first; its deviation is constant."""

    def __init__(self, spec: GaussianSpec) -> None:
        super().__init__(spec)
        self.skip = nn.Parameter(torch.ones(spec.num_action_chunks, spec.action_dim))

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        nn.init.ones_(self.skip)

    def distribution(self, features: Tensor) -> TanhGaussian:
        change = super().distribution(features).mean
        mean = change + self.skip * features[:, -change[0].numel() :].view_as(change)
        return FixedGaussian(mean, torch.full_like(mean, self.spec.initial_std))


class ReferencePolicy(OnFrozenPolicy):
    """Chooses the action from the RL token, the state and its reference, the frozen policy's greedy action."""

    network = ReferenceActor

    token: RLToken

    @classmethod
    def _value_input(cls, config: ModelConfig) -> dict[str, str]:
        return {"input": prefix_input(config)}

    @classmethod
    def _token(cls, config: ModelConfig, device: torch.device, width: int) -> RLToken:
        return _token_of(config, device, width)

    @staticmethod
    def spec_of(base: VLAPolicy, width: int, settings: SmallActorConfig) -> GaussianSpec:
        return ResidualPolicy.spec_of(base, width, settings)

    @torch.no_grad()
    def preprocess(self, observation: Observation) -> dict[str, Tensor]:
        """Return ``z_rl`` as ``seen float32[B,Z]``, ``state``, and ``base float32[B,C,A]``."""
        with keep_prefix() as kept:
            output = self.base.predict_action_batch(observation, "eval", GREEDY, compute_values=True)
        base = torch.from_numpy(output.actions).to(self.device)
        return {"seen": self.token.encode(*kept[-1]), "state": self._state(observation), "base": base}

    def chosen(self, features: Tensor, u: Tensor) -> Tensor:
        return u.clamp(-1.0, 1.0)

    def without_reference(self, features: Tensor, dropped: Tensor) -> Tensor:
        """Return features with the reference zeroed in the rows ``dropped bool[B]``."""
        numbers = self.num_action_chunks * self.action_dim
        kept = torch.cat([features[:, :-numbers], torch.zeros_like(features[:, -numbers:])], 1)
        return torch.where(dropped[:, None], kept, features)

    def parts(self) -> dict[str, nn.Module]:
        """Return ``small_actor``, ``rl_token`` and the parts of the frozen policy."""
        return {**super().parts(), "rl_token": self.token}

    def _save_beside(self, staging: Path) -> None:
        self.token.save(staging)


def _off_policy_only() -> EmbodrlError:
    return EmbodrlError(
        "a small actor on a frozen policy learns off-policy only",
        "choose algorithm=residual or algorithm=dsrl",
        code="small-actor-loss",
    )


def _mlp(chunk: int, dims: int, inputs: int, settings: SmallActorConfig) -> GaussianSpec:
    return GaussianSpec(
        num_action_chunks=chunk,
        action_dim=dims,
        use_images=False,
        image_size=1,
        num_cameras=1,
        channels=(),
        feature_dim=1,
        max_state_dim=inputs,
        hidden_sizes=settings.hidden_sizes,
        initial_std=settings.initial_std,
    )


def prefix_input(config: ModelConfig) -> str:
    """Return the ``model.value_head.input`` whose features are the mean of the prefix states in this family."""
    known = MODELS.entry(config.model_type).value_inputs or ()
    return next((name for name in PREFIX_INPUTS if name in known), "auto")


def _token_of(config: ModelConfig, device: torch.device, width: int) -> RLToken:
    """Load the RL token of the frozen policy; raise ``CheckpointError`` if missing or unfit."""
    if config.model_path is not None:
        return RLToken.load(checkpoint.resolve(config.model_path))
    directory = config.warm_start
    if directory is None and str(device) == "meta":  # memory is counted before anything is loaded
        return RLToken(RLTokenSpec(width, places=1))
    return RLToken.load(Path(directory or "builtin").expanduser())
