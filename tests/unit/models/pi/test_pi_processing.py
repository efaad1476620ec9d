"""Prompts to the letter, statistics worked out by hand, and what config.json leaves open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from embodrl.errors import CheckpointError, EmbodrlError, HubError, MissingDependencyError
from embodrl.hub import HubName
from embodrl.models.common.limits import check_vocabulary
from embodrl.models.common.norm_stats import MeanStd, Quantiles
from embodrl.models.common.tokenizer import TINY_TOKENIZER
from embodrl.models.flow import fetched_tokenizer as hub
from embodrl.models.openpi.config import BY_DEVIATION, BY_QUANTILES, PUBLIC, Normalization, PiConfig
from embodrl.models.openpi.processing import PiProcessor
from embodrl.models.openpi.stats import choose, cut, read_lerobot, read_openpi
from embodrl.models.openpi.tokenizer import TextTokenizer, load_tokenizer, tiny_tokenizer
from embodrl.types import Observation

CPU = torch.device("cpu")


class Letters(TextTokenizer):
    """One id a character, so that a prompt can be read back."""

    bos_id = 2
    vocab_size = 1000

    def __init__(self) -> None:
        self.calls: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.calls.append(text)
        return [ord(letter) for letter in text]

    def save(self, directory: Path) -> None:
        raise NotImplementedError


def processor(state: MeanStd | Quantiles | None = None, **changes: Any) -> PiProcessor:
    settings = {"variant": "pi0", "max_action_dim": 4, "num_images": 2, "max_prompt_tokens": 60}
    return PiProcessor(Letters(), PiConfig(**{**settings, **changes}), state)


def text_of(ids: list[int]) -> str:
    assert ids[0] == 2
    return "".join(chr(i) for i in ids[1:])


def observation(state: list[list[float]], texts: list[str], cameras: int = 1) -> Observation:
    batch = len(texts)
    images = np.random.default_rng(0).integers(0, 256, (batch, cameras, 8, 12, 3), dtype=np.uint8)
    states = np.array(state, np.float32).reshape(batch, -1)
    return Observation(images, states, texts, np.zeros(batch, np.int32))


# Prompts -------------------------------------------------------------------------------------------------------------


def test_pi0_prompt_is_the_text_and_a_line_feed_of_its_own():
    maker = processor()
    assert text_of(maker.prompt(" pick_up the\ncube ", np.zeros(3))) == "pick up the cube\n"
    assert maker.tokenizer.calls == ["pick up the cube", "\n"]


def test_lerobots_pi0_reads_instructions_as_they_are():
    """Pi0NewLineProcessor of lerobot 0.6.1 does no more than add a line feed, and the whole is encoded at once."""
    maker = processor(raw_instruction=True)
    assert text_of(maker.prompt(" pick_up the\ncube ", np.zeros(3))) == " pick_up the\ncube \n"
    assert text_of(maker.prompt("push\n", np.zeros(3))) == "push\n"
    assert maker.tokenizer.calls == [" pick_up the\ncube \n", "push\n"]


def test_pi05_without_the_state_is_like_pi0():
    maker = processor(variant="pi05")
    assert text_of(maker.prompt("push", np.zeros(3))) == "push\n"


def test_pi05_prompt_tells_the_state():
    maker = processor(variant="pi05", discrete_state=True)
    # 256 bins of 1/128 from -1: -1 is in 0, 0 in 128, 1/128 in 129, just below it in 128, 1 and more in 255.
    state = np.array([-1.0, 0.0, 1 / 128, 1 / 128 - 1e-6, 0.999, 1.0, 2.0, -1.01])
    wanted = "Task: push it, State: 0 128 129 128 255 255 255 -1;\nAction: "
    assert text_of(maker.prompt("push_it", state)) == wanted
    assert maker.tokenizer.calls == [wanted]


def test_lerobots_prompt_tells_the_padding_as_well():
    maker = processor(variant="pi05", discrete_state=True, padded_state_in_prompt=True)
    assert text_of(maker.prompt("push", np.array([0.5, -0.5]))) == "Task: push, State: 192 64 128 128;\nAction: "


def test_inputs_are_padded_on_the_right():
    found = processor()(observation([[], []], ["ab", "abcd"]), CPU)
    assert found["input_ids"].shape == found["attention_mask"].shape == (2, 60)
    assert found["input_ids"][0, :5].tolist() == [2, ord("a"), ord("b"), ord("\n"), 0]
    assert found["attention_mask"].sum(dim=1).tolist() == [4, 6] and found["attention_mask"][0, :4].all()
    assert found["images"].shape == (2, 1, 224, 224, 3) and found["images"].dtype == torch.uint8
    assert torch.equal(found["state"], torch.zeros(2, 4))


def test_a_state_in_the_prompt_differs_by_row():
    maker = processor(variant="pi05", discrete_state=True)
    found = maker(observation([[0.0], [0.5]], ["go", "go"]), CPU)
    rows = zip(found["input_ids"], found["attention_mask"], strict=True)
    texts = [text_of(ids[mask].tolist()) for ids, mask in rows]
    assert texts == ["Task: go, State: 128;\nAction: ", "Task: go, State: 192;\nAction: "] and "state" not in found


def test_what_does_not_fit_is_refused():
    with raises_code("prompt-too-long", EmbodrlError, "72", "60"):
        processor()(observation([[]], ["a" * 70]), CPU)
    with raises_code("num-cameras", EmbodrlError, "2", "3"):
        processor()(observation([[]], ["a"], cameras=3), CPU)
    with raises_code("state-size", EmbodrlError, "4", "5") as error:
        processor()(observation([[0.0] * 5], ["a"]), CPU)
    assert "max_action_dim=5" in error.value.hint


def test_a_prompt_with_state_needs_a_state():
    stats = MeanStd(np.zeros(2), np.ones(2))
    with raises_code("pi-state-missing"):
        processor(stats, variant="pi05", discrete_state=True)(observation([[]], ["go"]), CPU)
    assert "state" not in processor(stats, variant="pi05")(observation([[]], ["go"]), CPU)


# Statistics ----------------------------------------------------------------------------------------------------------


def test_deviation_by_hand():
    stats = MeanStd(np.array([1.0, -2.0]), np.array([0.5, 4.0]))
    np.testing.assert_allclose(stats.normalize(np.array([2.0, 2.0])), [1 / 0.500001, 4 / 4.000001], rtol=1e-12)
    np.testing.assert_allclose(stats.unnormalize(np.array([2.0, -1.0])), [1 + 2 * 0.500001, -2 - 4.000001], rtol=1e-12)


def test_quantiles_by_hand():
    stats = Quantiles(np.array([1.0]), np.array([3.0]))
    np.testing.assert_allclose(stats.normalize(np.array([[1.0], [2.5], [5.0]])).ravel(), [-1, 0.5, 3], atol=3e-6)
    assert stats.normalize(np.array([2.5]))[0] == 1.5 / 2.000001 * 2 - 1  # not clipped, and with eps in the range
    np.testing.assert_allclose(stats.unnormalize(np.array([0.5])), [1 + 0.75 * 2.000001], rtol=1e-12)
    constant = Quantiles(np.array([0.2]), np.array([0.2]))
    assert constant.normalize(np.array([0.2]))[0] == -1.0


def test_state_is_normalised_then_padded():
    maker = processor(MeanStd(np.array([1.0, 0.0]), np.array([2.0, 1.0])))
    found = maker(observation([[3.0, 0.5]], ["go"]), CPU)["state"]
    torch.testing.assert_close(found, torch.tensor([[2 / 2.000001, 0.5 / 1.000001, 0.0, 0.0]]))
    with raises_code("statistics-size", CheckpointError, "2", "3"):
        maker(observation([[3.0, 0.5, 1.0]], ["go"]), CPU)


def write_openpi(directory: Path, **sets: dict[str, Any]) -> None:
    for name, content in sets.items():
        folder = directory / "assets" / name.replace("__", "/")
        folder.mkdir(parents=True)
        (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": content}))


def entry(dims: int, shift: float = 0.0) -> dict[str, Any]:
    low = [shift - 1.0] * dims
    return {"mean": [shift] * dims, "std": [2.0] * dims, "q01": low, "q99": [shift + 1.0] * dims}


def test_openpis_statistics(tmp_path: Path):
    write_openpi(tmp_path, physical__libero={"state": entry(8), "actions": entry(7, 0.5)}, droid={"actions": entry(7)})
    sets = read_openpi(tmp_path)
    assert list(sets) == ["droid", "physical/libero"]
    stats = choose(sets, "physical/libero", BY_DEVIATION, 7, "here")
    assert isinstance(stats.actions, MeanStd) and stats.actions.mean.tolist() == [0.5] * 7
    assert isinstance(stats.state, MeanStd) and len(stats.state.mean) == 8
    quantiles = choose(sets, "droid", BY_QUANTILES, 7, "here")
    assert isinstance(quantiles.actions, Quantiles) and quantiles.state is None
    assert quantiles.actions.eps == 1e-6


def test_the_choice_of_statistics_says_what_there_is(tmp_path: Path):
    write_openpi(tmp_path, trossen={"actions": entry(14)}, droid={"actions": {"mean": [0.0], "std": [1.0]}})
    sets = read_openpi(tmp_path)
    with raises_code("statistics-choice", CheckpointError, 2, "droid", "trossen") as error:
        choose(sets, None, BY_DEVIATION, 7, "here")
    assert "model.unnorm_key" in error.value.hint
    with raises_code("statistics-missing", CheckpointError, "'trosen'", "droid", "trossen") as error:
        choose(sets, "trosen", BY_DEVIATION, 7, "here")
    assert "model.unnorm_key=trossen" in error.value.hint
    with raises_code("statistics-size", CheckpointError, "'trossen'", "14", "7"):
        choose(sets, "trossen", BY_DEVIATION, 7, "here")
    with raises_code("policy-file", CheckpointError, "q01", "q99", "it has mean, std"):
        choose(sets, "droid", BY_QUANTILES, 1, "here")
    with raises_code("statistics-missing", CheckpointError):
        choose({}, None, BY_DEVIATION, 7, "here")


def test_padding_in_statistics_is_cut():
    padded = MeanStd(np.zeros(4), np.array([1.0, 2.0, 0.0, 0.0]))
    assert cut(padded, 2, "x", "y").std.tolist() == [1.0, 2.0]
    with raises_code("statistics-size", CheckpointError, "4", "1"):
        cut(padded, 1, "x", "y")


def write_lerobot(directory: Path, action: str = "QUANTILES", state_file: bool = True) -> None:
    step = {
        "registry_name": "normalizer_processor",
        "config": {"eps": 1e-8, "norm_map": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": action}},
    }
    if state_file:
        step["state_file"] = "stats.safetensors"
    steps = [{"registry_name": "to_batch_processor", "config": {}}, step]
    (directory / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    tensors = {f"observation.state.{name}": torch.tensor(value) for name, value in entry(3).items()}
    tensors |= {f"action.{name}": torch.tensor(value) for name, value in entry(2, 0.5).items()}
    save_file(tensors, directory / "stats.safetensors")


def test_lerobots_statistics(tmp_path: Path):
    write_lerobot(tmp_path)
    sets, methods = read_lerobot(tmp_path)
    assert methods == Normalization("mean_std", "quantiles", 1e-8)
    stats = choose(sets, None, methods, 2, "here")
    assert isinstance(stats.actions, Quantiles) and stats.actions.q01.tolist() == [-0.5, -0.5]
    assert isinstance(stats.state, MeanStd) and stats.state.std.tolist() == [2.0] * 3
    assert stats.actions.eps == 1e-8


def test_lerobot_without_statistics_or_with_an_unknown_method(tmp_path: Path):
    assert read_lerobot(tmp_path) == ({}, None)
    write_lerobot(tmp_path, state_file=False)
    assert read_lerobot(tmp_path)[0] == {}
    write_lerobot(tmp_path, action="MIN_MAX")
    with raises_code("policy-file", CheckpointError, "'MIN_MAX'", "'ACTION'"):
        read_lerobot(tmp_path)
    write_lerobot(tmp_path, action="IDENTITY")
    sets, methods = read_lerobot(tmp_path)
    assert methods is not None
    stats = choose(sets, None, methods, 5, "here")
    assert stats.actions.unnormalize(np.array([0.1, 3.0, 0.0, -1.0, 7.0])).tolist() == [0.1, 3.0, 0.0, -1.0, 7.0]


# config.json ---------------------------------------------------------------------------------------------------------

OPENPI = {
    "action_dim": 32,
    "action_horizon": 50,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "precision": "bfloat16",
}
LEROBOT = {
    "type": "pi05",
    "chunk_size": 30,
    "max_action_dim": 32,
    "tokenizer_max_length": 200,
    "image_resolution": [224, 224],
    "input_features": {"observation.images.top": {"type": "VISUAL"}, "observation.state": {"type": "STATE"}},
}


def test_openpis_config():
    assert PiConfig.from_dict(OPENPI, "pi0") == PUBLIC["pi0"]
    base = PiConfig.from_dict(OPENPI, "pi05")
    assert (base.discrete_state, base.max_prompt_tokens, base.normalization) == (True, 200, BY_QUANTILES)
    assert not base.padded_state_in_prompt


def test_what_openpis_code_says_of_libero():
    libero = "physical-intelligence/libero"
    assert PiConfig.from_dict(OPENPI, "pi0").with_data_set(libero).relative_dims == 6
    assert PiConfig.from_dict(OPENPI, "pi0").with_data_set("droid").relative_dims == 0
    stateless = PiConfig.from_dict(OPENPI, "pi05").with_data_set(libero)
    assert (stateless.discrete_state, stateless.relative_dims) == (False, 0)


def test_lerobots_config():
    config = PiConfig.from_dict(LEROBOT, "pi05")
    assert (config.action_horizon, config.discrete_state, config.padded_state_in_prompt) == (30, True, True)
    assert config.num_images == 3


def test_own_config_survives_json():
    config = PiConfig.from_dict(OPENPI, "pi05").with_data_set("physical-intelligence/libero")
    raw = json.loads(json.dumps(config.to_dict("float32")))
    assert {name: raw[name] for name in OPENPI} == {**OPENPI, "precision": "float32"}
    assert PiConfig.from_dict(raw, "pi05") == config


U = "checkpoint-unsupported"


@pytest.mark.parametrize(
    ("raw", "code", "names"),
    [
        ({**LEROBOT, "type": "pi0"}, "checkpoint-family", ["'pi0'", "'pi05'"]),
        ({**LEROBOT, "type": "smolvla"}, "checkpoint-family", ["'smolvla'"]),
        ({**LEROBOT, "use_relative_actions": True}, U, ["use_relative_actions"]),
        ({**LEROBOT, "image_resolution": [448, 448]}, U, ["image_resolution", "448 x 448"]),
        ({**OPENPI, "paligemma_variant": "gemma_2b_lora"}, U, ["'gemma_2b_lora'"]),
        ({"model_type": "other"}, "checkpoint-family", ["type", "action_dim"]),
        ({"embodrl": {"variant": "pi05"}}, "policy-file", ["'normalization'"]),
    ],
)
def test_other_configs_are_refused(raw: dict[str, Any], code: str, names: list[str]):
    with raises_code(code, CheckpointError, *names) as error:
        PiConfig.from_dict(raw, "pi05")
    assert error.value.hint


# Tokenizers ----------------------------------------------------------------------------------------------------------


def test_the_picture_behind_the_vocabulary_needs_no_embedding(tmp_path: Path):
    """google/paligemma-3b-pt-224 has 257152 ids and, added by transformers, <image>; the embedding has 257152 rows."""
    tokenizer = Tokenizer.from_file(str(TINY_TOKENIZER))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, 640).vocab_size == 640
    tokenizer.add_special_tokens(["<other>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with raises_code("tokenizer-mismatch"):
        load_tokenizer(tmp_path, 640)


def test_shipped_tokenizer_marks_no_ends():
    tokenizer = tiny_tokenizer()
    assert tokenizer.bos_id == 1 and 1 not in tokenizer.encode("push the cube")
    assert tokenizer.encode("push") + tokenizer.encode("\n") == tokenizer.encode("push\n")


def test_a_tokenizer_of_another_model_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Llama's has a BOS, too, and only ids that PaliGemma has; nothing else would tell."""
    ids = {f"t{i}": i for i in range(2, 32000)} | {"<unk>": 0, "<s>": 1}
    Tokenizer(models.WordLevel(ids, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    load_tokenizer(tmp_path, 32064)
    check_vocabulary("the tiny OpenVLA", 640, 960)  # beside its prompts' tokens there are those of actions
    assert not caplog.records
    load_tokenizer(tmp_path, 257152)
    assert "32000 ids" in caplog.text and "257152 embeddings" in caplog.text and "paligemma" in caplog.text


def test_tokenizer_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tokenizer.model").write_bytes(b"not one")
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with raises_code("missing-dependency", MissingDependencyError) as missing:
        load_tokenizer(tmp_path, 640)
    assert "pip install sentencepiece" in missing.value.hint
    tiny_tokenizer().save(tmp_path)
    assert load_tokenizer(tmp_path, 640).encode("cube") == tiny_tokenizer().encode("cube")
    with raises_code("tokenizer-mismatch", CheckpointError, "640", "600"):
        load_tokenizer(tmp_path, 600)


@pytest.mark.parametrize("named", [None, "someone/tokenizer"])
def test_a_checkpoint_without_tokenizer_takes_that_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
):
    here, cache = tmp_path / "checkpoint", tmp_path / "cache"
    here.mkdir()
    cache.mkdir()
    if named is not None:
        steps = [{"registry_name": "to_batch_processor"}, {"config": {"tokenizer_name": named, "max_length": 48}}]
        (here / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    wanted = named or "google/paligemma-3b-pt-224"
    asked = []

    def fetch(name: HubName, patterns: list[str]) -> Path:
        asked.append((name.repository, patterns))
        return cache

    monkeypatch.setattr(hub, "fetch", fetch)
    with raises_code("hub-missing", CheckpointError, wanted, "tokenizer.json"):
        load_tokenizer(here, 640)
    tiny_tokenizer().save(cache)
    assert load_tokenizer(here, 640).encode("cube") == tiny_tokenizer().encode("cube")
    assert asked == [(wanted, ["tokenizer.json"])] * 2
    with raises_code("tokenizer-mismatch", CheckpointError, "640", "600"):
        load_tokenizer(here, 600)


def test_a_tokenizer_that_can_not_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fetch(*_: object) -> Path:
        raise HubError("no network", "log in", code="hub-access")

    monkeypatch.setattr(hub, "fetch", fetch)
    with raises_code("hub-access", CheckpointError, "google/paligemma-3b-pt-224", "no network") as error:
        load_tokenizer(tmp_path, 640)
    for part in ("log in", "tokenizer.json", "tokenizer.model", str(tmp_path), "licence"):
        assert part in error.value.hint
