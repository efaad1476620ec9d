"""Shared base of flow-matching policies: sampling, log-probs, values and the imitation loss.

Shapes: B batch, C actions run, H actions predicted, A action dimensions, D padded action dimensions, F features.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embodrl.config.policy_card import trained_delay
from embodrl.data.rng import RandomSource
from embodrl.errors import EmbodrlError
from embodrl.models.base import VLAPolicy
from embodrl.models.common.gripper import Convention, to_environment, to_model
from embodrl.models.common.sampling import noise_of, standard_normal
from embodrl.models.common.value_head import ValueHead
from embodrl.models.flow.cfm import CfmSampler
from embodrl.models.flow.flow import (
    NoiseHead,
    Sampler,
    Times,
    Velocity,
    denoising_times,
    integrate_with_features,
)
from embodrl.models.flow.flow_spec import FlowConfig, FlowModelConfig
from embodrl.models.flow.gemma import per_token
from embodrl.models.flow.rtc import conditioned, drawn_delays, guided, prefix_weights
from embodrl.types import ActMode, ChunkPrefix, EvalOutput, Observation, PolicyOutput, SamplingParams

TIME_ALPHA = 1.5
TIME_LOW = 0.001
EVALUATION_NOISE_SEED = 0
LEARNABLE = 5.0
"""In standard deviations or half ranges: few values of the matching data lie beyond, most values in other units do."""


class ActionNormalizer(Protocol):
    """Converts between environment units and model units."""

    def normalize(self, actions: NDArray[np.floating], /) -> NDArray[np.float64]:
        """Convert ``[...,A]`` from environment units to model units."""
        ...

    def scale(self, actions: NDArray[np.floating], /) -> NDArray[np.float64]:
        """Like ``normalize`` without clipping; infinite where ``unnormalize`` can't restore the value."""
        ...

    def unnormalize(self, actions: NDArray[np.float64], /) -> NDArray[np.float64]:
        """Convert ``[...,A]`` from model units to environment units."""
        ...


class FlowPolicy(VLAPolicy):
    """A policy whose network predicts the denoising velocity of an action chunk.

    A family defines ``preprocess``, ``encode``, ``velocity``, ``prefix_features``, ``training_times``, ``parts`` and
    its files.

    Args:
        stats: action statistics.
        config: section ``model``: C, A, ``flow``, ``gripper``, and the value head's ``input`` and ``detach``.
        horizon: H.
        padded_action_dim: D.
        value_input: meaning of ``value_head.input: auto``.
        value_head: critic, or None.
        noise_head: noise head for Flow-Noise.
    """

    draws_by_row = True

    euler_times: ClassVar[Times] = staticmethod(denoising_times)

    def __init__(
        self,
        stats: ActionNormalizer,
        config: FlowModelConfig,
        horizon: int,
        padded_action_dim: int,
        value_input: Literal["prefix", "suffix"],
        value_head: ValueHead | None,
        noise_head: NoiseHead | None,
    ) -> None:
        super().__init__()
        if config.num_action_chunks > horizon:
            raise EmbodrlError(
                f"the model predicts {horizon} actions, {config.num_action_chunks} are to be run",
                f"set model.num_action_chunks to {horizon} or less",
                code="action-horizon",
            )
        if config.action_dim > padded_action_dim:
            raise EmbodrlError(
                f"the model's actions have room for {padded_action_dim} dimensions, the environment's have "
                f"{config.action_dim}",
                "choose a model with more action dimensions",
                code="action-size",
            )
        self.stats = stats
        self.num_action_chunks = config.num_action_chunks
        self.action_dim = config.action_dim
        self.horizon = horizon
        self.padded_action_dim = padded_action_dim
        self.flow: FlowConfig = config.flow
        self.rtc_max_delay = trained_delay(config)
        self.gripper: Convention = config.gripper
        self.value_input = value_input if config.value_head.input == "auto" else config.value_head.input
        self.detach_value = config.value_head.detach
        self.value_head = value_head
        self.noise_head = noise_head
        self.sampler = self._make_sampler(noise_head)
        start = torch.Generator().manual_seed(EVALUATION_NOISE_SEED)
        self.register_buffer(
            "_evaluation_noise", torch.randn(1, horizon, padded_action_dim, generator=start), persistent=False
        )

    def _make_sampler(self, noise_head: NoiseHead | None) -> Sampler | CfmSampler:
        flow = self.flow
        chunk = (self.num_action_chunks, self.action_dim)
        if flow.method == "cfm":
            return CfmSampler(flow.num_steps, flow.num_samples, *chunk, type(self).euler_times, flow.keep_errors)
        return Sampler(flow.num_steps, flow.noise_level, *chunk, noise_head, flow.joint, flow.keep_errors)

    # Defined by families -----------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, inputs: dict[str, Tensor]) -> Any:
        """Encode images, prompt and state once per chunk; all denoising steps use the result."""

    @abstractmethod
    def velocity(self, context: Any) -> Velocity:
        """Return the network for an encoded observation, in the convention of ``flow.py``."""

    @abstractmethod
    def prefix_features(self, context: Any) -> Tensor:
        """Return features ``[B,F]`` for values of the observation alone, ignoring padding."""

    def training_times(self, batch: int) -> Tensor:
        """Draw imitation noise levels tau ``float32[B]``, on the CPU, from torch's global generator.

        ``0.001 + 0.999 Beta(1.5, 1)``, as in openpi: noisy levels are more frequent.
        """
        # The distribution function of Beta(a, 1) is u^a.
        return TIME_LOW + (1.0 - TIME_LOW) * torch.rand(batch) ** (1.0 / TIME_ALPHA)

    def loss_action_dims(self) -> int:
        """Return the number of leading action dimensions in the imitation loss; by default all D."""
        return self.padded_action_dim

    def relative_to(self, actions: NDArray[np.float64], observation: Observation) -> NDArray[np.float64]:
        """Convert environment actions ``[B,H,A]`` to the model's form before normalisation."""
        return actions

    def absolute_from(self, actions: NDArray[np.float64], observation: Observation) -> NDArray[np.float64]:
        """Invert ``relative_to`` for unnormalised actions ``[B,C,A]``."""
        return actions

    # VLAPolicy ---------------------------------------------------------------------------------------------------

    @property
    def action_horizon(self) -> int:
        return self.horizon

    @torch.no_grad()
    def predict_action_batch(
        self,
        observation: Observation,
        mode: ActMode,
        sampling: SamplingParams,
        generator: RandomSource | None = None,
        compute_values: bool = True,
    ) -> PolicyOutput:
        """Draw a chunk per row in ``train`` mode; in ``eval`` mode follow the ODE from ``_evaluation_start``.

        ``forward_inputs`` has the output of ``preprocess`` and, in ``train`` mode, the stored part of the chain.
        Log-probs in ``eval`` mode, which is deterministic, are 0. Raises ``EmbodrlError`` if values are requested
        without a value head.
        """
        self.check_mode(mode)
        inputs = self.preprocess(observation)
        context = self.encode(inputs)
        network = self.velocity(context)
        batch = observation.batch_size
        if mode == "train":
            chain = self.sampler.sample(network, (batch, self.horizon, self.padded_action_dim), generator, self.device)
            values = self._values(context, chain.features) if compute_values else None
            actions = self._to_environment(chain.actions, observation)
            return PolicyOutput(actions, chain.logprobs, values, {**inputs, **chain.stored})
        chosen, features = self._integrate(network, self._evaluation_start(observation))
        actions = self._to_environment(chosen, observation)
        values = self._mean_value(context, features) if compute_values else None
        return PolicyOutput(actions, torch.zeros(actions.shape, device=self.device), values, inputs)

    @torch.no_grad()
    def predict_values(self, observation: Observation) -> Tensor:
        """Return values; with value input ``suffix``, the mean over the denoising steps from a fixed noise.

        The critic is trained at points of sampled chains, so it is read at such points: at the mean of the starting
        noise, 0, it was never trained and is biased.
        """
        context = self.encode(self.preprocess(observation))
        if self.value_input == "prefix":
            return self._values(context, None)
        noise = self.get_buffer("_evaluation_noise").to(self.device).expand(observation.batch_size, -1, -1)
        return self._mean_value(context, self._integrate(self.velocity(context), noise)[1])

    def evaluate_actions(
        self,
        forward_inputs: dict[str, Tensor],
        sampling: SamplingParams,
        compute_entropy: bool = True,
        compute_values: bool = True,
    ) -> EvalOutput:
        """Return log-probs, entropy (constant for Flow-SDE) and values of stored chains, with gradients.

        With ``model.flow.keep_errors`` also return velocity errors.
        """
        context = self.encode(forward_inputs)
        result = self.sampler.evaluate(self.velocity(context), forward_inputs)
        values = self._values(context, result.features) if compute_values else None
        return EvalOutput(result.logprobs, result.entropy if compute_entropy else None, values, result.errors)

    def sft_inputs(self, observation: Observation, actions: Tensor) -> dict[str, Tensor]:
        """Return the output of ``preprocess``, ``target`` and ``noise`` ``float32[B,H,D]``, and ``tau float32[B]``.

        With ``model.flow.rtc_max_delay`` also ``given bool[B,H]``, actions that are given rather than learned. All
        draws come from torch's global generator here rather than in ``sft_loss``, which may run on threads.
        """
        raw = actions.detach().cpu().numpy().astype(np.float64)
        raw = to_model(raw, self.gripper)
        normalized = self.stats.normalize(self.relative_to(raw, observation))
        target = torch.zeros(len(raw), self.horizon, self.padded_action_dim)
        target[:, : raw.shape[1], : self.action_dim] = torch.from_numpy(normalized)
        drawn = {
            "target": target,
            "noise": standard_normal(target.shape, None, torch.device("cpu")),
            "tau": self.training_times(len(raw)),
        }
        if self.rtc_max_delay:
            delays = drawn_delays(len(raw), self.rtc_max_delay)
            drawn["given"] = torch.arange(self.horizon) < delays[:, None]
        return {**self.preprocess(observation), **{name: value.to(self.device) for name, value in drawn.items()}}

    def out_of_range(self, actions: NDArray[np.floating], state: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return values at least ``LEARNABLE`` from 0 when normalised; the noise has standard deviation 1."""
        raw = to_model(np.asarray(actions, np.float64), self.gripper)[:, None]
        nothing = np.zeros((len(raw), 0, 1, 1, 3), np.uint8)
        observation = Observation(nothing, state.astype(np.float32), [""] * len(raw), np.zeros(len(raw), np.int32))
        return np.abs(self.scaled(self.relative_to(raw, observation))[:, 0]) >= LEARNABLE

    def scaled(self, actions: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return actions ``[...,A]`` in model units, without clipping."""
        return self.stats.scale(actions)

    def sft_loss(self, batch: dict[str, Tensor], label_smoothing_bins: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean squared velocity error and ``l1``, the error of the implied actions (normalised units).

        Args:
            batch: output of ``sft_inputs``; an optional ``action_mask bool[B,H]`` excludes actions, and ``given``
                actions enter without noise, at tau 0.
            label_smoothing_bins: for token policies.
        """
        target = batch["target"]
        noise = batch["noise"]
        times = batch["tau"]
        if "given" in batch:
            times = times[:, None].masked_fill(batch["given"], 0.0)
        tau = per_token(times[..., None])
        x = tau * noise + (1.0 - tau) * target
        v, _ = self.velocity(self.encode(batch))(x, times)
        v = v.float()
        dims = self.loss_action_dims()
        weight = torch.ones_like(target[..., :1])
        weight[:, self.action_horizon :] = 0.0
        if "action_mask" in batch:
            weight[:, : self.action_horizon] = batch["action_mask"][..., None].to(target.dtype)
        if "given" in batch:
            weight = weight * ~batch["given"][..., None]
        total = weight.sum().clamp(min=1.0)
        loss = ((v - (noise - target))[..., :dims].square() * weight).sum() / (total * dims)
        with torch.no_grad():
            error = (x - v * tau - target)[..., : self.action_dim].abs()
            l1 = (error * weight).sum() / (total * self.action_dim)
        return loss, {"l1": l1}

    # Real-time chunking ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def continue_chunk(self, observation: Observation, prefix: ChunkPrefix, guidance: float) -> NDArray[np.float32]:
        """Continue the last chunk as ``predict_action_batch`` in ``eval`` mode; see ``rtc.py``.

        A policy with ``model.flow.rtc_max_delay`` receives only the first ``delay`` actions; others are guided, and
        their first ``delay`` actions come out close to the prefix, which is what must be executed. Without a prefix the
        actions equal those of ``predict_action_batch``.
        """
        if self.rtc_max_delay and int(prefix.delay.max()) > self.rtc_max_delay:
            raise EmbodrlError(
                f"a delay of {int(prefix.delay.max())} actions, but the policy was trained with {self.rtc_max_delay}",
                "send a delay within that limit, or serve with model.flow.rtc_max_delay=0 to use guidance instead",
                code="policy-rtc-delay",
            )
        shape = (observation.batch_size, self.horizon, self.padded_action_dim)
        target = torch.zeros(shape)
        weights = torch.zeros(shape)
        length = min(prefix.actions.shape[1], self.action_horizon)
        actions = np.zeros((shape[0], self.action_horizon, self.action_dim))  # statistics may be per step
        actions[:, :length] = prefix.actions[:, :length]
        units = self.scaled(self.relative_to(to_model(actions, self.gripper), observation))
        target[:, :length, : self.action_dim] = torch.from_numpy(units[:, :length])
        delay = torch.from_numpy(prefix.delay)
        noise = self._evaluation_start(observation)
        network = self.velocity(self.encode(self.preprocess(observation)))
        target = target.to(self.device)
        if self.rtc_max_delay:
            given = (torch.arange(self.horizon) < delay[:, None]).to(self.device)
            velocity = conditioned(network, given)
            noise = torch.where(given[..., None], target, noise)
        else:
            held = prefix_weights(delay, torch.from_numpy(prefix.length), self.horizon)
            weights[..., : self.action_dim] = held[..., None]
            velocity = guided(network, target, weights.to(self.device), guidance)
        return self._to_environment(self._integrate(velocity, noise)[0], observation)

    # Externally chosen noise ---------------------------------------------------------------------------------------

    def encode_observation(self, observation: Observation) -> Any:
        return self.encode(self.preprocess(observation))

    def denoise(self, context: Any, noise: Tensor, observation: Observation) -> NDArray[np.float32]:
        """Return the actions ``float32[B,C,A]``, in environment units, that the ODE reaches from ``float32[B,H,D]``."""
        return self._to_environment(self._integrate(self.velocity(context), noise)[0], observation)

    # Parts -------------------------------------------------------------------------------------------------------

    @property
    def trained_steps(self) -> int:
        """Action expert passes per row with gradients in an update."""
        return self.sampler.trained_steps

    def chosen_bytes(self, num_cameras: int) -> int:
        """Return the bytes of the sampler's stored values and the log-probs."""
        stored = self.sampler.stored_numbers(self.horizon, self.padded_action_dim)
        return torch.float32.itemsize * (stored + self.num_action_chunks * self.action_dim)

    def own_heads(self) -> dict[str, nn.Module]:
        """Return embodrl's additions to the family's network, by group."""
        heads = {"noise_head": self.noise_head, "value_head": self.value_head}
        return {name: head for name, head in heads.items() if head is not None}

    def _evaluation_start(self, observation: Observation) -> Tensor:
        """Return the starting noise ``float32[B,H,D]`` of evaluations, fixed or drawn from a row's images and state."""
        if self.flow.evaluation_noise == "fixed":
            noise = self.get_buffer("_evaluation_noise").expand(observation.batch_size, -1, -1)
        else:
            noise = noise_of(observation, (self.horizon, self.padded_action_dim))
        return noise.to(self.device)

    def _integrate(self, network: Velocity, noise: Tensor) -> tuple[Tensor, list[Tensor]]:
        return integrate_with_features(network, noise, self.flow.num_steps, type(self).euler_times)

    def _mean_value(self, context: Any, features: list[Tensor]) -> Tensor:
        """Return the mean value over the denoising steps; Flow-Noise's critic reads only the first step."""
        if self.value_input == "prefix":
            return self._values(context, None)
        read = features if self.noise_head is None else features[:1]
        return torch.stack([self._values(context, step) for step in read]).mean(dim=0)

    def _values(self, context: Any, features: Tensor | None) -> Tensor:
        if self.value_head is None:
            raise EmbodrlError(
                "the policy has no value head", "set model.add_value_head=true", code="value-head-missing"
            )
        if self.value_input == "prefix":
            hidden = self.prefix_features(context)
        else:
            assert features is not None
            hidden = features[:, : self.num_action_chunks].float().mean(dim=1)
        return self.value_head(hidden.detach() if self.detach_value else hidden)

    def _to_environment(self, actions: Tensor, observation: Observation) -> NDArray[np.float32]:
        run = actions[:, : self.num_action_chunks, : self.action_dim].double().cpu().numpy()
        raw = self.absolute_from(self.stats.unnormalize(run), observation)
        return to_environment(raw, self.gripper).astype(np.float32)
