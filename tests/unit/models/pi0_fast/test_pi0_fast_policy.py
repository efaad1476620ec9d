"""pi0-FAST: what chunks are written as, how they end, what they mean, and its files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expect import raises_code
from safetensors.torch import load_file, save_file
from tiny_families import TINY, build, generator, observation, tiny_config

from embodrl.data.statistics import RobotStatistics, dimension_stats
from embodrl.models.common.gripper import to_model
from embodrl.models.pi0_fast.codec import TINY_CODEC, ActionCodec, cosines, read_codec
from embodrl.models.pi0_fast.modeling import FastModel
from embodrl.models.pi0_fast.policy import SENTENCE, WRITTEN, FastPolicy
from embodrl.models.registry import build_policy
from embodrl.types import TOKEN_MASK, Observation, SamplingParams

SAMPLING = SamplingParams(0.8)
RECORDED = [18, 22, 12, 219, 213, 0, 14, 1, 9, 16, 14, 6, 220, 220, 5, 5, 6, 8, 9, 8, 297, 256]


@pytest.fixture(scope="module")
def codec() -> ActionCodec:
    return read_codec(TINY_CODEC)


@pytest.fixture
def policy() -> FastPolicy:
    made = build("pi0_fast")
    assert isinstance(made, FastPolicy)
    return made


def likely_end(policy: FastPolicy) -> FastPolicy:
    """Make the end about as probable as the rest together, so that chunks have different lengths."""

    def later(logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[..., policy.end] += math.log(40.0)
        return logits

    plain = policy.model.logits
    policy.model.logits = lambda hidden, ids=None: later(plain(hidden, ids))  # type: ignore[method-assign]
    return policy


# Codec ---------------------------------------------------------------------------------------------------------------


def test_coefficients_are_those_of_the_definition() -> None:
    """X_k = s_k sum_n x_n cos(pi (n + 1/2) k / N), with s_0 = sqrt(1/N) and s_k = sqrt(2/N)."""
    x = [0.3, -0.7, 0.2, 0.9, -0.1]
    wanted = [
        math.sqrt((1 if k == 0 else 2) / 5) * sum(v * math.cos(math.pi * (n + 0.5) * k / 5) for n, v in enumerate(x))
        for k in range(5)
    ]
    np.testing.assert_allclose(cosines(5) @ x, wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(cosines(5) @ cosines(5).T, np.eye(5), rtol=0, atol=1e-12)


def test_low_frequencies_of_all_dimensions_come_first(codec: ActionCodec) -> None:
    """Two equal actions: 10 sqrt(2) times each value for the constant, then zeros; as characters from -40 on."""
    [tokens] = codec.encode(np.array([[[0.5, -1.0, 0.0], [0.5, -1.0, 0.0]]]))
    assert codec.tokenizer.decode(tokens) == "".join(chr(value + 40) for value in (7, -14, 0, 0, 0, 0))


def test_tokens_of_the_public_processor(codec: ActionCodec) -> None:
    """Recorded with its expressions (scipy 1.17, transformers 5.19) over this vocabulary."""
    time = np.arange(5)[:, None]
    chunk = np.sin(0.4 * time + np.arange(7)) * 0.8
    assert codec.encode(chunk[None]) == [RECORDED]


def test_chunks_survive_but_for_rounding(codec: ActionCodec) -> None:
    chunks = np.random.default_rng(0).uniform(-1, 1, (20, 5, 7))
    decoded = codec.decode(codec.encode(chunks), 5, 7)
    assert 0.01 < np.abs(decoded - chunks).max() <= 0.05 * math.sqrt(5)
    assert codec.encode(decoded) == codec.encode(chunks)


def test_every_sequence_means_actions(codec: ActionCodec) -> None:
    [whole] = codec.encode(np.full((1, 5, 7), 0.5))
    part = codec.decode([whole[:3], [], [*whole, *whole]], 5, 7)
    letters = [ord(c) - 40 for c in codec.tokenizer.decode(whole[:3])]
    wanted = np.zeros((5, 7))
    wanted.flat[: len(letters)] = letters
    np.testing.assert_allclose(cosines(5) @ part[0] * 10, wanted, atol=1e-9)  # what is missing is 0
    assert not part[1].any()
    np.testing.assert_allclose(part[2], codec.decode([whole], 5, 7)[0])  # what is too much is dropped
    broken = [next(i for i in range(256) if codec.tokenizer.decode([i]) == "\N{REPLACEMENT CHARACTER}")]
    assert not codec.decode([broken], 5, 7).any()


# Sequences -----------------------------------------------------------------------------------------------------------


def test_chunks_end_where_they_say(policy: FastPolicy) -> None:
    likely_end(policy)
    seen = observation("pi0_fast", 1).select(np.zeros(40, np.int64))
    output = policy.predict_action_batch(seen, "train", SAMPLING, generator(1))
    tokens, mask = output.forward_inputs["action_tokens"], output.forward_inputs[TOKEN_MASK]
    lengths = mask.sum(dim=1)
    assert len(lengths.unique()) > 3 and int(lengths.min()) < int(lengths.max())
    for row, count in zip(tokens, lengths.tolist(), strict=True):
        ends = (row == policy.end).nonzero()
        assert count == policy.max_tokens or ends.tolist() == [[count - 1]]
        assert not row[count:].any()
    again = policy.evaluate_actions(output.forward_inputs, SAMPLING)
    torch.testing.assert_close(again.logprobs, output.logprobs, rtol=0, atol=1e-5)
    assert again.entropy is not None
    assert bool((again.logprobs[mask] < 0).all()) and bool((again.entropy[mask] > 0).all())
    assert not again.logprobs[~mask].any() and not again.entropy[~mask].any()
    # what stands behind the end changes neither the row nor its gradient
    changed = {**output.forward_inputs, "action_tokens": torch.where(mask, tokens, 7)}
    assert torch.equal(policy.evaluate_actions(changed, SAMPLING).logprobs, again.logprobs)


def test_the_log_prob_is_that_of_the_sequence_among_the_choices(policy: FastPolicy) -> None:
    """Each token after a whole pass without a cache over what comes before it, written out."""
    likely_end(policy)
    output = policy.predict_action_batch(observation("pi0_fast", 2), "train", SAMPLING, generator(3))
    inputs = output.forward_inputs
    choices, begin = policy.get_buffer("_choices"), policy.get_buffer("_begin")
    for row in range(2):
        one = {name: value[row : row + 1] for name, value in inputs.items()}
        x, valid = policy.prefix(one)
        count = int(one[TOKEN_MASK].sum())
        for place in range(count):
            known = choices[one["action_tokens"][:, :place]]
            written = torch.cat([begin[None], known], dim=1)
            logits = policy.model.logits(policy.model.hidden_states(x, valid, written)[:, -1], choices)
            wanted = (logits / SAMPLING.temperature).log_softmax(-1)[0, one["action_tokens"][0, place]]
            assert output.logprobs[row, place, 0].item() == pytest.approx(wanted.item(), abs=1e-5)


def test_prompt_and_what_is_written_see_what_they_may(policy: FastPolicy) -> None:
    """The prompt sees all of itself and BOS, and nothing else that is written; that sees what stands before it."""
    inputs = policy.preprocess(observation("pi0_fast", 1))
    x, valid = policy.prefix(inputs)
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = policy.model.hidden_states(x, valid, ids)
    length = x.shape[1]
    last = policy.model.hidden_states(x, valid, torch.tensor([[5, 6, 7, 9]]))
    assert torch.equal(last[:, :-1], plain[:, :-1]) and not torch.equal(last[:, -1], plain[:, -1])
    second = policy.model.hidden_states(x, valid, torch.tensor([[5, 9, 7, 8]]))
    assert torch.equal(second[:, : length + 1], plain[:, : length + 1])
    first = policy.model.hidden_states(x, valid, torch.tensor([[9, 6, 7, 8]]))
    assert (first - plain)[:, :length].abs().amax(-1).min() > 1e-6
    changed = x.clone()
    changed[:, -1] += 1.0
    assert (policy.model.hidden_states(changed, valid, ids) - plain)[:, : length - 1].abs().amax(-1).min() > 1e-6


def test_sentences_of_imitation(policy: FastPolicy) -> None:
    actions = torch.zeros(2, 4, 7)
    actions[1] = torch.rand(4, 7, generator=generator()) - 0.5
    batch = policy.sft_inputs(observation("pi0_fast", 2), actions)
    text = policy.processor.tokenizer
    begin = [text.bos_id, *text.encode("Action: ")]
    vocabulary = policy.model.config.vocab_size
    for row, chunk in enumerate(policy.codec.encode(actions.double().numpy())):
        ids = [*begin, *(vocabulary - 1 - code for code in chunk), *text.encode("|")]
        assert batch[SENTENCE][row][batch[WRITTEN][row]].tolist() == ids
    loss, scalars = policy.sft_loss(batch)
    x, valid = policy.prefix(batch)
    logits = policy.model.logits(policy.model.hidden_states(x, valid, batch[SENTENCE])[:, x.shape[1] :])
    means = []
    for row in range(2):
        count = int(batch[WRITTEN][row].sum())
        logp = logits[row].log_softmax(-1)
        means.append(sum(-logp[i, batch[SENTENCE][row, i + 1]].item() for i in range(count - 1)) / (count - 1))
    assert loss.item() == pytest.approx(sum(means) / 2, abs=1e-5)
    assert 0 <= float(scalars["token_accuracy"]) <= 1


def test_a_chunk_beyond_the_limit_is_refused() -> None:
    policy = build("pi0_fast", pi0_fast={**TINY["pi0_fast"], "max_action_tokens": 5})
    with raises_code("pi0-fast-chunk-too-long") as refused:
        policy.sft_inputs(observation("pi0_fast", 1), torch.rand(1, 4, 7, generator=generator()))
    assert "model.pi0_fast.max_action_tokens=" in refused.value.hint


def test_actions_in_the_units_of_the_robot_and_its_gripper(tmp_path: Path) -> None:
    """Normalized between the quantiles; a gripper of LIBERO's convention is 0 to 1, closed to open, to the model."""
    actions = np.stack([np.linspace(-9, 9, 101), np.repeat([-1.0, 1.0], [50, 51])], axis=1)
    file = tmp_path / "s.json"
    RobotStatistics("x", dimension_stats(to_model(actions, "libero"))[0], None, "libero").write(file)
    policy = build("pi0_fast", action_dim=2, gripper="libero", stats_path=str(file))
    assert isinstance(policy, FastPolicy)
    chunk = np.array([[[-4.5, 1.0], [0.0, 1.0], [4.5, -1.0], [9.0, -1.0]]])
    batch = policy.sft_inputs(observation("pi0_fast", 1), torch.from_numpy(chunk))
    ids = batch[SENTENCE][0][batch[WRITTEN][0]]
    codes = (policy.model.config.vocab_size - 1 - ids[len(policy.get_buffer("_begin")) : -1]).tolist()
    said = policy.codec.decode([codes], 4, 2)[0]
    q01, q99 = np.quantile(actions[:, 0], [0.01, 0.99])
    np.testing.assert_allclose(said[:, 0], 2 * (chunk[0, :, 0] - q01) / (q99 - q01) - 1, atol=0.1)
    tokens = torch.tensor([[*codes, policy.end]])
    acted = policy.actions_of(tokens, torch.ones_like(tokens, dtype=torch.bool))[0]
    np.testing.assert_allclose(acted[:, 0], chunk[0, :2, 0], atol=1.0)
    np.testing.assert_array_equal(acted[:, 1], [1.0, 1.0])
    assert policy.out_of_range(actions, np.zeros((101, 6))).mean() == 0
    assert policy.out_of_range(actions * 100, np.zeros((101, 6)))[:, 0].mean() > 0.5


def test_prompts_have_the_state_and_no_answer(policy: FastPolicy) -> None:
    seen = Observation(
        np.zeros((1, 1, 16, 16, 3), np.uint8),
        np.array([[-1.5, 0.0, 1.0]], np.float32),
        ["Push_it"],
        np.zeros(1, np.int32),
    )
    ids = policy.preprocess(seen)["input_ids"][0]
    text = policy.processor.tokenizer
    wanted = [text.bos_id, *text.encode("Task: Push it, State: -1 128 255;\n")]
    assert ids[: len(wanted)].tolist() == wanted and not ids[len(wanted) :].any()


# Files ---------------------------------------------------------------------------------------------------------------


def saved(policy: FastPolicy, directory: Path) -> Path:
    policy.save_pretrained(directory)
    return directory


def loaded(directory: Path, **changes: Any) -> tuple[FastPolicy, Any]:
    config = tiny_config("pi0_fast", model_path=str(directory), **changes)
    made, report = build_policy(config, device="cpu", dtype=torch.float32, seed=0)
    assert isinstance(made, FastPolicy)
    return made, report


HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"
EMBEDDING = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


def test_one_stored_matrix_is_embedding_and_output_layer(policy: FastPolicy, tmp_path: Path) -> None:
    """lerobot 0.4 stores one of them under either name, later versions both, which then differ."""
    path = saved(policy, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    assert {HEAD, EMBEDDING} <= tensors.keys() and not torch.equal(tensors[HEAD], tensors[EMBEDDING])
    apart, _ = loaded(tmp_path)
    hidden = torch.randn(2, 32, generator=generator())
    assert torch.equal(apart.model.logits(hidden), hidden @ tensors[HEAD].T)
    for kept, gone in ((HEAD, EMBEDDING), (EMBEDDING, HEAD)):
        save_file({name: tensor for name, tensor in tensors.items() if name != gone}, path)
        one, report = loaded(tmp_path)
        assert one.model.config.tied and report.ok
        assert torch.equal(one.model.logits(hidden), hidden @ tensors[kept].T)
        assert torch.equal(one.model.language.embed_tokens.weight, tensors[kept])
        again = saved(one, tmp_path / kept)
        assert load_file(again / "model.safetensors").keys() == tensors.keys() - {EMBEDDING}
        assert loaded(again)[0].model.config.tied


def test_lerobots_files(policy: FastPolicy, tmp_path: Path) -> None:
    saved(policy, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["type"], config["chunk_size"], config["max_decoding_steps"]) == ("pi0_fast", 4, 40)
    steps = json.loads((tmp_path / "policy_preprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in steps][2:6] == [
        "normalizer_processor",
        "pi0_fast_prepare_state_tokenizer_processor_step",
        "tokenizer_processor",
        "action_tokenizer_processor",
    ]
    assert steps[2]["config"]["norm_map"]["ACTION"] == "QUANTILES"
    after = json.loads((tmp_path / "policy_postprocessor.json").read_text())["steps"]
    stored = load_file(tmp_path / after[0]["state_file"])
    assert stored["action.q99"].tolist() == [1.0] * 7
    assert read_codec(tmp_path / "action_tokenizer").scale == 10


def test_settings_override_what_the_files_say(policy: FastPolicy, tmp_path: Path) -> None:
    saved(policy, tmp_path)
    assert not loaded(tmp_path)[0].processor.config.padded_state_in_prompt
    made, report = loaded(tmp_path, pi0_fast={**TINY["pi0_fast"], "padded_state_in_prompt": True, "antialias": False})
    assert made.processor.config.padded_state_in_prompt and not made.processor.config.antialias
    assert "model.pi0_fast.padded_state_in_prompt" in report.conventions["padding of the state in prompt"]


def test_what_is_refused(policy: FastPolicy, tmp_path: Path) -> None:
    jax = tmp_path / "jax"
    (jax / "params").mkdir(parents=True)
    with raises_code("pi0-fast-jax"):
        loaded(jax)
    with raises_code("action-horizon"):
        build("pi0_fast", num_action_chunks=5)
    sizes = replace(policy.model.config, inputs=replace(policy.model.config.inputs, vocab_size=200))
    with torch.device("meta"):
        small = FastModel(sizes)
    with raises_code("pi0-fast-vocabulary"):
        FastPolicy(small, policy.processor, policy.codec, policy.robot_stats, tiny_config("pi0_fast"))
    place = saved(policy, tmp_path / "saved")
    for name in ("tokenizer.json", "processor_config.json"):
        path = place / "action_tokenizer" / name
        text = path.read_text()
        path.write_text("{}")
        with raises_code("policy-file"):
            loaded(place)
        path.write_text(text)
    with raises_code("checkpoint-family") as other:
        build_policy(tiny_config("pi0", model_path=str(place)), device="cpu", dtype=torch.float32, seed=0)
    assert "model.model_type=pi0_fast" in other.value.hint
