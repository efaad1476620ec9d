"""Recordings of other sizes than the known ones, made by the networks here: their dimensions are found again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expect import raises_code
from safetensors.torch import save_file
from tiny_families import build
from torch import Tensor, nn

from embodrl.errors import CheckpointError
from embodrl.models.common.action_bins import ActionBins
from embodrl.models.common.checkpoint import write_json
from embodrl.models.common.config_file import fields_of
from embodrl.models.common.norm_stats import choose_stats, stats_sets
from embodrl.models.common.patches import SiglipSpec
from embodrl.models.flow.flow import integrate
from embodrl.models.flow.gemma import GemmaSpec
from embodrl.models.gr00t.action_head import FlowActionHead
from embodrl.models.gr00t.config import ActionHeadSpec
from embodrl.models.gr00t.dit import TransformerSpec
from embodrl.models.openpi.config import PiConfig
from embodrl.models.openvla.modeling import OpenVLAModel
from embodrl.models.openvla_oft.modeling import append_action_places, at_action_places
from embodrl.models.pi.modeling import PiModel
from embodrl.tools.parity import gr00t as gr00t_parity
from embodrl.tools.parity import openvla as openvla_parity
from embodrl.tools.parity import openvla_oft as oft_parity
from embodrl.tools.parity import pi as pi_parity
from embodrl.tools.parity.common import Comparison

HEAD = ActionHeadSpec(
    dit=TransformerSpec(2, 3, 8),
    vl=TransformerSpec(1, 5, 4),
    backbone_dim=20,
    hidden_size=14,
    action_dim=5,
    max_state_dim=9,
    action_horizon=6,
    num_embodiments=3,
    num_future_tokens=7,
    max_seq_len=11,
)
PI = PiConfig(
    "pi0",
    SiglipSpec(24, 8, 12, 3, 3, 20),
    GemmaSpec(40, 3, 56, 4, 2, 6),
    GemmaSpec(28, 3, 36, 4, 2, 6),
    vocab_size=90,
    max_action_dim=5,
    action_horizon=3,
    num_images=2,
    max_prompt_tokens=7,
)
VIT = {"width": 16, "depth": 4, "num_heads": 4, "mlp_dim": 20}
ARCHITECTURE = {
    "image_size": 24,
    "patch_size": 8,
    "dino": VIT,
    "siglip": {**VIT, "width": 24, "depth": 3, "num_heads": 3},
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
Settings = dict[str, Any]
Recorder = Callable[[Path], tuple[Settings, Callable[[Path], list[Comparison]]]]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape)


def stirred(module: nn.Module) -> Any:
    """Fill a network with random numbers, so that nothing is zero or one by initialisation."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0.0, 0.3)
    return module.eval()


def write(directory: Path, module: nn.Module, io: dict[str, Tensor], settings: Settings, **public: Any) -> None:
    directory.mkdir()
    for name, tensors in (("model", module.state_dict()), ("io", io)):
        save_file({key: value.clone() for key, value in tensors.items()}, directory / f"{name}.safetensors")
    write_json(directory / "config.json", {**public, "embodrl": settings})


@torch.no_grad()
def record_gr00t(directory: Path):
    head = stirred(FlowActionHead(HEAD))
    io = {"bf": draw(2, 8, 20), "state": draw(2, 1, 9), "emb": torch.tensor([0, 2])}
    io |= {"x": draw(2, 6, 5), "t": torch.tensor([10, 600])}
    io["vl"] = head.process_features(io["bf"], None)
    state = head.encode_state(io["state"], io["emb"])
    io["v"], _ = head(io["x"], io["t"], state, head.model.key_values(io["vl"]), None, io["emb"])
    settings = {"dit_heads": 3, "vl_heads": 5}
    write(directory, head, io, settings)
    return settings, gr00t_parity.run


def record_pi(variant: str) -> Recorder:
    @torch.no_grad()
    def record(directory: Path):
        model = stirred(PiModel(replace(PI, variant=variant)))
        io = {f"imgs.{camera}": draw(2, 3, 24, 24) for camera in range(2)}
        io |= {f"masks.{camera}": torch.tensor([True, True]) for camera in range(2)}
        io |= {"lang": torch.randint(0, 90, (2, 7)), "lm": torch.arange(7)[None] < torch.tensor([[7], [4]])}
        io |= {"state": draw(2, 5), "noise": draw(2, 3, 5), "act": draw(2, 3, 5), "t": torch.tensor([0.2, 0.9])}
        pixels = torch.stack([io["imgs.0"], io["imgs.1"]], dim=1)
        context = model.encode(pixels, io["lang"], io["lm"], io["state"])
        io["a"] = integrate(lambda x, tau: model.velocity(context, x, tau), io["noise"], 4)
        noisy = io["t"][:, None, None] * io["noise"] + (1 - io["t"][:, None, None]) * io["act"]
        io["loss"] = (model.velocity(context, noisy, io["t"])[0] - (io["noise"] - io["act"])) ** 2
        settings = {"siglip_heads": 3, "gemma_heads": 4, "num_steps": 4}
        write(directory, model, io, settings)
        return settings, pi_parity.run

    return record


def openvla_parts(family: str) -> tuple[OpenVLAModel, dict[str, Tensor], dict[str, Any]]:
    """Return a network, its inputs, and config.json with statistics of two datasets."""
    model = stirred(build(family, architecture=ARCHITECTURE).model)
    ids = torch.cat([torch.ones(1, 1, dtype=torch.long), torch.randint(3, 300, (1, 5))], dim=1)
    public = model.config.to_dict()
    [stats] = public["norm_stats"].values()
    low, high = [-2.0] * 7, [3.0] * 7
    public["norm_stats"] = {"first": stats, "second": {"action": {**stats["action"], "q01": low, "q99": high}}}
    return model, {"ids": ids, "pv": draw(1, 6, 24, 24)}, public


def logits_of(model: OpenVLAModel, hidden: Tensor) -> dict[str, Tensor]:
    first = model.config.first_action_id - 3
    return {f"logits_{first}_{first + 262}": model.language_model.lm_head(hidden)[..., first : first + 262]}


def actions_of(model: OpenVLAModel, public: dict[str, Any], tokens: Tensor) -> Tensor:
    bins = ActionBins(model.config.action_vocab_size, 256)
    stats = choose_stats(stats_sets(fields_of(public["norm_stats"], "here")), "second", 7, "here")
    return torch.from_numpy(stats.unnormalize(bins.decode(tokens.numpy())))


@torch.no_grad()
def record_openvla(directory: Path):
    model, io, public = openvla_parts("openvla")
    prefix = model.embed_prefix(io["pv"], io["ids"])
    io["h"] = model.hidden_states(prefix, None)
    io |= logits_of(model, io["h"])
    io["gen"] = openvla_parity.greedy_over_all_ids(model, prefix, 7)
    io["a"] = actions_of(model, public, io["gen"])
    settings = {"dino_heads": 4, "siglip_heads": 3, "unnorm_key": "second"}
    write(directory, model, io, settings, **{k: v for k, v in public.items() if k != "embodrl"})
    return settings, openvla_parity.run


@torch.no_grad()
def record_oft(directory: Path):
    model, io, public = openvla_parts("openvla_oft")
    prefix = model.embed_prefix(io["pv"], io["ids"])
    io["h"] = model.hidden_states(append_action_places(model, prefix, 14, False), None)
    io |= logits_of(model, io["h"])
    io["ah"] = at_action_places(io["h"], prefix.shape[1], 14)
    tokens = model.language_model.lm_head(io["ah"]).argmax(dim=-1).view(2, 7)
    io["a"] = actions_of(model, public, tokens)
    settings = {"dino_heads": 4, "siglip_heads": 3, "unnorm_key": "second", "keep_stop_token": False}
    write(directory, model, io, settings, **{k: v for k, v in public.items() if k != "embodrl"})
    return settings, oft_parity.run


RECORDERS = {
    "gr00t": record_gr00t,
    "pi0": record_pi("pi0"),
    "pi05": record_pi("pi05"),
    "openvla": record_openvla,
    "openvla_oft": record_oft,
}


def change(directory: Path, settings: Settings) -> None:
    write_json(directory / "config.json", {**json.loads((directory / "config.json").read_text()), "embodrl": settings})


@pytest.mark.parametrize("family", RECORDERS)
def test_a_recording_of_another_size(family: str, tmp_path: Path):
    settings, run = RECORDERS[family](tmp_path / family)
    results = run(tmp_path / family)
    assert len(results) >= 2 and all(result.ok for result in results), results
    # Each setting counts: without it, the default gives other numbers, or is refused.
    for name in settings:
        change(tmp_path / family, {key: value for key, value in settings.items() if key != name})
        try:
            assert not all(result.ok for result in run(tmp_path / family)), name
        except CheckpointError as error:
            assert name.split("_")[-1] in f"{error.message} {error.hint}"


@pytest.mark.parametrize("family", ["gr00t", "pi0", "openvla"])
def test_settings_that_are_none(family: str, tmp_path: Path):
    settings, run = RECORDERS[family](tmp_path / family)
    name = next(iter(settings))
    for wrong, code in (
        ({"heads": 3}, "policy-file"),
        ({name: 0}, "policy-file"),
        ({name: "3"}, "policy-file"),
        ({name: 7}, "parity-recording"),
    ):
        change(tmp_path / family, {**settings, **wrong})
        with raises_code(code, CheckpointError, name):
            run(tmp_path / family)


@pytest.mark.parametrize("family", ["gr00t", "pi0"])
def test_a_recording_of_something_else_is_reported(family: str, tmp_path: Path):
    _, run = RECORDERS[family](tmp_path / family)
    save_file({"w": torch.zeros(1)}, tmp_path / family / "model.safetensors")
    with raises_code("parity-recording", CheckpointError):
        run(tmp_path / family)
