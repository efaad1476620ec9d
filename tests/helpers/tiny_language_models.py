"""Public language models of a size that a test can afford, as users have them on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

KINDS = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
CORPUS = [
    "go to the red square, then to the blue square",
    '<tool_call>\n{"name": "reach", "arguments": {"colour": "yellow"}}\n</tool_call>',
    '{"type": "function", "function": {"name": "move", "description": "", "parameters": {"type": "object"}}}',
    "system user assistant tool grün",
]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call with <tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Return a tokenizer of bytes and some merges, with Qwen's marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=marks, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def write_language_model(directory: Path, kind: str = "qwen3", template: str | None = TEMPLATE, **changes: Any) -> Path:
    """Write a language model of random weights with its tokenizer, and return the directory."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    sizes = {"vocab_size": 336, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    if kind.startswith("qwen3"):
        sizes["head_dim"] = 8
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_experts": 4}
    if kind == "mixtral":
        experts = {"num_experts_per_tok": 2, "num_local_experts": 4}
    sizes |= experts if kind in ("mixtral", "qwen3_moe") else {"tie_word_embeddings": kind == "qwen2"}
    config = AutoConfig.for_model(
        kind, **{**sizes, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, **changes}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0.0, 0.2)
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    model.save_pretrained(directory)
    tiny_tokenizer(template).save_pretrained(directory)
    return directory
