"""OpenVLA's Llama in vLLM, in this process, that continues embeddings with action tokens.

A logits processor sees the logits of a step and leaves one token possible; a forward hook before the output layer sees
the hidden states. So the distribution is the one of ``models/common/sampling.py``, and the log-probs come from the
logits that vLLM computed, without its full-vocabulary softmax.

Shapes: B rows, P image and prompt tokens of a row, N action tokens, K bins, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from embodrl.hybrid_engines.rollout.vllm.llm import DecodeLimits, LocalLlm, ServedModel, import_vllm
from embodrl.models.common.sampling import draw
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.types import SamplingParams


@dataclass
class _Step:
    """Inputs and observed outputs of the current batch.

    Attributes:
        noise: ``float32[B,N,K]``; None chooses the most probable token.
        logits: ``float32[B,N,K]``.
        tokens: ``int64[B,N]``, indices among the K bins.
        hidden: ``[B,D]`` at the last prompt token.
        latest: ``[rows,D]``, hidden states at the tokens of the next logits.
    """

    first_id: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    noise: Tensor | None = None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: Tensor = field(default_factory=lambda: torch.empty(0))
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    latest: Tensor | None = None

    def choose(self, logits: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Return ids ``int64[R]`` for logits ``float32[R,V]`` of rows ``int64[R]`` at positions ``int64[R]``."""
        num_bins = self.logits.shape[-1]
        bins = logits[:, self.first_id : self.first_id + num_bins]
        noise = None if self.noise is None else self.noise[rows, places]
        index = draw(bins, self.sampling, noise)
        self.logits[rows, places] = bins
        self.tokens[rows, places] = index
        assert self.latest is not None
        starting = places == 0
        self.hidden[rows[starting]] = self.latest[starting].to(self.hidden.dtype)
        return index + self.first_id


class VllmDecoder(LocalLlm):
    """Continues embeddings by N action tokens.

    Args:
        model: provides the dimensions and the action-token ids.
        dtype: dtype of the copy: float32 or bfloat16.
        max_length: maximum tokens of a row, P + N.
        limits, num_threads, can_sleep: see LocalLlm.

    Raises:
        MissingDependencyError, EmbodrlError: see LocalLlm.
    """

    def __init__(
        self,
        model: OpenVLAModel,
        *,
        dtype: torch.dtype,
        max_length: int,
        limits: DecodeLimits,
        num_threads: int = 1,
        can_sleep: bool = False,
    ) -> None:
        self._num_bins = model.config.n_action_bins
        self._hidden_size = model.config.llama.hidden_size
        self._step = _Step(model.config.first_action_id)
        options = {
            "enable_prompt_embeds": True,
            # Prompts are embeddings of pictures, which do not recur.
            "enable_prefix_caching": False,
            "logits_processors": [_processor_class(self._step, model.language_model.lm_head.weight.device)],
        }
        super().__init__(served_llama(model, dtype, max_length), limits, num_threads, can_sleep, options)
        network: nn.Module = self.runner.get_model()
        output_layer: Any = network.logits_processor
        output_layer.register_forward_pre_hook(self._keep_hidden)

    @torch.no_grad()
    def run(
        self, prompts: list[Tensor], num_tokens: int, sampling: SamplingParams, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decode a chunk for every row.

        Args:
            prompts: embeddings ``[P,D]``, one per row; P may differ.
            num_tokens: N.
            sampling: temperature and top k.
            noise: ``float32[B,N,K]`` from Exp(1) for sampling; None chooses the most probable tokens.

        Returns:
            ``tokens int64[B,N]`` (indices among the K bins), the logits ``float32[B,N,K]`` they were drawn from, and
            the hidden states ``[B,D]`` at the last prompt token; on the device of the model.

        Raises:
            RolloutEngineError: vLLM failed now or earlier, and is unusable.
        """
        from vllm import SamplingParams as RequestParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        rows = len(prompts)
        device, dtype = self.served.device, self.served.dtype
        step = self._step
        step.sampling = sampling
        step.noise = noise
        step.logits = torch.zeros((rows, num_tokens, self._num_bins), device=device)
        step.tokens = torch.zeros((rows, num_tokens), dtype=torch.int64, device=device)
        step.hidden = torch.zeros((rows, self._hidden_size), dtype=dtype, device=device)
        requests = [{"prompt_embeds": prompt.to("cpu", dtype)} for prompt in prompts]
        # Temperature 0: the logits processor has already drawn and leaves one token possible.
        params = [
            RequestParams(
                temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, extra_args={"row": row}
            )
            for row in range(rows)
        ]
        answers = self.generate(requests, params)
        ids = torch.tensor([list(answer.token_ids) for answer in answers], device=device)
        assert torch.equal(ids, step.tokens + step.first_id)
        return step.tokens, step.logits, step.hidden

    def _keep_hidden(self, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._step.latest = arguments[1]


def served_llama(model: OpenVLAModel, dtype: torch.dtype, max_length: int) -> ServedModel:
    """Return the description of OpenVLA's language model that vLLM loads."""
    spec = model.config.llama
    config = {**spec.public(model.causal).to_dict(), "architectures": ["LlamaForCausalLM"]}
    cached = spec.num_hidden_layers, spec.num_key_value_heads * (spec.hidden_size // spec.num_attention_heads)
    return ServedModel(config, cached, model.language_model.lm_head.weight.device, dtype, max_length)


def _processor_class(step: _Step, device: torch.device) -> type:
    """Return a class, since vLLM constructs the object itself."""
    import_vllm(device)
    from vllm.v1.sample.logits_processor import LogitsProcessor  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates  # pyright: ignore[reportMissingImports]

    class ActionTokens(LogitsProcessor):
        """Draws an action token for each row and makes all others impossible."""

        def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
            # Position in vLLM's batch -> our row, and the list of tokens drawn so far, which vLLM appends to.
            self._requests: dict[int, tuple[int, list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: object) -> None:
            process_dict_updates(self._requests, batch_update, lambda p, _, done: (p.extra_args["row"], done))

        def apply(self, logits: Tensor) -> Tensor:
            asked = [self._requests[place] for place in range(len(logits))]
            rows = torch.tensor([row for row, _ in asked], device=logits.device)
            places = torch.tensor([len(done) for _, done in asked], device=logits.device)
            ids = step.choose(logits, rows, places)
            return logits.fill_(-torch.inf).scatter_(1, ids[:, None], 0.0)

    return ActionTokens
