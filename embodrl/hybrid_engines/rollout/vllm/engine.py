"""The rollout backend "vllm": the language model in vLLM, images and values in the policy's own modules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from embodrl.config.schema import RolloutConfig, SamplingConfig
from embodrl.data.rng import RandomSource
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.offload import OffloadReport, allocated_bytes
from embodrl.hybrid_engines.rollout.base import ActRequest, RolloutEngine
from embodrl.hybrid_engines.rollout.vllm.decoder import VllmDecoder
from embodrl.hybrid_engines.rollout.vllm.llm import DecodeLimits, LocalLlm
from embodrl.hybrid_engines.training.parallel import on_threads
from embodrl.hybrid_engines.training.precision import autocast
from embodrl.models.base import VLAPolicy
from embodrl.models.common.merging import merged_state_dict
from embodrl.models.common.sampling import exponential_noise
from embodrl.models.openvla.policy import OpenVLAPolicy
from embodrl.types import Decoding, Observation, PolicyOutput


@dataclass(frozen=True)
class _Prompts:
    """The prompts of a part of a batch.

    Attributes:
        inputs: result of ``preprocess``.
        rows: embeddings ``[P,D]`` of images and prompt, one per row, without padding.
        noise: ``float32[B,N,256]`` to sample with; None for the most probable tokens.
    """

    inputs: dict[str, Tensor]
    rows: list[Tensor]
    noise: Tensor | None


class VllmEngine(RolloutEngine):
    """Acts with a language model in vLLM, which has a copy of its weights.

    Attributes:
        decoder: vLLM, made by the constructor of a derived class, which then calls ``_load``.
    """

    decoder: LocalLlm
    _asleep = False
    _stale = False

    @abstractmethod
    def _language_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the language model's weights by transformers' names, adapters merged."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Overwrite vLLM's copy in place."""
        with self._lock:
            self._copy_weights(weights)
            self._load()
            self.version = version

    def offload(self) -> None:
        """Move vLLM's weights to main memory, and drop its cache."""
        with self._lock:
            if self.decoder.can_sleep and not self._asleep:
                before = allocated_bytes(self.device)
                self.decoder.sleep()
                self._asleep = True
                self.offload_report = OffloadReport(self.device, before, allocated_bytes(self.device))

    def onload(self) -> None:
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        if self._asleep:
            self.decoder.wake_up()
            self._asleep = False
        if self._stale:
            self._load()

    def _load(self) -> None:
        """Give vLLM the policy's weights, now or when it wakes up."""
        self._stale = self._asleep
        if not self._stale:
            self.decoder.load_weights(self._language_weights())


class VllmRolloutEngine(VllmEngine):
    """Acts with OpenVLA; vLLM decodes the action tokens on a copy of the language model.

    Images, projector, token embeddings and value head use the policy's own modules, so their weights are always
    current; vLLM gets the language model's weights with every ``update_weights``, low-rank adapters merged. Tokens are
    drawn as in the native engine, from the same random numbers: with equal weights and precision both choose the same
    tokens, unless two are equally likely to within rounding. See RolloutEngine.

    Args:
        policy, config, sampling, seed, num_threads, part: see RolloutEngine.
        limits: rows and tokens that vLLM processes at once.

    Raises:
        EmbodrlError: the policy does not decode token by token.
        MissingDependencyError: see VllmDecoder.
    """

    def __init__(
        self,
        policy: VLAPolicy,
        config: RolloutConfig,
        sampling: SamplingConfig,
        seed: int,
        num_threads: int = 1,
        part: tuple[int, int] = (0, 1),
        limits: DecodeLimits | None = None,
    ) -> None:
        super().__init__(policy, config, sampling, seed, num_threads, part)
        if not isinstance(policy, OpenVLAPolicy):
            raise unserved(policy)
        self._served = policy
        self._num_tokens = policy.num_action_chunks * policy.action_dim
        longest = policy.model.config.num_patches + policy.processor.max_prompt_tokens + self._num_tokens
        self.decoder = self._decoder = VllmDecoder(
            policy.model,
            dtype=torch.bfloat16 if self.precision == "bf16" else torch.float32,
            max_length=longest,
            limits=limits or DecodeLimits(),
            num_threads=self.num_threads,
            can_sleep=config.enable_offload,
        )
        self._load()

    @property
    def decodings(self) -> tuple[Decoding, ...]:
        """Decodings; vLLM conditions on its own choices, so ``mean`` is unsupported."""
        return tuple(name for name in self.policy.decodings if name != "mean")

    def _language_weights(self) -> Iterator[tuple[str, Tensor]]:
        return language_weights(self._served)

    def _predict(self, request: ActRequest) -> PolicyOutput:
        def ask(part: Observation, generator: RandomSource) -> _Prompts:
            with torch.no_grad(), autocast(self.precision, self.device):
                return self._prompts(part, generator if request.mode == "train" else None)

        pairs = zip(self._parts(request.observation), request.generators, strict=False)
        tasks = [lambda part=part, generator=generator: ask(part, generator) for part, generator in pairs]
        with self._lock:
            self._wake()
            parts = on_threads(tasks, self.num_threads)
            noise = [part.noise for part in parts if part.noise is not None]
            tokens, logits, hidden = self._decoder.run(
                [row for part in parts for row in part.rows],
                self._num_tokens,
                self.sampling,
                torch.cat(noise) if noise else None,
            )
            version = self.version
        inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs}
        values = self._values(request.observation, hidden) if request.compute_values else None
        output = self._served.make_output(inputs, tokens, logits, values, self.sampling)
        output.version = version
        return output

    def _prompts(self, part: Observation, generator: RandomSource | None) -> _Prompts:
        inputs = self._served.preprocess(part)
        embeddings, mask = self._served.prompt_embeddings(inputs)
        # Positions do not count padding, so omitting it changes nothing.
        rows = list(embeddings) if mask is None else [e[m.bool()] for e, m in zip(embeddings, mask, strict=True)]
        shape = (len(embeddings), self._num_tokens, self._served.bins.num_bins)
        return _Prompts(inputs, rows, None if generator is None else exponential_noise(shape, generator, self.device))

    def _values(self, observation: Observation, hidden: Tensor) -> Tensor:
        """Return values from the hidden states ``[B,D]`` at the end of the prompts, or from a separate pass."""
        if self._served.value_input != "prompt_end":
            return self.values(observation).to(self.device)
        with torch.no_grad():
            return self._served.values_from(hidden)


def language_weights(policy: OpenVLAPolicy) -> Iterator[tuple[str, Tensor]]:
    """Yield the language model's weights by transformers' Llama names, adapters merged."""
    for name, tensor in merged_state_dict(policy.model.language_model).items():
        yield name, tensor.detach()


def unserved(policy: VLAPolicy) -> EmbodrlError:
    """Return the error for a policy that vLLM cannot run."""
    return EmbodrlError(
        f"vLLM decodes token by token, but {type(policy).__name__} does not",
        "set rollout.backend=native, or model=openvla",
        code="vllm-policy",
    )
