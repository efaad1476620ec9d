"""Builds a planner: from random weights, from what embodrl wrote, or from a public language model's directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from embodrl.errors import CheckpointError
from embodrl.models.common import checkpoint
from embodrl.models.common.config_file import (
    CONFIG_FILE,
    check_family,
    check_multiple,
    own_section,
    read_file,
    size,
)
from embodrl.models.common.heads import build_value_head
from embodrl.models.common.init import new_generator
from embodrl.models.common.llama import Llama, LlamaSpec
from embodrl.models.load_report import LoadReport
from embodrl.models.planner.modeling import LlamaNetwork, init_weights
from embodrl.models.planner.network import Network
from embodrl.models.planner.policy import PlannerPolicy
from embodrl.models.planner.public_network import new_experts, read_config, read_network
from embodrl.models.planner.public_vocabulary import PublicVocabulary
from embodrl.models.planner.spec import FAMILY, PlannerModelConfig
from embodrl.models.planner.tokenizer import END, PAD, VOCAB_SIZE
from embodrl.models.planner.vocabulary import ByteVocabulary, Vocabulary


def build_planner(
    config: PlannerModelConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> tuple[PlannerPolicy, LoadReport]:
    """Build the configured policy; see ``models.registry.build_policy``."""
    device = torch.device(device)
    directory, report = checkpoint.locate(config)
    generator = new_generator(device, seed)
    raw = {} if directory is None else _config_of(directory)
    vocabulary: Vocabulary = ByteVocabulary()
    network: Network
    if directory is not None and not (own_section(raw) and raw.get("model_type") == "llama"):
        network, vocabulary = _transformers(config, directory, report, device, dtype)
    elif directory is None and config.planner.num_experts is not None:
        network = new_experts(_sizes(config), generator, report, device, dtype)
    else:
        network = _llama(config, directory, report, generator, device, dtype)
    head = build_value_head(config, network.hidden_size, directory, report, device, generator)
    return PlannerPolicy(network, vocabulary, config, head), report


def _config_of(directory: Path) -> dict[str, object]:
    fields = read_file(directory / CONFIG_FILE)
    check_family(fields, (FAMILY,))
    return dict(fields.content)


def _llama(
    config: PlannerModelConfig,
    directory: Path | None,
    report: LoadReport,
    generator: torch.Generator,
    device: torch.device,
    dtype: torch.dtype,
) -> LlamaNetwork:
    spec = _spec(config, directory)
    with torch.device("meta"):
        model = Llama(spec)
    files = [] if directory is None else checkpoint.weight_files(directory)
    checkpoint.fill(model, files, report, lambda: init_weights(model, generator), device=device, dtype=dtype)
    return LlamaNetwork(model)


def _transformers(
    config: PlannerModelConfig, directory: Path, report: LoadReport, device: torch.device, dtype: torch.dtype
) -> tuple[Network, Vocabulary]:
    """Return a network of transformers, and the vocabulary of its directory: bytes if embodrl drew the weights."""
    if report.adapters is not None:
        raise CheckpointError(
            f"model.lora_path: adapters are not read for a language model of transformers ({directory})",
            "merge them into its weights, or leave model.lora_path out",
            code="planner-adapters",
        )
    shape = config.planner
    found = read_config(directory, shape.max_prompt_tokens + shape.max_new_tokens)
    if own_section(_config_of(directory)):
        vocabulary: Vocabulary = ByteVocabulary()
        wanted = _sizes(config)
        del wanted["max_position_embeddings"]  # rotary positions have no weights
        wrong = [name for name, value in wanted.items() if getattr(found, name) != value]
        if config.model_path is None and wrong:
            raise _other_size(directory, ", ".join(wrong))
    else:
        vocabulary = PublicVocabulary(directory, int(found.vocab_size))
    return read_network(directory, found, report, device, dtype), vocabulary


def _sizes(config: PlannerModelConfig) -> dict[str, int]:
    """Return the dimensions of a Mixtral over bytes, by the names of ``MixtralConfig``."""
    shape = config.planner
    return {
        **{"vocab_size": VOCAB_SIZE, "eos_token_id": END, "pad_token_id": PAD},
        **{"hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size},
        **{"num_hidden_layers": shape.num_hidden_layers, "num_attention_heads": shape.num_attention_heads},
        **{"num_key_value_heads": shape.num_attention_heads, "num_local_experts": shape.num_experts or 0},
        "max_position_embeddings": shape.max_prompt_tokens + shape.max_new_tokens,
    }


def _spec(config: PlannerModelConfig, directory: Path | None) -> LlamaSpec:
    """Return the dimensions of the checkpoint, or the configured ones."""
    shape = config.planner
    length = shape.max_prompt_tokens + shape.max_new_tokens
    heads = shape.num_attention_heads
    wanted = LlamaSpec(
        VOCAB_SIZE, shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers, heads, heads, length
    )
    if directory is None:
        return wanted
    fields = read_file(directory / CONFIG_FILE)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    found = replace(wanted, **{name: size(fields, name) for name in names})
    check_multiple(fields, "hidden_size", "num_attention_heads")
    check_multiple(fields, "num_attention_heads", "num_key_value_heads")
    if config.model_path is None:
        checkpoint.check_size(found, wanted, names, directory, "model.planner")
        if shape.num_experts is not None:
            raise _other_size(directory, "num_experts")
    return found


def _other_size(directory: Path, names: str) -> CheckpointError:
    return CheckpointError(
        f"the warm start {directory} differs from model.planner in {names}",
        "set model.planner to the size of the warm start, or model.warm_start=null for random weights",
        code="warm-start-size",
    )
