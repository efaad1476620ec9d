"""The rollout backend "vllm" for policies that write text: prompts are tokens, whose keys and values vLLM keeps.

Shapes: B rows, M tokens of a message, K choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from embodrl.config.schema import RolloutConfig, SamplingConfig
from embodrl.errors import EmbodrlError
from embodrl.hybrid_engines.rollout.base import ActRequest
from embodrl.hybrid_engines.rollout.vllm.engine import VllmEngine, unserved
from embodrl.hybrid_engines.rollout.vllm.llm import DecodeLimits, LocalLlm, ServedModel
from embodrl.hybrid_engines.rollout.vllm.writing import RowWriting
from embodrl.models.base import VLAPolicy
from embodrl.models.planner.policy import PlannerPolicy
from embodrl.types import PolicyOutput

Common = tuple[VLAPolicy, RolloutConfig, SamplingConfig, int, int, tuple[int, int]]
"""``RolloutParts.common``."""


class VllmTextEngine(VllmEngine):
    """Writes with a planner's language model in vLLM.

    Tokens are drawn as in the native engine, from the same random numbers and among the same choices: with equal
    weights in float32 both write the same, unless two tokens are equally likely to within rounding. Values come from
    the policy's own pass over the prompts. See RolloutEngine.

    Args:
        common: the first arguments of RolloutEngine.
        limits: rows and tokens that vLLM processes at once, its processes, and whether it keeps prefixes.

    Raises:
        EmbodrlError: the policy is no planner, or one with experts.
        MissingDependencyError: see LocalLlm.
    """

    def __init__(self, common: Common, limits: DecodeLimits | None = None) -> None:
        super().__init__(*common)
        policy, config, *_ = common
        limits = limits or DecodeLimits()
        if not isinstance(policy, PlannerPolicy):
            raise unserved(policy)
        self._served = policy
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        network, length = policy.network, policy.max_prompt + policy.max_tokens
        # On a CPU vLLM packs the output layer, and reloading shared weights would leave its old ones packed.
        public = {**network.public_config(), "tie_word_embeddings": False}
        if public.get("num_local_experts") or public.get("num_experts"):
            raise EmbodrlError(
                "a language model of experts writes otherwise in vLLM once its weights are new",
                "set rollout.backend=native",
                code="vllm-experts",
            )
        self.decoder = LocalLlm(
            ServedModel(public, network.cached, self.device, dtype, length),
            limits,
            self.num_threads,
            config.enable_offload,
            {
                "enable_prefix_caching": limits.caches_prefixes,
                # By name: vLLM's processes import it.
                "logits_processors": ["embodrl.hybrid_engines.rollout.vllm.logits_processor:WrittenTokens"],
                # What it leaves of a row's logits is the log-prob of the token that it has drawn.
                "logprobs_mode": "processed_logits",
            },
        )
        self._load()

    def _language_weights(self) -> Iterator[tuple[str, Tensor]]:
        weights = self._served.network.public_weights()
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        for name, tensor in weights.items():
            yield name, tensor.detach()

    def _predict(self, request: ActRequest) -> PolicyOutput:
        policy, observation = self._served, request.observation
        policy.check_mode(request.mode)
        inputs, page = policy.preprocess(observation), policy.page(observation)
        noise: Sequence[Tensor | None] = [None] * observation.batch_size
        if request.mode == "train":
            pairs = zip(self._parts(observation), request.generators, strict=False)
            noise = [row for part, source in pairs for row in policy.noise(part.batch_size, source).cpu()]
        sampling = request.sampling or self.sampling
        rows = [
            RowWriting(() if tree is None else tree.texts, sampling, mine, policy.vocabulary.size)
            for tree, mine in zip(page.calls, noise, strict=True)
        ]
        prompts = [ids[mask].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
        with self._lock:
            self._wake()
            tokens, logprobs = self._write(prompts, rows)
            values = self.values(observation).to(self.device) if request.compute_values else None
            version = self.version
        page.copy(tokens)
        output = policy.make_output(inputs, page, logprobs, values)
        output.version = version
        return output

    def _write(self, prompts: list[list[int]], rows: list[RowWriting]) -> tuple[Tensor, Tensor]:
        """Return tokens ``int64[B,M]``, padded, and their log-probs ``float32[B,M]``, 0 where nothing was written."""
        from vllm import SamplingParams as RequestParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        policy = self._served
        params = [
            # Temperature 0: the logits processor has already drawn and leaves one token possible.
            RequestParams(
                temperature=0.0,
                max_tokens=policy.max_tokens,
                stop_token_ids=list(policy.vocabulary.ends),
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                extra_args={"writing": row},
            )
            for row in rows
        ]
        answers = self.decoder.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        tokens = torch.full((len(rows), policy.max_tokens), policy.vocabulary.pad)
        logprobs = torch.zeros(tokens.shape)
        for row, answer in enumerate(answers):
            ids = list(answer.token_ids)
            tokens[row, : len(ids)] = torch.tensor(ids)
            pairs = zip(answer.logprobs, ids, strict=True)
            logprobs[row, : len(ids)] = torch.tensor([found[token].logprob for found, token in pairs])
        return tokens, logprobs
