"""Run by an interpreter that has lerobot 0.5 or later: lerobot's own code loads an exported policy and acts.

lerobot_policy_check.py DIRECTORY INPUT.npz OUTPUT.npz

lerobot supports only the public sizes, so the policy's sizes are patched in; the rest of its code is unchanged. Its
``from_pretrained`` continues with random weights if loading fails; every tensor is therefore compared with the file.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies import factory
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi05 import modeling_pi05
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def change_sizes(module, sizes: dict) -> None:
    """Let the public names stand for other sizes."""
    specs = {"gemma_2b": sizes["vlm"], "gemma_300m": sizes["expert"]}
    module.get_gemma_config = lambda variant: module.GemmaConfig(**specs[variant])
    vlm, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM

    def small_vlm(config):
        config.text_config.vocab_size = sizes["vocab_size"]
        config.vision_config.projection_dim = config.projection_dim = sizes["vlm"]["width"]
        for theirs, ours in {
            "hidden_size": "width",
            "num_hidden_layers": "depth",
            "num_attention_heads": "num_heads",
            "intermediate_size": "mlp_dim",
            "patch_size": "patch_size",
        }.items():
            setattr(config.vision_config, theirs, sizes["siglip"][ours])
        return vlm(config=config)

    def small_expert(config):
        config.vocab_size = sizes["vocab_size"]
        return expert(config=config)

    module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM = small_vlm, small_expert


def tokenizer_of(directory: Path) -> PreTrainedTokenizerFast:
    """Return the exported tokenizer as that of PaliGemma is set up: a token begins the text, and 0 is padding."""
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    first = next(token for token in ("<bos>", "<s>") if backend.token_to_id(token) is not None)
    backend.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=first, pad_token=backend.id_to_token(0))


def main(directory: Path, given: Path, output: Path) -> None:
    data = np.load(given)
    sizes = json.loads(str(data["sizes"]))
    for module in (modeling_pi0, modeling_pi05):
        change_sizes(module, sizes)
    config = PreTrainedConfig.from_pretrained(directory)
    config.device = "cpu"
    policy = factory.get_policy_class(config.type).from_pretrained(directory, config=config, strict=True)
    loaded, stored = policy.state_dict(), load_file(directory / "model.safetensors")
    different = [name for name, tensor in stored.items() if not torch.equal(loaded[name], tensor)]
    assert not different, different
    before, after = factory.make_pre_post_processors(
        config,
        pretrained_path=str(directory),
        preprocessor_overrides={"tokenizer_processor": {"tokenizer": tokenizer_of(directory)}},
    )
    pictures = torch.from_numpy(data["images"]).permute(0, 1, 4, 2, 3).float() / 255
    batch = {name: pictures[:, index] for index, name in enumerate(config.image_features)}
    batch |= {
        "observation.state": torch.from_numpy(data["state"]),
        "task": [str(text) for text in data["instructions"]],
    }
    noise = torch.from_numpy(data["noise"]).expand(len(pictures), -1, -1)
    policy.model.sample_noise = lambda shape, device: noise
    with torch.no_grad():
        chunk = policy.predict_action_chunk(before(batch))
        actions = torch.stack([after(chunk[:, place]) for place in range(config.n_action_steps)], dim=1)
    np.savez(output, actions=actions.numpy())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
