"""The plain way to choose actions, as the public reference implementations do it, on embodrl's own weights.

Shapes: B batch, C actions run, A action dimensions, H actions predicted, D padded action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from embodrl.models.base import VLAPolicy
from embodrl.models.flow.flow_policy import FlowPolicy
from embodrl.models.openvla.policy import OpenVLAPolicy
from embodrl.models.openvla.token_policy import TokenPolicy
from embodrl.models.pi0_fast.policy import FastPolicy
from embodrl.types import Observation, SamplingParams

Plain = Callable[[Observation], NDArray[np.float32]]
"""From an observation, all rows with one instruction, to the actions ``float32[B,C,A]`` of evaluation."""


def plain_actions(policy: VLAPolicy) -> Plain:
    """Return the plain way for a policy; weights are shared, not copied."""
    if isinstance(policy, FlowPolicy):
        return lambda observation: _denoise(policy, observation)
    if isinstance(policy, FastPolicy):
        return lambda observation: _without_cache(policy, observation)
    if not isinstance(policy, TokenPolicy):
        raise TypeError(f"no plain way is known for {type(policy).__name__}")
    llama = stock_llama(policy)
    decode = _one_after_the_other if isinstance(policy, OpenVLAPolicy) else _all_at_once
    return lambda observation: decode(policy, llama, observation)


def stock_llama(policy: TokenPolicy) -> LlamaForCausalLM:
    """Return transformers' Llama with its own attention, on the policy's weights."""
    ours = policy.model.language_model
    config = ours.spec.public(ours.model.causal)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    llama.load_state_dict(ours.state_dict(), assign=True)
    llama.model.rotary_emb = LlamaRotaryEmbedding(config).to(policy.device)
    return llama.eval()


@torch.no_grad()
def _one_after_the_other(policy: TokenPolicy, llama: LlamaForCausalLM, observation: Observation) -> NDArray[np.float32]:
    """Greedy decoding with transformers' cache, as ``generate`` does it: logits of all ids, at every position fed."""
    embeddings, _ = policy.prompt_embeddings(policy.preprocess(observation))
    cache = DynamicCache(config=llama.config)
    bins = []
    for _ in range(policy.num_action_chunks * policy.action_dim):
        output = llama(inputs_embeds=embeddings, past_key_values=cache, use_cache=True)
        bins.append(_most_probable(policy, output.logits[:, -1]))
        embeddings = llama.model.embed_tokens(bins[-1] + policy.bins.first_id)[:, None]
    return _actions(policy, torch.stack(bins, dim=1))


@torch.no_grad()
def _all_at_once(policy: TokenPolicy, llama: LlamaForCausalLM, observation: Observation) -> NDArray[np.float32]:
    """One bidirectional pass over the prompt, empty places for the actions, and the stop token; logits of all ids."""
    prefix, _ = policy.prompt_embeddings(policy.preprocess(observation))
    batch, length, width = prefix.shape
    num_tokens = policy.num_action_chunks * policy.action_dim
    empty = prefix.new_zeros(batch, num_tokens, width)
    stop = torch.full((batch, 1), policy.model.config.eos_id, device=prefix.device)
    sequence = torch.cat([prefix, empty, llama.model.embed_tokens(stop)], dim=1)
    everything = sequence.new_zeros(batch, 1, sequence.shape[1], sequence.shape[1])  # added to the scores
    logits = llama(inputs_embeds=sequence, attention_mask=everything, use_cache=False).logits
    return _actions(policy, _most_probable(policy, logits[:, length - 1 : length - 1 + num_tokens]))


@torch.no_grad()
def _without_cache(policy: FastPolicy, observation: Observation) -> NDArray[np.float32]:
    """Greedy decoding that reads images, prompt and all that is written again for every token; logits of all ids."""
    inputs = policy.preprocess(observation)
    choices = policy.get_buffer("_choices")
    written = policy.get_buffer("_begin").expand(observation.batch_size, -1)
    tokens: list[Tensor] = []
    mask = [written.new_ones(observation.batch_size, dtype=torch.bool)]
    while len(tokens) < policy.max_tokens and bool(mask[-1].any()):
        hidden = policy.model.hidden_states(*policy.prefix(inputs), written)
        tokens.append(policy.model.logits(hidden[:, -1])[:, choices].argmax(dim=-1))
        mask.append(mask[-1] & (tokens[-1] != policy.end))
        written = torch.cat([written, choices[tokens[-1]][:, None]], dim=1)
    return policy.actions_of(torch.stack(tokens, dim=1), torch.stack(mask[:-1], dim=1))


@torch.no_grad()
def _denoise(policy: FlowPolicy, observation: Observation) -> NDArray[np.float32]:
    """Euler's method with images and prompt run again at every step."""
    inputs = policy.preprocess(observation)
    steps = policy.flow.num_steps
    x = policy.get_buffer("_evaluation_noise").to(policy.device).expand(observation.batch_size, -1, -1)
    for tau in type(policy).euler_times(steps)[:-1]:
        network = policy.velocity(policy.encode(inputs))
        v, _ = network(x, torch.full((len(x),), tau, device=x.device))
        x = x - v.float() / steps
    return policy._to_environment(x, observation)


def _most_probable(policy: TokenPolicy, logits: Tensor) -> Tensor:
    """Return the most probable bin ``int64[...]`` of logits ``[...,vocabulary]``."""
    first = policy.bins.first_id
    return logits.float()[..., first : first + policy.bins.num_bins].argmax(dim=-1)


def _actions(policy: TokenPolicy, bins: Tensor) -> NDArray[np.float32]:
    logits = torch.zeros(*bins.shape, policy.bins.num_bins, device=bins.device)
    return policy.make_output({}, bins, logits, None, SamplingParams()).actions
